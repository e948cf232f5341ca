"""Memory of large results: used again when nobody holds it, never before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernels import linear_cpu
from kernels.large_outputs import LargeOutputs

LARGE = 1000  # bytes


def test_memory_is_used_again_only_when_its_last_view_is_gone() -> None:
    outputs = LargeOutputs(LARGE)
    first = outputs.empty((10, 100))
    at = first.data_ptr()
    view = first[3:4].transpose(0, 1)
    del first
    second = outputs.empty((10, 100))
    assert second.data_ptr() != at
    assert outputs.kept == 2 * 4000
    del view
    third = outputs.empty((5, 100))  # fits into what the first had
    assert third.data_ptr() == at and third.shape == (5, 100) and third.is_contiguous()
    assert outputs.kept == 2 * 4000


def test_what_is_too_small_goes_when_more_is_needed() -> None:
    outputs = LargeOutputs(LARGE)
    held = outputs.empty((300,))
    outputs.empty((400,))
    outputs.empty((2000,))
    assert outputs.kept == 4 * (300 + 2000)
    held.fill_(1.0)  # still its own
    assert held.sum() == 300


def test_small_results_are_the_c_librarys() -> None:
    outputs = LargeOutputs(LARGE)
    assert outputs.empty((250,)).shape == (250,)
    assert outputs.kept == 0
    assert not outputs.is_large(250) and outputs.is_large(251)


def test_large_products_are_right_and_take_one_piece_of_memory(monkeypatch) -> None:
    """Both ways: our product, and torch's where it is the faster one."""
    torch.manual_seed(0)
    for most_rows in (32, 1000):
        monkeypatch.setattr(linear_cpu, "_most_rows", lambda *_, most=most_rows: most)
        monkeypatch.setattr(linear_cpu, "LargeOutputs", lambda: LargeOutputs(LARGE))
        for bias in (False, True):
            linear = nn.Linear(32, 48, bias=bias).requires_grad_(False)
            linear_cpu.speed_up(linear)
            addresses = set()
            for rows in (64, 40, 64):
                x = torch.randn(1, rows, 32)
                with torch.inference_mode():
                    y = linear(x)
                expected = F.linear(x, linear.weight, linear.bias)
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
                addresses.add(y.data_ptr())
                del y
            assert len(addresses) == 1, (most_rows, bias)
            with torch.inference_mode():
                one, other = linear(x), linear(x + 1)
            assert one.data_ptr() != other.data_ptr()
