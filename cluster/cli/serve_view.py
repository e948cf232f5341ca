"""What ``tandem serve`` shows: a start step by step, then where the cluster answers.

This file owns the words and the layout, live on a terminal and as plain lines elsewhere. It must
never start or ask anything.

Life of a ``ProgressView``: entered -> ``show`` as often as one likes -> left; the last state
stays on the screen.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.control.readiness import Endpoints, Progress, Step, StepState
from protocol.config import TandemConfig

_STYLES = {
    StepState.WAITING: "dim",
    StepState.PLACING: "yellow",
    StepState.LOADING: "yellow",
    StepState.WARMING: "yellow",
    StepState.READY: "green",
    StepState.FAILED: "bold red",
}
_QUESTION = "Why is the sky blue?"


class ProgressView:
    """The steps of one start."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)
        self._live: Live | None = None
        self._said: dict[str, str] = {}
        self._began = time.monotonic()

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def show(self, progress: Progress) -> None:
        """Draw the steps anew, or print a line for each that has changed."""
        if self._live is not None:
            self._live.update(self._table(progress), refresh=True)
            return
        for step in progress.steps:
            line = f"{step.state}{f': {step.detail}' if step.detail else ''}"
            if step.state is not StepState.WAITING and self._said.get(step.name) != line:
                self._said[step.name] = line
                at = time.monotonic() - self._began
                self._console.print(f"[{at:5.1f} s] {step.name}: {line}", markup=False)

    def _table(self, progress: Progress) -> Table:
        table = Table.grid(padding=(0, 2))
        for step in progress.steps:
            table.add_row(
                step.name, Text(step.state, style=_STYLES[step.state]), _seconds(step), step.detail
            )
        return table


def _seconds(step: Step) -> str:
    return f"{step.seconds:.1f} s" if step.seconds else ""


def ready_text(endpoints: Endpoints, config: TandemConfig, file: Path, detached: bool) -> str:
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
        "  workers      "
        + "\n               ".join(
            f"{w.worker_id}: {w.threads} thread{'s' if w.threads > 1 else ''}, "
            f"{w.max_num_batched_tokens} tokens a step, {w.max_num_seqs} sequences, "
            f"KV for {w.total_pages * w.model.geometry.page_size} tokens"
            for w in endpoints.workers
        ),
        "",
        f"  curl -s {endpoints.url}/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        "",
    ]
    end = "runs on; end it with" if detached else "Ctrl-C ends everything; from elsewhere:"
    lines.append(f"  {end} tandem down {file}")
    return "\n".join(lines)


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
                }
                for w in endpoints.workers
            ],
        }
    )
