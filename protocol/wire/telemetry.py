"""Every metric of Tandem in one table, and the registry that holds their values.

Owns the names: code that counts says a name of ``METRICS``, any other raises, so nothing is ever
counted where no dashboard looks; a name that nothing counts has no place here. One registry per
process object, no module state, so several workers can live in one test process. It must never
hold text that a client sent; a label's values are few (past ``LABEL_VALUES`` of one metric the
rest is counted as ``other``).

Exported names are ``tandem_`` + name, counters with ``_total``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from protocol.errors import InternalError

LABEL_VALUES = 48
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds; resolves both the gap between two tokens and a very long prompt.
SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0),
)


class Kind(StrEnum):
    """How a metric's values add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``label`` is the name of its only label, if it has one."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    buckets: tuple[float, ...] = SECONDS


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

_TABLE = (
    # router
    Metric("requests", _C, "Requests that ended, by how.", "outcome"),
    Metric("tokens_delivered", _C, "Output tokens handed to clients."),
    Metric("prompt_tokens", _C, "Prompt tokens of accepted requests."),
    Metric("fallbacks", _C, "Requests that did not take the configured way.", "cause"),
    Metric("rejected", _C, "Requests refused before any compute.", "cause"),
    Metric("requests_queued", _G, "Requests that wait for a place."),
    Metric("requests_running", _G, "Requests that hold a place."),
    Metric("ttft_seconds", _H, "Submit to first token."),
    Metric("itl_seconds", _H, "Gap between two tokens of one answer."),
    Metric("e2e_seconds", _H, "Submit to the end of the answer."),
    Metric("queue_seconds", _H, "Submit to dispatch."),
    Metric("stage_seconds", _H, "Time of one stage of a request.", "stage"),
    Metric("workers_lost", _C, "Workers that the router gave up, by why.", "cause"),
    Metric("slo_missed", _C, "First tokens and gaps later than their target.", "target"),
    # worker
    Metric("transfers", _C, "Hand-offs that ended, by how.", "outcome"),
    Metric("leases_ended", _C, "Rights to pages that ended on a clock.", "kind"),
    Metric("preemptions", _C, "Sequences that lost their pages for a while, by how.", "how"),
    # every process
    Metric("events_ignored", _C, "Late, duplicate or unknown events.", "kind"),
    Metric("frames_refused", _C, "Frames and calls without meaning or without proof.", "cause"),
    Metric("messages_dropped", _C, "Messages to somebody who is gone.", "kind"),
    Metric("streams_lost", _C, "Session and Transfer streams that ended.", "kind"),
    Metric("errors", _C, "Failures that a person should read about in the log.", "reason"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


class Telemetry:
    """The values of one process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._seen: dict[str, set[str]] = {}
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        for metric in _TABLE:
            self._families[metric.name] = self._family(metric)

    def count(self, metric: str, label: str = "", amount: float = 1) -> None:
        """Raise a counter. An unknown name, or a label where none belongs: ``InternalError``."""
        self._child(metric, Kind.COUNTER, label).inc(amount)

    def set(self, metric: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        self._child(metric, Kind.GAUGE, label).set(value)

    def observe(self, metric: str, value: float, label: str = "") -> None:
        """Add one observation to a histogram."""
        self._child(metric, Kind.HISTOGRAM, label).observe(value)

    def value(self, metric: str, label: str = "") -> float:
        """A counter's or gauge's value, a histogram's number of observations."""
        row = self._row(metric)
        suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[row.kind]
        labels = {row.label: label} if row.label else {}
        found = self._registry.get_sample_value(f"tandem_{metric}{suffix}", labels)
        return 0.0 if found is None else found

    def exposition(self) -> bytes:
        """The body of ``/metrics``; its type is ``CONTENT_TYPE``."""
        return bytes(generate_latest(self._registry))

    def _family(self, metric: Metric) -> Counter | Gauge | Histogram:
        name = f"tandem_{metric.name}"
        labels = (metric.label,) if metric.label else ()
        match metric.kind:
            case Kind.COUNTER:
                return Counter(name, metric.help, labels, registry=self._registry)
            case Kind.GAUGE:
                return Gauge(name, metric.help, labels, registry=self._registry)
            case Kind.HISTOGRAM:
                return Histogram(
                    name, metric.help, labels, registry=self._registry, buckets=metric.buckets
                )

    def _row(self, metric: str) -> Metric:
        row = METRICS.get(metric)
        if row is None:
            raise InternalError(f"no metric is called {metric!r}")
        return row

    def _child(self, metric: str, kind: Kind, label: str):  # type: ignore[no-untyped-def]
        row = self._row(metric)
        if row.kind is not kind:
            raise InternalError(f"metric {metric} is a {row.kind}, not a {kind}")
        family = self._families[metric]
        if not row.label:
            if label:
                raise InternalError(f"metric {metric} has no label, given {label!r}")
            return family
        return family.labels(self._bounded(metric, label))

    def _bounded(self, metric: str, label: str) -> str:
        with self._lock:
            seen = self._seen.setdefault(metric, set())
            if label in seen:
                return label
            if len(seen) >= LABEL_VALUES:
                return "other"
            seen.add(label)
            return label
