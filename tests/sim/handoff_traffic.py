"""What is asked of the small world: random tickets, their right answers, and the faults to inject.

The model is a function of all tokens before, so an answer computed from one wrong page is wrong.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from protocol.types import Peer, SamplingParams, Ticket, TicketId

EOS = 0
VOCAB = 29


def next_token(tokens: tuple[int, ...], seed: int) -> int:
    """The model: what follows ``tokens``."""
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


def answer(ticket: Ticket) -> list[int]:
    """The whole answer, by one worker that never fails."""
    tokens = list(ticket.tokens)
    while True:
        token = next_token(tuple(tokens), ticket.sampling.seed)
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


def random_ticket(
    number: int,
    rng: random.Random,
    chances: Chances,
    prefills: list[Peer],
    decodes: list[Peer],
    size: int,
) -> Ticket:
    """Any ticket: local or remote, short or long, around the boundaries of pages of ``size``."""
    n = rng.choice((1, size - 1, size, size + 1, rng.randint(1, 12), rng.randint(12, 60)))
    local = not prefills or rng.random() < 0.2
    hurried = rng.random() < chances.short_deadline
    return Ticket(
        id=TicketId(f"q{number}"),
        sender=None if local else rng.choice(prefills),
        receiver=rng.choice(decodes),
        tokens=tuple(rng.randrange(VOCAB) for _ in range(n)),
        n_prompt=n,
        sampling=SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, 20))),
            seed=rng.randrange(1 << 30),
            ignore_eos=rng.random() < 0.3,
        ),
        priority=rng.choice((0, 0, 0, 1, -1)),
        order_key=rng.random() * 10,
        remaining_s=rng.random() * 3 if hurried else 600.0,
    )
