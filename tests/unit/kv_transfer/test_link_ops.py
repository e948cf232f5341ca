"""Which pages may a link still touch?"""

from __future__ import annotations

from kv_transfer.link_ops import LinkOps
from protocol.types import TicketId

A, B = TicketId("a"), TicketId("b")


def test_an_operation_ends_once() -> None:
    ops = LinkOps()
    ops.started("w", A, 0, 0.0)
    assert (ops.touching(A), len(ops), ops.busy_with("w")) == (1, 1, True)
    assert ops.ended("w", A, 0, 1.0) is True
    assert ops.ended("w", A, 0, 1.0) is None
    assert (ops.touching(A), len(ops), ops.busy_with("w")) == (0, 0, False)


def test_strangers_are_unknown() -> None:
    ops = LinkOps()
    ops.started("w", A, 0, 0.0)
    assert ops.ended("v", A, 0, 0.0) is None
    assert ops.ended("w", B, 0, 0.0) is None
    assert ops.ended("w", A, 1, 0.0) is None
    assert ops.touching(A) == 1


def test_a_sink_touches_no_pages_and_ends_after_the_pages_of_its_key() -> None:
    ops = LinkOps()
    ops.started("w", A, 0, 0.0)
    ops.started_sink("w", A, 0, 0.0)
    assert ops.touching(A) == 1
    assert ops.ended("w", A, 0, 0.0) is True
    assert ops.ended("w", A, 0, 0.0) is False
    assert len(ops) == 0


def test_a_broken_link_ends_everything_on_it_and_nothing_else() -> None:
    ops = LinkOps()
    ops.started("w", A, 0, 0.0)
    ops.started("w", A, 1, 0.0)
    ops.started_sink("w", B, 0, 0.0)
    ops.started("v", B, 0, 0.0)
    assert ops.broken("w") == [A]
    assert (ops.touching(A), ops.touching(B), len(ops)) == (0, 1, 1)
    assert ops.broken("w") == []


def test_a_link_that_does_not_move_is_named_once() -> None:
    ops = LinkOps()
    ops.started("w", A, 0, 0.0)
    ops.started("w", A, 1, 5.0)
    assert ops.overdue(6.0, 6.0) == []
    assert ops.overdue(6.1, 6.0) == ["w"]
    assert ops.overdue(9.0, 6.0) == []


def test_a_link_that_moves_is_not_overdue() -> None:
    ops = LinkOps()
    ops.started("w", A, 0, 0.0)
    ops.started("w", A, 1, 0.0)
    ops.ended("w", A, 0, 5.0)
    assert ops.overdue(10.0, 6.0) == []
    assert ops.overdue(11.5, 6.0) == ["w"]
