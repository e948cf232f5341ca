"""What a client may ask for: one check of every value, for HTTP and gRPC alike.

This file owns the arithmetic of context lengths and the defaults of what a client leaves out
(temperature 1, top_p 1, every candidate, the rest of the context); the bounds of single values
are in ``router.bounds``. It raises ``InvalidArgument`` with the client's own name of the field.
It must never tokenize, do I/O or know a protocol; seeds and ids are drawn, and grammars compiled,
by functions handed in.

Life of a value: a front end parses types into ``Asked`` and the prompt into token ids; then
``Intake.request`` checks both against the model and makes the ``Request`` that is dispatched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.errors import ContextLengthExceeded, InvalidArgument, ModelNotFound
from protocol.types import Grammar, Request, SamplingParams
from router.bounds import check_min_tokens, check_token_ids, check_unicode, check_values

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
GREEDY_BELOW = 1e-5  # a temperature that would overflow logits / temperature is greedy
SEED_MASK = (1 << 63) - 1  # seeds are signed 64-bit on every wire and device
MAX_PROMPT_LOGPROBS = 200_000  # entries in all: they travel in one message
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # goes into headers and logs as it is


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model accepts.

    ``room_tokens``: what the roomiest worker can hold, in pages of ``page_size`` tokens.
    """

    served_name: str
    vocab_size: int
    max_model_len: int
    room_tokens: int | None = None
    page_size: int = 1


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
    n: int | None = None
    echo: bool = False
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprobs_field: str = "logprobs"  # the name under which the client said how many
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    grammar_field: str = "response_format"


def check_text(text: str, field: str) -> None:
    """Refuse text that is empty or that UTF-8 cannot write (half a surrogate pair)."""
    if not text:
        raise InvalidArgument(f"{field} is empty: give at least one character", field=field)
    check_unicode(text, field)


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
        check_grammar: Callable[[Grammar], str | None] = lambda grammar: None,
    ) -> None:
        """``check_grammar`` says why a grammar does not compile, or None."""
        self.limits = limits
        self._draw_seed = draw_seed
        self.draw_id = draw_id
        self._request_timeout_s = request_timeout_s
        self._check_grammar = check_grammar

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
        check_token_ids(tokens, field, self.limits.vocab_size)

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
        check_values(asked, self.limits.vocab_size)
        if asked.request_id is not None:
            check_request_id(asked.request_id)

    def check_grammar(self, asked: Asked) -> None:
        """Refuse a grammar that does not compile, in the compiler's words. May take a while."""
        if asked.grammar is None:
            return
        complaint = self._check_grammar(asked.grammar)
        if complaint is not None:
            raise InvalidArgument(f"{asked.grammar_field}: {complaint}", field=asked.grammar_field)

    def request(self, asked: Asked, prompt: Sequence[int], field: str = "prompt") -> Request:
        """The request to dispatch. ``field`` names the prompt in errors.

        Raises ``InvalidArgument`` for a wrong value and ``ContextLengthExceeded``, with the
        numbers, for a prompt or an answer that the context cannot hold.
        """
        self.check_values(asked)
        # Lengths first: looking at millions of ids would hold up every stream.
        max_tokens = self._max_tokens(asked, len(prompt), field)
        self.check_tokens(prompt, field)
        check_min_tokens(asked.min_tokens or 0, max_tokens, asked.max_tokens_field)
        prompt_logprobs = self._prompt_logprobs(asked, len(prompt))
        seed = self._draw_seed() if asked.seed is None else asked.seed
        deadline_s = self._request_timeout_s
        if asked.deadline_s is not None:
            deadline_s = min(deadline_s, asked.deadline_s)
        if max_tokens == 0:
            # The engine always draws a token after a prompt; this one nobody sees.
            sampling = SamplingParams(
                max_tokens=1,
                seed=seed & SEED_MASK,
                logprobs=asked.logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        else:
            sampling = self._sampling(asked, max_tokens, seed & SEED_MASK, prompt_logprobs)
        return Request(
            request_id=asked.request_id or self.draw_id(),
            prompt=tuple(prompt),
            sampling=sampling,
            stop=asked.stop if max_tokens else (),
            include_stop_str_in_output=asked.include_stop_str_in_output,
            priority=asked.priority,
            deadline_s=deadline_s,
            skip_special_tokens=asked.skip_special_tokens,
            n_choices=1 if asked.n is None else asked.n,
            echo=asked.echo,
            prompt_only=max_tokens == 0,
        )

    def _sampling(
        self, asked: Asked, max_tokens: int, seed: int, prompt_logprobs: int | None
    ) -> SamplingParams:
        temperature = 1.0 if asked.temperature is None else asked.temperature
        top_k = max(asked.top_k or 0, 0)
        penalty = asked.repetition_penalty
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else float(temperature),
            top_p=1.0 if asked.top_p is None else float(asked.top_p),
            top_k=0 if top_k >= self.limits.vocab_size else top_k,
            seed=seed,
            ignore_eos=asked.ignore_eos,
            min_p=float(asked.min_p or 0.0),
            presence_penalty=float(asked.presence_penalty or 0.0),
            frequency_penalty=float(asked.frequency_penalty or 0.0),
            repetition_penalty=1.0 if penalty is None else float(penalty),
            logit_bias=asked.logit_bias,
            min_tokens=asked.min_tokens or 0,
            stop_token_ids=asked.stop_token_ids,
            logprobs=asked.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=asked.grammar,
        )

    def _prompt_logprobs(self, asked: Asked, n_prompt: int) -> int | None:
        """How many per prompt token: what was asked for as such, or for the echo's sake."""
        wanted = (asked.prompt_logprobs, asked.logprobs if asked.echo else None)
        given = [k for k in wanted if k is not None]
        if not given:
            return None
        entries = n_prompt * (max(given) + 1) * (asked.n or 1)
        if entries > MAX_PROMPT_LOGPROBS:
            field = "prompt_logprobs" if asked.prompt_logprobs is not None else asked.logprobs_field
            raise InvalidArgument(
                f"{field} asks for {entries} values of a prompt of {n_prompt} tokens; at most "
                f"{MAX_PROMPT_LOGPROBS} are given",
                field=field,
            )
        return max(given)

    def _max_tokens(self, asked: Asked, n_prompt: int, field: str) -> int:
        context = self.limits.max_model_len
        if n_prompt >= context:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens; this model's context holds {context} "
                "tokens, the answer's included",
                field=field,
            )
        if asked.max_tokens is None:
            # At least one: a prompt that no worker can hold is refused with that reason later.
            return max(min(context, self._longest(n_prompt, asked.n or 1)) - n_prompt, 1)
        if n_prompt + asked.max_tokens > context:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens and {asked.max_tokens_field} asks for "
                f"{asked.max_tokens}, together {n_prompt + asked.max_tokens}; this model's "
                f"context holds {context}",
                field=asked.max_tokens_field,
            )
        return asked.max_tokens

    def _longest(self, n_prompt: int, n_choices: int) -> int:
        """Tokens of the longest sequences that a worker can hold; choices share full pages."""
        limits = self.limits
        if limits.room_tokens is None:
            return limits.max_model_len
        shared = n_prompt // limits.page_size
        own = (limits.room_tokens // limits.page_size - shared) // n_choices
        return (shared + own) * limits.page_size
