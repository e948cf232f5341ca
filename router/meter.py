"""What the router measures about its requests: the only place where it counts.

This file owns which event moves which metric of ``protocol.wire.telemetry`` and the few plain
counters that ``RouterStatus`` shows. It must never influence a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from protocol.config import SloConfig
from protocol.errors import TandemError
from protocol.types import Complete, StageTiming
from protocol.wire.telemetry import Telemetry
from router.flight import Flight


class Meter:
    """The figures of one router. Instants are those of the router's clock."""

    def __init__(self, telemetry: Telemetry, slo: SloConfig) -> None:
        self._telemetry = telemetry
        self._slo = slo
        self.counters: Counter[str] = Counter()

    def accepted(self, flight: Flight) -> None:
        """A request was dispatched or queued."""
        self._telemetry.count("prompt_tokens", amount=len(flight.request.prompt))

    def rejected(self, error: TandemError) -> None:
        """A request was refused before any compute."""
        self._telemetry.count("rejected", error.reason.lower())
        self.counters[f"rejected_{error.reason.lower()}"] += 1

    def dispatched(self, flight: Flight, now: float) -> None:
        """A request left for its workers."""
        self._telemetry.observe("queue_seconds", now - flight.arrival)

    def fallback(self, cause: str) -> None:
        """A request does not take the configured way."""
        self._telemetry.count("fallbacks", cause)
        self.counters[f"fallback_{cause}"] += 1

    def tokens(self, flight: Flight, choice: int, n_tokens: int, now: float) -> None:
        """Tokens of a choice are about to be noted in the flight."""
        self._telemetry.count("tokens_delivered", amount=n_tokens)
        last = flight.last_token_at.get(choice)
        if last is None:
            if flight.first_token_at is not None:
                return  # the first token of a further choice is neither a first nor a next one
            waited_s = now - flight.arrival
            self._telemetry.observe("ttft_seconds", waited_s)
            late, target = waited_s * 1000 > self._slo.ttft_ms, "ttft"
        else:
            gap_s = now - last
            self._telemetry.observe("itl_seconds", gap_s)
            late, target = gap_s * 1000 > self._slo.itl_ms, "itl"
        if late:
            self._telemetry.count("slo_missed", target)

    def stages(self, timings: Iterable[StageTiming]) -> None:
        """The stages of a request that was answered."""
        for timing in timings:
            self._telemetry.observe("stage_seconds", timing.seconds, timing.stage)

    def ended(self, flight: Flight, end: Complete | TandemError, now: float) -> None:
        """A client has its end."""
        outcome = end.reason.lower() if isinstance(end, TandemError) else end.finish_reason.value
        self._telemetry.count("requests", outcome)
        self.counters[f"requests_{outcome}"] += 1
        self._telemetry.observe("e2e_seconds", now - flight.arrival)

    def worker_lost(self, cause: str) -> None:
        """A worker was given up."""
        self._telemetry.count("workers_lost", cause)
        self.counters[f"workers_lost_{cause}"] += 1

    def ignored(self, kind: str) -> None:
        """Something came late, twice, or for nobody."""
        self._telemetry.count("events_ignored", kind)
        self.counters[kind] += 1

    def gauges(self, *, queued: int, running: int) -> None:
        """How many requests there are now."""
        self._telemetry.set("requests_queued", queued)
        self._telemetry.set("requests_running", running)
