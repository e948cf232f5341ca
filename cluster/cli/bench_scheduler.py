"""``tandem bench scheduler``: how long deciding a step takes, and that it does not grow.

Owns the options, the table and the targets. stdout is data, stderr progress.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

DECISION_MS = 1.0
# Of a role with a past to one without: more than noise of the measurement is growth.
GROWTH = 1.25
TARGET_MISSED = 3


def scheduler(
    running: Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")] = 256,
    waiting: Annotated[int, typer.Option(min=0, help="Requests that wait beside them.")] = 1000,
    decisions: Annotated[int, typer.Option(min=10, help="Steps decided per role.")] = 1000,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests served for the growth; 0: left out.")
    ] = 100_000,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 where a target is missed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Time of one scheduling decision on the real schedulers, without a model."""
    from rich.console import Console

    from cluster.bench.scheduler_bench import decision_time, growth
    from protocol.types import Role

    report: dict[str, Any] = {"decisions": [], "growth": []}
    for role in (Role.DECODE, Role.PREFILL):
        typer.echo(f"{role}: {decisions} decisions, {running} + {waiting}", err=True)
        report["decisions"].append(decision_time(role, running, waiting, decisions))
    for role in (Role.DECODE, Role.PREFILL) if requests else ():
        typer.echo(f"{role}: serving {requests} requests", err=True)
        report["growth"].append(growth(role, running, waiting, requests))
    report["targets"] = targets(report)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print(_table(report))
        for line in _sentences(report):
            typer.echo(line)
    if strict and not all(t["met"] for t in report["targets"]):
        raise typer.Exit(TARGET_MISSED)


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What was wanted, what came, and whether it is met."""
    found = [
        _target(f"{d['role']}: p50 of a decision, ms", d["p50_ms"], DECISION_MS)
        for d in report["decisions"]
    ]
    found += [
        _target(
            f"{g['role']}: a decision after {g['requests']} requests to one before",
            g["ratio"],
            GROWTH,
        )
        for g in report["growth"]
    ]
    return found


def _target(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "wanted": f"<= {limit:g}", "value": value, "met": value <= limit}


def _table(report: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    out = Table(
        title="CPU time of one scheduling decision, ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("role", no_wrap=True)
    for name in ("running", "waiting", "plan p50", "p99", "step_done p50", "p99"):
        out.add_column(name, justify="right", no_wrap=True)
    for d in report["decisions"]:
        times = (d["p50_ms"], d["p99_ms"], d["step_done_p50_ms"], d["step_done_p99_ms"])
        counts = (str(d["running"]), str(d["waiting"]))
        out.add_row(d["role"], *counts, *(f"{t:.3f}" for t in times))
    return out


def _sentences(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{g['role']}: over {g['requests']} requests served a decision went from "
        f"{g['first_ms']:.3f} to {g['last_ms']:.3f} ms (x {g['ratio']:.2f}); objects kept "
        f"{g['objects_grown']:+d}, resident memory {g['rss_grown_mb']:+.1f} MB."
        for g in report["growth"]
    ]
    missed = [t for t in report["targets"] if not t["met"]]
    lines.append(
        f"Targets met: {len(report['targets']) - len(missed)} of {len(report['targets'])}."
    )
    lines += [f"Missed: {t['what']}: {t['value']:g}, wanted {t['wanted']}." for t in missed]
    return lines
