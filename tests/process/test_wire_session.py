"""A router's Session with a worker, over real grpc.aio on loopback."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc.aio
import pytest
from wire_host import FAST, SECRET, RecordingHost, run, served

from protocol.errors import (
    MalformedFrame,
    Overloaded,
    StaleAttempt,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from protocol.events import FromRouter, RouterLost
from protocol.messages import (
    Cancel,
    Done,
    Open,
    RouterHeartbeat,
    Stop,
    TokenItem,
    Tokens,
    WorkerHeartbeat,
)
from protocol.types import Outcome, Peer, SamplingParams, Ticket, TicketId
from protocol.wire import session_pb2 as s
from protocol.wire import session_pb2_grpc
from protocol.wire.channel import ROUTER_ID_KEY, aio_channel, token_metadata
from protocol.wire.clients import SessionClient

ID = TicketId("r1")
TICKET = Ticket(
    id=ID,
    sender=None,
    receiver=Peer("decode-0", "a", "127.0.0.1:1"),
    tokens=(1, 2, 3),
    n_prompt=3,
    sampling=SamplingParams(max_tokens=4, seed=9),
)


def client(endpoint: str, router_id: str = "router-0", secret: str = SECRET) -> SessionClient:
    return SessionClient(endpoint, router_id, secret, timing=FAST)


def said(host: RecordingHost) -> list[Any]:
    """What the host's log has, heartbeats aside."""
    beats = RouterHeartbeat
    return [e for e in host.log if not (isinstance(e, FromRouter) and isinstance(e.message, beats))]


async def end_of(messages: Any) -> tuple[list[Any], TandemError]:
    """Everything up to the end of a stream, without heartbeats, and why it ended."""
    seen = []
    try:
        async for message in messages:
            if not isinstance(message, WorkerHeartbeat):
                seen.append(message)
    except TandemError as error:
        return seen, error
    raise AssertionError("the stream ended without a cause")


def tokens(index: int) -> Tokens:
    return Tokens((TokenItem(ID, index, (index,)),))


def test_messages_pass_both_ways_in_order_and_the_end_is_told_once() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            session = client(endpoint)
            await session.connect()
            messages = session.messages()
            first = await anext(messages)
            assert first == WorkerHeartbeat("decode-0", "decode-0-a", host.load())

            sent = [Open(TICKET), Stop(ID, 2), Cancel(ID, "client")]
            for message in sent:
                session.send_nowait(message)
            await host.wait_until_logged(FromRouter("router-0", sent[-1]))
            assert said(host) == [
                ("attach", "router-0"),
                *(FromRouter("router-0", message) for message in sent),
            ]

            # The engine's thread sends, as in a worker.
            def say() -> None:
                for index in range(50):
                    host.sends["router-0"](tokens(index))
                host.sends["router-0"](Done(ID, Outcome.OK))

            threading.Thread(target=say).start()
            got: list[Any] = []
            async for message in messages:
                if not isinstance(message, WorkerHeartbeat):
                    got.append(message)
                if isinstance(message, Done):
                    break
            assert got == [*(tokens(i) for i in range(50)), Done(ID, Outcome.OK)]

            await session.close()
            await host.wait_until_logged(RouterLost("router-0"))
            assert said(host)[-2:] == [("detach", "router-0"), RouterLost("router-0")]
            assert len(server.sessions.streams) == 0
        assert host.log.count(RouterLost("router-0")) == 1

    run(main())


def test_both_sides_hear_heartbeats() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            session = client(endpoint)
            await session.connect()
            messages = session.messages()
            for _ in range(3):
                assert isinstance(await anext(messages), WorkerHeartbeat)
            beat = FromRouter("router-0", RouterHeartbeat())
            await host.wait_for(lambda log: log.count(beat) >= 3)
            await session.close()

    run(main())


@pytest.mark.parametrize("secret", ["", "another cluster's"])
def test_a_router_without_the_token_is_refused_and_counted(secret: str) -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            session = client(endpoint, secret=secret)
            with pytest.raises(Unauthenticated, match="tandem-cluster-token"):
                await session.connect()
        assert host.log == []
        assert host.telemetry.value("frames_refused", "unauthenticated") == 1

    run(main())


