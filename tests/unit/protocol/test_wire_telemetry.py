"""The table of metrics, the registry, and that all code counts only what the table names."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import InternalError
from protocol.wire.clock import VirtualClock, WallClock
from protocol.wire.telemetry import LABEL_VALUES, METRICS, SECONDS, Kind, Telemetry

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("protocol", "kv_transfer", "prefill_worker", "decode_worker", "router", "cluster")
COUNTING = ("count", "observe", "set")


def test_values_reach_the_exposition_under_their_exported_names() -> None:
    telemetry = Telemetry()
    telemetry.count("requests", "ok", 2)
    telemetry.count("tokens_delivered")
    telemetry.set("requests_running", 3)
    telemetry.observe("ttft_seconds", 0.25)
    families = {f.name: f for f in text_string_to_metric_families(telemetry.exposition().decode())}
    samples = {
        (s.name, tuple(s.labels.values())): s.value for f in families.values() for s in f.samples
    }
    assert samples[("tandem_requests_total", ("ok",))] == 2
    assert samples[("tandem_tokens_delivered_total", ())] == 1
    assert samples[("tandem_requests_running", ())] == 3
    assert samples[("tandem_ttft_seconds_bucket", ("0.2",))] == 0
    assert samples[("tandem_ttft_seconds_bucket", ("0.3",))] == 1
    assert telemetry.value("requests", "ok") == 2
    assert telemetry.value("requests", "never") == 0
    assert telemetry.value("ttft_seconds") == 1


def test_buckets_resolve_one_millisecond_and_sixty_seconds() -> None:
    assert SECONDS[0] == 0.001
    assert SECONDS[-1] == 60
    assert all(1 < b / a <= 2 for a, b in itertools.pairwise(SECONDS))


def test_two_registries_do_not_share_values() -> None:
    one, other = Telemetry(), Telemetry()
    one.count("tokens_delivered")
    assert (one.value("tokens_delivered"), other.value("tokens_delivered")) == (1, 0)


def test_a_name_or_kind_or_label_outside_the_table_raises() -> None:
    telemetry = Telemetry()
    with pytest.raises(InternalError, match="no metric is called 'reqests'"):
        telemetry.count("reqests")
    with pytest.raises(InternalError, match="requests_running is a gauge, not a counter"):
        telemetry.count("requests_running")
    with pytest.raises(InternalError, match="tokens_delivered has no label"):
        telemetry.count("tokens_delivered", "x")


def test_a_label_with_too_many_values_becomes_other() -> None:
    telemetry = Telemetry()
    for n in range(LABEL_VALUES + 5):
        telemetry.count("rejected", f"cause-{n}")
    assert telemetry.value("rejected", "other") == 5
    assert telemetry.value("rejected", "cause-0") == 1


def _counts(call: ast.Call, has_effect: bool) -> bool:
    """Whether this call raises, sets or observes a metric."""
    func = call.func
    if isinstance(func, ast.Name):
        return has_effect and func.id == "Count"
    if not isinstance(func, ast.Attribute) or func.attr not in COUNTING:
        return False
    owner = func.value
    name = getattr(owner, "attr", getattr(owner, "id", ""))
    return name.strip("_") in ("telemetry", "host")


def _counted() -> list[tuple[str, str]]:
    """(place, metric name) of every literal name that the product counts or observes."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            has_effect = any(
                isinstance(node, ast.ImportFrom)
                and node.module == "protocol.events"
                and any(name.name == "Count" for name in node.names)
                for node in ast.walk(tree)
            )
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                first = node.args[0]
                literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
                if literal and _counts(node, has_effect):
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", first.value))
    return found


def test_all_code_counts_only_names_of_the_table() -> None:
    counted = _counted()
    unknown = [f"{place}: {name}" for place, name in counted if name not in METRICS]
    assert not unknown, unknown


def test_every_name_of_the_table_is_counted_somewhere() -> None:
    assert set(METRICS) <= {name for _, name in _counted()}


def test_names_are_plain() -> None:
    for metric in METRICS.values():
        assert metric.help.endswith("."), metric.name
        assert not metric.name.endswith("_total"), metric.name
        assert (metric.kind is Kind.HISTOGRAM) == metric.name.endswith("_seconds"), metric.name


def test_a_virtual_clock_moves_only_forward_and_only_by_hand() -> None:
    clock = VirtualClock(5)
    clock.advance(1.5)
    clock.move_to(3)
    assert clock.now() == 6.5
    clock.move_to(8)
    assert clock.now() == 8
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
    wall = WallClock()
    assert wall.now() <= wall.now()
