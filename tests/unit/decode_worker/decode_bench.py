"""A decode role at work, spoken to by hand: shorthands for its tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from protocol.errors import ErrorInfo
from protocol.events import (
    Effect,
    FromPeer,
    FromRouter,
    SegmentReceived,
    ToRouter,
    ToSender,
)
from protocol.messages import (
    Announce,
    Commit,
    Done,
    Offer,
    Open,
    SenderToReceiver,
    TokenItem,
    Tokens,
)
from protocol.role import RoleOptions
from protocol.step import RowResult, StepResult
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "inc-d", "d:1")
P = Peer("prefill-0", "inc-p", "p:1")
Q = TicketId("q")
EOS = 99
BROKEN = ErrorInfo("UNAVAILABLE", "it broke")


def make(total: int = 12, **changes: object) -> DecodeRole:
    values: dict[str, object] = {
        "page_bytes": 100,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 4,
        "max_model_len": 100,
        "min_prefill_tokens": 4,
        "eos_token_ids": (EOS,),
        "lease_s": 10,
        "max_waiting": 3,
        "window": 2,
        "max_parked": 2,
        **changes,
    }
    return DecodeRole(ME, Pages(total, 4), RoleOptions(**values))  # type: ignore[arg-type]


def ticket(
    n: int = 10, id_: TicketId = Q, sender: Peer | None = P, max_tokens: int = 6, **changes: object
) -> Ticket:
    params = SamplingParams(max_tokens=max_tokens)
    made = Ticket(id_, sender, ME, tuple(range(n)), n, params)
    return replace(made, **changes)  # type: ignore[arg-type]


def open_(role: DecodeRole, t: Ticket, now: float = 0.0, router: str = "r") -> list[Effect]:
    return role.handle(FromRouter(router, Open(t)), now)


def peer(role: DecodeRole, message: SenderToReceiver, now: float = 0.0) -> list[Effect]:
    return role.handle(FromPeer("prefill-0", message), now)


def said(effects: Iterable[Effect], kind: type) -> list[object]:
    return [
        e.message
        for e in effects
        if isinstance(e, ToRouter | ToSender) and isinstance(e.message, kind)
    ]


def done(effects: Iterable[Effect]) -> list[Done]:
    return [d for d in said(effects, Done) if isinstance(d, Done)]


def items(effects: Iterable[Effect]) -> list[TokenItem]:
    return [item for t in said(effects, Tokens) if isinstance(t, Tokens) for item in t.items]


def step(role: DecodeRole, *tokens: int, now: float = 0.0) -> list[Effect]:
    plan = role.plan(now)
    assert plan is not None
    sampled = [row for row in plan.rows if row.sample is not None]
    values = iter(tokens or [7] * sum(len(row.choices) for row in sampled))
    rows = tuple(
        RowResult(tuple(next(values) for _ in row.choices)) if row.sample else RowResult()
        for row in plan.rows
    )
    return role.step_done(StepResult(rows), now)


def grant(role: DecodeRole, t: Ticket, now: float = 0.0) -> list[Effect]:
    open_(role, t, now)
    return peer(role, Offer(t.id, len(t.tokens), 0.0), now)


def hand_over(role: DecodeRole, t: Ticket, token: int = 5, now: float = 0.0) -> list[Effect]:
    """Everything up to the seal, in one segment."""
    grant(role, t, now)
    pages = -(-len(t.tokens) // 4)
    peer(role, Announce(t.id, 0, 0, pages, pages * 100), now)
    peer(role, Commit(t.id, (token,), pages, pages * 100, (11,)), now)
    return role.handle(SegmentReceived("prefill-0", t.id, 0, 11), now)


def home(role: DecodeRole) -> None:
    role.check_integrity()
    assert role.is_idle()
    load = role.load(0.0)
    assert load.free_pages == load.total_pages
