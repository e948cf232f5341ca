"""Page hashes: equal exactly when everything that the KV depends on is equal."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.page_hash import (
    HASH_BYTES,
    PageChain,
    matchable_pages,
    page_hashes,
    root,
    salted,
)

ROOT = root("fp", "float32", 4)
TOKENS = st.lists(st.integers(0, 2), max_size=40)


def test_the_root_stands_for_model_dtype_page_size_and_tenant() -> None:
    roots = {
        ROOT,
        root("fq", "float32", 4),
        root("fp", "bfloat16", 4),
        root("fp", "float32", 16),
        root("fp", "float32", 4, "tenant"),
        root("fpfloat32", "", 4),
    }
    assert len(roots) == 6 and {len(r) for r in roots} == {HASH_BYTES}
    assert salted(ROOT, "tenant") == root("fp", "float32", 4, "tenant")
    assert salted(ROOT, "") == ROOT


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    assert [h.hex() for h in page_hashes(range(8), 4, root("fp", "float32", 4, "t"))] == [
        "0c07383cefb0c5b6a10af464f15bfbc5",
        "fce9b837e4765117c9f40e01b0e9efb8",
    ]


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_chains_agree_exactly_as_far_as_the_tokens_do(
    a: list[int], b: list[int], size: int
) -> None:
    hashes_a, hashes_b = page_hashes(a, size, ROOT), page_hashes(b, size, ROOT)
    assert (len(hashes_a), len(hashes_b)) == (len(a) // size, len(b) // size)
    assert len(set(hashes_a)) == len(hashes_a)
    for i, (x, y) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(TOKENS, st.integers(1, 5))
def test_a_growing_sequence_has_the_hashes_of_the_whole(tokens: list[int], size: int) -> None:
    chain = PageChain(size, ROOT)
    whole = page_hashes(tokens, size, ROOT)
    lazy = PageChain(size, ROOT)
    assert [*islice(lazy.walk(tokens, len(whole)), 2)] == whole[:2]
    assert [*lazy.walk(tokens, len(whole))] == whole and lazy.reach(tokens, len(whole), 1) == whole[
        1:
    ]
    for end in range(len(tokens) + 1):
        assert list(chain.reach(tokens[:end], end // size)) == whole[: end // size]
    assert list(chain.reach(tokens, len(whole))) == whole


def test_a_page_that_is_not_full_has_no_hash() -> None:
    with pytest.raises(ValueError, match="7 tokens do not fill 2 pages of 4"):
        PageChain(4, ROOT).reach(range(7), 2)


@pytest.mark.parametrize(("n", "pages"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_matched(n: int, pages: int) -> None:
    assert matchable_pages(n, 4) == pages
