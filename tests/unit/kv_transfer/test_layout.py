"""How pages are cut into segments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import SegmentRule


@given(st.integers(1, 1000), st.integers(1, 5000), st.integers(0, 50), st.integers(0, 50))
def test_cuts_cover_the_range_once_in_order(
    page_bytes: int, bound: int, first: int, end: int
) -> None:
    rule = SegmentRule(page_bytes, bound)
    covered: list[int] = []
    at = first
    while (cut := rule.cut(at, end)) is not None:
        start, count = cut
        assert count * page_bytes <= max(bound, page_bytes)  # a page is never cut
        covered += range(start, start + count)
        at = start + count
    assert covered == list(range(first, end))
