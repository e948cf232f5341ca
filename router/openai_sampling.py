"""How an HTTP client wants its answer drawn, read: the sampling fields of both endpoints.

This file owns the types and names of every sampling field in OpenAI's and vLLM's words, and
where the two endpoints differ (``logprobs``, ``echo``, ``max_completion_tokens``). It must never
judge a value: ``router.bounds`` does. Everything raises ``InvalidArgument`` with the field.
"""

from __future__ import annotations

import re
from typing import Any

from protocol.errors import InvalidArgument
from router.json_fields import boolean, integer, is_integer, number, string, wrong_type
from router.params import Asked
from router.structured_output import grammar_of

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def completion_asked(body: dict[str, Any]) -> Asked:
    """The wishes in a ``/v1/completions`` body."""
    if body.get("logprobs") is False:  # a chat's word for none
        body = body | {"logprobs": None}
    return _asked(
        body,
        ("max_tokens",),
        logprobs=integer(body, "logprobs"),
        echo=boolean(body, "echo", False),
    )


def chat_asked(body: dict[str, Any]) -> Asked:
    """The wishes in a ``/v1/chat/completions`` body."""
    wanted, top = boolean(body, "logprobs", False), integer(body, "top_logprobs")
    if top and not wanted:
        raise InvalidArgument(
            f"top_logprobs is {top if abs(top) < 1 << 63 else 'given'}, which needs logprobs to "
            "be true",
            field="top_logprobs",
        )
    logprobs = (top or 0) if wanted else None
    return _asked(
        body,
        ("max_completion_tokens", "max_tokens"),
        logprobs=logprobs,
        logprobs_field="top_logprobs",
    )


def _asked(body: dict[str, Any], max_names: tuple[str, ...], **more: Any) -> Asked:
    given = [(name, count) for name in max_names if (count := integer(body, name)) is not None]
    max_field, max_tokens = given[0] if given else ("max_tokens", None)
    string(body, "user")  # accepted and unused, but a wrong type is still the caller's mistake
    n = integer(body, "n")
    _check_best_of(integer(body, "best_of"), 1 if n is None else n)
    grammar, grammar_field = grammar_of(body)
    return Asked(
        max_tokens=max_tokens,
        max_tokens_field=max_field,
        temperature=number(body, "temperature"),
        top_p=number(body, "top_p"),
        top_k=integer(body, "top_k"),
        seed=integer(body, "seed"),
        stop=_stops(body.get("stop")),
        include_stop_str_in_output=boolean(body, "include_stop_str_in_output", False),
        ignore_eos=boolean(body, "ignore_eos", False),
        skip_special_tokens=boolean(body, "skip_special_tokens", True),
        priority=integer(body, "priority") or 0,
        request_id=string(body, "request_id"),
        n=n,
        min_p=number(body, "min_p"),
        presence_penalty=number(body, "presence_penalty"),
        frequency_penalty=number(body, "frequency_penalty"),
        repetition_penalty=number(body, "repetition_penalty"),
        logit_bias=_biases(body.get("logit_bias")),
        min_tokens=integer(body, "min_tokens"),
        stop_token_ids=_stop_tokens(body.get("stop_token_ids")),
        prompt_logprobs=integer(body, "prompt_logprobs"),
        grammar=grammar,
        grammar_field=grammar_field,
        **more,
    )


def _check_best_of(best_of: int | None, n: int) -> None:
    """Choosing the best of more answers than are given is not done here."""
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise InvalidArgument(f"best_of is less than n, which is {n}", field="best_of")
    raise InvalidArgument(
        f"best_of above n, which is {n}, is not supported by this server", field="best_of"
    )


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise InvalidArgument("stop must be a string or a list of strings", field="stop")


def _stop_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and all(is_integer(item) for item in value):
        return tuple(value)
    raise InvalidArgument("stop_token_ids must be a list of token ids", field="stop_token_ids")


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI's object from token ids, as strings, to numbers; in the order of the ids."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", "an object", value)
    biases = {}
    for name, bias in value.items():
        if not _TOKEN_ID.fullmatch(name):
            told = repr(name[:32]) if name.isascii() else "a key that"
            raise InvalidArgument(f"logit_bias: {told} is no token id", field="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong_type("logit_bias", "an object of numbers", bias)
        try:
            biases[int(name)] = float(bias)
        except OverflowError as error:
            raise InvalidArgument(
                "logit_bias holds a number that is too large", field="logit_bias"
            ) from error
    return tuple(sorted(biases.items()))
