"""Makes the gRPC clients of a worker's outgoing pairs; connects nothing itself."""

from __future__ import annotations

from protocol.config import TimingConfig
from protocol.messages import Hello
from protocol.types import Peer
from protocol.wire.clients import StoreClient, TransferClient


class GrpcDialler:
    """``outgoing.Dialler`` over the cluster's control channels."""

    def __init__(self, secret: str, timing: TimingConfig) -> None:
        self._secret = secret
        self._timing = timing

    def stream(self, peer: Peer, hello: Hello) -> TransferClient:
        """A Transfer stream, not yet connected."""
        return TransferClient(
            peer.endpoint,
            hello,
            self._secret,
            expect=peer,
            timing=self._timing,
            connect_s=self._timing.peer_dead_s,
        )

    def store(self, peer: Peer, link: str) -> StoreClient:
        """The receiver's rendezvous map of one link."""
        return StoreClient(
            peer.endpoint, link, self._secret, timing=self._timing, call_s=self._timing.link_op_s
        )
