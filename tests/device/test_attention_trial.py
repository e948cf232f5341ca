"""How the CPU's attention is chosen: by trial among those that can serve, aloud when one fails."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path

import pytest
import tiny
import torch
from stepping import PAGE, Sequence, new_runner, step

from kernels import attention_trial, attn_compiled
from kernels.attention import Declaration, Needs
from kernels.attention_trial import fastest
from kernels.attn_cpu import CpuAttention
from kernels.attn_numba import NumbaAttention
from kernels.attn_reference import ReferenceAttention
from kernels.model import load_model
from protocol.errors import ConfigError
from protocol.types import KvGeometry

CPU = torch.device("cpu")
GEOMETRY = KvGeometry(3, 2, 16, 4, "float32")


class Twin(CpuAttention):
    """The torch backend under another name."""

    def __init__(self, name: str) -> None:
        self.declaration = Declaration(name, frozenset({"cpu"}), frozenset({"float32"}))


class Broken(Twin):
    def attend(self, *_: object) -> torch.Tensor:
        raise RuntimeError("no code for this processor\nand a long trace")


def choose(*backends, needs: Needs = Needs()) -> tuple[str, str]:  # noqa: B008
    backend, line = fastest([*backends, ReferenceAttention()], needs, GEOMETRY, 2, CPU)
    return backend.declaration.name, line


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock will show for the first backend's two shapes, the second's, and so on."""
    script: list[float] = []
    turn = iter(range(10**6))

    def scripted(work) -> float:
        work()
        return script[next(turn) % len(script)]

    monkeypatch.setattr(attention_trial, "_seconds", scripted)
    return script


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((1e-3, 1e-3, 1e-3, 1e-3), "first"),
        ((1e-3, 1e-3, 0.9e-3, 0.9e-3), "first"),  # as good as equal: the declared order
        ((1e-3, 1e-3, 0.5e-3, 0.5e-3), "second"),
        ((1e-3, 4e-3, 2e-3, 1e-3), "second"),  # worse decodes, far better chunks
    ],
)
def test_the_declared_order_holds_unless_another_is_clearly_faster(seconds, times, chosen) -> None:
    # Preparation asks for a backend's two shapes twice before the turns begin.
    seconds.extend((*times[:2], *times[:2], *times[2:], *times[2:]))
    seconds.extend(times * 50)
    name, line = choose(Twin("first"), Twin("second"))
    assert name == chosen
    assert line.startswith(f"attention: {chosen} ") and "per layer at 8 x 256" in line
    assert "first" in line and "second" in line


def test_a_backend_that_fails_is_passed_over_and_named(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        name, line = choose(Broken("broken"), CpuAttention())
    assert name == "cpu"
    assert "passed over: broken: no code for this processor" in line
    assert "broken" in caplog.text and "long trace" not in caplog.text


def test_without_any_other_the_oracle_serves(caplog) -> None:
    assert choose(Broken("a"), Broken("b"))[0] == "reference"


def test_without_numba_torch_serves_and_the_line_says_so(monkeypatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object):
        if name == "kernels.attn_compiled":
            raise ImportError("Numba needs NumPy 2.3 or less")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    name, line = choose(NumbaAttention(), CpuAttention())
    assert name == "cpu"
    assert "numba cannot be used: Numba needs NumPy 2.3 or less" in line


def test_a_feature_that_one_lacks_decides_without_a_trial(seconds) -> None:
    name, line = choose(Twin("plain"), CpuAttention(), needs=Needs(softcap=True))
    assert name == "cpu" and "plain: no softcap" in line


def test_none_left_names_every_reason() -> None:
    with pytest.raises(ConfigError, match="plain: no window"):
        fastest([Twin("plain")], Needs(window=True), GEOMETRY, 2, CPU)


def test_a_float16_that_the_processor_cannot_read_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(attn_compiled, "_reads_halves", lambda: False)
    attn_compiled.compiled.cache_clear()
    with pytest.raises(ConfigError, match="float16"):
        attn_compiled.compiled(2, 16, torch.float16)


def test_nothing_is_compiled_once_a_runner_stands(tmp_path: Path) -> None:
    model = load_model(tiny.tiny_model(tmp_path / "llama", "llama"))
    runner = new_runner(model)
    assert "numba" in runner.attention and "ready in" in runner.attention
    compiled = attn_compiled.compiled.cache_info().misses
    sequence = Sequence("a", list(range(20, 20 + 3 * PAGE + 1)), list(range(12)))
    step(runner, {sequence: 2 * PAGE})
    step(runner, {sequence: PAGE + 1})
    step(runner, {sequence: 1})
    assert attn_compiled.compiled.cache_info().misses == compiled


@pytest.mark.parametrize("name", ["numba", "cpu", "reference"])
def test_a_backend_can_be_had_by_name(tmp_path: Path, name: str) -> None:
    model = load_model(tiny.tiny_model(tmp_path / "llama", "llama"))
    assert new_runner(model, 64, name).attention == f"attention: {name}"
