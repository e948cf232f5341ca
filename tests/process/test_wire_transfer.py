"""A sending worker's Transfer stream and the rendezvous calls, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from wire_host import FAST, SECRET, RecordingHost, hello, run, served

from protocol.errors import (
    ErrorInfo,
    PeerMismatch,
    StaleAttempt,
    TandemError,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from protocol.events import FromPeer, PeerLost
from protocol.messages import (
    Abort,
    Announce,
    Commit,
    Grant,
    Hello,
    Offer,
    ReceiverToSender,
    Sealed,
    TransferHeartbeat,
    Window,
)
from protocol.types import KvGeometry, Peer, TicketId
from protocol.wire import transfer_pb2 as t
from protocol.wire import transfer_pb2_grpc
from protocol.wire.channel import ACCEPTED_KEY, WireServer, aio_channel, token_metadata
from protocol.wire.clients import StoreClient, TransferClient
from protocol.wire.convert import RECEIVER_FRAMES, SENDER_FRAMES

ID = TicketId("r1", 2)


def client(endpoint: str, me: Hello | None = None, **options: Any) -> TransferClient:
    return TransferClient(endpoint, me or hello("prefill-0"), SECRET, timing=FAST, **options)


def lost(host: RecordingHost) -> list[PeerLost]:
    return [e for e in host.log if isinstance(e, PeerLost)]


async def end_of(messages: Any) -> TandemError:
    try:
        async for _ in messages:
            pass
    except TandemError as error:
        return error
    raise AssertionError("the stream ended without a cause")


def test_hellos_first_then_messages_both_ways_in_order() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            transfer = client(endpoint, hello("prefill-0", link_epoch=3))
            assert await transfer.connect() == host.me
            await host.wait_until_logged(("attach", "prefill-0", "prefill-0-a"))
            sent = [
                Offer(ID, 40, 0.5),
                *(Announce(ID, n, n, 1, 4096) for n in range(20)),
                Commit(ID, (7,), 20, 81920, tuple(range(2**64 - 20, 2**64))),
            ]
            for message in sent:
                transfer.send_nowait(message)
            await host.wait_until_logged(FromPeer("prefill-0", sent[-1]))
            assert host.log[1:] == [FromPeer("prefill-0", message) for message in sent]

            answers: list[ReceiverToSender] = [
                Grant(ID, 3, 8),
                Window(ID, 2),
                Abort(ID, ErrorInfo("CANCELLED", "gone")),
                Sealed(ID),
            ]
            for answer in answers:
                host.sends["prefill-0"](answer)
            got: list[ReceiverToSender] = []
            async for message in transfer.messages():
                if message != TransferHeartbeat():
                    got.append(message)
                if message == Sealed(ID):
                    break
            assert got == answers
            await transfer.close()
            await host.wait_for(lambda log: bool(lost(host)))
            assert host.log[-2] == ("detach", "prefill-0")
        assert [(e.worker_id, e.outgoing) for e in lost(host)] == [("prefill-0", False)]

    run(main())


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("fingerprint", "model-2", "model-1"),
        ("geometry", KvGeometry(2, 1, 4, 32, "float32"), "page_size=16"),
        ("wire_dtype", "bfloat16", "float32"),
        ("protocol_version", 9, "1"),
    ],
)
def test_peers_that_differ_are_refused_with_both_values(field: str, theirs: Any, ours: str) -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            transfer = client(endpoint, hello("prefill-0", **{field: theirs}))
            with pytest.raises(PeerMismatch) as refused:
                await transfer.connect()
        assert refused.value.field == field
        for part in (field, str(theirs), ours, "prefill-0", "decode-0"):
            assert part in refused.value.message
        assert host.log == []
        assert host.telemetry.value("frames_refused", "mismatch") == 1

    run(main())


def test_another_incarnation_at_the_address_is_refused_by_the_sender() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            before = Peer("decode-0", "an-older-one", endpoint)
            transfer = client(endpoint, expect=before)
            with pytest.raises(Unavailable, match=r"an-older-one.*decode-0-a.*restarted"):
                await transfer.connect()
            now = Peer("decode-0", "decode-0-a", endpoint)
            transfer = client(endpoint, expect=now)
            await transfer.connect()
            await transfer.close()

    run(main())


def test_a_restarted_sender_voids_its_older_stream_first() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            old = client(endpoint, hello("prefill-0", incarnation="one"))
            new = client(endpoint, hello("prefill-0", incarnation="two"))
            await old.connect()
            reader = asyncio.create_task(end_of(old.messages()))
            await new.connect()
            assert isinstance(await reader, StaleAttempt)
            kinds = [e if isinstance(e, tuple) else type(e) for e in host.log]
            assert kinds == [
                ("attach", "prefill-0", "one"),
                ("detach", "prefill-0"),
                PeerLost,
                ("attach", "prefill-0", "two"),
            ]
            assert server.transfers.streams.names() == ("prefill-0",)
            await old.close()
            await new.close()
            await host.wait_for(lambda log: len(lost(host)) == 2)
        assert len(lost(host)) == 2

    run(main())


@pytest.mark.parametrize(
    "bad",
    [
        t.SenderFrame().SerializeToString(),
        t.SenderFrame(announce={"segment": 1}).SerializeToString(),
        SENDER_FRAMES.encode(hello("prefill-0")).SerializeToString(),
        b"\xff\xff no protobuf",
    ],
)
def test_a_malformed_frame_ends_the_stream_and_nothing_after_it_counts(bad: bytes) -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _), aio_channel(endpoint) as channel:
            call = channel.stream_stream(
                "/tandem.v1.Transfer/Stream",
                request_serializer=bytes,
                response_deserializer=t.ReceiverFrame.FromString,
            )(metadata=token_metadata(SECRET))
            await call.write(SENDER_FRAMES.encode(hello("prefill-0")).SerializeToString())
            await host.wait_until_logged(("attach", "prefill-0", "prefill-0-a"))
            await call.write(bad)
            await call.write(SENDER_FRAMES.encode(Offer(ID, 1, 0.0)).SerializeToString())
            await host.wait_for(lambda log: bool(lost(host)))
            await call.done_writing()
        assert [e.error.reason for e in lost(host)] == ["MALFORMED_FRAME"]
        assert not [e for e in host.log if isinstance(e, FromPeer)]
        assert host.telemetry.value("frames_refused", "transfer") == 1

    run(main())


def test_a_stream_that_does_not_start_with_a_hello_is_refused() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _), aio_channel(endpoint) as channel:
            stub = transfer_pb2_grpc.TransferStub(channel)
            call = stub.Stream(metadata=token_metadata(SECRET))
            await call.write(SENDER_FRAMES.encode(Offer(ID, 1, 0.0)))
            assert (await call.code()).name == "INVALID_ARGUMENT"
            assert "Hello" in await call.details()
        assert host.log == []

    run(main())


def test_a_stopping_receiver_tells_the_sender_why() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, server):
            transfer = client(endpoint)
            await transfer.connect()
            reader = asyncio.create_task(end_of(transfer.messages()))
            await server.stop("decode-0 is stopping")
            cause = await reader
            assert isinstance(cause, Unavailable)
            await transfer.close()
        assert len(lost(host)) == 1
        assert lost(host)[0].error.message == "decode-0 is stopping"

    run(main())


class Silent(transfer_pb2_grpc.TransferServicer):
    """Answers the Hello and never says a word again."""

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        await context.read()
        await context.write(RECEIVER_FRAMES.encode(hello("decode-0")))
        await asyncio.Event().wait()


def test_a_receiver_that_falls_silent_is_given_up() -> None:
    async def main() -> None:
        server = WireServer(timing=FAST)
        transfer_pb2_grpc.add_TransferServicer_to_server(Silent(), server.grpc)
        endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start([])
        transfer = client(endpoint)
        await transfer.connect()
        cause = await end_of(transfer.messages())
        assert isinstance(cause, Unavailable)
        assert "has said nothing for" in cause.message
        await transfer.close()
        await server.stop()

    run(main())


# --- rendezvous --------------------------------------------------------------------------------


def test_the_map_of_a_link_is_reached_through_the_receiver() -> None:
    async def main() -> None:
        host = RecordingHost()
        host.rendezvous.open("p->d")
        async with served(host) as (endpoint, _):
            store = StoreClient(endpoint, "p->d", SECRET, timing=FAST)

            def talk() -> None:
                store.set("a", b"\x00\x01")
                assert host.rendezvous.get("p->d", "a", 0) == b"\x00\x01"
                assert store.get("a", 0.0) == b"\x00\x01"
                assert store.check(["a"])
                assert not store.check(["a", "b"])
                assert store.delete("a")
                assert not store.delete("a")
                store.set("empty", b"")
                assert store.get("empty", 0.0) == b""

            await asyncio.to_thread(talk)
            store.close()

    run(main())


def test_a_get_waits_for_its_key_and_no_longer_than_told() -> None:
    async def main() -> None:
        host = RecordingHost()
        host.rendezvous.open("p->d")
        async with served(host) as (endpoint, _):
            store = StoreClient(endpoint, "p->d", SECRET, timing=FAST)
            assert await asyncio.to_thread(store.get, "late", 0.05) is None
            waiting = asyncio.create_task(asyncio.to_thread(store.get, "late", 10.0))
            # The loop serves other calls while one waits.
            assert not await asyncio.to_thread(store.check, ["late"])
            await asyncio.to_thread(store.set, "late", b"here")
            assert await waiting == b"here"
            store.close()

    run(main())


def test_a_map_that_is_not_open_and_a_stranger_are_refused() -> None:
    async def main() -> None:
        host = RecordingHost()
        async with served(host) as (endpoint, _):
            store = StoreClient(endpoint, "unknown", SECRET, timing=FAST)
            with pytest.raises(WrongState, match="unknown"):
                await asyncio.to_thread(store.set, "a", b"")
            stranger = StoreClient(endpoint, "unknown", "", timing=FAST)
            with pytest.raises(Unauthenticated):
                await asyncio.to_thread(stranger.get, "a", 1.0)
            store.close()
            stranger.close()
            with pytest.raises(Unavailable):
                store.set("a", b"")

    run(main())
