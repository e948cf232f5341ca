"""The command line: exit codes, one-sentence errors, stdout for data."""

import json
import os
import socket
from dataclasses import replace

import pytest
import yaml

from cluster.cli.main import app, run
from cluster.cli.model_hint import fetch_hint
from cluster.cli.status import _table
from cluster.control import records
from cluster.control.bringup import ClusterHandle
from cluster.control.processes import identify
from cluster.control.records import ClusterRecord, RayRecord
from cluster.worker.clashes import refuse_clashes
from protocol.errors import ConfigError
from protocol.status import ClusterStatus, WorkerStatus
from protocol.types import Mode, Role, WorkerLoad


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: models/x}\npools: {decode: {max_num_seqs: 4}}\n")
    return file


def test_every_verb_has_help(capsys):
    names = [c.name for c in app.registered_commands] + [g.name for g in app.registered_groups]
    assert {"serve", "down", "status", "chat", "generate", "demo", "bench", "config"} <= set(names)
    for name in names:
        assert run([name, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out


def test_usage_errors_exit_2(capsys):
    assert run(["no-such-verb"]) == 2
    assert run(["bench", "interference", "--repeats", "0"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "no-such-verb" in err


def test_config_check_and_show(config_file, capsys):
    assert run(["config", "check", str(config_file)]) == 0
    assert run(["config", "show", str(config_file), "--json", "--set", "name=other"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[1])
    assert (shown["name"], shown["pools"]["decode"]["max_num_seqs"]) == ("other", 4)


def test_config_show_says_where_values_come_from(config_file, capsys, monkeypatch):
    monkeypatch.setenv("TANDEM__MODE", "colocated")
    assert run(["config", "show", str(config_file), "--origin"]) == 0
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["mode"].endswith("# environment TANDEM__MODE")
    assert lines["pools.decode.max_num_seqs"].endswith(f"# {config_file}:2:18")
    assert lines["timing.lease_s"].endswith("# default")


def test_config_errors_are_sentences_without_a_traceback(config_file, capsys):
    config_file.write_text("model: {path: x}\nmood: good\n")
    assert run(["config", "check", str(config_file)]) == 2
    err = capsys.readouterr().err
    assert err == f"error: {config_file}:2:1: mood: unknown key; did you mean 'mode'?\n"


def test_schema_describes_every_section(capsys):
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "pools", "kv", "timing", "router", "ray"} <= set(schema["properties"])


def test_bad_bench_arguments_are_named(capsys):
    assert run(["bench", "interference", "--budgets", "20", "--model", "nowhere"]) == 2
    assert "budget 20 is smaller" in capsys.readouterr().err


def test_unknown_model_is_refused_with_what_is_known(tmp_path, capsys):
    assert run(["model", "fetch", "smollm2-135", "--models-dir", str(tmp_path)]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_faults_of_one_file_stand_below_each_other(config_file, capsys):
    config_file.write_text("model: {path: x}\nmood: good\nkind: no\n")
    assert run(["config", "check", str(config_file)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {config_file}:2:1: mood")
    assert second.startswith(f"       {config_file}:3:1: kind")


def test_a_missing_model_is_noted_but_the_file_is_valid(config_file, tmp_path, capsys):
    assert run(["config", "check", str(config_file), "--set", f"model.path={tmp_path}/x"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{config_file}: valid\n"
    assert err.startswith("note: model.path: ") and "there is no such folder" in err
    (tmp_path / "config.json").write_text("{}")
    assert run(["config", "check", str(config_file), "--set", f"model.path={tmp_path}"]) == 0
    assert not capsys.readouterr().err


def test_only_models_that_exist_are_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fetch_hint("models/smollm2-135m") == "`tandem model fetch smollm2-135m` gets it"
    away = fetch_hint(f"{tmp_path}/away/smollm2-135m")
    assert away == f"`tandem model fetch smollm2-135m --models-dir {tmp_path}/away` gets it"
    assert fetch_hint("models/llama-9b") == "`tandem model fetch smollm2-135m` gets a small one"


def test_origins_come_with_values_as_yaml_writes_them(config_file, capsys):
    assert run(["config", "show", str(config_file), "--origin"]) == 0
    shown = capsys.readouterr().out
    assert "True" not in shown and "False" not in shown and "None" not in shown
    for line in shown.splitlines():
        assert len(yaml.safe_load(line)) == 1
    assert "chunked_prefill: true " in shown and "max_model_len: null " in shown


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tandem 0.")


def test_flags_and_overrides_look_the_same_everywhere(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for verb in (["serve"], ["bench", "interference"], ["config", "check"], ["config", "show"]):
        assert run([*verb, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "A.B=C" in shown
        assert "<bool>" not in shown


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_down_needs_no_name_where_one_cluster_runs(state, capsys):
    assert run(["down"]) == 0
    assert "no cluster runs" in capsys.readouterr().err
    records.save(ClusterRecord("one", "secret"))
    records.save(ClusterRecord("two", "secret"))
    assert run(["down"]) == 2
    assert "several clusters run (one, two)" in capsys.readouterr().err
    assert run(["down", "--name", "two"]) == 0
    assert run(["down"]) == 0
    assert "one: " in capsys.readouterr().out
    assert not records.load_all()


def test_a_worker_that_has_not_run_a_step_shows_none():
    worker = WorkerStatus("decode-0", "x", Role.DECODE, "ready", "h:1")
    cold = ClusterStatus("c", Mode.COLOCATED, "m", 1.0, (worker,))
    assert " ms" not in _table(cold)
    warm = replace(cold, workers=(replace(worker, load=WorkerLoad(step_s=0.012)),))
    assert "12 ms" in _table(warm)


def test_the_second_start_of_a_name_hears_of_the_name_and_not_of_ports(state, config_file, capsys):
    me = identify(os.getpid())
    records.save(ClusterRecord("tandem", "secret", owner=me))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", str(config_file), "--set", f"router.http=127.0.0.1:{port}"]) == 2
    err = capsys.readouterr().err
    assert "a cluster named 'tandem' runs already" in err and "tandem down --name tandem" in err


def test_force_keeps_the_record_of_actors_on_a_ray_that_is_not_ours(state):
    for owned in (True, False):
        handle = ClusterHandle()
        handle._record = ClusterRecord("one", "secret")
        handle._take_ray_record(RayRecord("h:1", owned))
        handle.force()
        assert bool(records.load("one")) is not owned


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["chat", "--temperature", "nan"], "temperature must be a finite number, not nan"),
        (["generate", "x", "--timeout", "nan"], "timeout must lie between 0"),
        (["generate", "x", "--timeout", "-1"], "timeout must lie between 0"),
        (["bench", "interference", "--set", "name=x"], "--set changes a configuration"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(line, words, capsys):
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ") and words in err and "Traceback" not in err


def test_a_foreign_package_of_our_name_is_refused_with_the_remedy(tmp_path, monkeypatch):
    refuse_clashes()
    info = tmp_path / "kernels-0.18.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"kernels 0\.18\.1 .*pip uninstall kernels"):
        refuse_clashes()
