"""Which page holds which content, and which of the unreferenced ones goes first.

This file owns the names (hashes, ``protocol.page_hash``) of published pages and the order of
eviction. It must never give one hash two pages, and never drop a name whose page somebody uses.
It counts no references and frees nothing: ``kv_transfer.pages`` does, and tells it.

Life of a named page:
 1. ``name``: its content is final. Another page may have the hash already; then that one keeps
    it, and this page only remembers what it holds.
 2. Used by any number of sequences. ``let_go`` at every release: a hash that lost its page in the
    meantime takes this one, and the page that has the hash counts as used just now.
 3. Unreferenced: ``rest`` puts it last in the order of eviction; ``wake`` when it is matched.
 4. ``evict``: the one that rested longest loses its name.

A release goes through a sequence from its tail to its head, so of a chain that rests the tail is
always evicted before the head, and what rests can always be reached from its head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from protocol.errors import InternalError


class PrefixCache:
    """The names of one worker's pages. Every operation is O(1) per page."""

    def __init__(self, total: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * total  # what a page's content is
        self._resting: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest first

    def __len__(self) -> int:
        """Published pages that nobody uses."""
        return len(self._resting)

    @property
    def named(self) -> int:
        """Published pages, used or not."""
        return len(self._page_of)

    def content(self, page: int) -> bytes | None:
        """The hash of what this page holds for good; None while it may still be written."""
        return self._hash_of[page]

    def are_final(self, pages: Iterable[int]) -> bool:
        """The content of all these pages is known and written no more."""
        contents = self._hash_of
        return None not in [contents[page] for page in pages]

    def is_named(self, page: int) -> bool:
        """This page is the one that its hash names."""
        content = self._hash_of[page]
        return content is not None and self._page_of.get(content) == page

    def match(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """The pages of the longest leading run of hashes that have one."""
        page_of = self._page_of.get
        pages: list[int] = []
        for content in hashes:
            if (page := page_of(content)) is None:
                break
            pages.append(page)
        return tuple(pages)

    def name(self, page: int, content: bytes) -> None:
        """This page holds ``content`` and will not be written any more."""
        held = self._hash_of[page]
        if held is not None and held != content:
            raise InternalError(
                f"page {page} holds {held.hex()} and is published as {content.hex()}"
            )
        self._hash_of[page] = content
        self._page_of.setdefault(content, page)

    def distrust(self, page: int) -> None:
        """This page, which somebody uses, does not hold what it should: nobody finds it again."""
        content = self._hash_of[page]
        if content is not None and self._page_of.get(content) == page:
            del self._page_of[content]
        self._hash_of[page] = None

    def let_go(self, page: int) -> None:
        """A sequence that held this page is over: its content was used just now."""
        content = self._hash_of[page]
        if content is None:
            return
        named = self._page_of.setdefault(content, page)
        if named in self._resting:
            self._resting.move_to_end(named)

    def rest(self, page: int) -> bool:
        """Nobody uses this page any more. False: it is worth nothing here and must be freed."""
        if self.is_named(page):
            self._resting[page] = None
            return True
        self._hash_of[page] = None
        return False

    def wake(self, page: int) -> None:
        """A resting page is used again."""
        del self._resting[page]

    def evict(self) -> int:
        """Take the name from the page that rested longest."""
        page, _ = self._resting.popitem(last=False)
        content, self._hash_of[page] = self._hash_of[page], None
        if content is not None:
            del self._page_of[content]
        return page

    def resting(self) -> tuple[int, ...]:
        """Published pages that nobody uses, in the order in which they would be evicted."""
        return tuple(self._resting)

    def check_integrity(self) -> None:
        """``InternalError`` unless every hash names exactly one page, which holds that content."""
        wrong = [p for content, p in self._page_of.items() if self._hash_of[p] != content]
        stray = [p for p in self._resting if not self.is_named(p)]
        if wrong or stray or len(set(self._page_of.values())) != len(self._page_of):
            raise InternalError(
                f"prefix cache: {len(self._page_of)} hashes; pages {wrong} hold something else, "
                f"pages {stray} rest without a name"
            )
