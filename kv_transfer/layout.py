"""How the KV of one ticket is cut into segments, and whether two workers can exchange pages.

This file owns arithmetic only: pages per segment and the agreement of two ends on the shape of
a page. Workers of unequal tensor-parallel degree, whose pages would be cut by head, are refused
here with both values named.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from protocol.errors import PeerMismatch
from protocol.messages import Hello


@dataclass(frozen=True, slots=True)
class Segment:
    """One unit of announcement: ``n_pages`` whole pages from ``first_page`` of the sequence."""

    index: int
    first_page: int
    n_pages: int


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """How large a segment may be. A page is never cut, however large it is."""

    page_bytes: int
    max_segment_bytes: int

    @property
    def max_pages(self) -> int:
        """Most pages of one segment, at least one."""
        return max(1, self.max_segment_bytes // self.page_bytes)

    def cut(self, first_page: int, end_page: int) -> tuple[int, int] | None:
        """(first page, count) of the next segment within ``[first_page, end_page)``, or None."""
        if first_page >= end_page:
            return None
        return first_page, min(self.max_pages, end_page - first_page)


AGREED = ("fingerprint", "geometry", "wire_dtype", "protocol_version")


def check_agreement(mine: Hello, theirs: Hello) -> None:
    """Raise ``PeerMismatch``, naming both values, unless pages of the two ends are the same.

    Ids, endpoints and link epochs may differ; model, page shape, wire dtype and version may not.
    """
    for name in AGREED:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours == other:
            continue
        if name == "geometry":
            parts = [
                f"{f.name} {getattr(ours, f.name)} and {getattr(other, f.name)}"
                for f in fields(ours)
                if getattr(ours, f.name) != getattr(other, f.name)
            ]
            raise PeerMismatch(
                f"{mine.worker_id} and {theirs.worker_id} have different KV geometry: "
                + ", ".join(parts)
            )
        raise PeerMismatch(
            f"{mine.worker_id} and {theirs.worker_id} differ in {name}: {ours} and {other}"
        )
