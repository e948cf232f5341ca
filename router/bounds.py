"""The bounds of every value that a client may ask for, those that need no prompt.

This file owns what is out of range and what contradicts itself; every refusal is an
``InvalidArgument`` that names the client's field and the value. It is pure and looks at numbers
and lengths only; whether a grammar compiles is asked elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from protocol.errors import InvalidArgument

if TYPE_CHECKING:
    from router.params import Asked

MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY = 1e-6  # logits are divided by it in single precision
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_GRAMMAR_CHARS = 1 << 16  # as many as the compiler reads
_INT32 = 1 << 31
_INT64 = 1 << 63


def check_values(asked: Asked, vocab_size: int) -> None:
    """Refuse what no prompt could make right."""
    _check_lengths(asked)
    _check_range(asked.temperature, "temperature", 0.0, MAX_TEMPERATURE)
    _check_range(asked.top_p, "top_p", 0.0, 1.0, open_low=True)
    _check_range(asked.min_p, "min_p", 0.0, 1.0)
    _check_range(asked.presence_penalty, "presence_penalty", -2.0, 2.0)
    _check_range(asked.frequency_penalty, "frequency_penalty", -2.0, 2.0)
    _check_range(
        asked.repetition_penalty,
        "repetition_penalty",
        0.0,
        MAX_REPETITION_PENALTY,
        open_low=True,
    )
    if asked.repetition_penalty is not None:
        _check_range(
            asked.repetition_penalty,
            "repetition_penalty",
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
    if asked.top_k is not None and asked.top_k < -1:
        raise InvalidArgument(
            f"top_k is {asked.top_k}; it must be positive, or 0 or -1 for no limit",
            field="top_k",
        )
    if asked.seed is not None and not -_INT64 <= asked.seed < _INT64:
        raise InvalidArgument("seed must fit 64 signed bits", field="seed")
    if not -_INT32 <= asked.priority < _INT32:
        raise InvalidArgument("priority must fit 32 signed bits", field="priority")
    _check_whole(asked.n, "n", 1, MAX_CHOICES)
    _check_whole(asked.logprobs, asked.logprobs_field, 0, MAX_LOGPROBS)
    _check_whole(asked.prompt_logprobs, "prompt_logprobs", 0, MAX_LOGPROBS)
    _check_biases(asked.logit_bias, vocab_size)
    _check_stop_tokens(asked.stop_token_ids, vocab_size)
    _check_stops(asked.stop)
    _check_grammar(asked)


def check_unicode(text: str, field: str) -> None:
    """Refuse text that UTF-8 cannot write (half a surrogate pair)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} holds half of a surrogate pair at character {error.start}", field=field
        ) from error


def check_min_tokens(min_tokens: int, max_tokens: int, max_tokens_field: str) -> None:
    """Refuse an answer that would have to be longer than it may be."""
    if min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens is {min_tokens}, more than {max_tokens_field}, which is {max_tokens}",
            field="min_tokens",
        )


def _check_lengths(asked: Asked) -> None:
    count, field = asked.max_tokens, asked.max_tokens_field
    if count == 0 and not asked.echo:
        raise InvalidArgument(
            f"{field} is 0; an answer has at least one token (0 is only of use together with "
            "echo, to score a prompt)",
            field=field,
        )
    if count is not None and count < 0:
        raise InvalidArgument(
            f"{field} is {count if count > -_INT64 else 'negative'}; it must be at least 1",
            field=field,
        )
    if count is not None and count >= _INT32:
        # Refused here, because Python prints no number of thousands of digits.
        raise InvalidArgument(f"{field} must fit 32 signed bits", field=field)
    least = asked.min_tokens
    if least is not None and least < 0:
        raise InvalidArgument("min_tokens must not be negative", field="min_tokens")
    if least is not None and least >= _INT32:
        raise InvalidArgument("min_tokens must fit 32 signed bits", field="min_tokens")
    if least and count is not None:
        check_min_tokens(least, count, field)


def _check_range(
    value: float | None, field: str, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    inside = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
    if not inside:
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidArgument(f"{field} is {value}; it must be {bounds}", field=field)


def _check_whole(value: int | None, field: str, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        told = value if -_INT64 < value < _INT64 else "out of range"
        raise InvalidArgument(f"{field} is {told}; it must be {low} to {high}", field=field)


def check_token_ids(tokens: Sequence[int], field: str, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; an empty sequence has none."""
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        told = wrong if -_INT64 < wrong < _INT64 else "of many digits"
        raise InvalidArgument(
            f"{field} holds token id {told}; ids of this model are 0 to {vocab_size - 1}",
            field=field,
        )


def _check_biases(biases: Sequence[tuple[int, float]], vocab_size: int) -> None:
    if len(biases) > MAX_BIASES:
        raise InvalidArgument(
            f"logit_bias holds {len(biases)} tokens; at most {MAX_BIASES} are allowed",
            field="logit_bias",
        )
    check_token_ids([token for token, _ in biases], "logit_bias", vocab_size)
    for token, bias in biases:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgument(
                f"logit_bias of token {token} is {bias}; it must be from {-MAX_BIAS:g} to "
                f"{MAX_BIAS:g}",
                field="logit_bias",
            )


def _check_stop_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if len(tokens) > MAX_STOP_TOKENS:
        raise InvalidArgument(
            f"stop_token_ids holds {len(tokens)} ids; at most {MAX_STOP_TOKENS} are allowed",
            field="stop_token_ids",
        )
    check_token_ids(tokens, "stop_token_ids", vocab_size)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidArgument(
            f"stop holds {len(stops)} strings; at most {MAX_STOPS} are allowed", field="stop"
        )
    for stop in stops:
        if not stop:
            raise InvalidArgument("stop holds an empty string", field="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidArgument(
                f"stop holds a string of {len(stop)} characters; at most {MAX_STOP_CHARS} "
                "are allowed",
                field="stop",
            )
        check_unicode(stop, "stop")


def _check_grammar(asked: Asked) -> None:
    if asked.grammar is None:
        return
    field, length = asked.grammar_field, len(asked.grammar.text)
    if length > MAX_GRAMMAR_CHARS:
        raise InvalidArgument(
            f"{field} has {length} characters; at most {MAX_GRAMMAR_CHARS} are allowed",
            field=field,
        )
    check_unicode(asked.grammar.text, field)
    if asked.ignore_eos:
        raise InvalidArgument(
            f"ignore_eos contradicts {field}: the answer ends where its grammar does",
            field="ignore_eos",
        )
