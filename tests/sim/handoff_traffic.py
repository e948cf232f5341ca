"""What is asked of the small world: random tickets, their right answers, and the faults to inject.

The model is a function of all tokens before, so an answer computed from one wrong page is wrong.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

from protocol.types import Peer, SamplingParams, Ticket, TicketId

EOS = 0
VOCAB = 29


def next_token(tokens: tuple[int, ...], seed: int, choice: int = 0) -> int:
    """The model: what follows ``tokens``."""
    digest = hashlib.blake2b(repr((tokens, seed, choice)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


def answer(ticket: Ticket, choice: int = 0) -> list[int]:
    """The whole answer, by one worker that never fails."""
    tokens = list(ticket.tokens)
    while True:
        token = next_token(tuple(tokens), ticket.sampling.seed, choice)
        tokens.append(token)
        made = len(tokens) - ticket.n_prompt
        if (token == EOS and not ticket.sampling.ignore_eos) or made >= ticket.sampling.max_tokens:
            return tokens[len(ticket.tokens) :]


@dataclass
class Chances:
    """How likely each fault is, per occasion."""

    cancel: float = 0.0
    stop: float = 0.0
    break_link: float = 0.0  # per segment
    dial_fails: float = 0.0
    corrupt: float = 0.0
    step_fails: float = 0.0
    row_fails: float = 0.0
    router_lost: float = 0.0  # per ticket
    noise: float = 0.0  # duplicates and strangers, per message
    retry: float = 0.0  # a newer attempt while the old one lives
    short_deadline: float = 0.0
    stall: float = 0.0  # a message, a step or a link operation takes seconds


@dataclass
class Habits:
    """How likely what clients ask for is, per ticket."""

    share: float = 0.5  # it begins like one that was asked before, or goes on from its answer
    tenant: float = 0.2
    choices: float = 0.15
    logprobs: float = 0.1
    prompt_logprobs: float = 0.1


@dataclass
class Draw:
    """Draws tickets: local or remote, short or long, around the boundaries of pages of ``size``."""

    rng: random.Random
    chances: Chances
    habits: Habits
    prefills: list[Peer]
    decodes: list[Peer]
    size: int
    asked: list[Ticket] = field(default_factory=list)

    def ticket(self, number: int) -> Ticket:
        """The next one."""
        rng, habits = self.rng, self.habits
        local = not self.prefills or rng.random() < 0.2
        hurried = rng.random() < self.chances.short_deadline
        tokens = self._tokens()
        ticket = Ticket(
            id=TicketId(f"q{number}"),
            sender=None if local else rng.choice(self.prefills),
            receiver=rng.choice(self.decodes),
            tokens=tokens,
            n_prompt=len(tokens),
            sampling=SamplingParams(
                max_tokens=rng.choice((1, 2, rng.randint(1, 20))),
                seed=rng.randrange(1 << 30),
                ignore_eos=rng.random() < 0.3,
                logprobs=0 if rng.random() < habits.logprobs else None,
                prompt_logprobs=0 if rng.random() < habits.prompt_logprobs else None,
            ),
            n_choices=rng.randint(2, 3) if rng.random() < habits.choices else 1,
            priority=rng.choice((0, 0, 0, 1, -1)),
            order_key=rng.random() * 10,
            remaining_s=rng.random() * 3 if hurried else 600.0,
            salt="tenant" if rng.random() < habits.tenant else "",
        )
        self.asked.append(ticket)
        return ticket

    def _tokens(self) -> tuple[int, ...]:
        rng, size = self.rng, self.size
        n = rng.choice((1, size - 1, size, size + 1, rng.randint(1, 12), rng.randint(12, 60)))
        fresh = tuple(rng.randrange(VOCAB) for _ in range(max(1, n)))
        if not self.asked or rng.random() >= self.habits.share:
            return fresh
        before = rng.choice(self.asked[-20:])
        match rng.choice(("again", "cut", "turn")):
            case "again":
                return before.tokens
            case "cut":
                return (before.tokens[: rng.randint(1, len(before.tokens))] + fresh)[:60]
            case _:
                return (before.tokens + tuple(answer(before)) + fresh)[:60]
