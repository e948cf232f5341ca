"""What a client may ask for: one check of every value, for HTTP and gRPC alike.

This file owns the bounds of every sampling field, the arithmetic of context lengths and the
defaults of what a client leaves out (temperature 1, top_p 1, every candidate, the rest of the
context). It raises ``InvalidArgument`` with the client's own name of the field. It must never
tokenize, do I/O or know a protocol; seeds and ids are drawn by functions handed in.

Life of a value: a front end parses types into ``Asked`` and the prompt into token ids; then
``Intake.request`` checks both against the model and makes the ``Request`` that is dispatched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.errors import ContextLengthExceeded, InvalidArgument, ModelNotFound
from protocol.types import Request, SamplingParams

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5  # a temperature that would overflow logits / temperature is greedy
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
SEED_MASK = (1 << 63) - 1  # seeds are signed 64-bit on every wire and device
_INT32 = 1 << 31
_INT64 = 1 << 63
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # goes into headers and logs as it is


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model accepts. ``room_tokens``: longest sequence a worker can hold."""

    served_name: str
    vocab_size: int
    max_model_len: int
    room_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One client's wishes, types checked, values not; None where the client said nothing."""

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # the name under which the client gave it
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    request_id: str | None = None
    deadline_s: float | None = None


def check_text(text: str, field: str) -> None:
    """Refuse text that is empty or that UTF-8 cannot write (half a surrogate pair)."""
    if not text:
        raise InvalidArgument(f"{field} is empty: give at least one character", field=field)
    _check_unicode(text, field)


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} holds half of a surrogate pair at character {error.start}", field=field
        ) from error


def chat_role(role: object, field: str) -> str:
    """The chat template's name of a message's role; OpenAI's ``developer`` is ``system``."""
    if isinstance(role, str) and role in ROLES:
        return ROLES[role]
    raise InvalidArgument(f"{field} is {role!r}; it must be one of {', '.join(ROLES)}", field=field)


def check_conversation(messages: Sequence[Mapping[str, str]], field: str) -> None:
    """Refuse a conversation in which nobody says anything; one empty message is fine.

    The chat template would still make tokens of it, and the model would answer nothing.
    """
    if messages and not any(message["content"] for message in messages):
        last = f"{field}[{len(messages) - 1}].content"
        raise InvalidArgument(f"{last} is empty, and no other message has any content", field=last)


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """Refuse ids that could not travel in a header or a log line unchanged."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument(
            f"{field} must be 1 to 128 printable ASCII characters without spaces", field=field
        )


class Intake:
    """Checks requests for one served model and fills in what clients leave out."""

    def __init__(
        self,
        limits: ModelLimits,
        *,
        draw_seed: Callable[[], int],
        draw_id: Callable[[], str],
        request_timeout_s: float,
    ) -> None:
        self.limits = limits
        self._draw_seed = draw_seed
        self.draw_id = draw_id
        self._request_timeout_s = request_timeout_s

    def check_model(self, name: str | None) -> None:
        """Accept the served name, or no name at all; raise ``ModelNotFound`` for another."""
        if name and name != self.limits.served_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist here; this server serves "
                f"{self.limits.served_name!r}",
                field="model",
            )

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Refuse an empty list and ids outside the vocabulary."""
        if not tokens:
            raise InvalidArgument(f"{field} is empty: give at least one token", field=field)
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.limits.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidArgument(
                f"{field} holds token id {wrong}; ids of this model are 0 to "
                f"{self.limits.vocab_size - 1}",
                field=field,
            )

    def check_sequence(self, tokens: Sequence[int], field: str) -> None:
        """Refuse as ``check_tokens`` does, and what no context holds: decoding blocks streams."""
        n_tokens, context = len(tokens), self.limits.max_model_len
        if n_tokens > context:
            raise ContextLengthExceeded(
                f"{field} holds {n_tokens} tokens; this model's context holds {context}",
                field=field,
            )
        self.check_tokens(tokens, field)

    def check_values(self, asked: Asked) -> None:
        """Check everything that does not depend on the prompt: before any tokenizing."""
        _check_count(asked)
        _check_range(asked.temperature, "temperature", 0.0, MAX_TEMPERATURE)
        _check_range(asked.top_p, "top_p", 0.0, 1.0, open_low=True)
        if asked.top_k is not None and asked.top_k < -1:
            raise InvalidArgument(
                f"top_k is {asked.top_k}; it must be positive, or 0 or -1 for no limit",
                field="top_k",
            )
        if asked.seed is not None and not -_INT64 <= asked.seed < _INT64:
            raise InvalidArgument("seed must fit 64 signed bits", field="seed")
        if not -_INT32 <= asked.priority < _INT32:
            raise InvalidArgument("priority must fit 32 signed bits", field="priority")
        if asked.request_id is not None:
            check_request_id(asked.request_id)
        _check_stops(asked.stop)

    def request(self, asked: Asked, prompt: Sequence[int], field: str = "prompt") -> Request:
        """The request to dispatch. ``field`` names the prompt in errors.

        Raises ``InvalidArgument`` for a wrong value and ``ContextLengthExceeded``, with the
        numbers, for a prompt or an answer that the context cannot hold.
        """
        self.check_values(asked)
        # Lengths first: looking at millions of ids would hold up every stream.
        max_tokens = self._max_tokens(asked, len(prompt), field)
        self.check_tokens(prompt, field)
        seed = self._draw_seed() if asked.seed is None else asked.seed
        temperature = 1.0 if asked.temperature is None else asked.temperature
        top_k = max(asked.top_k or 0, 0)
        deadline_s = self._request_timeout_s
        if asked.deadline_s is not None:
            deadline_s = min(deadline_s, asked.deadline_s)
        return Request(
            request_id=asked.request_id or self.draw_id(),
            prompt=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0 if temperature < GREEDY_BELOW else float(temperature),
                top_p=1.0 if asked.top_p is None else float(asked.top_p),
                top_k=0 if top_k >= self.limits.vocab_size else top_k,
                seed=seed & SEED_MASK,
                ignore_eos=asked.ignore_eos,
            ),
            stop=asked.stop,
            include_stop_str_in_output=asked.include_stop_str_in_output,
            priority=asked.priority,
            deadline_s=deadline_s,
            skip_special_tokens=asked.skip_special_tokens,
        )

    def _max_tokens(self, asked: Asked, n_prompt: int, field: str) -> int:
        context = self.limits.max_model_len
        if n_prompt >= context:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens; this model's context holds {context} "
                "tokens, the answer's included",
                field=field,
            )
        if asked.max_tokens is None:
            room = context if self.limits.room_tokens is None else self.limits.room_tokens
            # At least one: a prompt that no worker can hold is refused with that reason later.
            return max(min(context, room) - n_prompt, 1)
        if n_prompt + asked.max_tokens > context:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens and {asked.max_tokens_field} asks for "
                f"{asked.max_tokens}, together {n_prompt + asked.max_tokens}; this model's "
                f"context holds {context}",
                field=asked.max_tokens_field,
            )
        return asked.max_tokens


def _check_count(asked: Asked) -> None:
    count, field = asked.max_tokens, asked.max_tokens_field
    if count == 0:
        raise InvalidArgument(
            f"{field} is 0; an answer has at least one token (0 is only of use together with "
            "echo, which this server does not offer)",
            field=field,
        )
    if count is not None and count < 0:
        raise InvalidArgument(f"{field} is {count}; it must be at least 1", field=field)
    if count is not None and count >= _INT32:
        # Refused here, because Python prints no number of thousands of digits.
        raise InvalidArgument(f"{field} must fit 32 signed bits", field=field)


def _check_range(
    value: float | None, field: str, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    inside = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
    if not inside:
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidArgument(f"{field} is {value}; it must be {bounds}", field=field)


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
        _check_unicode(stop, "stop")
