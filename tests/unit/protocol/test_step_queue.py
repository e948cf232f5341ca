"""The waiting queue: order, ageing with its stated bound, and the prefill share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InternalError
from protocol.step import MAX_OVERTAKES, UrgencyQueue, prefill_share
from protocol.types import Peer, SamplingParams, Ticket, TicketId

PEER = Peer("decode-0", "i", "e")


def ticket(name: str, priority: int = 0, order_key: float = 0.0) -> Ticket:
    return Ticket(
        TicketId(name),
        None,
        PEER,
        (1,),
        1,
        SamplingParams(max_tokens=1),
        priority=priority,
        order_key=order_key,
    )


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3), st.booleans()), max_size=40))
def test_order_is_priority_then_key_then_arrival(items: list[tuple[int, int, bool]]) -> None:
    queue = UrgencyQueue()
    reference: list[tuple[int, float, int, TicketId]] = []
    for i, (priority, key, leaves) in enumerate(items):
        t = ticket(f"q{i}", priority, key)
        queue.add(t)
        reference.append((priority, key, i, t.id))
        if leaves and len(reference) > 1:
            gone = reference.pop(len(reference) // 2)
            assert queue.remove(gone[3])
            assert not queue.remove(gone[3])
        expected = [entry[3] for entry in sorted(reference)]
        assert queue.in_order() == expected
        assert [queue.ahead_of(ticket_id) for ticket_id in expected] == list(range(len(expected)))
        assert set(queue.reasons("why")) == set(expected)
    assert len(queue) == len(reference)


def test_nobody_waits_beyond_the_bound() -> None:
    """A flood of more urgent arrivals; one is served and leaves per decision."""
    queue = UrgencyQueue()
    for i in range(5):
        queue.add(ticket(f"old{i}", priority=9, order_key=float(i)))
    decisions: dict[TicketId, int] = {}
    for decision in range(1, (MAX_OVERTAKES + 1) * 6 + 1):
        queue.add(ticket(f"new{decision}", priority=0))
        chosen = queue.in_order()[0]
        queue.served((chosen,))
        queue.remove(chosen)
        decisions[chosen] = decision
    for i in range(5):  # i older ones ahead, one decision each
        assert decisions[TicketId(f"old{i}")] <= (MAX_OVERTAKES + 1) * (i + 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_for_random_work(seed: int) -> None:
    rng = random.Random(seed)
    queue = UrgencyQueue(max_overtakes=3)
    work: dict[TicketId, int] = {}
    ahead: dict[TicketId, int] = {}  # decisions that older ones needed when it came
    came: dict[TicketId, int] = {}
    first: dict[TicketId, int] = {}
    for decision in range(300):
        if rng.random() < 0.4:
            t = ticket(f"q{decision}", rng.choice((0, 1)), rng.random())
            ahead[t.id], came[t.id] = sum(work.values()), decision
            work[t.id] = rng.randint(1, 4)
            queue.add(t)
        if not work:
            continue
        chosen = queue.in_order()[: rng.choice((1, 1, 2))]
        queue.served(chosen)
        for ticket_id in chosen:
            first.setdefault(ticket_id, decision)
            work[ticket_id] -= 1
            if not work[ticket_id]:
                del work[ticket_id]
                queue.remove(ticket_id)
    for ticket_id, decision in first.items():
        assert decision - came[ticket_id] <= 4 * (ahead[ticket_id] + 1)


def test_urgent_traffic_keeps_its_share_however_long_the_queue() -> None:
    queue = UrgencyQueue()
    for i in range(500):
        queue.add(ticket(f"batch{i}", priority=5))
    urgent = 0
    for decision in range(90):
        queue.add(ticket(f"chat{decision}", priority=0))
        chosen = queue.in_order()[0]
        urgent += chosen.request_id.startswith("chat")
        queue.served((chosen,))
        queue.remove(chosen)
    assert urgent == 90 * MAX_OVERTAKES // (MAX_OVERTAKES + 1)


def test_a_ticket_comes_back_to_its_old_place() -> None:
    queue = UrgencyQueue()
    arrival = queue.add(ticket("a"))
    queue.add(ticket("b"))
    queue.remove(TicketId("a"))
    queue.add(ticket("a"), arrival)
    assert queue.in_order() == [TicketId("a"), TicketId("b")]
    with pytest.raises(InternalError):
        queue.add(ticket("a"))


@given(st.integers(1, 4096), st.integers(0, 512), st.integers(1, 128))
def test_prompts_get_what_decodes_leave(budget: int, decodes: int, floor: int) -> None:
    share = prefill_share(budget, decodes, floor)
    assert share >= floor
    if budget >= decodes + floor:
        assert share + decodes == budget
