"""Several choices of one ticket: one prompt, shared pages, a sequence and an end for each."""

from __future__ import annotations

import pytest
from unit.decode_worker.decode_bench import (
    EOS,
    Q,
    done,
    grant,
    home,
    items,
    make,
    open_,
    peer,
    said,
    step,
    ticket,
)

from protocol.errors import ErrorInfo
from protocol.events import Count, FromRouter, SegmentReceived
from protocol.messages import Announce, Cancel, Commit, Grant, Reserved, Stop, TokenItem
from protocol.step import CopyKind, RowResult, StepResult
from protocol.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    Outcome,
    SamplingParams,
    TicketId,
    TokenLogprobs,
)


def test_a_local_prompt_is_computed_once_and_its_full_pages_are_shared() -> None:
    role = make(20)
    effects = open_(role, ticket(10, sender=None, n_choices=3))
    assert said(effects, Reserved) == [Reserved(Q, 5)]  # three for the prompt, one per further one
    plan = role.plan(0.0)
    assert plan is not None and dict(plan.advance) == {Q: 10}
    (row,) = plan.rows
    assert row.choices == (0, 1, 2) and row.sample is not None and not plan.copies
    effects = role.step_done(StepResult((RowResult((5, 6, 7)),)), 0.0)
    assert items(effects) == [
        TokenItem(Q, 0, (5,)),
        TokenItem(Q, 0, (6,), choice=1),
        TokenItem(Q, 0, (7,), choice=2),
    ]
    plan = role.plan(0.0)
    assert plan is not None and dict(plan.advance) == {Q: 3}
    assert [(r.choices, list(r.tokens), r.start) for r in plan.rows] == [
        ((0,), [5], 10),
        ((1,), [6], 10),
        ((2,), [7], 10),
    ]
    first, *others = (list(r.pages) for r in plan.rows)
    assert all(pages[:2] == first[:2] for pages in others)  # two full pages of four
    assert len({first[2], *(pages[2] for pages in others)}) == 3
    assert [(c.kind, c.source, c.target) for c in plan.copies] == [
        (CopyKind.WITHIN, first[2], pages[2]) for pages in others
    ]
    assert role.load(0.0).free_pages == 15  # two shared, three of their own
    role.step_done(StepResult((RowResult((1,)),) * 3), 0.0)
    role.check_integrity()


def test_a_prompt_of_whole_pages_needs_no_copy() -> None:
    role = make(20)
    open_(role, ticket(8, sender=None, n_choices=2))
    step(role, 5, 6)
    plan = role.plan(0.0)
    assert plan is not None and not plan.copies
    assert list(plan.rows[0].pages)[:2] == list(plan.rows[1].pages)[:2]
    assert plan.rows[0].pages[2] != plan.rows[1].pages[2]


def test_every_choice_ends_by_itself_and_the_ticket_with_the_last() -> None:
    role = make(30)
    params = SamplingParams(max_tokens=4, stop_token_ids=(77,))
    open_(role, ticket(10, sender=None, n_choices=4, sampling=params))
    effects = step(role, 5, EOS, 6, 7)
    assert [i.finish_reason for i in items(effects)] == [None, FinishReason.STOP, None, None]
    assert done(effects) == []
    effects = role.handle(FromRouter("r", Stop(Q, 1, 3)), 0.0)  # a stop string in choice 3
    assert done(effects) == []
    effects = step(role, 1, 77)
    assert [(i.choice, i.finish_reason) for i in items(effects)] == [
        (0, None),
        (2, FinishReason.STOP),
    ]
    assert isinstance(role.handle(FromRouter("r", Stop(Q, 1, 3)), 0.0)[0], Count)  # over already
    step(role, 1)
    effects = step(role, 1)
    assert items(effects) == [TokenItem(Q, 3, (1,), FinishReason.LENGTH)]
    assert [d.outcome for d in done(effects)] == [Outcome.OK]
    home(role)


def test_the_first_choice_may_end_at_once_and_the_others_keep_the_prompt() -> None:
    role = make(20)
    open_(role, ticket(10, sender=None, n_choices=3))
    step(role, EOS, 6, 7)
    plan = role.plan(0.0)
    assert plan is not None and [r.choices for r in plan.rows] == [(1,), (2,)]
    assert [list(r.history)[-1] for r in plan.rows] == [6, 7]
    role.step_done(StepResult((RowResult((1,)),) * 2), 0.0)
    role.handle(FromRouter("r", Cancel(Q, "gone")), 0.0)
    home(role)


@pytest.mark.parametrize("stops", [0, 1])
def test_a_choice_stopped_before_it_has_its_pages_leaves_the_others_whole(stops: int) -> None:
    """Also the one that the pages would have come from: the others are computed again."""
    role = make(20)
    open_(role, ticket(10, sender=None, n_choices=3))
    step(role, 5, 6, 7)
    role.handle(FromRouter("r", Stop(Q, 1, stops)), 0.0)
    left = [c for c in range(3) if c != stops]
    seen: dict[int, list[int]] = {}
    while not role.is_idle():
        plan = role.plan(0.0)
        assert plan is not None
        made = tuple(RowResult((10 + r.choices[0],) if r.sample else ()) for r in plan.rows)
        for item in items(role.step_done(StepResult(made), 0.0)):
            seen.setdefault(item.choice, []).extend(item.token_ids)
    assert seen == {c: [10 + c] * 5 for c in left}
    home(role)


