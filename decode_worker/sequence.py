"""One sequence of a ticket on a decode worker: one choice, or all of them before they part.

This file owns the record, its states and the rule by which a choice ends. It decides nothing
about pages, links or time.

Life of a sequence (``TABLE``; an unknown pair of state and event raises):

    waiting --prompt--> prompt --computed--> running --end--> over
       |                  |  ^                  ^ |
       |                  |  +---- again ----+  | +--preempt--> away --back--> running
       |                  +----- preempt --> away             (pages from host memory)
       +--arrive--> arriving --sealed--> running
                       +--lapse--> waiting

 1. It begins as one sequence for all choices of its ticket: the prompt is computed (or received)
    once. The first tokens part it: each further choice is a sequence of its own, ``forking``
    until the next step gives it the prompt's pages.
 2. Running: one token in every step.
 3. Away: preempted. It has no pages here; its tokens are all that is needed to go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kv_transfer.pages import Reservation
from protocol.lifecycle import follow
from protocol.page_hash import PageChain
from protocol.types import FinishReason, TicketId

if TYPE_CHECKING:
    from decode_worker.leg import Leg

SequenceId = tuple[TicketId, int]  # a ticket's sequence, by its first choice
MAX_PREEMPTIONS = 3  # after so many it comes before everybody who has had fewer


class State(StrEnum):
    """What becomes of a sequence now."""

    WAITING = "waiting"  # has no pages and never had any
    ARRIVING = "arriving"  # its KV comes over a link
    PROMPT = "prompt"  # its tokens are computed in chunks
    FORKING = "forking"  # the next step gives it another choice's pages
    RUNNING = "running"
    AWAY = "away"
    OVER = "over"


class On(StrEnum):
    """What happens to a sequence."""

    PROMPT = "prompt"
    ARRIVE = "arrive"
    LAPSE = "lapse"
    SEALED = "sealed"
    COMPUTED = "computed"
    FORKED = "forked"
    PREEMPT = "preempt"
    AGAIN = "again"  # away, and its tokens are computed anew
    BACK = "back"  # away, and its pages come from host memory
    END = "end"


TABLE = {
    (State.WAITING, On.PROMPT): State.PROMPT,
    (State.WAITING, On.ARRIVE): State.ARRIVING,
    (State.ARRIVING, On.LAPSE): State.WAITING,
    (State.ARRIVING, On.SEALED): State.RUNNING,
    (State.PROMPT, On.COMPUTED): State.RUNNING,
    (State.FORKING, On.FORKED): State.RUNNING,
    (State.AWAY, On.AGAIN): State.PROMPT,
    (State.AWAY, On.BACK): State.RUNNING,
    **{(state, On.PREEMPT): State.AWAY for state in (State.PROMPT, State.FORKING, State.RUNNING)},
    **{(state, On.END): State.OVER for state in State if state is not State.OVER},
}


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens`` are prompt and answer; the KV of the first ``computed`` is in ``pages``.

    ``serial`` is the order in which tickets came to this worker, ``longest`` the length of
    ``tokens`` at which the answer ends at the latest.
    """

    leg: Leg
    choices: tuple[int, ...]
    tokens: list[int]
    serial: int
    longest: int
    chain: PageChain
    state: State = State.WAITING
    computed: int = 0
    capacity: int = 0  # positions that the bound pages hold
    publish_at: int = 0  # positions that must be computed for the next page to be full
    reservation: Reservation | None = None
    forks: Reservation | None = None  # a page for each further choice, until they part
    parent: Sequence | None = None  # whose pages a forking one will share
    host: tuple[int, ...] = ()  # host pages that hold its first pages
    in_step: bool = False  # a running step reads or writes its pages
    preempted: int = 0
    overtaken: int = 0  # times that a newcomer was placed while this one was away
    finish_reason: FinishReason | None = None
    pages: list[int] = field(default_factory=list)  # ``reservation.bound`` itself

    @property
    def id(self) -> SequenceId:
        """Names it among all sequences of a worker."""
        return self.leg.ticket.id, self.choices[0]

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Who keeps the pages when there are too few: smaller first.

        The first of all is never preempted, so it ends; whoever was preempted often ranks before
        the classes, by age alone, so everybody is the first one day.
        """
        ticket = self.leg.ticket
        if self.preempted >= MAX_PREEMPTIONS:
            return 0, 0, self.serial, self.choices[0]
        return 1, ticket.priority, self.serial, self.choices[0]

    @property
    def n_answer(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.leg.ticket.n_prompt

    @property
    def remaining(self) -> int:
        """Output tokens that it may still make."""
        return self.longest - len(self.tokens)

    def follow(self, event: On) -> None:
        """Go to the next state; ``InternalError`` if the table does not have the pair."""
        self.state = follow(TABLE, self.state, event)

    def take(self, token: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Append a sampled token; why the choice ends with it, if it does."""
        sampling, n_answer = self.leg.ticket.sampling, self.n_answer + 1
        self.tokens.append(token)
        ends = token in sampling.stop_token_ids or (
            token in eos_token_ids and not sampling.ignore_eos
        )
        # An end comes before ``min_tokens`` only where a grammar leaves no other way on.
        if ends and (n_answer > sampling.min_tokens or sampling.grammar is not None):
            self.finish_reason = FinishReason.STOP
        elif n_answer >= sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason
