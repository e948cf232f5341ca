"""How a gRPC client wants its answer drawn, read: ``GenerateRequest`` to ``Asked``.

This file owns presence (a field that is not set stays None), the deadline that a call's remaining
time leaves, and the grammar's kinds. It must never judge a value: ``router.bounds`` does.
"""

from __future__ import annotations

from typing import Any

from protocol.errors import InvalidArgument
from protocol.types import Grammar, GrammarKind
from protocol.wire import inference_pb2 as pb
from router.params import Asked
from router.structured_output import choice_grammar, schema_grammar

# grpc ends an expired call on both sides without any words of ours. So a request ends this much
# before its call does, in seconds and at most as a share of it: its reason still arrives.
LAST_WORD_S = 0.25
LAST_WORD_SHARE = 0.1
_PRESENT = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"),
    "prompt_logprobs",
)
_TEXTS = {"regex": GrammarKind.REGEX, "lark": GrammarKind.LARK}


def asked_of(request: pb.GenerateRequest, remaining_s: float | None) -> Asked:
    """What the client asked for; a field that is not present stays None."""
    given: dict[str, Any] = {f: getattr(request, f) for f in _PRESENT if request.HasField(f)}
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    grammar, grammar_field = _grammar(request)
    return Asked(
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=skip,
        priority=request.priority,
        request_id=request.request_id or None,
        deadline_s=None if remaining_s is None else before(remaining_s),
        echo=request.echo,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        stop_token_ids=tuple(request.stop_token_ids),
        grammar=grammar,
        grammar_field=grammar_field,
        **given,
    )


def _grammar(request: pb.GenerateRequest) -> tuple[Grammar | None, str]:
    """The grammar, and the path of the field that holds it."""
    field = "structured_output"
    if not request.HasField(field):
        return None, field
    wanted = request.structured_output
    kind = wanted.WhichOneof("grammar")
    if kind is None:
        raise InvalidArgument(f"{field} is set and says nothing", field=field)
    path = f"{field}.{kind}"
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT), path
    if kind == "choice":
        return choice_grammar(list(wanted.choice.texts), f"{path}.texts"), f"{path}.texts"
    if kind == "json_schema":
        return schema_grammar(wanted.json_schema, path), path
    text = getattr(wanted, kind)
    if not text:
        raise InvalidArgument(f"{path} is empty", field=path)
    return Grammar(_TEXTS[kind], text), path


def before(remaining_s: float) -> float:
    """The request's deadline for a call that has ``remaining_s`` seconds left."""
    return round(remaining_s - min(LAST_WORD_S, LAST_WORD_SHARE * max(remaining_s, 0.0)), 3)
