"""The page accounts against an obvious reference, and every misuse refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.pages import Pages, Reservation
from protocol.errors import InternalError
from protocol.types import PageRef, TicketId

OWNER = TicketId("q")


@given(total=st.integers(1, 40), seed=st.integers(0, 10_000))
def test_random_traces_conserve_pages(total: int, seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(total, 16)
    held: list[Reservation] = []
    generations = [0] * total
    for _ in range(60):
        action = rng.choice(("reserve", "bind", "release"))
        if action == "reserve" and pages.available:
            held.append(pages.reserve(OWNER, rng.randint(1, pages.available)))
        elif action == "bind" and held:
            reservation = rng.choice(held)
            n = rng.randint(0, reservation.credit)
            before = list(reservation.bound)
            new = pages.bind(reservation, n)
            assert len(new) == n and reservation.bound == [*before, *new]
        elif action == "release" and held:
            reservation = held.pop(rng.randrange(len(held)))
            for page in reservation.bound:
                generations[page] += 1
            pages.release(reservation)
        pages.check_integrity()
        assert pages.available == total - sum(r.pages for r in held)
        owned = [page for r in held for page in r.bound]
        assert len(owned) == len(set(owned)) == pages.bound
        assert [pages.generation(p) for p in range(total)] == generations
        assert pages.credited == sum(r.credit for r in held)
    for reservation in held:
        pages.release(reservation)
    assert pages.available == total


def test_double_release_is_an_internal_error() -> None:
    pages = Pages(4, 16)
    reservation = pages.reserve(OWNER, 2)
    pages.bind(reservation, 2)
    pages.release(reservation)
    with pytest.raises(InternalError, match="an ended reservation"):
        pages.release(reservation)
    with pytest.raises(InternalError, match="an ended reservation"):
        pages.bind(reservation, 1)
    pages.check_integrity()
    assert pages.available == 4


def test_foreign_release_is_an_internal_error() -> None:
    mine, other = Pages(4, 16), Pages(4, 16)
    foreign = other.reserve(OWNER, 1)
    with pytest.raises(InternalError, match="a foreign reservation"):
        mine.release(foreign)
    mine.check_integrity()
    other.check_integrity()


@pytest.mark.parametrize("n", [0, -1, 5])
def test_reserving_what_is_not_there_is_an_internal_error(n: int) -> None:
    with pytest.raises(InternalError):
        Pages(4, 16).reserve(OWNER, n)


def test_binding_beyond_the_credit_is_an_internal_error() -> None:
    pages = Pages(4, 16)
    with pytest.raises(InternalError, match="binds 3 pages of a credit of 2"):
        pages.bind(pages.reserve(OWNER, 2), 3)


def test_a_freed_page_is_not_current_any_more() -> None:
    pages = Pages(2, 16)
    reservation = pages.reserve(OWNER, 1)
    refs = pages.refs(pages.bind(reservation, 1))
    assert pages.are_current(refs)
    pages.release(reservation)
    assert not pages.are_current(refs)
    assert pages.are_current([PageRef(refs[0].page, refs[0].generation + 1)])


def test_take_freed_names_each_free_page_once_and_no_bound_one() -> None:
    pages = Pages(2, 16)
    first = pages.reserve(OWNER, 2)
    bound = pages.bind(first, 2)
    pages.release(first)
    again = pages.reserve(OWNER, 1)
    taken = pages.bind(again, 1)
    assert set(pages.take_freed()) == set(bound) - set(taken)
    assert pages.take_freed() == ()


def test_check_integrity_sees_a_lost_page() -> None:
    pages = Pages(3, 16)
    reservation = pages.reserve(OWNER, 1)
    pages.bind(reservation, 1)
    reservation.bound.clear()  # what a bug would do
    with pytest.raises(InternalError, match="2 free"):
        pages.check_integrity()
