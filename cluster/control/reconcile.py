"""What the controller does next, from what it wants and what it sees (pure).

This file owns every decision about the members of a cluster (workers and routers): when one is
started, taken for lost, replaced or given up, each with a reason an operator can read. It must
never act: the controller carries the actions out and brings back what became of them.

Life of a member, as ``Seen.phase``::

    (wanted, not seen) --Start--> placing -> loading -> ready
    any of these --Lose, or found dead--> lost --Replace, after a back-off--> placing
    lost too often in a row, or for a reason that a repeat cannot cure: stays lost, given up

A member that dies after a long life is replaced at once; one that dies young, or while it
starts, waits longer each time. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from protocol.config import TandemConfig
from protocol.types import Mode, Role


class Kind(StrEnum):
    """What a member is for. The value is the first part of its id."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"

    @property
    def role(self) -> Role | None:
        """The worker role of this kind; None for a router."""
        return None if self is Kind.ROUTER else Role(self.value)


class Phase(StrEnum):
    """How far a member has come."""

    PLACING = "placing"
    LOADING = "loading"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One member that there should be."""

    member_id: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Seen:
    """One member as the controller sees it.

    ``began``: when this life of it was started; ``since``: when it entered ``phase``; ``heard``:
    when it last reported. ``failures`` counts short lives in a row. ``fault`` is what its report
    complains about, or, once lost, what it was lost for.
    """

    member_id: str
    kind: Kind
    phase: Phase
    began: float
    since: float
    heard: float
    failures: int = 0
    fault: str = ""
    hopeless: bool = False  # lost for a reason that a repeat cannot cure

    def now_in(self, phase: Phase, now: float) -> Seen:
        """This member after it entered ``phase``."""
        return self if phase is self.phase else replace(self, phase=phase, since=now, heard=now)


@dataclass(frozen=True, slots=True)
class Limits:
    """When patience ends."""

    start_s: float = 300.0  # from Start to ready
    silent_s: float = 30.0  # a ready member that reports nothing; far above a busy one's delay
    young_s: float = 60.0  # a life shorter than this counts as a failure
    backoff_s: float = 1.0  # before the replacement after the first failure; doubles
    longest_backoff_s: float = 30.0
    tries: int = 3  # failures in a row that end the trying


@dataclass(frozen=True, slots=True)
class Start:
    """Start a member that there is nothing of yet."""

    member_id: str
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End a member that is not wanted."""

    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lose:
    """Take a member for lost: nobody talks to it any more, its process is ended."""

    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a lost member again, under the same id."""

    member_id: str
    kind: Kind
    reason: str


Action = Start | Stop | Lose | Replace


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and why nothing is done about the rest."""

    actions: tuple[Action, ...]
    waiting: Mapping[str, str] = field(default_factory=dict)  # member id -> reason
    given_up: Mapping[str, str] = field(default_factory=dict)  # member id -> reason


def wanted_members(config: TandemConfig) -> tuple[Wanted, ...]:
    """Everything that a configuration asks for. Colocated mode has no prefill pool."""
    kinds = {Kind.DECODE: config.pools.decode.replicas}
    if config.mode is Mode.DISAGGREGATED:
        kinds = {Kind.PREFILL: config.pools.prefill.replicas, **kinds}
    workers = [Wanted(f"{kind}-{i}", kind) for kind, n in kinds.items() for i in range(n)]
    return (*workers, Wanted("router-0", Kind.ROUTER))


def started(member_id: str, kind: Kind, now: float, before: Seen | None = None) -> Seen:
    """A member whose start has just begun; ``before`` is its previous life."""
    failures = before.failures if before is not None else 0
    return Seen(member_id, kind, Phase.PLACING, began=now, since=now, heard=now, failures=failures)


def lost(seen: Seen, reason: str, now: float, limits: Limits, *, hopeless: bool = False) -> Seen:
    """A member after it was found dead or taken for lost."""
    if seen.phase is Phase.LOST:
        return seen
    old = seen.phase is Phase.READY and now - seen.since >= limits.young_s
    return replace(
        seen,
        phase=Phase.LOST,
        since=now,
        failures=0 if old else seen.failures + 1,
        fault=reason,
        hopeless=hopeless,
    )


def reconcile(wanted: Iterable[Wanted], seen: Iterable[Seen], now: float, limits: Limits) -> Plan:
    """Compare what there should be with what there is."""
    actions: list[Action] = []
    waiting: dict[str, str] = {}
    given_up: dict[str, str] = {}
    there = {s.member_id: s for s in seen}
    for want in wanted:
        member = there.pop(want.member_id, None)
        if member is None:
            actions.append(Start(want.member_id, want.kind, "the configuration asks for it"))
        elif member.phase is Phase.LOST:
            _judge_lost(member, want, now, limits, actions, waiting, given_up)
        elif member.kind is not want.kind:
            actions.append(Lose(want.member_id, f"it is {member.kind}, {want.kind} is wanted"))
        elif reason := _reason_to_lose(member, now, limits):
            actions.append(Lose(want.member_id, reason))
        elif member.phase is not Phase.READY:
            waiting[want.member_id] = f"{member.phase} for {now - member.since:.0f} s"
    actions.extend(Stop(i, "the configuration does not ask for it") for i in there)
    return Plan(tuple(actions), waiting, given_up)


def _reason_to_lose(member: Seen, now: float, limits: Limits) -> str:
    if member.phase is not Phase.READY:
        if now - member.began > limits.start_s:
            return f"not ready after {limits.start_s:.0f} s (still {member.phase})"
        return ""
    if member.fault:
        return member.fault
    if now - member.heard > limits.silent_s:
        return f"no report for {limits.silent_s:.0f} s"
    return ""


def _judge_lost(
    member: Seen,
    want: Wanted,
    now: float,
    limits: Limits,
    actions: list[Action],
    waiting: dict[str, str],
    given_up: dict[str, str],
) -> None:
    if member.hopeless:
        given_up[member.member_id] = member.fault
        return
    if member.failures >= limits.tries:
        given_up[member.member_id] = f"failed {member.failures} times in a row: {member.fault}"
        return
    due = member.since + backoff(member.failures, limits)
    if now >= due:
        actions.append(Replace(want.member_id, want.kind, member.fault))
    else:
        waiting[member.member_id] = f"next try in {due - now:.1f} s: {member.fault}"


def backoff(failures: int, limits: Limits) -> float:
    """Seconds to wait before the next try, after so many failures in a row."""
    if failures == 0:
        return 0.0
    return float(min(limits.backoff_s * 2.0 ** (failures - 1), limits.longest_backoff_s))
