"""OpenAI's request bodies, read: JSON in, one typed call out, every wrong type named.

This file owns which fields of ``/v1/completions`` and ``/v1/chat/completions`` are understood,
which are refused because they would change the answer and are not supported, and that all others
are ignored; how an answer is drawn is read by ``router.openai_sampling``. It must never look at
the model (``router.params`` does) or do I/O.

Life of a body: ``router.json_fields`` makes an object of the bytes, ``completion_call`` or
``chat_call`` make a frozen call of it; both raise ``InvalidArgument`` with the field's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidArgument
from router.json_fields import boolean, is_integer, string, wrong_type
from router.openai_sampling import chat_asked, completion_asked
from router.params import Asked, chat_role, check_conversation, check_text

MAX_PROMPTS = 64

# Fields that would change the answer, with the values that ask for nothing. ``None`` always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "logits_processors": ([],),
}
# The same for what differs between the two calls.
_COMPLETION_NEUTRAL = _NEUTRAL | {"top_logprobs": (0,)}
_CHAT_NEUTRAL = _NEUTRAL | {"add_special_tokens": (False,), "echo": (False,)}


@dataclass(frozen=True, slots=True)
class Streaming:
    """How an answer is sent. ``enabled`` False: in one piece."""

    enabled: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A ``/v1/completions`` body. Each prompt is text or token ids; choice i answers prompt i."""

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    asked: Asked
    streaming: Streaming


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A ``/v1/chat/completions`` body; messages are ``{"role": ..., "content": ...}``."""

    model: str | None
    messages: tuple[dict[str, str], ...]
    asked: Asked
    streaming: Streaming


def completion_call(body: dict[str, Any]) -> CompletionCall:
    """Read a ``/v1/completions`` body."""
    _refuse_unsupported(body, _COMPLETION_NEUTRAL)
    return CompletionCall(
        model=string(body, "model"),
        prompts=_prompts(body.get("prompt")),
        asked=completion_asked(body),
        streaming=_streaming(body),
    )


def chat_call(body: dict[str, Any]) -> ChatCall:
    """Read a ``/v1/chat/completions`` body."""
    _refuse_unsupported(body, _CHAT_NEUTRAL)
    return ChatCall(
        model=string(body, "model"),
        messages=_messages(body.get("messages")),
        asked=chat_asked(body),
        streaming=_streaming(body),
    )


def _refuse_unsupported(body: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> None:
    for field, values in neutral.items():
        value = body.get(field)
        if value is None or any(_same(value, allowed) for allowed in values):
            continue
        hint = f" (only {json.dumps(values[0])} is)" if values else ""
        raise InvalidArgument(f"{field} is not supported by this server{hint}", field=field)


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not by Python's accident that True is 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _streaming(body: dict[str, Any]) -> Streaming:
    enabled = boolean(body, "stream", False)
    options = body.get("stream_options")
    if enabled and body.get("prompt_logprobs") is not None:
        raise InvalidArgument(
            "prompt_logprobs are not given in a stream; ask without stream, or with echo",
            field="prompt_logprobs",
        )
    if options is None:
        return Streaming(enabled)
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    if not enabled:
        raise InvalidArgument(
            "stream_options is only allowed when stream is true", field="stream_options"
        )
    return Streaming(
        enabled,
        include_usage=boolean(options, "include_usage", False, "stream_options."),
        continuous_usage=boolean(options, "continuous_usage_stats", False, "stream_options."),
    )


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        raise InvalidArgument("prompt is missing", field="prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and is_integer(value[0])):
        value = [value]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, token ids, or a list of either", value)
    if not value:
        raise InvalidArgument("prompt is empty", field="prompt")
    if len(value) > MAX_PROMPTS:
        raise InvalidArgument(
            f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed", field="prompt"
        )
    many = len(value) > 1
    return tuple(
        _prompt(item, f"prompt[{i}]" if many else "prompt") for i, item in enumerate(value)
    )


def _prompt(value: Any, field: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        check_text(value, field)
        return value
    if isinstance(value, list) and {int}.issuperset(map(type, value)):  # fast, and no booleans
        return tuple(value)
    raise InvalidArgument(f"{field} must be a string or a list of token ids", field=field)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if value is None:
        raise InvalidArgument("messages is missing", field="messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "a list", value)
    if not value:
        raise InvalidArgument("messages is empty: give at least one message", field="messages")
    messages = tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))
    check_conversation(messages, "messages")
    return messages


def _message(value: Any, field: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(field, "an object", value)
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise InvalidArgument(
                f"{field}.{name} is not supported by this server", field=f"{field}.{name}"
            )
    role = chat_role(value.get("role"), f"{field}.role")
    return {"role": role, "content": _content(value.get("content"), f"{field}.content")}


def _content(value: Any, field: str) -> str:
    if isinstance(value, str):
        if value:
            check_text(value, field)
        return value
    if not isinstance(value, list):
        raise wrong_type(field, "a string or a list of text parts", value)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidArgument(
                f"{field}[{i}] is of type {kind!r}; this server reads text only",
                field=f"{field}[{i}].type",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise wrong_type(f"{field}[{i}].text", "a string", text)
        texts.append(_content(text, f"{field}[{i}].text"))
    return "".join(texts)
