"""The other process of the p2p tests: one end of a link, driven by lines on its stdin.

Arguments: the port of the test's store, ``sender`` or ``receiver``, seed, segments. Prints one
line per segment: number, checksum of the wire, and hash of the pages it was to or from; then
``end`` and, when stdin closes, leaves.
"""

from __future__ import annotations

import sys

import xxhash
from link_rig import LARGE, Side, TcpRendezvous, link_name, page_sets

from kv_transfer.transports.p2p import P2pTransport
from protocol.events import SegmentReceived, SegmentSent

PAGES = 160
MOST = 10


def main() -> None:
    """Carry ``segments`` segments, then hold the link until stdin closes."""
    port, role, seed, segments = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    outgoing = role == "sender"
    side = Side(P2pTransport(), LARGE, PAGES)
    side.fill(seed)
    side.links.open(link_name(), outgoing=outgoing, rendezvous=TcpRendezvous(port, serve=False))
    sets = page_sets(seed, segments, PAGES, MOST)
    for segment, (sources, targets) in enumerate(sets):
        if outgoing:
            side.send(segment, sources)
        else:
            side.receive(segment, targets)
    for sources, targets in sets:
        event = side.next()
        if not isinstance(event, SegmentSent | SegmentReceived):
            sys.exit(f"unexpected {event}")
        rows = side.pool.rows[sources if outgoing else targets]
        pages_hash = xxhash.xxh3_64_intdigest(rows.numpy().tobytes())
        print(event.segment, event.checksum, pages_hash, flush=True)
    print("end", flush=True)
    sys.stdin.read()
    side.links.close_all("told to leave", 5.0)


if __name__ == "__main__":
    main()
