"""The engine comparison as JSON, as a terminal table, and held against its targets.

Owns the shape that other programs read: the field names of a row do not change. Figures are
medians over repeats; a target is met or missed by the median of the ratios of single repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from cluster.bench.engine import Results
from cluster.bench.engine_work import Phase, Rates
from protocol.types import KvGeometry

OURS, PLAIN, PEER, MACHINE = "tandem", "transformers", "peer", "machine"


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a case costs at least, to hold its rate against the machine."""

    geometry: KvGeometry
    weight_bytes: int
    flops: dict[int, float]  # prompt length -> operations of its prefill


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the list of targets. ``value`` None: not measured in this run."""

    what: str
    wanted: str
    value: float | None
    met: bool | None


def rows_json(results: Results, yardstick: Yardstick) -> list[dict[str, Any]]:
    """One object per case; ``context`` of a prefill row is its prompt's length."""
    return [_row(rates, yardstick) for rates in results.rates]


def _row(rates: Rates, yardstick: Yardstick) -> dict[str, Any]:
    case, ours = rates.case, rates.typical(OURS)
    row: dict[str, Any] = {
        "phase": case.phase.value,
        "batch": case.batch,
        "context": case.context,
        "tok_s": _round(ours),
        "transformers_tok_s": _round(rates.typical(PLAIN)),
        "peer_tok_s": _round(rates.typical(PEER)),
        "ratio_transformers": _round(rates.ratio(OURS, PLAIN), 3),
        "ratio_peer": _round(rates.ratio(OURS, PEER), 3),
        "spread": {
            arm: [_round(x) for x in rates.spread(arm) or ()] for arm in (OURS, PLAIN, PEER)
        },
        "repeats": {arm: len(rates.by_arm.get(arm, ())) for arm in (OURS, PLAIN, PEER)},
    }
    share = rates.ratio(OURS, MACHINE)
    if case.phase is Phase.PREFILL:
        needs = yardstick.flops[case.context] / case.context
        row["matmul_share"] = _round(share and share * needs / 1e9, 3)
    else:
        step = yardstick.weight_bytes + case.batch * case.context * yardstick.geometry.token_bytes
        row["bandwidth_share"] = _round(share and share * step / case.batch / 1e9, 3)
    return row


def machine_rate(results: Results, phase: Phase) -> float | None:
    """Median of the machine's own rate beside the cases of one phase: GFLOP/s or GB/s."""
    found = [
        rate
        for rates in results.rates
        if rates.case.phase is phase
        for rate in rates.by_arm.get(MACHINE, ())
    ]
    return _round(median(found), 1) if found else None


def targets(rows: list[dict[str, Any]], engine_thread: list[dict[str, Any]]) -> list[Target]:
    """The targets that this run can speak about, met or not."""
    found: list[Target] = []

    def at_least(row: dict[str, Any], name: str, against: str, wanted: float) -> None:
        value = row[name]
        what = f"{row['phase']}, batch {row['batch']}, context {row['context']} against {against}"
        met = None if value is None else value >= wanted
        found.append(Target(what, f">= {wanted:g}", value, met))

    for row in rows:
        if row["phase"] == Phase.PREFILL.value:
            at_least(row, "ratio_transformers", "transformers", 0.95)
            if row["context"] in (512, 2048):
                at_least(row, "ratio_peer", "the peer", 1.0 if row["context"] == 512 else 1.15)
        elif row["batch"] in (8, 16) and row["context"] in (128, 1024):
            at_least(row, "ratio_peer", "the peer", 1.3)
    for entry in engine_thread:
        limit = {16: 1.0, 256: 4.0}.get(entry["batch"])
        if limit is not None:
            value = entry["outside_ms"]
            met = None if value is None else value <= limit
            what = f"engine thread outside the model, batch {entry['batch']}, ms per step"
            found.append(Target(what, f"<= {limit:g}", value, met))
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per case, within 80 columns."""
    out = Table(
        title="One worker's engine, tokens per second (medians)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    out.add_column("phase", no_wrap=True)
    for name in ("batch", "context", "tandem", "transformers", "x", "peer", "x", "of machine"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        share = row.get("matmul_share", row.get("bandwidth_share"))
        out.add_row(
            row["phase"],
            str(row["batch"]),
            str(row["context"]),
            _cell(row["tok_s"]),
            _cell(row["transformers_tok_s"]),
            _cell(row["ratio_transformers"], 2),
            _cell(row["peer_tok_s"]),
            _cell(row["ratio_peer"], 2),
            "-" if share is None else f"{share:.0%}",
        )
    return out


def sentences(report: dict[str, Any]) -> list[str]:
    """What the table does not say: the machine, the engine thread, the targets."""
    machine = report["machine"]
    lines = [
        f"Threads of every arm: {machine['threads']}; {report['dtype']}. This machine: "
        f"{_cell(machine['matmul_gflops'])} GFLOP/s of matrix products, "
        f"{_cell(machine['read_gbytes_s'])} GB/s of reads; the last column is the share of them "
        f"(prefill, decode) that tandem reaches."
    ]
    for entry in report["engine_thread"]:
        lines.append(
            f"Engine thread outside the model at batch {entry['batch']}: "
            f"{_cell(entry['outside_ms'], 2)} ms of CPU per step (deciding and delivering "
            f"{_cell(entry['role_ms'], 2)}, before the model {_cell(entry['before_ms'], 2)}, "
            f"after it, sampling included, {_cell(entry['after_ms'], 2)})."
        )
    for name, why in report["lost"].items():
        lines.append(f"The arm {name} did not finish: {why}.")
    known = [t for t in report["targets"] if t["met"] is not None]
    missed = [t for t in known if not t["met"]]
    lines.append(f"Targets met: {len(known) - len(missed)} of {len(known)}.")
    lines += [f"Missed: {t['what']}: {t['value']:g}, wanted {t['wanted']}." for t in missed]
    return lines


def _round(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