def test_a_newer_stream_of_the_same_router_ends_the_older_one_first() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            old, new = client(endpoint), client(endpoint)
            await old.connect()
            old.send_nowait(Cancel(ID, "old"))
            await host.wait_until_logged(FromRouter("router-0", Cancel(ID, "old")))
            reader = asyncio.create_task(end_of(old.messages()))
            await new.connect()
            _, cause = await reader
            assert isinstance(cause, StaleAttempt)
            old.send_nowait(Cancel(ID, "late"))
            new.send_nowait(Cancel(ID, "new"))
            await host.wait_until_logged(FromRouter("router-0", Cancel(ID, "new")))
            assert said(host) == [
                ("attach", "router-0"),
                FromRouter("router-0", Cancel(ID, "old")),
                ("detach", "router-0"),
                RouterLost("router-0"),
                ("attach", "router-0"),
                FromRouter("router-0", Cancel(ID, "new")),
            ]
            assert server.sessions.streams.names() == ("router-0",)
            await old.close()
            await new.close()
            await host.wait_for(lambda log: log.count(RouterLost("router-0")) == 2)
        assert host.log.count(RouterLost("router-0")) == 2

    run(main())


def test_two_routers_have_a_stream_each() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            one, two = client(endpoint, "router-0"), client(endpoint, "router-1")
            await one.connect()
            await two.connect()
            await host.wait_until_logged(("attach", "router-1"))
            await one.close()
            await host.wait_until_logged(RouterLost("router-0"))
            assert RouterLost("router-1") not in host.log
            assert server.sessions.streams.names() == ("router-1",)
            await two.close()

    run(main())


def test_a_router_that_falls_silent_is_lost() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _), aio_channel(endpoint) as channel:
            metadata = (*token_metadata(SECRET), (ROUTER_ID_KEY, "frozen"))
            call = session_pb2_grpc.SessionStub(channel).Stream(metadata=metadata)
            await call.initial_metadata()
            await host.wait_until_logged(RouterLost("frozen"))
            with pytest.raises(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert "frozen has said nothing for" in await call.details()

    run(main())


def test_a_session_without_a_router_id_is_refused() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _), aio_channel(endpoint) as channel:
            call = session_pb2_grpc.SessionStub(channel).Stream(metadata=token_metadata(SECRET))
            assert (await call.code()).name == "INVALID_ARGUMENT"
        assert host.log == []

    run(main())


def test_malformed_frames_are_counted_answered_and_the_stream_goes_on() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _), aio_channel(endpoint) as channel:
            metadata = (*token_metadata(SECRET), (ROUTER_ID_KEY, "odd"))
            stub = channel.stream_stream(
                "/tandem.v1.Session/Stream",
                request_serializer=bytes,
                response_deserializer=s.WorkerFrame.FromString,
            )
            call = stub(metadata=metadata)
            await call.write(b"\xff\xff no protobuf")
            await call.write(s.RouterFrame().SerializeToString())
            bad = s.RouterFrame(open={"ticket": {"id": {"request_id": "r1", "attempt": 1}}})
            await call.write(bad.SerializeToString())
            good = s.RouterFrame(heartbeat={})
            await call.write(good.SerializeToString())
            await host.wait_until_logged(FromRouter("odd", RouterHeartbeat()))
            assert host.telemetry.value("frames_refused", "session") == 3
            while (frame := await call.read()).WhichOneof("message") != "done":
                assert frame.WhichOneof("message") == "heartbeat"
            assert frame.done.ticket_id.request_id == "r1"
            assert frame.done.error.reason == MalformedFrame.reason
            assert "without sampling" in frame.done.error.message
            call.cancel()

    run(main())


def test_a_router_that_does_not_read_is_cut_off_not_skipped() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            server.sessions._queue_limit = 4
            session = client(endpoint)
            await session.connect()
            await host.wait_until_logged(("attach", "router-0"))
            for index in range(6):  # faster than the writer, which runs on this loop
                host.sends["router-0"](tokens(index))
            seen, cause = await end_of(session.messages())
            assert isinstance(cause, Overloaded)
            assert "4 messages behind" in cause.message
            assert seen == []
            await host.wait_until_logged(RouterLost("router-0"))
            await session.close()

    run(main())


def test_what_was_said_before_a_worker_stops_arrives_and_then_the_cause() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            session = client(endpoint)
            await session.connect()
            await host.wait_until_logged(("attach", "router-0"))
            for index in range(100):
                host.sends["router-0"](tokens(index))
            host.sends["router-0"](Done(ID, Outcome.OK))
            await server.stop("decode-0 is draining")
            seen, cause = await end_of(session.messages())
            assert seen == [*(tokens(i) for i in range(100)), Done(ID, Outcome.OK)]
            assert isinstance(cause, Unavailable)
            assert cause.message == "decode-0 is draining"
            host.sends["router-0"](tokens(101))  # after the end: ignored
            await session.close()

    run(main())


def test_nobody_there_is_told_at_once() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            pass
        session = client(endpoint)
        with pytest.raises(Unavailable):
            await session.connect()
        await session.close()

    run(main(), 5)
