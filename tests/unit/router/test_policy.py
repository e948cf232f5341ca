"""Where requests go, and the ledger and queue that decide with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import ModelConfig, SloConfig, TandemConfig
from protocol.errors import InternalError, Overloaded
from protocol.types import (
    KvGeometry,
    Mode,
    ModelInfo,
    Request,
    Role,
    SamplingParams,
    StageTiming,
    TicketId,
    WorkerInfo,
    WorkerLoad,
)
from router.admission import MAX_OVERTAKEN, MAX_TRIES, Waiting, WaitQueue
from router.ledger import Ledger
from router.policy import Reject, Route, Wait, choose, order_key

MODEL = ModelInfo("f", 320, 4096, (2,), KvGeometry(2, 2, 16, 16, "float32"))
CONFIG = TandemConfig(model=ModelConfig(path="x"))
COLOCATED = TandemConfig(model=ModelConfig(path="x"), mode=Mode.COLOCATED)


def worker(worker_id: str, role: Role, **kwargs: Any) -> WorkerInfo:
    values: dict[str, Any] = {"total_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return WorkerInfo(worker_id, "i", role, f"{worker_id}:1", MODEL, **(values | kwargs))


def ledger(n_prefill: int = 1, n_decode: int = 1, **kwargs: Any) -> Ledger:
    book = Ledger()
    for i in range(n_prefill):
        book.add_worker(worker(f"prefill-{i}", Role.PREFILL, **kwargs))
    for i in range(n_decode):
        book.add_worker(worker(f"decode-{i}", Role.DECODE, **kwargs))
    return book


def request(n_prompt: int = 20, max_tokens: int = 12, name: str = "r", **kwargs: Any) -> Request:
    return Request(name, (7,) * n_prompt, SamplingParams(max_tokens), **kwargs)


def dispatch(book: Ledger, route: Route, n_prompt: int, name: str) -> TicketId:
    ticket_id = TicketId(name)
    local = route.sender is None
    book.dispatch(
        ticket_id,
        route.receiver.worker_id,
        pages=route.pages,
        prompt_tokens=n_prompt if local else 0,
    )
    if route.sender is not None:
        book.dispatch(ticket_id, route.sender.worker_id, pages=0, prompt_tokens=n_prompt)
    return ticket_id


def load(**kwargs: int) -> WorkerLoad:
    return WorkerLoad(**({"total_pages": 64, "free_pages": 64} | kwargs))


# --- choose ------------------------------------------------------------------------------------


def test_a_pair_and_the_pages_of_the_prompt() -> None:
    route = choose(request(20, 900), ledger(), CONFIG)
    assert isinstance(route, Route) and route.sender is not None
    assert (route.sender.worker_id, route.receiver.worker_id) == ("prefill-0", "decode-0")
    assert route.pages == 2 and not route.fallback
    assert "prefill-0 has 0 prompt tokens queued" in route.reason


@pytest.mark.parametrize("config", [CONFIG, COLOCATED], ids=["pairs", "colocated"])
def test_ten_requests_in_one_millisecond_spread_over_all_workers(config: TandemConfig) -> None:
    book = ledger(5, 5)
    picked = []
    for i in range(10):
        route = choose(request(), book, config)
        assert isinstance(route, Route)
        dispatch(book, route, 20, f"r{i}")
        picked.append((route.sender and route.sender.worker_id, route.receiver.worker_id))
    receivers = [receiver for _, receiver in picked]
    assert all(receivers.count(f"decode-{i}") == 2 for i in range(5))
    if config is CONFIG:
        senders = [sender for sender, _ in picked]
        assert all(senders.count(f"prefill-{i}") == 2 for i in range(5))


def test_tokens_weigh_and_not_requests() -> None:
    book = ledger(2, 1, total_pages=1000, max_num_seqs=100)
    long = choose(request(2000), book, CONFIG)
    assert isinstance(long, Route) and long.sender is not None
    dispatch(book, long, 2000, "long")
    for i in range(5):
        route = choose(request(100), book, CONFIG)
        assert isinstance(route, Route) and route.sender is not None
        assert route.sender.worker_id != long.sender.worker_id
        dispatch(book, route, 100, f"short{i}")


def test_a_local_prompt_goes_where_the_fewest_prompt_tokens_wait() -> None:
    book = ledger(0, 2)
    book.report("decode-0", load(queued_tokens=2000))
    book.report("decode-1", load(free_pages=20, running=3))
    route = choose(request(), book, COLOCATED)
    assert isinstance(route, Route) and route.receiver.worker_id == "decode-1"


def test_no_prefill_worker_means_local_and_says_so() -> None:
    route = choose(request(), ledger(0, 1), CONFIG)
    assert isinstance(route, Route)
    assert route.sender is None and route.fallback == "no_prefill_worker"


def test_a_prompt_larger_than_every_prefill_worker_goes_to_the_decode_worker() -> None:
    book = Ledger()
    book.add_worker(worker("prefill-0", Role.PREFILL, total_pages=4))
    book.add_worker(worker("decode-0", Role.DECODE))
    route = choose(request(65), book, CONFIG)
    assert isinstance(route, Route)
    assert route.sender is None and route.fallback == "prompt_larger_than_prefill_worker"
    assert isinstance(fits := choose(request(64), book, CONFIG), Route) and fits.sender is not None


def test_without_a_decode_worker_nothing_waits() -> None:
    answer = choose(request(), ledger(1, 0), CONFIG)
    assert isinstance(answer, Reject)
    assert answer.error.reason == "UNAVAILABLE" and answer.error.retry_after_s


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    assert isinstance(choose(request(1000, 24), ledger(), CONFIG), Route)  # exactly 64 pages
    answer = choose(request(1000, 25), ledger(), CONFIG)
    assert isinstance(answer, Reject) and answer.error.reason == "NEVER_FITS"
    for number in ("1000", "25", "65 pages", "16 tokens", "64"):
        assert number in answer.error.message


def test_choices_share_the_prompt_and_need_a_seat_each() -> None:
    route = choose(request(100, 60, n_choices=3), ledger(), CONFIG)
    assert isinstance(route, Route) and route.pages == 7 + 2
    # 6 full pages are shared; each choice has 58 of its own, or 29
    answer = choose(request(100, 924, n_choices=2), ledger(), CONFIG)
    assert isinstance(answer, Reject) and "2 choices: together 122 pages" in answer.error.message
    assert isinstance(choose(request(100, 460, n_choices=2), ledger(), CONFIG), Route)
    book = ledger()
    book.dispatch(TicketId("a"), "decode-0", pages=9, prompt_tokens=0, seats=6)
    assert isinstance(choose(request(n_choices=2), book, CONFIG), Route)
    answer = choose(request(n_choices=3), book, CONFIG)
    assert isinstance(answer, Wait) and "3 seats are needed" in answer.reason
    answer = choose(request(n_choices=9), book, CONFIG)
    assert isinstance(answer, Reject) and answer.error.field == "n"
    assert "9 choices" in answer.error.message and "8 sequences" in answer.error.message


def test_shared_pages_count_as_the_worker_reports_them() -> None:
    """Twenty prompts with one long beginning: the worker has room, so the router must not wait."""
    book = ledger(1, 1, max_num_seqs=32)
    for i in range(4):
        book.dispatch(TicketId(f"q{i}"), "decode-0", pages=15, prompt_tokens=0)
    assert isinstance(choose(request(200), book, CONFIG), Wait)
    book.report("decode-0", load(free_pages=64 - 20, running=4))
    assert isinstance(choose(request(200), book, CONFIG), Route)


def test_full_pages_and_full_seats_mean_wait_with_the_numbers() -> None:
    book = ledger(1, 1)
    book.dispatch(TicketId("a"), "decode-0", pages=63, prompt_tokens=0)
    answer = choose(request(), book, CONFIG)
    assert isinstance(answer, Wait) and "decode-0 has 1 of 64 pages and 7 of 8" in answer.reason
    book.release(TicketId("a"), "decode-0")
    for i in range(8):
        book.dispatch(TicketId(f"s{i}"), "decode-0", pages=1, prompt_tokens=0)
    answer = choose(request(), book, CONFIG)
    assert isinstance(answer, Wait) and "0 of 8 seats" in answer.reason


def test_order_key_is_least_slack_and_hopeless_prompts_keep_their_place() -> None:
    config = TandemConfig(model=ModelConfig(path="x"), slo=SloConfig(ttft_ms=1000))
    book = ledger()
    book.prefill_s_per_token = 0.001
    assert order_key(request(100), 50.0, book, config) == pytest.approx(50.9)
    assert order_key(request(900), 50.0, book, config) == pytest.approx(50.1)
    hopeless = order_key(request(3000), 50.0, book, config)
    assert hopeless == 50.0  # not before its arrival, however long
    assert order_key(request(900), 49.5, book, config) < hopeless


# --- ledger ------------------------------------------------------------------------------------


def test_the_report_shows_what_other_routers_hold() -> None:
    book = ledger()
    book.dispatch(TicketId("a"), "decode-0", pages=10, prompt_tokens=0)
    book.report("decode-0", load(free_pages=34, running=3))
    decode = book.book("decode-0")
    assert decode is not None
    assert (decode.free_pages, decode.seats_taken) == (34, 3)
    book.release(TicketId("a"), "decode-0")
    assert (decode.free_pages, decode.seats_taken) == (44, 2)  # at once, without a report


def test_prompt_tokens_count_at_once_then_by_the_report() -> None:
    book = ledger()
    prefill = book.book("prefill-0")
    assert prefill is not None
    book.dispatch(TicketId("a"), "prefill-0", pages=0, prompt_tokens=1000)
    assert prefill.queued_tokens == 1000
    book.report("prefill-0", load(queued_tokens=0))  # may have been sent before
    assert prefill.queued_tokens == 1000
    book.report("prefill-0", load(queued_tokens=600))
    assert prefill.queued_tokens == 600
    book.dispatch(TicketId("b"), "prefill-0", pages=0, prompt_tokens=50)
    assert prefill.queued_tokens == 650
    book.release(TicketId("a"), "prefill-0")
    assert prefill.queued_tokens == 50
    book.prompt_computed(TicketId("b"), "prefill-0")
    book.release(TicketId("b"), "prefill-0")
    assert prefill.queued_tokens == 0


def test_unknown_workers_and_tickets_are_nothing_but_twice_is_a_bug() -> None:
    book = ledger()
    book.report("nobody", load())
    book.release(TicketId("a"), "nobody")
    book.release(TicketId("a"), "decode-0")
    book.prompt_computed(TicketId("a"), "nobody")
    book.dispatch(TicketId("a"), "decode-0", pages=1, prompt_tokens=0)
    with pytest.raises(InternalError, match="twice"):
        book.dispatch(TicketId("a"), "decode-0", pages=1, prompt_tokens=0)


def test_a_worker_that_comes_back_has_an_empty_book() -> None:
    book = ledger()
    book.dispatch(TicketId("a"), "decode-0", pages=5, prompt_tokens=0)
    book.drop_worker("decode-0")
    assert book.books(Role.DECODE) == []
    book.add_worker(worker("decode-0", Role.DECODE))
    again = book.book("decode-0")
    assert again is not None and again.free_pages == 64
    book.release(TicketId("a"), "decode-0")
    book.check_integrity()


def test_the_prefill_rate_is_learned_from_what_was_measured() -> None:
    book = ledger()
    for _ in range(50):
        book.learn((StageTiming("prefill", "p", 1.0), StageTiming("decode", "d", 9.0)), 100)
    assert book.predicted_prefill_s(100) == pytest.approx(1.0, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_ledger_balances_after_any_trace(data: st.DataObject) -> None:
    book = ledger(2, 2, max_num_seqs=5)
    live: dict[TicketId, list[str]] = {}
    for step in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["go", "go", "end", "report", "computed", "flap"]))
        if action == "go":
            n_prompt = data.draw(st.integers(1, 400))
            route = choose(request(n_prompt), book, CONFIG)
            if isinstance(route, Route):
                names = [w.worker_id for w in (route.receiver, route.sender) if w is not None]
                live[dispatch(book, route, n_prompt, f"t{step}")] = names
        elif action == "report":
            name = data.draw(st.sampled_from(["prefill-0", "decode-0", "decode-1"]))
            book.report(
                name,
                load(
                    free_pages=data.draw(st.integers(0, 64)),
                    queued_tokens=data.draw(st.integers(0, 900)),
                ),
            )
        elif action == "flap":
            book.drop_worker("decode-1")
            book.add_worker(worker("decode-1", Role.DECODE, max_num_seqs=5))
        elif live:
            ticket_id = data.draw(st.sampled_from(sorted(live)))
            for name in live[ticket_id]:
                if action == "end":
                    book.release(ticket_id, name)
                else:
                    book.prompt_computed(ticket_id, name)
            if action == "end":
                del live[ticket_id]
        book.check_integrity()
        for entry in [*book.books(Role.DECODE), *book.books(Role.PREFILL)]:
            assert 0 <= entry.free_pages <= 64 and entry.queued_tokens >= 0
            assert len(entry.entries) <= 60
    for ticket_id, names in live.items():
        for name in names:
            book.release(ticket_id, name)
    for entry in [*book.books(Role.DECODE), *book.books(Role.PREFILL)]:
        assert not entry.entries and entry.own_pages == entry.own_seats == entry.fresh_tokens == 0


# --- queue -------------------------------------------------------------------------------------


def waiting(serial: int, key: float = 0.0, priority: int = 0) -> Waiting:
    return Waiting(priority, key, serial, request(name=f"r{serial}"), 0.0)


def test_order_is_priority_then_slack_then_arrival() -> None:
    queue = WaitQueue(10)
    for one in [waiting(1, 5.0), waiting(2, 3.0), waiting(3, 9.0, -1), waiting(4, 3.0)]:
        queue.push(one, 1.0)
    seen: list[int] = []
    queue.drain(lambda one: seen.append(one.serial) is None)
    assert seen == [3, 2, 4, 1] and len(queue) == 0


def test_a_full_queue_says_when_to_come_back() -> None:
    queue = WaitQueue(1)
    queue.push(first := waiting(1), 1.0)
    with pytest.raises(Overloaded, match="1 requests wait") as refused:
        queue.push(waiting(2), 3.5)
    assert refused.value.retry_after_s == 3.5
    assert queue.remove(first) and not queue.remove(first)
    queue.push(waiting(2), 1.0)


def test_small_ones_overtake_a_large_one_only_so_often() -> None:
    queue = WaitQueue(1000)
    queue.push(large := waiting(0, -1.0), 1.0)
    n_overtaken = 0
    for i in range(1, 3 * MAX_OVERTAKEN):
        queue.push(waiting(i), 1.0)
        before = len(queue)
        queue.drain(lambda one: one is not large)
        n_overtaken += before - len(queue)
    assert n_overtaken == MAX_OVERTAKEN == large.overtaken
    queue.drain(lambda one: True)
    assert len(queue) == 0


def test_a_round_ends_when_many_in_a_row_find_no_place() -> None:
    queue = WaitQueue(1000)
    for i in range(500):
        queue.push(waiting(i), 1.0)
    tried: list[int] = []
    queue.drain(lambda one: tried.append(one.serial) is not None)
    assert tried == list(range(MAX_TRIES)) and len(queue) == 500
