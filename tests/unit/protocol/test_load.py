"""Configuration files: places in errors, precedence, duplicates, did-you-mean."""

import pytest

from protocol.config import Section, TandemConfig
from protocol.errors import ConfigError
from protocol.load import dump_config, load_config, load_with_origins

GOOD = """\
model: {path: models/x}
mode: colocated
pools:
  decode:
    max_num_batched_tokens: 256
    max_num_seqs: 8
"""


@pytest.fixture
def write(tmp_path):
    def _write(text):
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return file

    return _write


def fault(file, **kw):
    with pytest.raises(ConfigError) as e:
        load_config(file, **kw)
    return e.value.message.replace(str(file), "cluster.yaml")


def test_defaults_and_values(write):
    config = load_config(write(GOOD))
    assert config.pools.decode.max_num_seqs == 8
    assert config.pools.prefill.replicas == 1
    assert config.timing.lease_s == 10


def test_precedence_and_origins(write):
    file = write(GOOD)
    env = {"TANDEM__POOLS__DECODE__MAX_NUM_SEQS": "4", "TANDEM__NAME": "from-env", "HOME": "/x"}
    loaded = load_with_origins(file, ["name=from-set"], env)
    assert loaded.config.name == "from-set"
    assert loaded.config.pools.decode.max_num_seqs == 4
    assert loaded.origins["name"] == "--set name=from-set"
    assert loaded.origins["pools.decode.max_num_seqs"].startswith("environment TANDEM__POOLS")
    assert loaded.origins["mode"] == f"{file}:2:1"


def test_unknown_key_names_place_and_suggests(write):
    message = fault(write(GOOD.replace("max_num_seqs", "max_num_seq")))
    assert message == (
        "cluster.yaml:6:5: pools.decode.max_num_seq: unknown key; did you mean 'max_num_seqs'?"
    )


def test_budget_smaller_than_seqs_plus_prefill_says_the_numbers(write):
    message = fault(write(GOOD.replace("256", "70")))
    assert message.startswith("cluster.yaml:4:3: pools.decode: ")
    for number in ("70", "8", "64", "72"):
        assert number in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {path: a}\nmodel: {path: b}\n", "cluster.yaml:2:1: duplicate key 'model'"),
        ("mode: colocated\n", "model: required, but not set"),
        ("- a\n", "cluster.yaml:1:1: expected sections"),
        ("model: {path: x\n", "not valid YAML"),
        ("model: {path: x}\nmode: fast\n", "cluster.yaml:2:1: mode: "),
        ("model: {path: x}\n1: 2\n", "cluster.yaml:2:1: key 1 is not a text"),
        ("model: &m {path: *m}\n", "alias"),
        ("", "model: required, but not set"),
        ("model: {path: x}\ntiming: {lease_s: -1}\n", "cluster.yaml:2:10: timing.lease_s: "),
        ("model: {path: x}\ntiming: {lease_s: .nan}\n", "timing.lease_s"),
        ("model: {path: x}\nkv: {page_size: 0}\n", "kv.page_size"),
        ("model: {path: x}\nkv: {page_size: -16}\n", "cluster.yaml:2:6: kv.page_size"),
        ("model: {path: x}\npools: {decode: {max_num_batched_tokens: 0}}\n", "batched_tokens"),
        ("model: {path: x}\ntiming: {lease_s: .inf}\n", "timing.lease_s"),
        (
            "model: {path: x}\npools: {decode: {max_num_batched_tokens: lots}}\n",
            "cluster.yaml:2:18: pools.decode.max_num_batched_tokens: ",
        ),
        ("model: {path: x}\nmode: !!python/object:os.system x\n", "cluster.yaml:2:7: "),
        ("model: {path: x}\nmode: !!timestamp x\n", "cluster.yaml:2:7: no value of its kind"),
        ("model: " + 2000 * "[", "not valid YAML"),
    ],
)
def test_faults_name_place_and_field(write, text, expected):
    assert expected in fault(write(text))


def test_every_fault_is_reported_at_once(write):
    text = GOOD.replace("mode: colocated", "mode: colocatd\nnme: x")
    assert len(fault(write(text)).splitlines()) == 2


def test_bad_set_and_missing_file(write, tmp_path):
    assert "expected section.key=value" in fault(write(GOOD), overrides=["oops"])
    assert "no such file" in fault(tmp_path / "nowhere.yaml")
    assert fault(write(GOOD), overrides=["mode=[1"]).startswith("--set mode=[1")
    assert fault(write(GOOD), overrides=["name=2026-02-30"]).startswith("--set name=2026-02-30")
    assert "not a YAML value" in fault(write(GOOD), overrides=["name=" + 2000 * "["])


def test_dump_round_trips(write, tmp_path):
    config = load_config(write(GOOD))
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    assert TandemConfig.model_validate(config.model_dump()) == config


def test_every_field_is_documented():
    def undocumented(section, place):
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Section):
                assert inner.__doc__
                yield from undocumented(inner, f"{place}{name}.")
            elif not field.description:
                yield f"{place}{name}"

    assert list(undocumented(TandemConfig, "")) == []
