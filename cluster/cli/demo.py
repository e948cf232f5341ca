"""``tandem demo``: the whole idea on this machine, in a few minutes.

Fetches the model, answers one question through the disaggregated path and says where each stage
ran, then lets a long prompt arrive in a naive, a chunked and a disaggregated arm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from protocol.config import TandemConfig
    from protocol.types import StageTiming

QUESTION = "What is the capital of France? Answer in one sentence."
DEMO_BUDGETS = (128,)


def demo(
    models_dir: Annotated[Path, typer.Option(help="Folder that holds the models.")] = Path(
        "models"
    ),
    html: Annotated[Path, typer.Option(help="Where the picture is written.")] = Path(
        "reports/interference.html"
    ),
) -> None:
    """Fetch a model, answer a question, show the freeze and its absence."""
    from rich.console import Console

    from cluster.bench.arms import default_config, make_arms, usable_cores
    from cluster.bench.interference import compare
    from cluster.bench.picture import page
    from cluster.bench.report import as_json, conclusion, table
    from cluster.bench.results import Workload
    from cluster.cli.model_store import fetch

    started = time.monotonic()

    def say(line: str) -> None:
        typer.echo(f"[{time.monotonic() - started:5.0f} s] {line}", err=True)

    say("step 1 of 3: the model")
    model = fetch("smollm2-135m", models_dir, say)
    arms = make_arms(default_config(model), usable_cores(), DEMO_BUDGETS)
    say("step 2 of 3: one question through a prefill worker and a decode worker")
    _ask(arms[-1].config, say)
    say(f"step 3 of 3: a long prompt arrives while six chats stream, {len(arms)} ways to serve")
    workload = Workload()
    results = compare(arms, workload, 1, say)
    report, sentences = as_json(results, workload), conclusion(results)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page(results, report, sentences, "tandem demo"), encoding="utf-8")
    Console().print(table(results))
    for sentence in sentences:
        typer.echo(sentence)
    typer.echo(f"\nThe picture, every token of every stream: {html.resolve().as_uri()}")
    typer.echo(
        "What to try next:\n"
        "  .venv/bin/tandem serve deploy/examples/local-cpu.yaml   a server, until Ctrl-C\n"
        "  .venv/bin/tandem chat                                   talk to it\n"
        "  .venv/bin/tandem status deploy/examples/local-cpu.yaml  what it does\n"
        "  .venv/bin/tandem bench interference                     the full comparison"
    )
    say("done")


def _ask(config: TandemConfig, say: Callable[[str], None]) -> None:
    """Answer one question and print where each stage ran and how long it took."""
    import asyncio

    from cluster.control.bringup import ClusterHandle
    from cluster.control.readiness import Progress

    shown: set[tuple[str, str]] = set()

    def show(progress: Progress) -> None:
        for step in progress.steps:
            if (step.name, step.state.value) not in shown:
                shown.add((step.name, step.state.value))
                say(f"  {step.name}: {step.state.value} {step.detail}".rstrip())

    with ClusterHandle() as cluster:
        endpoints = cluster.start(config, show)
        timings = asyncio.run(_answer(endpoints.grpc))
        for timing in timings:
            say(f"  {timing.stage:<10} {timing.seconds * 1000:8.1f} ms  on {timing.worker_id}")


async def _answer(endpoint: str) -> tuple[StageTiming, ...]:
    """Stream one answer to stdout; returns its stages."""
    from protocol.types import Complete
    from protocol.wire.inference_client import GenerateCall, InferenceClient

    call = GenerateCall(messages=[("user", QUESTION)], temperature=0.0, max_tokens=48)
    typer.echo(f"\n  you:    {QUESTION}\n  tandem: ", nl=False)
    timings: tuple[StageTiming, ...] = ()
    async with InferenceClient(endpoint) as client:
        async for piece in client.generate(call, timeout_s=120):
            if isinstance(piece, Complete):
                timings = piece.timings
            else:
                typer.echo(piece.text, nl=False)
    typer.echo("\n")
    return timings
