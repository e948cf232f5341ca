"""What the small world of a decode role is asked, and what it must answer.

The next token is a function of all tokens before, the seed and the choice; so the slow, obvious
reference is one sequence computed alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from protocol.role import RoleOptions
from protocol.types import FinishReason, Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "inc", "d:1")
P = Peer("prefill-0", "inc", "p:1")
EOS, STOP, VOCAB, SIZE = 0, 1, 23, 4


def next_token(tokens: Iterable[int], seed: int, choice: int) -> int:
    """The model."""
    text = repr((list(tokens), seed, choice)).encode()
    return hashlib.blake2b(text, digest_size=2).digest()[0] % VOCAB


def answer(ticket: Ticket, choice: int) -> tuple[list[int], FinishReason]:
    """What this choice must say, computed alone."""
    params, tokens = ticket.sampling, list(ticket.tokens)
    while True:
        token = next_token(tokens, params.seed, choice)
        tokens.append(token)
        made = tokens[ticket.n_prompt :]
        ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if ends and len(made) > params.min_tokens:
            return tokens[len(ticket.tokens) :], FinishReason.STOP
        if len(made) >= params.max_tokens:
            return tokens[len(ticket.tokens) :], FinishReason.LENGTH


def make_options(**changes: object) -> RoleOptions:
    """Options of a tiny worker."""
    values: dict[str, object] = {
        "page_bytes": 100,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "max_model_len": 200,
        "min_prefill_tokens": 4,
        "eos_token_ids": (EOS,),
        "lease_s": 1e6,
        "max_waiting": 10_000,
        "max_parked": 10_000,
        "hash_root": b"root",
        "reserve_tokens": 4,
        **changes,
    }
    return RoleOptions(**values)  # type: ignore[arg-type]


def random_ticket(rng: random.Random, number: int, total: int) -> Ticket:
    """Any ticket that fits a pool of ``total`` pages alone; many share the starts of prompts."""
    room = total * SIZE
    n_choices = rng.choice((1, 1, 1, 1, 2, 3, 5))
    longest = max(2, room // n_choices - SIZE)
    n = rng.randint(1, max(1, min(longest - 1, rng.choice((3, 9, 17, 40)))))
    common = [5 + i % 7 for i in range(n)]
    shared = rng.choice((0, n // 2, n))
    tokens = common[:shared] + [rng.randrange(2, VOCAB) for _ in range(n - shared)]
    more = rng.choice((0, 0, 0, rng.randint(0, 2)))
    n_prompt = max(1, n - more)
    most = max(n - n_prompt + 1, min(longest - n_prompt, rng.choice((1, 8, 30, 90))))
    return Ticket(
        id=TicketId(f"q{number}"),
        sender=rng.choice((None, P)),
        receiver=ME,
        tokens=tuple(tokens),
        n_prompt=n_prompt,
        sampling=SamplingParams(
            max_tokens=most,
            seed=rng.randrange(1 << 20),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=rng.choice(((), (), (), (STOP,))),
            min_tokens=0,
            prompt_logprobs=rng.choice((None, None, None, 0)),
        ),
        n_choices=n_choices,
        priority=rng.choice((0, 0, 0, 1, -1)),
        order_key=rng.random() * 10,
        remaining_s=1e6,
        salt=rng.choice(("", "", "tenant")),
    )
