"""What a prefill worker commits: choices, logprobs, cached tokens, and only the pages that lack."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from kv_transfer.pages import Pages
from prefill_worker.role import PrefillRole
from protocol.errors import ErrorInfo
from protocol.events import (
    Effect,
    FromPeer,
    FromRouter,
    SegmentSent,
    SendPages,
    ToReceiver,
    ToRouter,
)
from protocol.messages import Announce, Commit, Done, Grant, Offer, Open, Sealed
from protocol.page_hash import page_hashes, root
from protocol.role import RoleOptions
from protocol.step import RowResult, StepPlan, StepResult
from protocol.types import Outcome, Peer, SamplingParams, Ticket, TicketId, TokenLogprobs

ME = Peer("prefill-0", "inc-p", "p:1")
D = Peer("decode-0", "inc-d", "d:1")
ROOT = root("fp", "float32", 4)
NAN = ErrorInfo("INTERNAL", "logits are not finite")


class Bench:
    """One role over pages that can be looked at."""

    def __init__(self, total: int = 12) -> None:
        self.pages = Pages(total, 4)
        self.role = PrefillRole(
            ME,
            self.pages,
            RoleOptions(
                page_bytes=100,
                max_num_batched_tokens=12,
                max_num_seqs=4,
                max_model_len=100,
                min_prefill_tokens=4,
                hash_root=ROOT,
                remembered=16,
            ),
        )

    def open(self, t: Ticket) -> list[Effect]:
        return self.role.handle(FromRouter("r", Open(t)), 0.0)

    def grant(self, t: Ticket, prefix_tokens: int = 0) -> list[Effect]:
        return self.role.handle(FromPeer("decode-0", Grant(t.id, 9, 8, prefix_tokens)), 0.0)

    def plan(self) -> StepPlan:
        plan = self.role.plan(0.0)
        assert plan is not None
        return plan

    def step(self) -> list[Effect]:
        plan = self.plan()
        rows = [
            RowResult(tuple(range(7, 7 + len(r.choices))) if r.sample else ()) for r in plan.rows
        ]
        return self.role.step_done(StepResult(tuple(rows)), 0.0)

    def done(self, t: Ticket, effects: list[Effect]) -> Commit:
        """Let the link take everything; the commit, which is sealed then."""
        for send in [e for e in effects if isinstance(e, SendPages)]:
            effects = self.role.handle(SegmentSent("decode-0", t.id, send.segment, 5), 0.0)
        (commit,) = commits(effects)
        (end,) = self.role.handle(FromPeer("decode-0", Sealed(t.id)), 0.0)
        assert isinstance(end, ToRouter) and isinstance(end.message, Done)
        assert end.message.outcome is Outcome.OK
        self.role.check_integrity()
        return commit

    def serve(self, t: Ticket) -> Commit:
        """One ticket all the way, granted before it is computed."""
        self.open(t)
        effects = self.grant(t)
        while not effects or not commits(effects):
            effects = self.step()
            for send in [e for e in effects if isinstance(e, SendPages)]:
                effects = self.role.handle(SegmentSent("decode-0", t.id, send.segment, 5), 0.0)
        return self.done(t, effects)


def commits(effects: list[Effect]) -> list[Commit]:
    return [
        e.message for e in effects if isinstance(e, ToReceiver) and isinstance(e.message, Commit)
    ]


def announced(effects: list[Effect]) -> list[tuple[int, int]]:
    return [
        (e.message.first_page, e.message.n_pages)
        for e in effects
        if isinstance(e, ToReceiver) and isinstance(e.message, Announce)
    ]


def ticket(name: str, n: int = 10, **asks: object) -> Ticket:
    sampling = replace(SamplingParams(max_tokens=8), **asks)  # type: ignore[arg-type]
    return Ticket(TicketId(name), ME, D, tuple(range(n)), n, sampling)


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1)


def test_cached_tokens_are_those_that_nobody_computed() -> None:
    bench = Bench()
    assert bench.serve(ticket("first", 10)).cached_tokens == 0
    assert bench.serve(ticket("second", 11)).cached_tokens == 8
    assert bench.pages.cached == 2 and bench.pages.available == 12


def test_tokens_of_an_earlier_attempt_are_no_prompt() -> None:
    bench = Bench()
    bench.serve(ticket("first", 20))
    again = replace(ticket("again", 20, max_tokens=30), n_prompt=6)
    assert bench.serve(again).cached_tokens == 6  # 16 were found, 10 of them are answer


def test_every_choice_has_its_first_token() -> None:
    bench = Bench()
    commit = bench.serve(replace(ticket("q"), n_choices=6))  # one row draws them all
    assert commit.first_tokens == (7, 8, 9, 10, 11, 12) and commit.logprobs == ()


@pytest.mark.parametrize(
    ("prefix", "spans", "n_pages"), [(0, [(0, 3)], 3), (8, [(2, 1)], 1), (12, [], 0), (96, [], 0)]
)
def test_only_what_the_receiver_lacks_is_sent(
    prefix: int, spans: list[tuple[int, int]], n_pages: int
) -> None:
    bench = Bench()
    t = ticket("q", 12)
    bench.open(t)
    assert bench.grant(t, prefix) == []
    effects = bench.step()
    assert announced(effects) == spans
    commit = bench.done(t, effects)
    assert (commit.n_pages, commit.n_bytes) == (n_pages, 100 * n_pages)
    assert bench.role.is_idle()


def test_a_grant_after_the_last_chunk_to_one_that_holds_all_is_a_commit_at_once() -> None:
    bench = Bench()
    t = ticket("q", 12)
    bench.open(t)
    bench.step()
    effects = bench.grant(t, 12)
    assert announced(effects) == [] and bench.done(t, effects).n_pages == 0


def test_pages_from_the_cache_are_sent_while_the_rest_is_computed() -> None:
    bench = Bench()
    bench.serve(ticket("first", 10))
    t = ticket("q", 14)
    bench.open(t)
    assert announced(bench.grant(t)) == []
    plan = bench.plan()
    assert plan.rows[0].start == 8
    assert announced(bench.role.tick(0.1)) == [(0, 2)]
    assert announced(bench.role.tick(0.2)) == []
    effects = bench.role.step_done(StepResult((RowResult((7,)),)), 0.3)
    assert announced(effects) == [(2, 2)]


def test_logprobs_come_with_the_commit_and_those_of_the_prompt_from_every_chunk() -> None:
    bench = Bench()
    t = replace(ticket("q", 20, logprobs=0, prompt_logprobs=0), n_choices=2)
    bench.open(t)
    bench.grant(t)
    plan = bench.plan()
    first = RowResult(prompt_logprobs=tuple(logprob(i) for i in range(1, 13)))
    bench.role.step_done(StepResult((first,)), 0.0)
    plan = bench.plan()
    assert (plan.rows[0].start, plan.rows[0].choices) == (12, (0, 1))
    last = RowResult((7, 8), (logprob(7), logprob(8)), tuple(logprob(i) for i in range(13, 20)))
    bench.role.handle(SegmentSent("decode-0", t.id, 0, 5), 0.0)
    commit = bench.done(t, bench.role.step_done(StepResult((last,)), 0.0))
    assert commit.logprobs == (logprob(7), logprob(8))
    assert [p.token_id for p in commit.prompt_logprobs] == list(range(1, 20))


def test_the_prompt_logprobs_of_a_dropped_prompt_start_again() -> None:
    bench = Bench(total=5)
    t = ticket("q", 20, prompt_logprobs=0)
    bench.open(t)
    assert bench.plan().n_tokens == 12
    first = RowResult(prompt_logprobs=tuple(logprob(i) for i in range(1, 13)))
    bench.role.step_done(StepResult((first,)), 0.0)
    other = replace(ticket("other", 8), priority=-1)
    bench.open(replace(other, tokens=tuple(range(50, 58))))
    bench.grant(other)
    effects = bench.step()  # drops q for other
    bench.done(other, effects)
    bench.grant(t)
    assert bench.plan().rows[0].start == 0
    bench.role.step_done(StepResult((first,)), 0.0)
    assert bench.plan().rows[0].start == 12
    last = RowResult((7,), (), tuple(logprob(i) for i in range(13, 20)))
    bench.role.handle(SegmentSent("decode-0", t.id, 0, 5), 0.0)
    commit = bench.done(t, bench.role.step_done(StepResult((last,)), 0.0))
    assert [p.token_id for p in commit.prompt_logprobs] == list(range(1, 20))


@pytest.mark.parametrize(
    ("asks", "got", "words"),
    [
        ({}, RowResult(), "0 tokens for q#1, 1 were due"),
        ({}, RowResult((1, 2)), "2 tokens for q#1, 1 were due"),
        ({"logprobs": 1}, RowResult((1,)), "0 logprobs for q#1, 1 were due"),
        ({"prompt_logprobs": 1}, RowResult((1,)), "0 prompt logprobs for q#1, 9 were due"),
        ({}, RowResult((1,), error=NAN), "not finite"),
    ],
)
def test_a_row_that_gave_too_little_or_too_much_fails_its_ticket(
    asks: dict[str, object], got: RowResult, words: str
) -> None:
    bench = Bench()
    bench.open(ticket("q", 10, **asks))
    bench.plan()
    effects = bench.role.step_done(StepResult((got,)), 0.0)
    (end,) = [e.message for e in effects if isinstance(e, ToRouter)]
    assert isinstance(end, Done) and end.error is not None and words in end.error.message
    assert bench.role.is_idle() and bench.pages.available == 12


def test_what_led_to_logits_that_are_not_finite_is_not_found_again() -> None:
    bench = Bench()
    bench.serve(ticket("first", 10))
    names = page_hashes(range(8), 4, ROOT)
    assert len(bench.pages.match(names)) == 2
    grammar = ErrorInfo("INVALID_ARGUMENT", "the grammar has no way on")
    for error, found in ((grammar, 2), (NAN, 0)):
        bench.open(ticket(error.reason, 11))
        assert bench.plan().rows[0].start == 8
        bench.role.step_done(StepResult((RowResult(error=error),)), 0.0)
        assert len(bench.pages.match(names)) == found
    assert bench.pages.available == 12
    bench.role.check_integrity()


def test_an_offer_says_how_long_the_prompt_is_whatever_is_cached() -> None:
    bench = Bench()
    bench.serve(ticket("first", 10))
    (effect,) = bench.open(ticket("q", 11))
    assert isinstance(effect, ToReceiver) and isinstance(effect.message, Offer)
    assert effect.message.n_tokens == 11


def size(value: object, seen: set[int]) -> int:
    """Entries of all containers that can be reached from here."""
    if id(value) in seen or isinstance(value, str | bytes | int | float | type):
        return 0
    seen.add(id(value))
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    parts: list[object] = [getattr(value, n) for n in names if hasattr(value, n)]
    parts += vars(value).values() if hasattr(value, "__dict__") else ()
    if isinstance(value, dict):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts += value
    return len(parts) + sum(size(part, seen) for part in parts)


def test_nothing_grows_with_the_requests_served() -> None:
    bench = Bench()
    sizes = []
    for number in range(300):
        t = replace(ticket(f"q{number:04}", 9), n_prompt=9)
        bench.serve(replace(t, tokens=tuple(number % 97 + i for i in range(9))))
        if number in (150, 299):
            sizes.append(size(bench.role, set()))
    assert sizes[1] <= sizes[0] + 20, sizes
