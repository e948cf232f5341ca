"""One segment on its way over a link: how its pages become wire operations.

This file owns the cut of a segment into *units* (one wire operation each), the staging buffers,
the generation checks of the reading side and the checksum of the wire bytes. Both ends cut the
same way, from the page size and the transport's declared capabilities alone. It must never touch
a page after the unit that names it has completed.

Life of a segment: made when it reaches the head of its link's queue -> ``post`` for every unit in
order -> ``complete`` for every unit in order, once its operation has ended -> ``event`` once.

Shape suffixes: N pages of one unit, B bytes of one page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_transfer.checksum import Checksum
from kv_transfer.pool import KvPool
from kv_transfer.transport import Capabilities, Link, LinkError, Pending
from protocol.events import ReceivePages, SegmentReceived, SegmentSent, SegmentStale, SendPages
from protocol.types import PageRef


@dataclass(frozen=True, slots=True)
class Cut:
    """How a transport moves pages of one size: ``direct`` from where they lie, or staged."""

    page_bytes: int
    pages_per_unit: int
    direct: bool

    @staticmethod
    def of(page_bytes: int, capabilities: Capabilities) -> Cut:
        """The cut that both ends derive."""
        if page_bytes >= capabilities.direct_bytes:
            return Cut(page_bytes, capabilities.group, True)
        return Cut(page_bytes, max(1, capabilities.staged_bytes // page_bytes), False)

    def units(self, n_pages: int) -> int:
        """Wire operations of a segment."""
        return -(-n_pages // self.pages_per_unit)


class Staging:
    """The buffers of one link: a ring of slots, one per operation in flight, made when needed."""

    def __init__(self, cut: Cut, slots: int, device: torch.device) -> None:
        self._cut = cut
        self._slots: list[torch.Tensor | None] = [None] * slots
        self._zeros: torch.Tensor | None = None
        self._device = device

    def slot_NB(self, operation: int, n_pages: int) -> torch.Tensor:
        """Room for ``n_pages``; free again when ``operation`` and its ring place come round."""
        place = operation % len(self._slots)
        slot_NB = self._slots[place]
        if slot_NB is None:
            slot_NB = self._slots[place] = self._new()
        return slot_NB[:n_pages]

    def zeros_NB(self, n_pages: int) -> torch.Tensor:
        """Zeros in place of pages that must not be read; never written."""
        if self._zeros is None:
            self._zeros = self._new()
        return self._zeros[:n_pages]

    def _new(self) -> torch.Tensor:
        shape = (self._cut.pages_per_unit, self._cut.page_bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)


class Unit:
    """One wire operation: its buffers, and the pages that a staged receive still has to fill."""

    __slots__ = ("buffers", "pages", "pending", "slot_NB")

    def __init__(self, buffers: list[torch.Tensor], pending: Pending) -> None:
        self.buffers = buffers
        self.pending = pending
        self.pages: list[int] = []
        self.slot_NB: torch.Tensor | None = None


@dataclass(slots=True)
class Workshop:
    """What all segments of one link share."""

    pool: KvPool
    cut: Cut
    staging: Staging
    generation_of: Callable[[int], int]

    def fresh(self, pages: Sequence[PageRef]) -> bool:
        """Whether every page still has the generation it is named with."""
        return all(self.generation_of(ref.page) == ref.generation for ref in pages)

    def gather(self, pages: list[int], out_NB: torch.Tensor) -> None:
        """Copy pages into a slot."""
        rows = self.pool.rows
        if rows.is_cuda:
            torch.index_select(rows, 0, torch.tensor(pages, device=rows.device), out=out_NB)
        else:
            # numpy and not torch: a torch copy would start a thread team for this thread.
            np.take(rows.numpy(), pages, axis=0, out=out_NB.numpy(), mode="clip")

    def scatter(self, slot_NB: torch.Tensor, pages: list[int]) -> None:
        """Copy a slot into pages."""
        rows = self.pool.rows
        if rows.is_cuda:
            rows.index_copy_(0, torch.tensor(pages, device=rows.device), slot_NB)
        else:
            rows.numpy()[pages] = slot_NB.numpy()


class SendSegment:
    """Reads pages and sends them. A page that changed hands makes the whole segment stale."""

    def __init__(self, effect: SendPages, shop: Workshop, checksum: Checksum) -> None:
        self._effect = effect
        self._shop = shop
        self._checksum = checksum
        self._pages = [ref.page for ref in effect.pages]
        self._stale = False
        self.n_units = shop.cut.units(len(self._pages))

    def post(self, index: int, operation: int, link: Link) -> Unit:
        """Start unit ``index``. Stale pages are not read: zeros keep the wire in order."""
        shop, n = self._shop, self._shop.cut.pages_per_unit
        pages = self._pages[index * n : (index + 1) * n]
        if not shop.fresh(self._effect.pages[index * n : (index + 1) * n]):
            self._stale = True
        if self._stale:
            rows_NB = shop.staging.zeros_NB(len(pages))
            buffers = list(rows_NB) if shop.cut.direct else [rows_NB.view(-1)]
        elif shop.cut.direct:
            buffers = [shop.pool.row(page) for page in pages]
        else:
            slot_NB = shop.staging.slot_NB(operation, len(pages))
            shop.gather(pages, slot_NB)
            buffers = [slot_NB.view(-1)]
        unit = Unit(buffers, link.send(buffers))
        for buffer in buffers:  # while the operation is under way
            self._checksum.update(buffer)
        return unit

    def complete(self, unit: Unit) -> None:
        """The unit's operation has ended."""

    def event(self) -> SegmentSent | SegmentStale:
        """What became of the segment. The pages are checked a second time, after the reading."""
        effect = self._effect
        if self._stale or not self._shop.fresh(effect.pages):
            return SegmentStale(effect.worker_id, effect.ticket_id, effect.segment)
        return SegmentSent(
            effect.worker_id, effect.ticket_id, effect.segment, self._checksum.digest()
        )


