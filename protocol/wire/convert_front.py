"""Client-facing dataclasses (answers, cluster status) to protobuf and back.

Owns the wire meaning of ``protocol.types.Delta`` and ``Complete`` and of ``protocol.status``. It
never reads a ``GenerateRequest``: its defaults and checks belong to the router's front, which
knows the model. Errors as in ``convert``.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import MalformedFrame
from protocol.status import ClusterStatus, Note, RouterStatus, WorkerStatus
from protocol.types import Complete, Delta, Mode, TokenLogprobs, Usage
from protocol.wire import admin_pb2 as a
from protocol.wire import inference_pb2 as i
from protocol.wire.convert_parts import (
    FINISH_FROM_WIRE,
    FINISH_TO_WIRE,
    ROLE_FROM_WIRE,
    ROLE_TO_WIRE,
    decode_load,
    decode_timings,
    encode_load,
    encode_timings,
    known,
    need,
    number,
)


def encode_answer(
    value: Delta | Complete, token_bytes: Callable[[int], bytes] | None = None
) -> i.GenerateResponse:
    """A piece or the end of an answer. ``token_bytes`` gives what stands beside a logprob."""
    if isinstance(value, Delta):
        chunk = i.Chunk(index=value.index, token_ids=value.token_ids, text=value.text)
        if value.choice:
            chunk.choice = value.choice
        if value.finish_reason is not None:
            chunk.finish_reason = FINISH_TO_WIRE[value.finish_reason]
            if value.matched_stop is not None:
                chunk.matched_stop = value.matched_stop
        if value.logprobs:
            chunk.logprobs.extend([_encode_logprob(e, token_bytes) for e in value.logprobs])
        if value.prompt_logprobs:
            chunk.prompt_logprobs.extend(
                [_encode_logprob(e, token_bytes) for e in value.prompt_logprobs]
            )
        return i.GenerateResponse(chunk=chunk)
    usage = value.usage
    return i.GenerateResponse(
        complete=i.Complete(
            finish_reason=FINISH_TO_WIRE[value.finish_reason],
            matched_stop=value.matched_stop,
            usage=i.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            ),
            timings=encode_timings(value.timings),
        )
    )


def _encode_logprob(
    value: TokenLogprobs, token_bytes: Callable[[int], bytes] | None
) -> i.TokenLogprob:
    def of(token_id: int) -> bytes:
        return b"" if token_bytes is None else token_bytes(token_id)

    return i.TokenLogprob(
        token_id=value.token_id,
        logprob=value.logprob,
        rank=value.rank,
        token=of(value.token_id),
        top=[i.TokenLogprob(token_id=t, logprob=lp, token=of(t)) for t, lp in value.top],
    )


def _decode_logprob(message: i.TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(
        message.token_id,
        number(message.logprob, "logprob"),
        message.rank,
        tuple((e.token_id, number(e.logprob, "logprob")) for e in message.top),
    )


def decode_answer(message: i.GenerateResponse) -> Delta | Complete:
    """A piece or the end of an answer."""
    event = message.WhichOneof("event")
    if event == "chunk":
        chunk = message.chunk
        finish = None
        if chunk.finish_reason:
            finish = known(FINISH_FROM_WIRE, chunk.finish_reason, "finish_reason")
        return Delta(
            chunk.index,
            tuple(chunk.token_ids),
            chunk.text,
            chunk.choice,
            tuple(_decode_logprob(e) for e in chunk.logprobs),
            tuple(_decode_logprob(e) for e in chunk.prompt_logprobs),
            finish,
            chunk.matched_stop if chunk.HasField("matched_stop") else None,
        )
    if event == "complete":
        complete = message.complete
        usage = need(complete, "usage")
        return Complete(
            known(FINISH_FROM_WIRE, complete.finish_reason, "finish_reason"),
            Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            complete.matched_stop if complete.HasField("matched_stop") else None,
            decode_timings(complete.timings),
        )
    raise MalformedFrame("GenerateResponse without an event that is known here")


def encode_status(value: ClusterStatus) -> a.StatusResponse:
    """The state of a cluster."""
    return a.StatusResponse(
        cluster=value.cluster,
        mode=value.mode.value,
        model=value.model,
        uptime_s=value.uptime_s,
        workers=[
            a.WorkerStatus(
                worker_id=w.worker_id,
                incarnation=w.incarnation,
                role=ROLE_TO_WIRE[w.role],
                state=w.state,
                endpoint=w.endpoint,
                node=w.node,
                pid=w.pid,
                threads=w.threads,
                load=encode_load(w.load),
            )
            for w in value.workers
        ],
        routers=[
            a.RouterStatus(router_id=r.router_id, state=r.state, http=r.http, grpc=r.grpc)
            for r in value.routers
        ],
        notes=[a.Note(age_s=n.age_s, text=n.text) for n in value.notes],
    )


def decode_status(message: a.StatusResponse) -> ClusterStatus:
    """The state of a cluster."""
    if message.mode not in tuple(Mode):
        raise MalformedFrame(f"mode {message.mode!r} is unknown", field="mode")
    return ClusterStatus(
        cluster=message.cluster,
        mode=Mode(message.mode),
        model=message.model,
        uptime_s=number(message.uptime_s, "uptime_s"),
        workers=tuple(
            WorkerStatus(
                worker_id=w.worker_id,
                incarnation=w.incarnation,
                role=known(ROLE_FROM_WIRE, w.role, "role"),
                state=w.state,
                endpoint=w.endpoint,
                node=w.node,
                pid=w.pid,
                threads=w.threads,
                load=decode_load(need(w, "load")),
            )
            for w in message.workers
        ),
        routers=tuple(RouterStatus(r.router_id, r.state, r.http, r.grpc) for r in message.routers),
        notes=tuple(Note(number(n.age_s, "age_s"), n.text) for n in message.notes),
    )
