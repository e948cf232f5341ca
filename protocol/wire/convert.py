"""Dataclasses of ``protocol.messages`` to protobuf frames and back.

This file owns the meaning of every field of the Session and Transfer channels on the wire. It
never does I/O and never guesses: a frame without a message, of an unknown kind, without a part
that the dataclass needs, or with a value outside an enum raises ``MalformedFrame``, which the
stream's owner counts and refuses. A dataclass that does not fit the wire (a negative count) is a
bug of ours and raises ``InternalError``. ``decode_x(encode_x(m)) == m`` for every message.

Parts shared by messages are in ``convert_parts``, tickets in ``convert_ticket``, tokens and their
logprobs in ``convert_tokens``, client-facing messages in ``convert_front``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol import messages as m
from protocol.errors import InternalError, MalformedFrame
from protocol.types import KvGeometry, TicketId
from protocol.wire import common_pb2 as c
from protocol.wire import session_pb2 as s
from protocol.wire import transfer_pb2 as t
from protocol.wire.convert_parts import (
    OUTCOME_FROM_WIRE,
    OUTCOME_TO_WIRE,
    decode_failure,
    decode_load,
    decode_ticket_id,
    decode_timings,
    encode_failure,
    encode_load,
    encode_ticket_id,
    encode_timings,
    known,
    need,
    number,
)
from protocol.wire.convert_ticket import decode_ticket, encode_ticket
from protocol.wire.convert_tokens import (
    decode_logprobs,
    decode_tokens,
    encode_logprobs,
    encode_tokens,
)


def _encode_hello(v: m.Hello) -> t.Hello:
    g = v.geometry
    return t.Hello(
        worker_id=v.worker_id,
        incarnation=v.incarnation,
        endpoint=v.endpoint,
        fingerprint=v.fingerprint,
        geometry=c.KvGeometry(
            layers=g.layers,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            page_size=g.page_size,
            dtype=g.dtype,
        ),
        wire_dtype=v.wire_dtype,
        protocol_version=v.protocol_version,
        link_epoch=v.link_epoch,
    )


def _decode_hello(v: t.Hello) -> m.Hello:
    g = need(v, "geometry")
    return m.Hello(
        worker_id=v.worker_id,
        incarnation=v.incarnation,
        endpoint=v.endpoint,
        fingerprint=v.fingerprint,
        geometry=KvGeometry(g.layers, g.kv_heads, g.head_dim, g.page_size, g.dtype),
        wire_dtype=v.wire_dtype,
        protocol_version=v.protocol_version,
        link_epoch=v.link_epoch,
    )


def _id(message: Any) -> TicketId:
    return decode_ticket_id(need(message, "ticket_id"))


def _encode_abort(v: m.Abort) -> t.Abort:
    return t.Abort(ticket_id=encode_ticket_id(v.ticket_id), error=encode_failure(v.error))


def _decode_abort(v: t.Abort) -> m.Abort:
    return m.Abort(_id(v), decode_failure(need(v, "error")))


def _encode_alive(v: m.TransferHeartbeat) -> t.TransferHeartbeat:
    return t.TransferHeartbeat(live=[encode_ticket_id(i) for i in v.live])


def _decode_alive(v: t.TransferHeartbeat) -> m.TransferHeartbeat:
    return m.TransferHeartbeat(tuple(decode_ticket_id(i) for i in v.live))


Codec = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]

# field of the frame's oneof -> dataclass, to protobuf, from protobuf
ROUTER: dict[str, Codec] = {
    "open": (
        m.Open,
        lambda v: s.Open(ticket=encode_ticket(v.ticket)),
        lambda v: m.Open(decode_ticket(need(v, "ticket"))),
    ),
    "stop": (
        m.Stop,
        lambda v: s.Stop(ticket_id=encode_ticket_id(v.ticket_id), index=v.index, choice=v.choice),
        lambda v: m.Stop(_id(v), v.index, v.choice),
    ),
    "cancel": (
        m.Cancel,
        lambda v: s.Cancel(ticket_id=encode_ticket_id(v.ticket_id), cause=v.cause),
        lambda v: m.Cancel(_id(v), v.cause),
    ),
    "heartbeat": (
        m.RouterHeartbeat,
        lambda v: s.RouterHeartbeat(),
        lambda v: m.RouterHeartbeat(),
    ),
}

WORKER: dict[str, Codec] = {
    "tokens": (m.Tokens, encode_tokens, decode_tokens),
    "queued": (
        m.Queued,
        lambda v: s.Queued(ticket_id=encode_ticket_id(v.ticket_id), ahead=v.ahead, reason=v.reason),
        lambda v: m.Queued(_id(v), v.ahead, v.reason),
    ),
    "reserved": (
        m.Reserved,
        lambda v: s.Reserved(ticket_id=encode_ticket_id(v.ticket_id), pages=v.pages),
        lambda v: m.Reserved(_id(v), v.pages),
    ),
    "sender_lost": (
        m.SenderLost,
        lambda v: s.SenderLost(
            ticket_id=encode_ticket_id(v.ticket_id), error=encode_failure(v.error)
        ),
        lambda v: m.SenderLost(_id(v), decode_failure(need(v, "error"))),
    ),
    "done": (
        m.Done,
        lambda v: s.Done(
            ticket_id=encode_ticket_id(v.ticket_id),
            outcome=OUTCOME_TO_WIRE[v.outcome],
            timings=encode_timings(v.timings),
            error=None if v.error is None else encode_failure(v.error),
        ),
        lambda v: m.Done(
            _id(v),
            known(OUTCOME_FROM_WIRE, v.outcome, "outcome"),
            decode_timings(v.timings),
            decode_failure(v.error) if v.HasField("error") else None,
        ),
    ),
    "heartbeat": (
        m.WorkerHeartbeat,
        lambda v: s.WorkerHeartbeat(
            worker_id=v.worker_id, incarnation=v.incarnation, load=encode_load(v.load)
        ),
        lambda v: m.WorkerHeartbeat(v.worker_id, v.incarnation, decode_load(need(v, "load"))),
    ),
}

_HELLO: Codec = (m.Hello, _encode_hello, _decode_hello)
_ABORT: Codec = (m.Abort, _encode_abort, _decode_abort)
_ALIVE: Codec = (m.TransferHeartbeat, _encode_alive, _decode_alive)

SENDER: dict[str, Codec] = {
    "hello": _HELLO,
    "offer": (
        m.Offer,
        lambda v: t.Offer(
            ticket_id=encode_ticket_id(v.ticket_id),
            n_tokens=v.n_tokens,
            predicted_start_s=v.predicted_start_s,
        ),
        lambda v: m.Offer(_id(v), v.n_tokens, number(v.predicted_start_s, "predicted_start_s")),
    ),
    "announce": (
        m.Announce,
        lambda v: t.Announce(
            ticket_id=encode_ticket_id(v.ticket_id),
            segment=v.segment,
            first_page=v.first_page,
            n_pages=v.n_pages,
            n_bytes=v.n_bytes,
        ),
        lambda v: m.Announce(_id(v), v.segment, v.first_page, v.n_pages, v.n_bytes),
    ),
    "commit": (
        m.Commit,
        lambda v: t.Commit(
            ticket_id=encode_ticket_id(v.ticket_id),
            first_tokens=v.first_tokens,
            n_pages=v.n_pages,
            n_bytes=v.n_bytes,
            checksums=v.checksums,
            logprobs=encode_logprobs(v.logprobs),
            cached_tokens=v.cached_tokens,
            prompt_logprobs=encode_logprobs(v.prompt_logprobs),
        ),
        lambda v: m.Commit(
            _id(v),
            tuple(v.first_tokens),
            v.n_pages,
            v.n_bytes,
            tuple(v.checksums),
            decode_logprobs(v.logprobs),
            v.cached_tokens,
            decode_logprobs(v.prompt_logprobs),
        ),
    ),
    "abort": _ABORT,
    "heartbeat": _ALIVE,
}

RECEIVER: dict[str, Codec] = {
    "hello": _HELLO,
    "grant": (
        m.Grant,
        lambda v: t.Grant(
            ticket_id=encode_ticket_id(v.ticket_id),
            pages=v.pages,
            window=v.window,
            prefix_tokens=v.prefix_tokens,
        ),
        lambda v: m.Grant(_id(v), v.pages, v.window, v.prefix_tokens),
    ),
    "window": (
        m.Window,
        lambda v: t.Window(ticket_id=encode_ticket_id(v.ticket_id), segments=v.segments),
        lambda v: m.Window(_id(v), v.segments),
    ),
    "sealed": (
        m.Sealed,
        lambda v: t.Sealed(ticket_id=encode_ticket_id(v.ticket_id)),
        lambda v: m.Sealed(_id(v)),
    ),
    "abort": _ABORT,
    "heartbeat": _ALIVE,
}


class FrameCodec:
    """Both directions of one frame type, over one of the tables above."""

    def __init__(self, frame: type, table: dict[str, Codec]) -> None:
        self._frame = frame
        self._readers = {field: decode for field, (_, _, decode) in table.items()}
        self._writers = {kind: (field, encode) for field, (kind, encode, _) in table.items()}

    def encode(self, value: Any) -> Any:
        """A dataclass as a frame; ``InternalError`` when it does not fit the wire."""
        kind = type(value)
        if kind not in self._writers:
            raise InternalError(f"{kind.__name__} does not travel as {self._frame.__name__}")
        field, encode = self._writers[kind]
        try:
            return self._frame(**{field: encode(value)})
        except (ValueError, TypeError, KeyError) as error:
            raise InternalError(f"{kind.__name__} does not fit the wire: {error}") from error

    def decode(self, frame: Any) -> Any:
        """A frame as a dataclass; ``MalformedFrame`` when it has no meaning."""
        field = frame.WhichOneof("message")
        if field not in self._readers:
            raise MalformedFrame(f"{self._frame.__name__} without a message that is known here")
        return self._readers[field](getattr(frame, field))


ROUTER_FRAMES = FrameCodec(s.RouterFrame, ROUTER)
WORKER_FRAMES = FrameCodec(s.WorkerFrame, WORKER)
SENDER_FRAMES = FrameCodec(t.SenderFrame, SENDER)
RECEIVER_FRAMES = FrameCodec(t.ReceiverFrame, RECEIVER)
