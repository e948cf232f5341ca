"""What links stand on: the pool and its size, checksums, and the rendezvous map."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import xxhash
from link_rig import SMALL

from kv_transfer.checksum import Sums, new_checksum
from kv_transfer.links import Links
from kv_transfer.pool import KvPool, available_memory, pages_in, parse_memory
from kv_transfer.rendezvous import RendezvousMap, RendezvousStore
from kv_transfer.segments import Cut
from kv_transfer.transport import LinkAborted, LinkOverdue
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.p2p import P2pTransport
from protocol.errors import ConfigError, InternalError, Overloaded, WrongState
from protocol.types import KvGeometry

GIB = 1 << 30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_the_pages_themselves(dtype: str) -> None:
    geometry = KvGeometry(layers=3, kv_heads=2, head_dim=4, page_size=4, dtype=dtype)
    pool = KvPool(geometry, 5)
    assert pool.tensor.shape == (5, 3, 2, 4, 2, 4)
    assert pool.rows.shape == (5, geometry.page_bytes)
    assert pool.row(2).data_ptr() == pool.tensor[2].data_ptr()
    pool.tensor[2].fill_(1.5)
    assert pool.row(2).view(getattr(torch, dtype)).eq(1.5).all()
    assert not pool.row(1).any() and not pool.row(3).any()


def test_poison_fills_the_named_pages_only() -> None:
    pool = KvPool(SMALL, 4)
    pool.poison([1, 3])
    assert pool.tensor[[1, 3]].isnan().all()
    assert pool.tensor[[0, 2]].eq(0).all()


def test_a_pool_needs_a_page_and_memory() -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        KvPool(SMALL, 0)
    with pytest.raises(ConfigError, match="cannot allocate"):
        KvPool(SMALL, 1 << 50)


@pytest.mark.parametrize(
    ("text", "sharers", "useful", "expected"),
    [
        ("2GiB", 1, None, 2 * GIB),
        ("1.5 gib", 2, None, 3 * GIB // 2),
        ("500MB", 1, None, 500_000_000),
        ("4096", 1, None, 4096),
        ("80%", 1, None, int(8 * GIB * 0.8)),
        ("80 %", 2, None, int(8 * GIB * 0.4)),
        ("auto", 2, None, 2 * GIB),
        ("auto", 1, GIB, GIB),
        (" Auto ", 4, 64 * GIB, GIB),
    ],
)
def test_memory_is_a_size_a_share_or_auto(
    text: str, sharers: int, useful: int | None, expected: int
) -> None:
    assert parse_memory(text, available=8 * GIB, sharers=sharers, useful=useful) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lots", "none of a size"),
        ("2 GiBs", "none of a size"),
        ("-1GiB", "none of a size"),
        ("0%", "share"),
        ("101%", "share"),
        ("9GiB", "8.00 GiB are free"),
    ],
)
def test_wrong_memory_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_memory(text, available=8 * GIB)
    assert caught.value.field == "kv.memory" and "\n" not in caught.value.message


def test_too_little_memory_names_the_numbers() -> None:
    page = SMALL.page_bytes
    assert pages_in(SMALL, 10 * page + page - 1, max_model_len=40) == 10
    with pytest.raises(
        ConfigError, match=r"holds 10 pages \(40 tokens\), but .* 41 needs 11 pages"
    ):
        pages_in(SMALL, 10 * page, max_model_len=41)


def test_available_memory_is_of_this_machine() -> None:
    assert 16 << 20 < available_memory("cpu") < 1 << 50


@pytest.mark.parametrize("name", ["xxh3-64", "sums-64"])
def test_a_checksum_depends_on_every_byte_and_on_order_but_not_on_the_split(name: str) -> None:
    data = torch.randint(0, 256, (4096,), dtype=torch.uint8)

    def digest(*parts: torch.Tensor) -> int:
        checksum = new_checksum(name)  # type: ignore[arg-type]
        for part in parts:
            checksum.update(part)
        return checksum.digest()

    whole = digest(data)
    assert 0 <= whole < 1 << 64
    assert digest(data[:1024], data[1024:]) == whole
    assert digest(data[1024:], data[:1024]) != whole
    assert digest(data, torch.zeros(8, dtype=torch.uint8)) != whole
    for place in (0, 1000, 4095):
        changed = data.clone()
        changed[place] ^= 1
        assert digest(changed) != whole
    assert digest() == digest()


def test_the_host_checksum_is_plain_xxh3() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    checksum = new_checksum("xxh3-64")
    checksum.update(data)
    assert checksum.digest() == xxhash.xxh3_64_intdigest(bytes(range(100)))


def test_the_device_checksum_refuses_a_ragged_buffer() -> None:
    with pytest.raises(InternalError, match="7 bytes"):
        Sums().update(torch.zeros(7, dtype=torch.uint8))


@pytest.mark.parametrize("page_bytes", [512, 100 << 10, 256 << 10, 3 << 20])
def test_the_cut_covers_every_page(page_bytes: int) -> None:
    capabilities = P2pTransport().capabilities
    cut = Cut.of(page_bytes, capabilities)
    assert cut.direct == (page_bytes >= capabilities.direct_bytes)
    assert cut.pages_per_unit >= 1
    for n_pages in (1, 2, 7, 8, 9, 4096):
        assert (cut.units(n_pages) - 1) * cut.pages_per_unit < n_pages
        assert n_pages <= cut.units(n_pages) * cut.pages_per_unit
    assert cut.units(0) == 0


def test_a_transport_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="for cuda, but the KV pool is on cpu"):
        Links(
            P2pTransport("cuda"),
            KvPool(SMALL, 1),
            generation_of=lambda page: 0,
            on_event=lambda event: None,
            op_timeout_s=1,
        )
    assert LoopbackTransport().capabilities.devices == {"cpu"}


def test_an_address_of_another_host_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"kv\.interface '203\.0\.113\.7'") as caught:
        P2pTransport(hostname="203.0.113.7")
    assert caught.value.field == "kv.interface"


# --- rendezvous --------------------------------------------------------------------------------


def test_only_open_links_have_a_map() -> None:
    rendezvous = RendezvousMap()
    for call in (
        lambda: rendezvous.set("a", "k", b"v"),
        lambda: rendezvous.get("a", "k", 0),
        lambda: rendezvous.check("a", ["k"]),
        lambda: rendezvous.delete("a", "k"),
    ):
        with pytest.raises(WrongState):
            call()
    local = rendezvous.open("a")
    rendezvous.open("b")
    local.set("k", b"v")
    assert rendezvous.get("a", "k", 0) == b"v"
    assert rendezvous.get("b", "k", 0) is None
    assert local.check(["k"]) and not local.check(["k", "other"])
    assert local.delete("k") and not local.delete("k")
    rendezvous.close("a")
    rendezvous.close("a")
    with pytest.raises(WrongState):
        local.set("k", b"v")
    assert len(rendezvous) == 1


def test_the_map_is_bounded() -> None:
    rendezvous = RendezvousMap(max_keys=2, max_value_bytes=10)
    local = rendezvous.open("a")
    with pytest.raises(Overloaded):
        local.set("k", b"x" * 11)
    local.set("k", b"1")
    local.set("l", b"1")
    local.set("k", b"2")
    with pytest.raises(Overloaded):
        local.set("m", b"1")
    assert local.get("k", 0) == b"2"


def test_a_get_waits_for_the_value_and_ends_with_the_map() -> None:
    rendezvous = RendezvousMap()
    local = rendezvous.open("a")
    got: list[object] = []

    def wait_for(key: str) -> None:
        try:
            got.append(local.get(key, 20))
        except WrongState as error:
            got.append(error)

    threads = [threading.Thread(target=wait_for, args=(key,)) for key in ("early", "never")]
    for thread in threads:
        thread.start()
    local.set("early", b"v")
    threads[0].join(5)
    assert got == [b"v"]
    rendezvous.close("a")
    threads[1].join(5)
    assert isinstance(got[1], WrongState)


def test_the_store_waits_until_its_deadline_or_until_it_is_aborted() -> None:
    local = RendezvousMap().open("a")
    started = time.monotonic()
    store = RendezvousStore(local, started + 0.3, lambda: False)
    store.set("k", "text")
    assert store.get("k") == b"text"
    with pytest.raises(LinkOverdue):
        store.wait(["k", "never"])
    assert 0.25 < time.monotonic() - started < 2
    with pytest.raises(LinkAborted):
        RendezvousStore(local, started + 100, lambda: True).get("never")
    assert store.check(["k"]) and store.delete_key("k") and not store.check(["k"])
