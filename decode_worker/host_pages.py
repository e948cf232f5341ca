"""Pages of host memory that preempted sequences may move to: the account, without the memory.

This file owns which host page is free. A host page belongs to one sequence from ``take`` to
``give_back``; nothing is shared there. More than there is, or a page given back twice, raises
``InternalError``.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.errors import InternalError


class HostPages:
    """``total`` pages, numbered by themselves. The one given back last is taken first: warm."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that ``take`` could give."""
        return len(self._free)

    @property
    def taken(self) -> int:
        """Pages that sequences have."""
        return len(self._taken)

    def take(self, n_pages: int) -> tuple[int, ...]:
        """``n_pages`` pages. ``InternalError`` if there are fewer: ask ``free`` first."""
        if not 0 <= n_pages <= len(self._free):
            raise InternalError(f"{n_pages} host pages are taken of {len(self._free)} free ones")
        pages = tuple(self._free.pop() for _ in range(n_pages))
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """These are free again."""
        for page in pages:
            if page not in self._taken:
                raise InternalError(f"host page {page} is given back and is nobody's")
            self._taken.remove(page)
            self._free.append(page)
