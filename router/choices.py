"""The choices of one request: how far each has come, and which tokens are news.

This file owns the progress of every choice of a ticket as a frozen value and the judgement of a
token item against it: late, repeated, wrong, or the next. It is pure and never ends a request;
``router.legs`` does with the judgement.

Life of a ``Choice``: tokens are counted -> its last token or a matched stop string closes it ->
``is_over`` once the text layer has looked at its last token. Over is over: nothing reopens it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from protocol.errors import ErrorInfo, InternalError
from protocol.messages import TokenItem
from protocol.types import FinishReason, Ticket


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice. ``n_tokens`` is the sequence number expected next."""

    n_tokens: int = 0
    finish: FinishReason | None = None
    matched_stop: str | None = None
    is_over: bool = False


Choices = tuple[Choice, ...]


def changed(choices: Choices, index: int, **changes: Any) -> Choices:
    """The choices with one of them changed."""
    return (*choices[:index], replace(choices[index], **changes), *choices[index + 1 :])


def no_news(choices: Choices, item: TokenItem) -> str | None:
    """The counter to raise for tokens that came late or twice; None for news."""
    if item.choice >= len(choices):
        return None
    choice = choices[item.choice]
    if choice.finish is not None:
        return "late_tokens"
    end = item.index + len(item.token_ids)
    again = item.index < choice.n_tokens and end <= choice.n_tokens
    empty = not item.token_ids and item.finish_reason is None and item.index == choice.n_tokens
    return "duplicate_tokens" if again or empty else None


def fault(ticket: Ticket, choices: Choices, item: TokenItem) -> ErrorInfo | None:
    """Why these tokens cannot be right, or None."""
    worker, n_tokens = ticket.receiver.worker_id, len(item.token_ids)
    if item.choice >= len(choices):
        return InternalError(
            f"{worker} sent tokens of choice {item.choice}; the request has {len(choices)}"
        ).info()
    expected, end = choices[item.choice].n_tokens, item.index + n_tokens
    if item.index != expected:
        return InternalError(
            f"{worker} sent token {item.index} of choice {item.choice} where token {expected} "
            "was due"
        ).info()
    most = ticket.sampling.max_tokens
    if end > most:
        return InternalError(f"{worker} sent {end} tokens of at most {most}").info()
    asked = ticket.sampling
    if asked.logprobs is not None and len(item.logprobs) != n_tokens:
        return InternalError(
            f"{worker} sent {len(item.logprobs)} logprobs with {n_tokens} tokens"
        ).info()
    if asked.prompt_logprobs is not None and item.index == 0:
        due = ticket.n_prompt - 1
        if n_tokens and len(item.prompt_logprobs) != due:
            return InternalError(
                f"{worker} sent {len(item.prompt_logprobs)} logprobs of a prompt with {due} to tell"
            ).info()
    return None
