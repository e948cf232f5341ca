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

from cluster.bench.quiet import DISTURBED
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
        "foreign_load": _round(result.foreign_load, 3),
        "longest_gap_ms_per_repeat": [_round(run.gaps()["during"].max) for run in result.runs],
    }


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def table(results: Sequence[ArmResult]) -> Table:
    """One row per arm, within 80 columns: gaps as p50/p99/max and the long prompt's TTFT in
    milliseconds, the chats' tokens per second."""
    out = Table(
        title="Gaps between a chat's tokens around one long prompt (p50/p99/max, ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("arm", no_wrap=True)
    for name in WINDOWS:
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("TTFT", justify="right", no_wrap=True)
    out.add_column("tok/s", justify="right", no_wrap=True)
    for result in results:
        gaps = result.gaps()
        cells = ["/".join(map(_cell, (g.p50, g.p99, g.max))) for g in map(gaps.get, WINDOWS) if g]
        rate = f"{result.output_tok_s:.1f}"
        out.add_row(result.arm.name, *cells, _cell(result.long_ttft_ms), rate)
    return out


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def conclusion(results: Sequence[ArmResult]) -> list[str]:
    """What the figures say, in sentences: the gain, its price, and when to doubt both."""
    by_name = {r.arm.name: r for r in results}
    naive, split = by_name.get("naive"), by_name.get("disaggregated")
    if naive is None or split is None:
        return []
    lines = [
        f"Longest silence of a chat: {_silence(naive):.0f} ms naive, {_silence(split):.0f} ms "
        f"disaggregated ({_silence(naive) / _silence(split):.1f} x).",
        f"First token of the long prompt: {naive.long_ttft_ms:.0f} ms naive, "
        f"{split.long_ttft_ms:.0f} ms disaggregated.",
        f"Chat tokens per second: {naive.output_tok_s:.1f} naive, {split.output_tok_s:.1f} "
        "disaggregated.",
    ]
    chunked = [r for r in results if r.arm.name.startswith("chunked")]
    if chunked:
        best = min(chunked, key=_silence)
        lines.append(
            f"Chunked prefill alone, best budget here ({best.arm.budget}): longest silence "
            f"{_silence(best):.0f} ms."
        )
    worse = [
        f"{what} ({better.arm.name})"
        for what, better in (
            ("longest silence", min(results, key=_silence)),
            ("first token of the long prompt", min(results, key=lambda r: r.long_ttft_ms)),
            ("chat tokens per second", max(results, key=lambda r: r.output_tok_s)),
        )
        if better is not split
    ]
    if worse:
        lines.append(f"Where another arm is better than disaggregated: {', '.join(worse)}.")
    foreign = max((r.foreign_load or 0.0 for r in results), default=0.0)
    if foreign > DISTURBED:
        lines.append(
            f"Doubt these figures: other programs used {foreign:.0%} of this machine's cores "
            "between the runs. Run it again on a quiet machine."
        )
    return lines


def _silence(result: ArmResult) -> float:
    """Longest gap of a chat while the long prompt was served, ms; median over repeats."""
    return result.gaps()["during"].max or 0.0