class ReceiveSegment:
    """Receives into pages, or into a sink: a slot of the ring whose content nobody reads."""

    def __init__(self, effect: ReceivePages, shop: Workshop, checksum: Checksum) -> None:
        page_bytes = shop.cut.page_bytes
        n_pages, rest = divmod(effect.n_bytes, page_bytes)
        if rest or (effect.pages is not None and len(effect.pages) != n_pages):
            raise LinkError(
                f"a segment of {effect.n_bytes} bytes was announced, which is not "
                f"{n_pages if effect.pages is None else len(effect.pages)} pages of {page_bytes}"
            )
        self._effect = effect
        self._shop = shop
        self._checksum = checksum
        self._pages = None if effect.pages is None else [ref.page for ref in effect.pages]
        # Pages are bound until this segment ends, so this is never seen; writing a page that is
        # somebody else's would be the worst fault of all, so it is looked at again.
        self._stale = effect.pages is not None and not shop.fresh(effect.pages)
        if self._stale:
            self._pages = None
        self._n_pages = n_pages
        self.n_units = shop.cut.units(n_pages)

    def post(self, index: int, operation: int, link: Link) -> Unit:
        """Start unit ``index``."""
        shop, n = self._shop, self._shop.cut.pages_per_unit
        n_rows = min(n, self._n_pages - index * n)
        pages = None if self._pages is None else self._pages[index * n : index * n + n_rows]
        if shop.cut.direct and pages is not None:
            buffers = [shop.pool.row(page) for page in pages]
            return Unit(buffers, link.receive(buffers))
        slot_NB = shop.staging.slot_NB(operation, n_rows)
        buffers = list(slot_NB) if shop.cut.direct else [slot_NB.view(-1)]
        unit = Unit(buffers, link.receive(buffers))
        if pages is not None:
            unit.pages, unit.slot_NB = pages, slot_NB
        return unit

    def complete(self, unit: Unit) -> None:
        """The unit's bytes are here: sum them, and move staged ones into their pages."""
        for buffer in unit.buffers:
            self._checksum.update(buffer)
        if unit.slot_NB is not None:
            self._shop.scatter(unit.slot_NB, unit.pages)

    def event(self) -> SegmentReceived | SegmentStale:
        """What became of the segment."""
        effect = self._effect
        if self._stale:
            return SegmentStale(effect.worker_id, effect.ticket_id, effect.segment)
        return SegmentReceived(
            effect.worker_id, effect.ticket_id, effect.segment, self._checksum.digest()
        )
