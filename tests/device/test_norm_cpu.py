"""Our RMS norm against the modules that it replaces and against float64; what is not replaced."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kernels import host_code, norm_cpu

pytestmark = pytest.mark.skipif(
    host_code.register_tile(64, "float32") is None, reason="no vectors for this CPU"
)

KINDS = (LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Ragged by the code's units: vectors of 16, turns of 64.
DEPTHS = (1, 7, 16, 67, 128, 333, 576)


def prepared(norm: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    norm = norm.to(dtype).eval().requires_grad_(False)
    norm.weight.normal_(generator=torch.Generator().manual_seed(1))
    return norm


def exchanged(norm: nn.Module) -> nn.Module:
    assert norm_cpu.speed_up_norms(norm) == "norms: 1 by our own code"
    assert isinstance(norm.forward, norm_cpu._Fused)
    return norm


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_as_the_module_does(kind: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for depth in DEPTHS:
        norm = prepared(kind(depth), dtype)
        own = norm.forward
        exchanged(norm)
        for shape in ((depth,), (1, 1, depth), (1, 5, 3, depth), (300, depth)):
            x = torch.randn(shape).to(dtype)
            ours, theirs = norm(x), own(x)
            assert ours.shape == theirs.shape and ours.dtype == dtype and ours.is_contiguous()
            away = (ours.double() - theirs.double()).abs()
            if dtype == torch.float32:
                assert (away <= 1e-6 * theirs.double().abs()).all()
            else:
                tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
                bound = 2 * torch.finfo(dtype).eps * theirs.double().abs() + tiny
                assert (away <= bound).all()
                # A few may be rounded the other way; another point of rounding changes many.
                assert (ours != theirs).sum() <= max(1, 2e-3 * ours.numel())


def test_float32_is_near_the_exact_value() -> None:
    torch.manual_seed(0)
    norm = exchanged(prepared(LlamaRMSNorm(576, eps=1e-5)))
    x = torch.randn(64, 576)
    wide = x.double()
    mean = wide.pow(2).mean(-1, keepdim=True)
    exact = norm.weight.double() * wide / (mean + 1e-5).sqrt()
    assert ((norm(x).double() - exact).abs() <= 4e-7 * exact.abs()).all()


def test_a_row_is_the_same_bits_in_every_batch(threads: int) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        norm = exchanged(prepared(LlamaRMSNorm(576), dtype))
        x = torch.randn(400, 576).to(dtype)  # large enough for the team
        assert x.numel() >= norm_cpu._TEAM_NUMBERS
        together = norm(x)
        for rows in (1, 3, 17, 100):
            alone = torch.cat([norm(part) for part in x.split(rows)])
            assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    norm = prepared(LlamaRMSNorm(67), dtype)
    own = norm.forward
    exchanged(norm)
    x = torch.randn(40, 67, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = norm(x)
    x[5, 66], x[20, 0], x[21, 40] = math.nan, math.inf, -math.inf
    dirty = norm(x)
    others = [i for i in range(40) if i not in (5, 20, 21)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[5].isnan().all()
    x.view(torch.uint8)[5, -x.element_size() :] = 0x7F  # a NaN of another pattern
    x.view(torch.uint8)[5, -x.element_size() : -1] = 0xFF
    assert x[5, 66].isnan() and norm(x)[5].isnan().all()
    assert torch.equal(dirty[20:22].isnan(), own(x[20:22]).isnan())


def test_other_layouts_and_no_rows() -> None:
    torch.manual_seed(0)
    norm = prepared(LlamaRMSNorm(48))
    own = norm.forward
    exchanged(norm)
    wide = torch.randn(6, 4, 100)
    layouts = (
        wide[..., 7:55],  # rows apart from each other
        wide[::2, :, 50:98],
        torch.randn(48, 5).t(),  # numbers of a row apart
        torch.randn(4, 6, 48).transpose(0, 1),
        torch.randn(1, 48).expand(5, 48),
    )
    for x in layouts:
        assert not x.is_contiguous()
        torch.testing.assert_close(norm(x), own(x), rtol=1e-6, atol=0)
        assert norm(x).is_contiguous()
    assert norm(torch.empty(0, 48)).shape == (0, 48)
    assert norm(torch.empty(1, 0, 48)).shape == (1, 0, 48)


def test_what_was_not_tried_goes_the_modules_own_way() -> None:
    torch.manual_seed(0)
    norm = prepared(LlamaRMSNorm(48))
    own = norm.forward
    exchanged(norm)
    half = torch.randn(3, 48).bfloat16()
    assert torch.equal(norm(half), own(half)) and norm(half).dtype == torch.float32
    asks = torch.randn(3, 48, requires_grad=True)
    assert norm(asks).requires_grad
    with pytest.raises(RuntimeError, match="device"):
        norm(torch.empty(3, 48, device="meta"))
    with pytest.raises(RuntimeError, match="must match"):
        norm(torch.randn(3, 47))


class Altered(LlamaRMSNorm):
    """Built like the others; ``way`` says in which respect it answers differently."""

    def __init__(self, way: str) -> None:
        super().__init__(64)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "takes the mean away":
            return super().forward(x - x.mean(-1, keepdim=True))
        if self.way == "epsilon outside the root":
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)
        if self.way == "another dtype":
            return super().forward(x).double()
        if self.way == "over all rows":
            return self.weight * x * torch.rsqrt(x.pow(2).mean() + self.variance_epsilon)
        raise ValueError("never without its gate")


@pytest.mark.parametrize(
    "way",
    ["takes the mean away", "epsilon outside the root", "another dtype", "over all rows", "gate"],
)
def test_a_module_that_answers_differently_keeps_its_forward(way: str) -> None:
    norm = prepared(Altered(way))
    assert norm_cpu.speed_up_norms(norm) == "norms: torch"
    assert "forward" not in vars(norm)


def test_a_module_of_another_structure_keeps_its_forward() -> None:
    training = LlamaRMSNorm(8).requires_grad_(False).train()
    trained = LlamaRMSNorm(8).eval()
    biased = nn.LayerNorm(8).eval().requires_grad_(False)
    mean = nn.LayerNorm(8, bias=False).eval().requires_grad_(False)
    two = prepared(LlamaRMSNorm(8))
    two.eps = 1e-3  # which one?
    parent = nn.Sequential(prepared(LlamaRMSNorm(8)), biased, mean, training, trained, two).eval()
    training.train()
    assert norm_cpu.speed_up_norms(parent) == "norms: 1 by our own code, 1 by torch's"
    assert [("forward" in vars(m)) for m in parent] == [True] + [False] * 5


def test_without_llvmlite_every_norm_keeps_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_cpu, "_MISSING", "No module named 'llvmlite'")
    norm = prepared(LlamaRMSNorm(8))
    assert norm_cpu.speed_up_norms(norm) == "norms: torch (No module named 'llvmlite')"
    assert "forward" not in vars(norm)
