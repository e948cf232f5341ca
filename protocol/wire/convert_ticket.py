"""Tickets, with how their tokens are drawn, to protobuf and back.

Owns the wire meaning of ``Ticket``, ``SamplingParams`` and ``Grammar``. Rules and errors as in
``convert``; whether a value makes sense for the model is the router's and the role's business,
here it only has to be a value.
"""

from __future__ import annotations

import math

from protocol.errors import MalformedFrame
from protocol.types import Grammar, GrammarKind, SamplingParams, Ticket
from protocol.wire import session_pb2 as s
from protocol.wire.convert_parts import (
    decode_peer,
    decode_ticket_id,
    encode_peer,
    encode_ticket_id,
    known,
    need,
    number,
)

GRAMMAR_TO_WIRE = {
    GrammarKind.JSON_OBJECT: s.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.JSON_SCHEMA: s.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: s.GRAMMAR_KIND_REGEX,
    GrammarKind.LARK: s.GRAMMAR_KIND_LARK,
    GrammarKind.CHOICE: s.GRAMMAR_KIND_CHOICE,
}
GRAMMAR_FROM_WIRE = {number: kind for kind, number in GRAMMAR_TO_WIRE.items()}
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_AS_THEY_ARE = ("max_tokens", "top_k", "seed", "ignore_eos", "min_tokens")
_OPTIONAL = ("logprobs", "prompt_logprobs")


def encode_ticket(value: Ticket) -> s.Ticket:
    """One attempt at one request."""
    return s.Ticket(
        id=encode_ticket_id(value.id),
        sender=encode_peer(value.sender),
        receiver=encode_peer(value.receiver),
        tokens=value.tokens,
        n_prompt=value.n_prompt,
        sampling=_encode_sampling(value.sampling),
        n_delivered=value.n_delivered,
        n_choices=value.n_choices,
        priority=value.priority,
        order_key=value.order_key,
        ttft_target_s=value.ttft_target_s,
        remaining_s=value.remaining_s,
        salt=value.salt,
    )


def decode_ticket(message: s.Ticket) -> Ticket:
    """One attempt at one request; its prompt is at least one token."""
    sampling = _decode_sampling(need(message, "sampling"))
    if not 1 <= message.n_prompt <= len(message.tokens):
        raise MalformedFrame(
            f"n_prompt {message.n_prompt} is not within 1..{len(message.tokens)} tokens",
            field="n_prompt",
        )
    return Ticket(
        id=decode_ticket_id(need(message, "id")),
        sender=decode_peer(message.sender) if message.HasField("sender") else None,
        receiver=decode_peer(need(message, "receiver")),
        tokens=tuple(message.tokens),
        n_prompt=message.n_prompt,
        sampling=sampling,
        n_delivered=message.n_delivered,
        n_choices=message.n_choices,
        priority=message.priority,
        order_key=number(message.order_key, "order_key"),
        ttft_target_s=(
            number(message.ttft_target_s, "ttft_target_s")
            if message.HasField("ttft_target_s")
            else None
        ),
        remaining_s=number(message.remaining_s, "remaining_s"),
        salt=message.salt,
    )


def _encode_sampling(value: SamplingParams) -> s.Sampling:
    # A value of None leaves an optional field unset.
    fields = {n: getattr(value, n) for n in (*_AS_THEY_ARE, *_NUMBERS, *_OPTIONAL)}
    message = s.Sampling(**fields)
    if value.repetition_penalty != 1.0:
        message.repetition_penalty = value.repetition_penalty
    if value.logit_bias:
        message.bias_ids.extend([token_id for token_id, _ in value.logit_bias])
        message.biases.extend([bias for _, bias in value.logit_bias])
    if value.stop_token_ids:
        message.stop_token_ids.extend(value.stop_token_ids)
    if value.grammar is not None:
        message.grammar.kind = GRAMMAR_TO_WIRE[value.grammar.kind]
        message.grammar.text = value.grammar.text
    return message


def _decode_sampling(message: s.Sampling) -> SamplingParams:
    if len(message.bias_ids) != len(message.biases):
        raise MalformedFrame(
            f"biases has {len(message.biases)} rows, not {len(message.bias_ids)}", field="biases"
        )
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not 0.0 < repetition < math.inf:
        raise MalformedFrame(
            f"repetition_penalty {repetition} is no factor", field="repetition_penalty"
        )
    biases = [number(bias, "biases") for bias in message.biases]
    fields = {n: getattr(message, n) for n in _AS_THEY_ARE}
    fields |= {n: number(getattr(message, n), n) for n in _NUMBERS}
    fields |= {n: getattr(message, n) for n in _OPTIONAL if message.HasField(n)}
    return SamplingParams(
        repetition_penalty=repetition,
        logit_bias=tuple(zip(message.bias_ids, biases, strict=True)),
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=(
            Grammar(known(GRAMMAR_FROM_WIRE, message.grammar.kind, "grammar"), message.grammar.text)
            if message.HasField("grammar")
            else None
        ),
        **fields,
    )
