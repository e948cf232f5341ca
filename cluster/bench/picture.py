"""One self-contained HTML file: every token of every stream as a tick, arm under arm.

Owns the picture of the freeze. One row per stream, time from left to right on one scale for all
arms, zero at the long prompt's submit; a silence is a gap in the row, visible at a glance. No
script, no outside asset, light and dark.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from cluster.bench.results import ArmResult, Run
from cluster.bench.windows import WINDOWS

WIDTH, LEFT, RIGHT = 1120, 92, 16
ROW, TICK = 17, 12

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #6b7585; --line: #d9dee6;
  --paper: #ffffff; --chat: #2563a8; --long: #b4541a; --during: #f4e7c6; --freeze: #c62f2f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #97a1b0; --line: #353c48;
  --paper: #14181f; --chat: #6fb1f2; --long: #f0a068; --during: #3a3320; --freeze: #ff7a70; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 1160px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .1rem; }
p { margin: .2rem 0; } .soft { color: var(--soft); } .worst { color: var(--freeze); }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--soft); }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; font-size: .85rem; }
code { font-size: .85rem; }
"""


def page(
    results: Sequence[ArmResult], report: dict[str, Any], sentences: Sequence[str], command: str
) -> str:
    """The whole document. ``report`` is the JSON form and is embedded for other programs."""
    runs = [(result, result.typical_run()) for result in results]
    start = min(run.marks.warm - run.marks.submit for _, run in runs)
    end = max(run.end - run.marks.submit for _, run in runs)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Who freezes when a long prompt arrives</title><style>{_STYLE}</style>",
        "</head><body>",
        "<h1>Who freezes when a long prompt arrives</h1>",
        "<p class='soft'>Each tick is one token reaching a client; a hole in a row is a user who "
        "waits. The shaded band runs from the submit of the long prompt to its second token. "
        "Same model, same cores, same time scale in every arm.</p>",
        *(f"<p>{html.escape(s)}</p>" for s in sentences),
        *(_arm_section(result, run, start, end) for result, run in runs),
        _table(report),
        f"<p class='soft'>Made by <code>{html.escape(command)}</code>; figures are medians of "
        f"{_repeats(report)}, in milliseconds; the picture shows the repeat with the "
        "median longest gap. A p99 needs 200 gaps in its window.</p>",
        f"<script type='application/json' id='report'>{_embedded(report)}</script>",
        "</body></html>",
    ]
    return "\n".join(parts)


def _repeats(report: dict[str, Any]) -> str:
    n = report["repeats"]
    return f"{n} repeats" if n > 1 else "one repeat"


def _embedded(report: dict[str, Any]) -> str:
    return json.dumps(report).replace("</", "<\\/")


def _arm_section(result: ArmResult, run: Run, start: float, end: float) -> str:
    longest = run.gaps()["during"].max
    budget = f", token budget {result.arm.budget}" if result.arm.budget else ""
    note = f"<span class='worst'>longest silence {longest:.0f} ms</span>" if longest else ""
    return (
        f"<h2>{html.escape(result.arm.name)}</h2>"
        f"<p class='soft'>{result.arm.describe_workers()}{budget}; {note}</p>"
        + _raster(run, start, end)
    )


def _raster(run: Run, start: float, end: float) -> str:
    span = max(end - start, 1e-6)
    zero = run.marks.submit

    def x(instant: float) -> float:
        return LEFT + (instant - zero - start) / span * (WIDTH - LEFT - RIGHT)

    streams = [*run.chats, run.long]
    height = ROW * len(streams) + 26
    bottom = ROW * len(streams) + 4
    parts = [
        f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='token arrivals'>",
        f"<rect x='{x(zero):.1f}' y='0' width='{x(run.marks.second) - x(zero):.1f}' "
        f"height='{bottom}' fill='var(--during)'/>",
    ]
    for row, stream in enumerate(streams):
        y = ROW * row + 4
        color = "var(--long)" if stream is run.long else "var(--chat)"
        ticks = "".join(
            f"M{x(t):.1f} {y}v{TICK}" for t in stream.arrivals if start <= t - zero <= end
        )
        parts.append(f"<text x='0' y='{y + 10}'>{html.escape(stream.name)}</text>")
        parts.append(f"<path d='{ticks}' stroke='{color}' stroke-width='1.2' fill='none'/>")
    parts.append(_longest_gap_mark(run, x))
    step = _axis_step(span)
    second = int(start / step) * step
    while second <= end:
        at = x(zero + second)
        parts.append(
            f"<path d='M{at:.1f} {bottom}v5' stroke='var(--soft)'/>"
            f"<text x='{at:.1f}' y='{bottom + 17}' text-anchor='middle'>{second:g} s</text>"
        )
        second += step
    parts.append("</svg>")
    return "".join(parts)


def _longest_gap_mark(run: Run, x: Callable[[float], float]) -> str:
    """A line through the longest silence that overlaps the long prompt."""
    worst: tuple[float, float, float, int] | None = None
    for row, chat in enumerate(run.chats):
        for earlier, later in pairwise(chat.arrivals):
            overlaps = later > run.marks.submit and earlier < run.marks.second
            if overlaps and (worst is None or later - earlier > worst[0]):
                worst = (later - earlier, earlier, later, row)
    if worst is None:
        return ""
    _, earlier, later, row = worst
    y = ROW * row + 4 + TICK / 2
    return (
        f"<path d='M{x(earlier):.1f} {y}H{x(later):.1f}' stroke='var(--freeze)' "
        "stroke-width='2.5'/>"
    )


def _axis_step(span: float) -> float:
    return next((step for step in (1, 2, 5, 10, 20, 60) if span / step <= 16), 120)


def _table(report: dict[str, Any]) -> str:
    head = "".join(f"<th>{w} {f}</th>" for w in WINDOWS for f in ("p50", "p99", "max"))
    rows = []
    for arm in report["arms"]:
        cells = "".join(
            f"<td>{_cell(arm['chat_itl_ms'][w][f])}</td>"
            for w in WINDOWS
            for f in ("p50", "p99", "max")
        )
        rows.append(
            f"<tr><td>{html.escape(arm['name'])}</td>{cells}<td>{arm['long_ttft_ms']:.0f}</td>"
            f"<td>{arm['output_tok_s']:.1f}</td></tr>"
        )
    return (
        f"<table><thead><tr><th>arm</th>{head}<th>long prompt TTFT</th><th>chat tokens/s</th></tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.0f}"
