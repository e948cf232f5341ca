"""What ``tandem serve`` shows: a start step by step, then where the cluster answers.

This file owns the words and the layout, live on a terminal and as plain lines elsewhere. It must
never start or ask anything. What went wrong is said once, by whoever prints the error.

Life of a ``ProgressView``: entered -> ``show`` as often as one likes -> ``close`` or left; the
last state stays on the screen. In between a thread shows that time passes, also while the caller
waits for one long step: seconds tick on a terminal, elsewhere a line comes every few seconds.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.control.readiness import Endpoints, Progress, Step, StepState
from protocol.config import TandemConfig
from protocol.types import WorkerInfo

_STYLES = {
    StepState.WAITING: "dim",
    StepState.PLACING: "yellow",
    StepState.LOADING: "yellow",
    StepState.WARMING: "yellow",
    StepState.READY: "green",
    StepState.FAILED: "bold red",
}
_QUESTION = "Why is the sky blue?"


_MOVES = (StepState.PLACING, StepState.LOADING, StepState.WARMING)


class ProgressView:
    """The steps of one start."""

    def __init__(self, out: TextIO, say_every_s: float = 10.0) -> None:
        """``say_every_s``: elsewhere than on a terminal, the longest silence."""
        self._console = Console(file=out, highlight=False)
        self._say_every_s = say_every_s
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of what follows
        self._shown = (Progress(), time.monotonic())  # and when that was
        self._moves_since: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._table)
            self._live.__enter__()
        else:
            self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Show nothing more. May be called twice."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
        if self._ticker is not None:
            self._ticker.join()

    def show(self, progress: Progress) -> None:
        """Draw the steps anew, or print a line for each that has changed."""
        with self._lock:
            self._shown = (progress, time.monotonic())
            if self._live is None:
                for step in progress.steps:
                    self._say_if_new(step)
        if self._live is not None:
            self._live.refresh()

    def _say_if_new(self, step: Step) -> None:
        if step.state is StepState.WAITING:
            return
        line = f"{step.state}{_detail(step, ': ')}"
        if self._said.get(step.name) != line:
            self._said[step.name] = line
            self._moves_since.setdefault(step.name, time.monotonic())
            self._say(f"{step.name}: {line}")

    def _tick(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                if now >= self._last_line + self._say_every_s:
                    self._say_what_moves(now)
                wake_at = self._last_line + self._say_every_s
            if self._closed.wait(max(0.0, wake_at - now)):
                return

    def _say_what_moves(self, now: float) -> None:
        self._last_line = now  # also when nothing moves
        for step in self._shown[0].steps:
            if step.state in _MOVES:
                since = self._moves_since.get(step.name, now)
                self._say(f"{step.name}: still {step.state} after {now - since:.0f} s")

    def _say(self, line: str) -> None:
        self._last_line = time.monotonic()
        at = self._last_line - self._began
        # Not wrapped: a line of a log is one line, however long.
        self._console.print(f"[{at:5.1f} s] {line}", markup=False, soft_wrap=True)

    def _table(self) -> Table:
        progress, at = self._shown
        table = Table.grid(padding=(0, 2))
        for step in progress.steps:
            more = time.monotonic() - at if step.state in _MOVES else 0.0
            seconds = step.seconds + more
            table.add_row(
                step.name,
                Text(step.state, style=_STYLES[step.state]),
                f"{seconds:.1f} s" if seconds else "",
                Text(_detail(step)),
            )
        return table


def _detail(step: Step, before: str = "") -> str:
    """What a step waits for; the cause of a failure is the error's to tell."""
    told = step.detail and step.state is not StepState.FAILED
    return f"{before}{step.detail}" if told else ""


def ready_text(endpoints: Endpoints, config: TandemConfig, detached: bool) -> str:
    """Where the cluster answers and what to try, for a person."""
    base = f"http://{endpoints.http}"
    body = json.dumps(
        {"model": endpoints.model, "messages": [{"role": "user", "content": _QUESTION}]}
    )
    lines = [
        "",
        f"Tandem serves {endpoints.model} ({endpoints.mode})",
        f"  OpenAI API   {endpoints.url}",
        f"  gRPC         {endpoints.grpc}",
        f"  health       {base}/health   {base}/ready   {base}/metrics",
        *_worker_lines(endpoints.workers),
        "",
        f"  curl -s {endpoints.url}/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        "",
    ]
    end = "runs on; end it with" if detached else "Ctrl-C ends everything; from elsewhere:"
    lines.append(f"  {end} tandem down --name {endpoints.cluster}")
    return "\n".join(lines)


def _worker_lines(workers: tuple[WorkerInfo, ...]) -> list[str]:
    """Two columns: what each worker has, and below it what was chosen at its start and why."""
    lines: list[str] = []
    for w in workers:
        lines.append(
            f"{w.worker_id}: {w.threads} thread{'s' if w.threads > 1 else ''}, "
            f"{w.max_num_batched_tokens} tokens a step, {w.max_num_seqs} sequences, "
            f"KV for {w.total_pages * w.model.geometry.page_size} tokens"
        )
        lines += [f"  {note}" for note in w.notes]
    return [f"  {'' if i else 'workers':<12} {line}" for i, line in enumerate(lines)]


def ready_json(endpoints: Endpoints) -> str:
    """The same for a program; the secret is left out."""
    return json.dumps(
        {
            "cluster": endpoints.cluster,
            "mode": endpoints.mode,
            "model": endpoints.model,
            "url": endpoints.url,
            "http": endpoints.http,
            "grpc": endpoints.grpc,
            "workers": [
                {
                    "worker_id": w.worker_id,
                    "role": w.role,
                    "endpoint": w.endpoint,
                    "pid": w.pid,
                    "threads": w.threads,
                    "max_num_batched_tokens": w.max_num_batched_tokens,
                    "max_num_seqs": w.max_num_seqs,
                    "total_pages": w.total_pages,
                    "notes": w.notes,
                }
                for w in endpoints.workers
            ],
        }
    )
