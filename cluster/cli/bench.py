"""``tandem bench``: measurements that start and stop what they measure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import bench_engine, bench_scheduler
from cluster.cli.config import SetOption

app = typer.Typer(help="Measure, beside the alternatives.", no_args_is_help=True)
app.command("engine")(bench_engine.engine)
app.command("scheduler")(bench_scheduler.scheduler)


@app.command()
def interference(
    config: Annotated[
        Path | None, typer.Argument(help="Take model, kv and timing from this file.")
    ] = None,
    set_: SetOption = None,
    model: Annotated[
        Path, typer.Option(help="Model folder, where no configuration is named.")
    ] = Path("models/smollm2-135m"),
    budgets: Annotated[
        str, typer.Option(help="Token budgets of the chunked arms.")
    ] = "64,128,256,512",
    cores: Annotated[
        int | None, typer.Option(min=2, help="CPU threads of every arm; default: all cores.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of every arm.")] = 3,
    chats: Annotated[int, typer.Option(min=1, max=16, help="Chats that stream.")] = 6,
    long_tokens: Annotated[int, typer.Option(min=64, help="Length of the long prompt.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    html: Annotated[Path, typer.Option(help="Where the picture is written.")] = Path(
        "reports/interference.html"
    ),
) -> None:
    """Chats stream; one very long prompt arrives. Who freezes, in which arm?"""
    from rich.console import Console

    from cluster.bench.arms import default_config, make_arms, parse_budgets, usable_cores
    from cluster.bench.interference import compare
    from cluster.bench.picture import page
    from cluster.bench.report import as_json as report_of
    from cluster.bench.report import conclusion, table
    from cluster.bench.results import Workload
    from protocol.errors import InvalidArgument
    from protocol.load import load_config

    if set_ and config is None:
        raise InvalidArgument("--set changes a configuration: name its file too", field="set")
    base = load_config(config, set_ or (), os.environ) if config else default_config(model)
    arms = make_arms(base, cores or usable_cores(), parse_budgets(budgets))
    workload = Workload(chats=chats, long_tokens=long_tokens)
    results = compare(arms, workload, repeats, lambda line: typer.echo(line, err=True))
    report = report_of(results, workload)
    sentences = conclusion(results)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page(results, report, sentences, "tandem bench interference"), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print(table(results))
        for sentence in sentences:
            typer.echo(sentence)
    typer.echo(f"picture: {html}", err=True)
