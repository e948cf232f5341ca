"""The interference comparison as JSON, as a terminal table, and in one sentence.

Owns the shape that other programs read: field names do not change. Every arm is always printed,
also where disaggregation loses; figures are medians over repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from cluster.bench.results import ArmResult, Workload
from cluster.bench.windows import WINDOWS


def as_json(results: Sequence[ArmResult], workload: Workload) -> dict[str, Any]:
    """``arms`` as documented; ``workload`` and each repeat's longest gap beside it."""
    return {
        "arms": [_arm(result) for result in results],
        "repeats": len(results[0].runs),
        "workload": asdict(workload),
    }


def _arm(result: ArmResult) -> dict[str, Any]:
    gaps = result.gaps()
    return {
        "name": result.arm.name,
        "budget": result.arm.budget,
        "workers": result.arm.workers,
        "threads": sum(result.arm.threads_per_worker),
        "long_ttft_ms": round(result.long_ttft_ms, 1),
        "output_tok_s": round(result.output_tok_s, 2),
        "chat_itl_ms": {
            name: {
                "p50": _round(gaps[name].p50),
                "p99": _round(gaps[name].p99),
                "max": _round(gaps[name].max),
            }
            for name in WINDOWS
        },
        "gaps": {name: gaps[name].count for name in WINDOWS},
        "longest_gap_ms_per_repeat": [_round(run.gaps()["during"].max) for run in result.runs],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def table(results: Sequence[ArmResult]) -> Table:
    """One row per arm; milliseconds, as p50 / p99 / max."""
    out = Table(
        title="Gaps between a chat's tokens around one long prompt (p50/p99/max, ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    out.add_column("arm", no_wrap=True)
    for name in WINDOWS:
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("long TTFT", justify="right", no_wrap=True)
    out.add_column("chat tok/s", justify="right", no_wrap=True)
    for result in results:
        gaps = result.gaps()
        cells = ["/".join(map(_cell, (g.p50, g.p99, g.max))) for g in map(gaps.get, WINDOWS) if g]
        rate = f"{result.output_tok_s:.1f}"
        out.add_row(result.arm.name, *cells, _cell(result.long_ttft_ms), rate)
    return out


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def conclusion(results: Sequence[ArmResult]) -> list[str]:
    """What the figures say, in sentences; both the gain and its price."""
    by_name = {r.arm.name: r for r in results}
    naive, split = by_name.get("naive"), by_name.get("disaggregated")
    if naive is None or split is None:
        return []
    naive_gap, split_gap = naive.gaps()["during"].max, split.gaps()["during"].max
    lines = []
    if naive_gap and split_gap:
        lines.append(
            f"Longest silence of a chat while the long prompt was served: {naive_gap:.0f} ms "
            f"naive, {split_gap:.0f} ms disaggregated ({naive_gap / split_gap:.1f} x)."
        )
    lines.append(
        f"The long prompt's first token: {naive.long_ttft_ms:.0f} ms naive, "
        f"{split.long_ttft_ms:.0f} ms disaggregated; chat tokens/s: {naive.output_tok_s:.1f} "
        f"against {split.output_tok_s:.1f}."
    )
    chunked = [r for r in results if r.arm.name.startswith("chunked")]
    slower = [
        what
        for what, split_value, best in (
            (
                "long prompt's first token",
                -split.long_ttft_ms,
                -min(r.long_ttft_ms for r in results),
            ),
            ("chat throughput", split.output_tok_s, max(r.output_tok_s for r in results)),
        )
        if split_value < best
    ]
    if slower:
        lines.append(f"Disaggregation is not the best arm in: {', '.join(slower)}.")
    if chunked:
        best_chunked = min(chunked, key=lambda r: r.gaps()["during"].max or 0.0)
        gap = best_chunked.gaps()["during"].max
        lines.append(
            f"Chunked prefill alone, at its best budget here ({best_chunked.arm.budget}): "
            f"longest silence {gap:.0f} ms."
        )
    return lines
