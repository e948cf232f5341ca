"""Our matrix product for linear layers against float64, and what is exchanged in a model."""

from __future__ import annotations

import ctypes
import math
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kernels import host_code, linear_cpu
from kernels.tile_ir import Tile

pytestmark = pytest.mark.skipif(
    host_code.register_tile(64, "float32") is None, reason="no register tile for this CPU"
)

# Ragged by every unit there is: lanes (4, 8, 16), turns (4), panels (256); and rows 4 KiB apart.
DEPTHS = (1, 67, 256, 259, 1024)
# Float32 sums of K products err by far less than this share of the sum of their sizes.
RELATIVE = 2e-6


def layer(
    n: int, depth: int, *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    linear = nn.Linear(depth, n, bias=bias).to(dtype).requires_grad_(False)
    assert linear_cpu.speed_up(linear).startswith("linear layers: 1 by our own product")
    assert type(linear) is nn.Linear
    linear.forward._rows = (1, math.inf)  # whatever this machine's trial said
    return linear


def check(linear: nn.Linear, x: torch.Tensor) -> None:
    """Within rounding of the exact product; 16-bit results within the rounding of their format."""
    y = linear(x)
    bias = None if linear.bias is None else linear.bias.double()
    exact = F.linear(x.double(), linear.weight.double(), bias)
    sizes = F.linear(
        x.double().abs(), linear.weight.double().abs(), None if bias is None else bias.abs()
    )
    eps = RELATIVE if y.dtype == torch.float32 else torch.finfo(y.dtype).eps
    bound = RELATIVE * sizes + (0 if y.dtype == torch.float32 else eps * exact.abs())
    assert y.dtype == x.dtype and y.shape == exact.shape and y.is_contiguous()
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_row_count_and_ragged_edge(depth: int, threads: int) -> None:
    torch.manual_seed(depth)
    for n, bias in ((16, False), (37, True)):
        linear = layer(n, depth, bias=bias)
        for rows in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 20, 24, 31, 33, 64, 100):
            check(linear, torch.randn(rows, depth))


def test_more_rows_than_one_pass() -> None:
    torch.manual_seed(0)
    check(layer(48, 64), torch.randn(2 * linear_cpu._ROWS_PER_PASS + 3, 64))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(16, 80),
    depth=st.sampled_from([6, 260]),
    rows=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_random_products(
    n: int, depth: int, rows: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = layer(n, depth, bias=bias, dtype=dtype)
    check(linear, torch.randn(rows, depth).to(dtype))


@pytest.mark.parametrize("tile", [(16, (4, 8, 16)), (8, (4, 8, 16)), (8, (4, 8)), (16, (4,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiles_of_other_machines(tile: tuple[int, tuple[int, ...]], dtype: torch.dtype) -> None:
    """What this machine does not choose gives the same results, if more slowly."""
    torch.manual_seed(5)
    linear = nn.Linear(70, 37).to(dtype).requires_grad_(False)
    own = Tile(70, str(dtype).removeprefix("torch."), *tile)
    linear.forward = linear_cpu._Product(
        linear.weight, linear.bias, own, linear_cpu._Scratch(), math.inf
    )
    for rows in (2, 7, 16, 21):
        check(linear, torch.randn(rows, 70).to(dtype))


def test_a_row_is_the_same_bits_in_every_batch(threads: int) -> None:
    torch.manual_seed(1)
    linear, x = layer(80, 259, bias=True), torch.randn(40, 259)
    whole = linear(x)
    for rows in (1, 2, 5, 8, 13, 16, 17, 29, 40):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_inputs_of_any_layout() -> None:
    torch.manual_seed(2)
    linear = layer(32, 48)
    wide = torch.randn(9, 96)
    check(linear, wide[:, 48:])  # rows further apart than they are long
    check(linear, wide[:, ::2])  # numbers further apart
    check(linear, torch.randn(48, 9).t())
    check(linear, torch.randn(2, 3, 48))
    check(linear, torch.randn(48))
    check(linear, torch.randn(1, 1, 48).expand(4, 5, 48))
    assert linear(torch.randn(0, 48)).shape == (0, 32)


def test_not_a_number_stays_in_its_row() -> None:
    torch.manual_seed(3)
    linear, x = layer(32, 64), torch.randn(7, 64)
    clean = linear(x)
    x[3, 5] = math.nan
    y = linear(x)
    assert y[3].isnan().all()
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(y[kept], clean[kept])


def test_wrong_input_is_refused_as_by_torch() -> None:
    linear = layer(32, 64)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.randn(4, 63))
    with pytest.raises(RuntimeError, match="dtype"):
        linear(torch.randn(4, 64, dtype=torch.float64))


def test_threads_do_not_share_scratch() -> None:
    """Products of several threads at once, as none holds Python's lock while it computes."""
    torch.manual_seed(4)
    linear = layer(64, 512)
    inputs = [torch.randn(24, 512) for _ in range(4)]
    want = [linear(x) for x in inputs]
    ready, wrong = threading.Barrier(len(inputs)), []

    def work(i: int) -> None:
        ready.wait()
        wrong.extend(i for _ in range(100) if not torch.equal(linear(inputs[i]), want[i]))

    team = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert wrong == []


def test_only_fitting_layers_are_exchanged() -> None:
    class Own(nn.Linear):
        """A subclass may do anything in its forward."""

    trained = nn.Linear(32, 32)
    narrow = nn.Linear(32, 8, bias=False)  # fewer outputs than a block has rows
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(32, 64),
            "own": Own(32, 64),
            "wide": nn.Linear(32, 64).double(),
            "narrow": narrow,
            "strided": nn.Linear(32, 64),
        }
    ).requires_grad_(False)
    model["trained"] = trained
    model["strided"].weight.data = torch.randn(32, 64).t()
    line = linear_cpu.speed_up(model)
    exchanged = {name for name, m in model.items() if isinstance(m.forward, linear_cpu._Product)}
    few = {"narrow"} if host_code.register_tile(32, "float32").rows <= 8 else set()
    assert exchanged == {"plain"} | few
    assert line.startswith(f"linear layers: {len(exchanged)} by our own product")
    assert line.endswith(f"{6 - len(exchanged)} by torch's")


def test_above_the_limit_torch_computes() -> None:
    linear = layer(32, 64)
    linear.forward._rows = (1, 4)
    x = torch.randn(5, 64)
    assert torch.equal(linear(x), F.linear(x, linear.weight))


def test_without_llvmlite_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cpu, "_MISSING", "No module named 'llvmlite'")
    linear = nn.Linear(32, 32).requires_grad_(False)
    assert linear_cpu.speed_up(linear) == "linear layers: torch (No module named 'llvmlite')"
    assert "forward" not in vars(linear)


def test_the_team_is_torchs_own() -> None:
    """A second OpenMP runtime beside torch's would spin on the same cores."""
    if not host_code.team():
        pytest.skip("torch has no OpenMP runtime here")

    class Where(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p)] + [
            (name, ctypes.c_void_p) for name in ("symbol", "address")
        ]

    where = Where()
    assert ctypes.CDLL(None).dladdr(ctypes.c_void_p(host_code.team()), ctypes.byref(where))
    library = Path(where.file.decode()).resolve()
    assert library in {p.resolve() for p in (Path(torch.__file__).parent / "lib").iterdir()}
