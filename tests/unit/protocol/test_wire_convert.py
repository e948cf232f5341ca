"""Every message survives the wire unchanged; everything else is refused with a clear error."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import messages as m
from protocol import status as cluster
from protocol import types as p
from protocol.errors import BY_REASON, ErrorInfo, InternalError, MalformedFrame
from protocol.wire import session_pb2 as s
from protocol.wire import transfer_pb2 as t
from protocol.wire.convert import (
    RECEIVER_FRAMES,
    ROUTER_FRAMES,
    SENDER_FRAMES,
    WORKER_FRAMES,
)
from protocol.wire.convert_front import decode_answer, decode_status, encode_answer, encode_status

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**31)
SECONDS = st.floats(allow_nan=False)
TEXT = st.text(max_size=12)
NAME = st.text(min_size=1, max_size=12)
TOKENS = st.lists(U32, max_size=8).map(tuple)
TICKET_ID = st.builds(p.TicketId, NAME, st.integers(1, 2**32 - 1))
ERROR = st.builds(
    ErrorInfo, st.sampled_from(sorted(BY_REASON)), TEXT, st.none() | TEXT, st.none() | SECONDS
)
PEER = st.builds(p.Peer, TEXT, TEXT, TEXT)
SAMPLING = st.builds(
    p.SamplingParams,
    max_tokens=U32,
    temperature=SECONDS,
    top_p=SECONDS,
    top_k=U32,
    seed=st.integers(-(2**63), 2**63 - 1),
    ignore_eos=st.booleans(),
    min_p=SECONDS,
    presence_penalty=SECONDS,
    frequency_penalty=SECONDS,
    repetition_penalty=st.floats(0, allow_infinity=False, exclude_min=True),
    logit_bias=st.lists(st.tuples(U32, SECONDS), max_size=3).map(tuple),
    min_tokens=U32,
    stop_token_ids=st.lists(U32, max_size=3).map(tuple),
    logprobs=st.none() | U32,
    prompt_logprobs=st.none() | U32,
    grammar=st.none() | st.builds(p.Grammar, st.sampled_from(p.GrammarKind), TEXT),
)
LOGPROB = st.floats(max_value=0, allow_nan=False)
LOGPROBS = st.lists(
    st.builds(
        p.TokenLogprobs, U32, LOGPROB, U32, st.lists(st.tuples(U32, LOGPROB), max_size=3).map(tuple)
    ),
    max_size=3,
).map(tuple)


@st.composite
def tickets(draw: st.DrawFn) -> p.Ticket:
    tokens = draw(st.lists(U32, min_size=1, max_size=8).map(tuple))
    return p.Ticket(
        id=draw(TICKET_ID),
        sender=draw(st.none() | PEER),
        receiver=draw(PEER),
        tokens=tokens,
        n_prompt=draw(st.integers(1, len(tokens))),
        sampling=draw(SAMPLING),
        n_delivered=draw(U32),
        n_choices=draw(U32),
        priority=draw(st.integers(-(2**63), 2**63 - 1)),
        order_key=draw(SECONDS),
        ttft_target_s=draw(st.none() | SECONDS),
        remaining_s=draw(SECONDS),
        salt=draw(TEXT),
    )


GEOMETRY = st.builds(p.KvGeometry, U32, U32, U32, U32, st.sampled_from(sorted(p.DTYPE_BYTES)))
LOAD = st.builds(p.WorkerLoad, U64, U64, U64, U64, U64, U64, SECONDS, SECONDS, U64)
TIMINGS = st.lists(st.builds(p.StageTiming, TEXT, TEXT, SECONDS), max_size=3).map(tuple)
FINISH = st.sampled_from(p.FinishReason)
ITEM = st.builds(m.TokenItem, TICKET_ID, U32, TOKENS, st.none() | FINISH, U32)
RICH_ITEM = st.builds(m.TokenItem, TICKET_ID, U32, TOKENS, st.none(), U32, LOGPROBS, U32, LOGPROBS)
PLAIN_ITEM = st.builds(m.TokenItem, st.builds(p.TicketId, NAME), U32, st.tuples(U32))
HELLO = st.builds(m.Hello, TEXT, TEXT, TEXT, TEXT, GEOMETRY, TEXT, U32, U64)
ABORT = st.builds(m.Abort, TICKET_ID, ERROR)
ALIVE = st.builds(m.TransferHeartbeat, st.lists(TICKET_ID, max_size=3).map(tuple))
CHANNELS = {
    "router": (
        ROUTER_FRAMES,
        m.RouterToWorker,
        [
            st.builds(m.Open, tickets()),
            st.builds(m.Stop, TICKET_ID, U32, U32),
            st.builds(m.Cancel, TICKET_ID, TEXT),
            st.just(m.RouterHeartbeat()),
        ],
    ),
    "worker": (
        WORKER_FRAMES,
        m.WorkerToRouter,
        [
            st.builds(m.Queued, TICKET_ID, U32, TEXT),
            st.builds(m.Reserved, TICKET_ID, U32),
            st.builds(m.Tokens, st.lists(ITEM | PLAIN_ITEM | RICH_ITEM, max_size=5).map(tuple)),
            st.builds(m.SenderLost, TICKET_ID, ERROR),
            st.builds(m.Done, TICKET_ID, st.sampled_from(p.Outcome), TIMINGS, st.none() | ERROR),
            st.builds(m.WorkerHeartbeat, TEXT, TEXT, LOAD),
        ],
    ),
    "sender": (
        SENDER_FRAMES,
        m.SenderToReceiver,
        [
            HELLO,
            st.builds(m.Offer, TICKET_ID, U32, SECONDS),
            st.builds(m.Announce, TICKET_ID, U32, U32, U32, U64),
            st.builds(
                m.Commit,
                TICKET_ID,
                TOKENS,
                U32,
                U64,
                st.lists(U64, max_size=4).map(tuple),
                LOGPROBS,
                U32,
                LOGPROBS,
            ),
            ABORT,
            ALIVE,
        ],
    ),
    "receiver": (
        RECEIVER_FRAMES,
        m.ReceiverToSender,
        [
            HELLO,
            st.builds(m.Grant, TICKET_ID, U32, U32, U32),
            st.builds(m.Window, TICKET_ID, U32),
            st.builds(m.Sealed, TICKET_ID),
            ABORT,
            ALIVE,
        ],
    ),
}


@pytest.mark.parametrize("channel", CHANNELS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_message_survives_its_channel(channel: str, data: st.DataObject) -> None:
    codec, union, strategies = CHANNELS[channel]
    for strategy in strategies:
        value = data.draw(strategy)
        frame = codec.encode(value)
        read = type(frame).FromString(frame.SerializeToString())
        assert codec.decode(read) == value
    assert len(strategies) == len(union.__args__), "a message of this channel is not tried"


@settings(max_examples=100, deadline=None)
@given(
    st.builds(p.Delta, U32, TOKENS, TEXT)
    | st.builds(p.Delta, U32, TOKENS, TEXT, U32, LOGPROBS, LOGPROBS, FINISH, st.none() | TEXT)
    | st.builds(p.Complete, FINISH, st.builds(p.Usage, U32, U32, U32), st.none() | TEXT, TIMINGS)
)
def test_answers_survive(value: p.Delta | p.Complete) -> None:
    assert decode_answer(encode_answer(value)) == value


WORKER_STATUS = st.builds(
    cluster.WorkerStatus, TEXT, TEXT, st.sampled_from(p.Role), TEXT, TEXT, TEXT, U32, U32, LOAD
)
STATUS = st.builds(
    cluster.ClusterStatus,
    TEXT,
    st.sampled_from(p.Mode),
    TEXT,
    SECONDS,
    st.lists(WORKER_STATUS, max_size=2).map(tuple),
    st.lists(st.builds(cluster.RouterStatus, TEXT, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    st.lists(st.builds(cluster.Note, SECONDS, TEXT), max_size=2).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(STATUS)
def test_status_survives(value: cluster.ClusterStatus) -> None:
    assert decode_status(encode_status(value)) == value


@pytest.mark.parametrize("channel", CHANNELS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_a_message_or_refused_never_anything_else(
    channel: str, data: st.DataObject
) -> None:
    codec, _, strategies = CHANNELS[channel]
    frame = codec.encode(data.draw(st.one_of(strategies)))
    raw = bytearray(frame.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        value = codec.decode(type(frame).FromString(bytes(raw)))
    except (MalformedFrame, DecodeError):
        return
    assert codec.decode(codec.encode(value)) == value


TICKET = s.Ticket(
    id={"request_id": "r", "attempt": 1},
    receiver={"worker_id": "decode-0"},
    tokens=[1, 2],
    n_prompt=2,
    sampling={"max_tokens": 1},
)


def _ticket(**changes: object) -> s.RouterFrame:
    ticket = s.Ticket()
    ticket.CopyFrom(TICKET)
    for field, value in changes.items():
        if value is None:
            ticket.ClearField(field)
        else:
            setattr(ticket, field, value)
    return s.RouterFrame(open={"ticket": ticket})


def _sampling(**changes: object) -> s.RouterFrame:
    frame = _ticket()
    frame.open.ticket.sampling.MergeFrom(s.Sampling(**changes))
    return frame


ONE_LOGPROB = {"token_ids": [1], "logprobs": [-1.0], "ranks": [1]}


def _one_token(**columns: object) -> s.WorkerFrame:
    plain = {"request_ids": ["r"], "indexes": [0], "token_ids": [5]}
    return s.WorkerFrame(tokens=plain | columns)


def test_the_ticket_that_the_bad_ones_are_made_of_is_good() -> None:
    assert ROUTER_FRAMES.decode(_ticket()).ticket.n_prompt == 2


@pytest.mark.parametrize(
    ("codec", "frame", "says"),
    [
        (ROUTER_FRAMES, s.RouterFrame(), "without a message"),
        (ROUTER_FRAMES, s.RouterFrame.FromString(b"\xfa\x06\x00"), "without a message"),
        (ROUTER_FRAMES, s.RouterFrame(open={}), "Open without ticket"),
        (ROUTER_FRAMES, s.RouterFrame(stop={"index": 3}), "Stop without ticket_id"),
        (ROUTER_FRAMES, s.RouterFrame(cancel={"ticket_id": {"attempt": 1}}), "request id"),
        (ROUTER_FRAMES, _ticket(id=None), "without id"),
        (ROUTER_FRAMES, _ticket(receiver=None), "without receiver"),
        (ROUTER_FRAMES, _ticket(sampling=None), "without sampling"),
        (ROUTER_FRAMES, _ticket(n_prompt=0), "n_prompt 0"),
        (ROUTER_FRAMES, _ticket(n_prompt=3), "n_prompt 3"),
        (ROUTER_FRAMES, _ticket(order_key=float("nan")), "order_key is not a number"),
        (
            WORKER_FRAMES,
            s.WorkerFrame(done={"ticket_id": {"request_id": "r", "attempt": 1}}),
            "outcome 0 is unknown",
        ),
        (WORKER_FRAMES, s.WorkerFrame(tokens={"request_ids": ["r"]}), "indexes has 0 rows"),
        (
            WORKER_FRAMES,
            s.WorkerFrame(tokens={"request_ids": ["r"], "indexes": [0]}),
            "0 tokens, not 1",
        ),
        (
            WORKER_FRAMES,
            s.WorkerFrame(
                tokens={
                    "request_ids": ["r"],
                    "indexes": [0],
                    "token_ids": [5],
                    "finish_reasons": [9],
                }
            ),
            "finish_reasons 9 is unknown",
        ),
        (WORKER_FRAMES, s.WorkerFrame(heartbeat={"worker_id": "w"}), "without load"),
        (WORKER_FRAMES, _one_token(logprob_counts=[1]), "0 logprobs, not 1"),
        (WORKER_FRAMES, _one_token(logprob_counts=[0, 0]), "logprobs_counts has 2 rows"),
        (WORKER_FRAMES, _one_token(cached_tokens=[1, 2]), "cached_tokens has 2 rows"),
        (WORKER_FRAMES, _one_token(prompt_logprob_counts=[4_000_000_000]), "not 4000000000"),
        (
            WORKER_FRAMES,
            _one_token(logprob_counts=[1], logprobs={"token_ids": [1], "logprobs": [-1.0]}),
            "ranks has 0 rows, not 1",
        ),
        (
            WORKER_FRAMES,
            _one_token(logprob_counts=[1], logprobs=ONE_LOGPROB | {"top_counts": [1]}),
            "0 top_ids, not 1",
        ),
        (
            WORKER_FRAMES,
            _one_token(logprob_counts=[1], logprobs=ONE_LOGPROB | {"top_ids": [1]}),
            "differ in length",
        ),
        (
            WORKER_FRAMES,
            _one_token(logprob_counts=[1], logprobs=ONE_LOGPROB | {"logprobs": [math.nan]}),
            "not a number",
        ),
        (ROUTER_FRAMES, _sampling(bias_ids=[1]), "biases has 0 rows, not 1"),
        (ROUTER_FRAMES, _sampling(bias_ids=[1], biases=[math.nan]), "biases is not a number"),
        (ROUTER_FRAMES, _sampling(repetition_penalty=0.0), "repetition_penalty 0.0"),
        (ROUTER_FRAMES, _sampling(repetition_penalty=math.nan), "repetition_penalty nan"),
        (ROUTER_FRAMES, _sampling(min_p=math.nan), "min_p is not a number"),
        (ROUTER_FRAMES, _sampling(grammar={"text": "x"}), "grammar 0 is unknown"),
        (ROUTER_FRAMES, _sampling(grammar={"kind": 77}), "grammar 77 is unknown"),
        (
            SENDER_FRAMES,
            t.SenderFrame(
                commit={
                    "ticket_id": {"request_id": "r", "attempt": 1},
                    "prompt_logprobs": {"token_ids": [1]},
                }
            ),
            "logprobs has 0 rows, not 1",
        ),
        (SENDER_FRAMES, t.SenderFrame(hello={"worker_id": "w"}), "without geometry"),
        (RECEIVER_FRAMES, t.ReceiverFrame(abort={"ticket_id": {"request_id": "r"}}), "attempt"),
    ],
)
def test_a_frame_without_meaning_is_refused_by_name(
    codec: object, frame: object, says: str
) -> None:
    with pytest.raises(MalformedFrame, match=says):
        codec.decode(frame)  # type: ignore[attr-defined]


def test_what_does_not_fit_the_wire_is_a_bug_of_ours() -> None:
    with pytest.raises(InternalError, match="Stop does not fit"):
        ROUTER_FRAMES.encode(m.Stop(p.TicketId("r"), -1))
    with pytest.raises(InternalError, match="Grant does not travel as RouterFrame"):
        ROUTER_FRAMES.encode(m.Grant(p.TicketId("r"), 1, 1))


def test_a_plain_decode_step_is_compact() -> None:
    """64 streams, one token each: under 30 bytes per token with ids of 16 characters."""
    ids = [p.TicketId(f"request-{i:08}") for i in range(64)]
    tokens = m.Tokens(tuple(m.TokenItem(i, 1000, (40_000,)) for i in ids))
    frame = WORKER_FRAMES.encode(tokens)
    assert frame.ByteSize() < 30 * 64
    assert not frame.tokens.attempts
    assert not frame.tokens.finish_reasons
    set_columns = {field.name for field, _ in frame.tokens.ListFields()}
    assert set_columns == {"request_ids", "indexes", "token_ids"}


def test_logprobs_are_compact_and_only_those_rows_that_asked_have_them() -> None:
    """One row of 64 with 5 likeliest tokens: about a hundred bytes more in all."""
    ids = [p.TicketId(f"request-{i:08}") for i in range(64)]
    plain = [m.TokenItem(i, 1000, (40_000,)) for i in ids]
    top = tuple((40_000 + i, -1.0 - i) for i in range(5))
    rich = replace(plain[7], logprobs=(p.TokenLogprobs(40_000, -0.5, 1, top),))
    tokens = m.Tokens((*plain[:7], rich, *plain[8:]))
    frame = WORKER_FRAMES.encode(tokens)
    more = frame.ByteSize() - WORKER_FRAMES.encode(m.Tokens(tuple(plain))).ByteSize()
    assert more < 64 + 100
    assert WORKER_FRAMES.decode(frame) == tokens
