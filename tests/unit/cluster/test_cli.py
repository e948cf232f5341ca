"""The command line: exit codes, one-sentence errors, stdout for data."""

import json

import pytest

from cluster.cli.main import app, run


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
