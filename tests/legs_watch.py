"""What the rest of the world sees of one request's legs, and the laws that it must obey.

Shared by the tests of ``router.legs``: a ``Watch`` feeds events, keeps the effects, and fails at
the first broken law.
"""

from __future__ import annotations

from dataclasses import replace

from protocol.errors import ErrorInfo
from protocol.messages import TokenItem
from protocol.types import (
    FinishReason,
    Outcome,
    Peer,
    SamplingParams,
    StageTiming,
    Ticket,
    TicketId,
)
from router import leg_events as on
from router.leg_events import Side
from router.leg_state import LegState, Phase
from router.legs import advance, begin

P, D = Peer("prefill-0", "i", "p:1"), Peer("decode-0", "i", "d:1")
TICKET = Ticket(TicketId("r"), P, D, (5, 6), 2, SamplingParams(max_tokens=3))
LOCAL = replace(TICKET, sender=None)
TWO = replace(LOCAL, n_choices=2, sampling=SamplingParams(max_tokens=2))
BAD = ErrorInfo("DATA_LOSS", "checksums differ")
GONE = ErrorInfo("UNAVAILABLE", "worker is gone")


def item(
    index: int, *ids: int, end: FinishReason | None = None, choice: int = 0, **more: object
) -> on.TokensArrived:
    return on.TokensArrived(TokenItem(TICKET.id, index, ids, end, choice, **more))


def done(side: Side, outcome: Outcome = Outcome.OK) -> on.LegDone:
    error = BAD if outcome is Outcome.FAILED else None
    return on.LegDone(side, outcome, (StageTiming(side.value, "w", 1.0),), error)


class Watch:
    """What the rest of the world saw of one request, and the laws it must obey."""

    def __init__(self, ticket: Ticket = TICKET) -> None:
        self.legs, effects = begin(ticket, {})
        self.ends: list[on.Effect] = []
        self.delivered_by: dict[int, list[int]] = {c: [] for c in range(ticket.n_choices)}
        self.released: list[Side] = []
        self.told: dict[Side, list[str]] = {side: [] for side in Side}
        self.see(effects)

    def copy(self) -> Watch:
        other = object.__new__(Watch)
        other.legs, other.ends = self.legs, [*self.ends]
        other.delivered_by = {c: [*ids] for c, ids in self.delivered_by.items()}
        other.released, other.told = [*self.released], {s: [*m] for s, m in self.told.items()}
        return other

    @property
    def delivered(self) -> list[int]:
        return self.delivered_by[0]

    def feed(self, event: on.Event) -> list[on.Effect]:
        self.legs, effects = advance(self.legs, event)
        self.see(effects)
        return effects

    def see(self, effects: list[on.Effect]) -> None:
        for i, effect in enumerate(effects):
            match effect:
                case on.Finish() | on.Fail():
                    self.ends.append(effect)
                    assert len(self.ends) == 1, f"two ends: {self.ends}"
                case on.Deliver(index=index, token_ids=ids, choice=choice):
                    assert not self.ends, "tokens after the end"
                    assert i == len(effects) - 1, "Deliver is the last effect"
                    assert index == len(self.delivered_by[choice]), "tokens out of sequence"
                    self.delivered_by[choice] += ids
                case on.Release(side=side):
                    assert side not in self.released, "a leg is released once"
                    self.released.append(side)
                case on.OpenLeg(side=side):
                    self.told[side].append("open")
                case on.CancelLeg(side=side):
                    self.told[side].append("cancel")
                case on.StopReceiver(choice=choice):
                    told = "stop" if len(self.legs.choices) == 1 else f"stop {choice}"
                    assert told not in self.told[Side.RECEIVER], "a choice is stopped once"
                    self.told[Side.RECEIVER].append(told)
        self.check()

    def check(self) -> None:
        legs = self.legs
        assert legs.has_ended == (len(self.ends) == 1)
        for side in Side:
            told = self.told[side]
            assert told.count("open") <= 1 and told.count("cancel") + told.count("stop") <= 1
            stopped = len([word for word in told if word.startswith("stop")])
            assert stopped + told.count("cancel") <= len(legs.choices), "Stop was enough"
            if side in self.released:
                assert legs.leg(side) is LegState.OVER
        if legs.phase is Phase.FAILED:
            assert all(legs.leg(side) is not LegState.OPEN for side in Side), "a leg runs on"
        if legs.phase is Phase.COMPLETE:
            assert all(c.finish is not None for c in legs.choices)
            assert isinstance(self.ends[0], on.Finish)
            assert self.ends[0].n_tokens == legs.n_tokens
        if legs.phase in (Phase.RESERVING, Phase.RESERVED):
            assert legs.n_tokens == 0
