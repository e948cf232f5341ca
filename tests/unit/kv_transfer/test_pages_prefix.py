"""Shared and cached pages against a slow, obvious model that also knows what every page holds.

The model writes content into pages as owners do, and looks after every match that each page holds
what its hash says. Who is evicted is checked too: the page whose content was used longest ago,
and of one sequence the tail before the head.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kv_transfer.pages import Pages, Reservation
from protocol.errors import InternalError
from protocol.page_hash import page_hashes, root
from protocol.types import TicketId

SIZE = 2
ROOT = root("fp", "float32", SIZE)
OWNER = TicketId("q")
ACTIONS = ("begin", "begin", "bind", "bind", "write", "write", "fork", "end", "end")


@dataclass(eq=False)
class Sequence:
    """Tokens of one sequence and its reservation; ``published`` leading pages."""

    reservation: Reservation
    hashes: list[bytes]
    published: int


@dataclass
class Model:
    """Everything spelled out: who refers to what, what is where, when a content was used."""

    pages: Pages
    rng: random.Random
    live: list[Sequence] = field(default_factory=list)
    memory: dict[int, bytes | None] = field(default_factory=dict)  # what a page really holds
    names: dict[bytes, int] = field(default_factory=dict)
    final: dict[int, bytes] = field(default_factory=dict)  # published, whoever has the name
    used: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # (release, -position)
    generations: dict[int, int] = field(default_factory=dict)
    clock: int = 0
    hits: int = 0
    evictions: int = 0

    def holders(self, page: int) -> int:
        return sum(s.reservation.bound.count(page) for s in self.live)

    def cached(self) -> dict[bytes, int]:
        return {h: p for h, p in self.names.items() if not self.holders(p)}

    def available(self) -> int:
        in_use = {p for s in self.live for p in s.reservation.bound}
        credit = sum(s.reservation.credit for s in self.live)
        return self.pages.total - len(in_use) - credit

    def begin(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(SIZE * self.rng.randint(1, 5))]
        hashes = page_hashes(tokens, SIZE, ROOT)
        shared = self.pages.match(hashes)
        expected = []
        for content in hashes:
            if content not in self.names:
                break
            expected.append(self.names[content])
        assert list(shared) == expected
        assert [self.memory[p] for p in shared] == hashes[: len(shared)], (
            "a page under a wrong hash"
        )
        shared = shared[: self.rng.choice((len(shared), self.rng.randint(0, len(shared))))]
        n = self.rng.randint(0 if shared else 1, len(hashes))
        unused = sum(not self.holders(p) for p in shared)
        fits = n + unused <= self.available()
        assert self.pages.room_for(n, shared) == fits
        if not fits:
            with pytest.raises(InternalError):
                self.pages.reserve(OWNER, n, shared)
            return
        self.hits += len(shared)
        reservation = self.pages.reserve(OWNER, n, shared)
        self.live.append(Sequence(reservation, hashes, len(shared)))

    def extend(self, s: Sequence) -> None:
        n = self.rng.randint(0, 3)
        if n <= self.available():
            self.pages.extend(s.reservation, n)
        else:
            with pytest.raises(InternalError):
                self.pages.extend(s.reservation, n)

    def bind(self, s: Sequence) -> None:
        n = self.rng.choice((s.reservation.credit, self.rng.randint(0, s.reservation.credit)))
        held = {p for x in self.live for p in x.reservation.bound}
        free = self.pages.total - len(held | set(self.names.values()))
        oldest = sorted(self.cached(), key=lambda h: self.used[h])[: max(0, n - free)]
        gone = [self.names.pop(h) for h in oldest]
        self.evictions += len(gone)
        for page in gone:
            self.generations[page] += 1
        new = self.pages.bind(s.reservation, n)
        assert len(set(new)) == n and not set(new) & held
        assert set(gone) <= set(new), "somebody else was evicted"
        for page in new:
            self.memory[page] = None  # the new owner scribbles
            self.final.pop(page, None)
            assert self.pages.may_write(page)

    def write(self, s: Sequence) -> None:
        """Compute pages in order, as far as they are bound, and publish some of them."""
        bound, first = s.reservation.bound, s.published
        for i in range(first, min(len(bound), len(s.hashes))):
            if not self.pages.may_write(bound[i]):
                return
            self.memory[bound[i]] = s.hashes[i]
        end = max(first, min(len(bound), len(s.hashes)))
        end = self.rng.choice((end, self.rng.randint(first, end)))
        self.pages.publish(s.reservation, s.hashes[first:end], first)
        if first and bound[first - 1] not in self.final:
            return  # the page ahead turned out wrong
        for i in range(first, end):
            self.names.setdefault(s.hashes[i], bound[i])
            self.final[bound[i]] = s.hashes[i]
        s.published = end

    def fork(self, s: Sequence) -> None:
        n_shared = self.rng.randint(0, len(s.reservation.bound))
        n = self.rng.randint(0, 2)
        if n > self.available():
            with pytest.raises(InternalError):
                self.pages.fork(s.reservation, OWNER, n_shared, n)
            return
        fork = self.pages.fork(s.reservation, OWNER, n_shared, n)
        assert fork.bound == s.reservation.bound[:n_shared]
        self.live.append(Sequence(fork, s.hashes, min(s.published, n_shared)))

    def release(self, s: Sequence) -> None:
        self.clock += 1
        bound = list(s.reservation.bound)
        self.live.remove(s)
        for i, page in enumerate(bound):
            if page in self.final:
                self.names.setdefault(self.final[page], page)
                self.used[self.final[page]] = (self.clock, -i)
        for page in bound:
            if not self.holders(page) and page not in self.names.values():
                self.generations[page] += 1
        self.pages.release(s.reservation)

    def distrust(self, s: Sequence) -> None:
        """Its pages turned out wrong; everybody who has them computes on, and names nothing."""
        bad = set(s.reservation.bound)
        self.pages.unpublish(s.reservation)
        self.names = {h: p for h, p in self.names.items() if p not in bad}
        self.final = {p: h for p, h in self.final.items() if p not in bad}

    def check(self) -> None:
        pages = self.pages
        pages.check_integrity()
        in_use = {p for s in self.live for p in s.reservation.bound}
        assert pages.available == self.available()
        assert pages.bound == len(in_use)
        assert pages.references == sum(len(s.reservation.bound) for s in self.live)
        assert pages.cached == len(self.cached())
        assert {p: pages.generation(p) for p in self.generations} == self.generations
        for content, page in self.names.items():
            assert self.memory[page] == content
        taken = set(pages.take_freed())
        assert not taken & (in_use | set(self.names.values())), "a page with content is poisoned"


def trace(seed: int, events: int) -> Model:
    rng = random.Random(seed)
    total = rng.choice((4, 7, 10, 14))
    model = Model(Pages(total, SIZE), rng, generations=dict.fromkeys(range(total), 0))
    for _ in range(events):
        action = rng.choice(ACTIONS)
        if action == "begin" or not model.live:
            model.begin()
            if model.live and rng.random() < 0.7:
                model.bind(model.live[-1])
                model.write(model.live[-1])
        else:
            s = rng.choice(model.live)
            if action == "end" or len(model.live) > 4:
                model.release(s)
            elif action == "bind" and rng.random() < 0.2:
                model.extend(s)
            elif action == "fork" and rng.random() < 0.03:
                model.distrust(s)
            else:
                {"bind": model.bind, "write": model.write, "fork": model.fork}[action](s)
        model.check()
    for s in list(model.live):
        model.release(s)
        model.check()
    assert model.pages.available == total and model.pages.bound == 0
    return model


@pytest.mark.parametrize("seed", range(8))
def test_random_traces_equal_the_model(seed: int) -> None:
    model = trace(seed, 600)
    assert model.hits and model.evictions


@pytest.mark.long
def test_a_hundred_thousand_random_events() -> None:
    models = [trace(1000 + seed, 2500) for seed in range(40)]
    assert sum(m.evictions for m in models) > 5000 and sum(m.hits for m in models) > 5000


def filled(pages: Pages, hashes: list[bytes]) -> Reservation:
    """A sequence with all its pages bound and published."""
    reservation = pages.reserve(OWNER, len(hashes))
    pages.bind(reservation, len(hashes))
    pages.publish(reservation, hashes)
    return reservation


def hashes(*tokens: int) -> list[bytes]:
    return page_hashes([t for t in tokens for _ in range(SIZE)], SIZE, ROOT)


def test_a_released_page_that_is_published_keeps_its_content_and_generation() -> None:
    pages = Pages(4, SIZE)
    first = filled(pages, hashes(1, 2))
    refs = pages.refs(first.bound)
    pages.release(first)
    assert pages.available == 4 and pages.cached == 2 and pages.take_freed() == ()
    assert pages.match(hashes(1, 2, 3)) == tuple(r.page for r in refs)
    assert pages.are_current(refs)
    assert pages.match(hashes(2, 1)) == ()


def test_the_tail_is_evicted_before_the_head_and_then_refused() -> None:
    pages = Pages(3, SIZE)
    chain = filled(pages, hashes(1, 2, 3))
    refs = pages.refs(chain.bound)
    pages.release(chain)
    other = pages.reserve(OWNER, 1)
    assert pages.bind(other, 1) == (refs[2].page,)
    assert pages.match(hashes(1, 2, 3)) == (refs[0].page, refs[1].page)
    assert [pages.are_current([r]) for r in refs] == [True, True, False]


def test_what_a_running_sequence_has_published_is_shared_without_a_copy() -> None:
    pages = Pages(3, SIZE)
    first = filled(pages, hashes(1, 2))
    second = pages.reserve(OWNER, 1, pages.match(hashes(1, 2, 3)))
    assert second.bound == first.bound and pages.bound == 2 and pages.references == 4
    assert not any(pages.may_write(p) for p in first.bound)
    pages.release(first)
    assert pages.cached == 0 and pages.bound == 2
    pages.release(second)
    assert pages.cached == 2


def test_cached_pages_that_are_shared_are_not_room_for_others() -> None:
    pages = Pages(3, SIZE)
    pages.release(filled(pages, hashes(1, 2)))
    shared = pages.match(hashes(1, 2))
    assert pages.room_for(3) and pages.room_for(1, shared) and not pages.room_for(2, shared)
    with pytest.raises(InternalError, match="2 pages beside 2 shared ones; 3 are available"):
        pages.reserve(OWNER, 2, shared)


def test_the_same_content_computed_twice_keeps_its_first_page() -> None:
    pages = Pages(4, SIZE)
    first, second = filled(pages, hashes(1)), filled(pages, hashes(1))
    assert pages.match(hashes(1)) == tuple(first.bound)
    kept = tuple(first.bound)
    pages.release(second)
    assert pages.match(hashes(1)) == kept and pages.cached == 0
    pages.release(first)
    assert pages.cached == 1


def test_a_second_page_takes_over_when_the_first_was_evicted() -> None:
    pages = Pages(2, SIZE)
    first, second = filled(pages, hashes(1)), filled(pages, hashes(1))
    pages.release(first)
    pages.bind(pages.reserve(OWNER, 1), 1)  # evicts the page that had the name
    assert pages.match(hashes(1)) == ()
    kept = tuple(second.bound)
    pages.release(second)
    assert pages.match(hashes(1)) == kept


def test_what_turned_out_wrong_is_not_found_again() -> None:
    pages = Pages(6, SIZE)
    first = filled(pages, hashes(1, 2))
    other = pages.reserve(OWNER, 2, pages.match(hashes(1)))
    pages.bind(other, 2)
    pages.unpublish(first)
    assert pages.match(hashes(1)) == ()
    pages.publish(other, hashes(1, 3)[1:], 1)  # behind a page without a name: nothing
    assert pages.match(hashes(1, 3)) == ()
    pages.release(first)
    pages.release(other)
    assert pages.cached == 0 and len(pages.take_freed()) == 4


def test_a_match_asks_for_no_hash_beyond_the_first_miss() -> None:
    asked: list[int] = []

    def chain() -> Iterator[bytes]:
        for i, content in enumerate(hashes(1, 9, 3)):
            asked.append(i)
            yield content

    pages = Pages(3, SIZE)
    filled(pages, hashes(1, 2, 3))
    assert len(pages.match(chain())) == 1 and asked == [0, 1]


def test_misuse_is_an_internal_error() -> None:
    pages = Pages(4, SIZE)
    chain = filled(pages, hashes(1, 2))
    with pytest.raises(InternalError, match="is published as"):
        pages.publish(chain, hashes(3))
    with pytest.raises(InternalError, match="of 2 bound ones"):
        pages.publish(chain, hashes(1, 2, 3))
    plain = pages.reserve(OWNER, 2)
    pages.bind(plain, 2)
    with pytest.raises(InternalError, match="not all of which are published"):
        pages.reserve(OWNER, 0, plain.bound)
    with pytest.raises(InternalError, match="shares 3 pages"):
        pages.fork(chain, OWNER, 3, 0)
    pages.release(chain)
    with pytest.raises(InternalError, match="an ended reservation"):
        pages.publish(chain, hashes(1))
    pages.check_integrity()


def test_check_integrity_sees_a_reference_too_many() -> None:
    pages = Pages(3, SIZE)
    chain = filled(pages, hashes(1, 2))
    fork = pages.fork(chain, OWNER, 2, 0)
    fork.bound.append(chain.bound[0])  # what a bug would do
    with pytest.raises(InternalError, match="reservations refer to 5 pages, the account says 4"):
        pages.check_integrity()
