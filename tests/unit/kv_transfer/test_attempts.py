"""The fence between attempts of one request."""

from __future__ import annotations

from kv_transfer.attempts import Attempts, Standing
from protocol.types import TicketId


def q(attempt: int, request: str = "q") -> TicketId:
    return TicketId(request, attempt)


def test_a_newer_attempt_drops_the_live_one_and_older_ones_are_stale() -> None:
    attempts = Attempts(8)
    assert attempts.standing(q(2)) is Standing.NEW
    attempts.begin(q(2))
    assert attempts.standing(q(2)) is Standing.DUPLICATE
    assert attempts.standing(q(1)) is Standing.STALE
    assert attempts.standing(q(3)) is Standing.NEWER
    assert attempts.live_attempt(q(3)) == q(2)


def test_finished_attempts_are_remembered() -> None:
    attempts = Attempts(8)
    attempts.begin(q(1))
    attempts.finish(q(1))
    assert attempts.standing(q(1)) is Standing.DUPLICATE
    assert attempts.is_over(q(1))
    assert attempts.standing(q(2)) is Standing.NEW
    assert attempts.live_attempt(q(2)) is None


def test_an_attempt_that_makes_way_may_finish_after_its_successor_began() -> None:
    attempts = Attempts(8)
    attempts.begin(q(1))
    attempts.begin(q(2))
    attempts.finish(q(1))
    assert attempts.live_attempt(q(3)) == q(2)
    assert attempts.standing(q(1)) is Standing.DUPLICATE
    attempts.finish(q(2))
    assert attempts.live_attempt(q(3)) is None


def test_the_memory_is_bounded_but_live_requests_are_never_forgotten() -> None:
    attempts = Attempts(3)
    attempts.begin(q(1, "long"))
    for i in range(1000):
        attempts.begin(q(1, f"r{i}"))
        attempts.finish(q(1, f"r{i}"))
    assert len(attempts._finished) == 3 and len(attempts._live) == 1
    assert attempts.standing(q(2, "long")) is Standing.NEWER
    assert attempts.is_over(q(1, "r999")) and not attempts.is_over(q(1, "r0"))
