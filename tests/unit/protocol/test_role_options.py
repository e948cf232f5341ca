"""What a role is told, and what no worker of its model could serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import ConfigError
from protocol.role import RoleOptions
from protocol.types import Peer, SamplingParams, Ticket, TicketId

OPTIONS = RoleOptions(
    page_bytes=100,
    max_num_batched_tokens=128,
    max_num_seqs=32,
    max_model_len=50,
)
TICKET = Ticket(
    TicketId("q"), None, Peer("d", "i", "e"), tuple(range(20)), 18, SamplingParams(max_tokens=10)
)


def test_a_budget_that_cannot_hold_decodes_and_prompts_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"95 is smaller than max_num_seqs 32 .* 64 = 96"):
        replace(OPTIONS, max_num_batched_tokens=95)
    replace(OPTIONS, max_num_batched_tokens=96)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"tokens": (), "n_prompt": 0}, "INVALID_ARGUMENT"),
        ({"n_prompt": 21}, "INVALID_ARGUMENT"),
        ({"n_choices": 0}, "INVALID_ARGUMENT"),
        ({"n_choices": 32}, None),
        ({"n_choices": 33}, "INVALID_ARGUMENT"),
        ({"sampling": SamplingParams(max_tokens=2)}, "INVALID_ARGUMENT"),  # 2 are there already
        ({"sampling": SamplingParams(max_tokens=32)}, None),
        ({"sampling": SamplingParams(max_tokens=33)}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"order_key": float("inf")}, "INVALID_ARGUMENT"),
        ({"remaining_s": float("nan")}, "INVALID_ARGUMENT"),
    ],
)
def test_refusals(change: dict[str, object], reason: str | None) -> None:
    error = OPTIONS.refusal(replace(TICKET, **change))  # type: ignore[arg-type]
    assert (error.reason if error else None) == reason
