"""What a start shows: nothing twice, nothing broken, and never silence."""

from __future__ import annotations

import io
import queue

from cluster.cli.serve_view import ProgressView, ready_text
from cluster.control.readiness import Endpoints, Progress, Step, StepState
from protocol.config import TandemConfig
from protocol.types import KvGeometry, Mode, ModelInfo, Role, WorkerInfo


class Lines(io.StringIO):
    """Where lines go that a test waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> int:
        for line in filter(None, text.split("\n")):
            self.queue.put(line)
        return len(text)


class Terminal(Lines):
    """The same, as a terminal."""

    def isatty(self) -> bool:
        return True


def loading(detail: str = "") -> Progress:
    return Progress((Step("ray", StepState.LOADING, detail), Step("router-0", StepState.WAITING)))


def test_a_long_step_is_told_again_while_nothing_changes() -> None:
    out = Lines()
    with ProgressView(out, say_every_s=0.05) as view:
        view.show(loading())
        assert "ray: loading" in out.queue.get(timeout=5)
        for _ in range(2):
            assert "ray: still loading after 0 s" in out.queue.get(timeout=5)
    while not out.queue.empty():
        out.queue.get()
    view.close()
    assert out.queue.empty()


def test_on_a_terminal_the_seconds_of_a_step_go_on_while_nobody_calls(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    with ProgressView(out) as view:
        view.show(loading())
        seen: set[str] = set()
        while len(seen) < 3:
            line = out.queue.get(timeout=5)
            if "ray" in line:
                seen.add(line)


def test_a_long_line_stays_one_and_the_cause_of_a_failure_is_left_to_the_error() -> None:
    out = Lines()
    with ProgressView(out) as view:
        view.show(loading("waiting " * 40))
        assert out.queue.get(timeout=5).count("waiting") == 40
        view.show(Progress((Step("ray", StepState.FAILED, "it broke"),)))
        assert out.queue.get(timeout=5).endswith("ray: failed")
    assert out.queue.empty()


def test_what_a_worker_chose_stands_below_it() -> None:
    model = ModelInfo("fp", 320, 512, (2,), KvGeometry(2, 1, 8, 16, "float32"))
    workers = tuple(
        WorkerInfo(f"decode-{i}", "i", Role.DECODE, "e", model, 10, 4, 64, notes=notes)
        for i, notes in enumerate((("attention: numba", "warning: slow"), ()))
    )
    endpoints = Endpoints("t", Mode.COLOCATED, "tiny", "h:1", "h:2", "secret", workers)
    config = TandemConfig.model_validate({"model": {"path": "m"}})
    lines = ready_text(endpoints, config, detached=False).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  workers      decode-0: "))
    assert lines[first + 1] == 17 * " " + "attention: numba"
    assert lines[first + 2] == 17 * " " + "warning: slow"
    assert lines[first + 3].startswith(15 * " " + "decode-1: ")
    assert "secret" not in "".join(lines)
