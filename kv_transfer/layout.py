"""How the KV of one ticket is cut into segments.

This file owns arithmetic only. Segments are announced and received one by one, so their size is
what a window and the deadline of a link operation are worth. A page is never cut. (Whether two
workers' pages have one shape is settled at connect, in ``protocol.agreement``.)
"""

from __future__ import annotations

from dataclasses import dataclass


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