def test_a_remote_ticket_brings_a_first_token_per_choice() -> None:
    role = make(20)
    effects = grant(role, ticket(10, n_choices=2))
    assert said(effects, Grant) == [Grant(Q, 3, 2)]
    peer(role, Announce(Q, 0, 0, 3, 300))
    logprobs = (TokenLogprobs(5, -0.1, 1), TokenLogprobs(6, -0.2, 2))
    prompt = (TokenLogprobs(1, -1.0, 3),)
    commit = Commit(Q, (5, 6), 3, 300, (11,), logprobs, 8, prompt)
    peer(role, commit)
    effects = role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0)
    assert items(effects) == [
        TokenItem(Q, 0, (5,), None, 0, logprobs[:1], 8, prompt),
        TokenItem(Q, 0, (6,), None, 1, logprobs[1:], 8, prompt),
    ]
    plan = role.plan(0.0)
    assert plan is not None and len(plan.copies) == 1 and len(plan.rows) == 2


def test_a_choice_whose_row_fails_fails_the_ticket_and_nobody_else() -> None:
    role = make(30)
    open_(role, ticket(10, sender=None, n_choices=2))
    step(role, 5, 6)
    assert role.plan(0.0) is not None
    nan = ErrorInfo("INTERNAL", "not finite")
    effects = role.step_done(StepResult((RowResult(error=nan), RowResult((1,)))), 0.0)
    assert [d.error for d in done(effects)] == [nan]
    home(role)


def test_choices_take_a_seat_each() -> None:
    role = make(100, max_num_seqs=4)
    open_(role, ticket(4, sender=None, n_choices=3))
    assert not said(open_(role, ticket(4, TicketId("two"), sender=None, n_choices=2)), Reserved)
    assert said(step(role, 5, EOS, 6), Reserved)  # one choice is over: there are two seats


def test_what_never_fits_counts_the_choices() -> None:
    role = make(12)
    assert not done(open_(role, ticket(10, max_tokens=10, n_choices=1)))
    (end,) = done(open_(role, ticket(10, TicketId("n"), max_tokens=10, n_choices=4)))
    assert end.error is not None and end.error.reason == "NEVER_FITS"
    assert "4 choices, need 14 pages of 4; decode-0 has 12" in end.error.message
    (end,) = done(open_(role, ticket(10, TicketId("m"), n_choices=5)))
    assert end.error is not None and end.error.field == "n"


def test_prompt_logprobs_are_gathered_over_the_chunks_and_ride_on_the_first_item() -> None:
    role = make(20)
    params = SamplingParams(max_tokens=6, prompt_logprobs=1)
    open_(role, ticket(20, sender=None, sampling=params))
    said_of = [TokenLogprobs(i, -1.0, 1) for i in range(19)]
    plan = role.plan(0.0)
    assert plan is not None and plan.rows[0].prompt_logprobs == 1
    n = len(plan.rows[0].tokens)
    role.step_done(StepResult((RowResult(prompt_logprobs=tuple(said_of[:n])),)), 0.0)
    plan = role.plan(0.0)
    assert plan is not None and len(plan.rows[0].tokens) == 20 - n
    last = RowResult((5,), prompt_logprobs=tuple(said_of[n:]))
    (item,) = items(role.step_done(StepResult((last,)), 0.0))
    assert item.prompt_logprobs == tuple(said_of)
    plan = role.plan(0.0)
    assert plan is not None and plan.rows[0].prompt_logprobs is None


@pytest.mark.parametrize(
    ("token", "changes", "reason"),
    [
        (EOS, {}, FinishReason.STOP),
        (EOS, {"ignore_eos": True}, None),
        (EOS, {"min_tokens": 2}, None),  # the sampler never draws it; it would not end anything
        (77, {"stop_token_ids": (77,)}, FinishReason.STOP),
        (77, {"stop_token_ids": (77,), "ignore_eos": True}, FinishReason.STOP),
        (77, {"stop_token_ids": (77,), "min_tokens": 1}, None),
        (EOS, {"min_tokens": 2, "grammar": Grammar(GrammarKind.REGEX, "a")}, FinishReason.STOP),
        (78, {"stop_token_ids": (77,)}, None),
        (78, {"max_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_how_a_choice_ends(token: int, changes: dict[str, object], reason: object) -> None:
    role = make(20)
    params = SamplingParams(**{"max_tokens": 6, **changes})  # type: ignore[arg-type]
    open_(role, ticket(4, sender=None, sampling=params))
    (item,) = items(step(role, token))
    assert item.finish_reason is reason
