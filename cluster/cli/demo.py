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
STAGES = {
    "queue": "waiting for its turn",
    "prefill": "the prompt is read, its first token drawn",
    "transfer": "the rest of the KV pages, after the prompt was read",
    "reserve": "waiting for room",
    "decode": "the rest of the answer",
}
ARMS = """\
  naive          one worker; a prompt is read in one step, everybody waits for it
  chunked-N      one worker; a step computes N tokens at most, answers first
  disaggregated  a prefill and a decode worker; prompts are read elsewhere"""


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
    say(f"step 3 of 3: a long prompt arrives while six chats stream; {len(arms)} arms")
    typer.echo(ARMS, err=True)
    workload = Workload()
    results = compare(arms, workload, 1, say)
    report, sentences = as_json(results, workload), conclusion(results)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page(results, report, sentences, "tandem demo"), encoding="utf-8")
    Console().print(table(results))
    for sentence in sentences:
        typer.echo(sentence)
    typer.echo("A p99 (-) needs 200 gaps in its window.")
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

    from cluster.bench.progress import StartLines
    from cluster.control.bringup import ClusterHandle

    with ClusterHandle() as cluster:
        endpoints = cluster.start(config, StartLines(say, each=True).show)
        timings = asyncio.run(_answer(endpoints.grpc))
    for timing in timings:
        place = f"{timing.seconds * 1000:7.1f} ms on {timing.worker_id}"
        typer.echo(f"  {timing.stage:<9} {place:<24} {STAGES.get(timing.stage, '')}")
    typer.echo("")


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
