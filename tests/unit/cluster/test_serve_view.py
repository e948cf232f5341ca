"""What a start shows: nothing twice, nothing broken, and never silence."""

from __future__ import annotations

import io
import queue

from cluster.cli.serve_view import ProgressView
from cluster.control.readiness import Progress, Step, StepState


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
