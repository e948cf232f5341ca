"""Each call into FlashAttention and torch's varlen_attn, held against what the real ones demand.

Neither runs without a GPU. So the foreign function is replaced by one with its real signature
that checks every argument as the C++ behind it does (csrc/flash_attn/flash_api.cpp,
``mha_varlen_fwd``; torch's copy is the same) and answers by the textbook formula. The whole table
then runs through our glue.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch
from attention_cases import (
    ROWS,
    ROWS_256,
    SHAPES_256,
    Shape,
    check,
    layer_inputs,
    prepare,
    random_rows,
)

from kernels.attention import Needs, choose, why_not
from kernels.attention_op import BACKENDS as OFFERED
from kernels.attn_flash import FlashAttention
from kernels.attn_varlen import VarlenAttention

PAGE = 256
CALLS: list[str] = []


def demands(q, k, v, cu_q, cu_k, max_q, max_k, table, kv_len=None) -> None:
    """The checks of ``mha_varlen_fwd``, and what it reads without checking."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    rows = len(cu_q) - 1
    for t in (cu_q, cu_k, table, *([] if kv_len is None else [kv_len])):
        assert t.dtype == torch.int32 and t.is_contiguous()
    assert cu_q.shape == cu_k.shape == (rows + 1,) and table.shape[0] == rows > 0
    assert q.dim() == 3 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.dim() == 4 and k.shape == v.shape and k.shape[1] % 256 == 0
    assert q.shape[2] == k.shape[3] <= 256 and q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[2] == 0
    assert cu_q[0] == cu_k[0] == 0 and cu_q[-1] == len(q)
    q_len, lengths = cu_q.diff(), cu_k.diff()
    assert type(max_q) is int and type(max_k) is int
    assert q_len.max() == max_q and lengths.max() == max_k and (lengths >= q_len).all()
    assert table.shape[1] * k.shape[1] >= max_k
    assert table.min() >= 0 and table.max() < len(k)
    if kv_len is not None:
        assert torch.equal(kv_len, lengths)


def answer(q, k, v, cu_q, cu_k, table, scale, causal, left, right, softcap) -> torch.Tensor:
    """Row by row, masks aligned to the bottom right corner as FlashAttention's are."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[2]
    for r in range(len(cu_q) - 1):
        own = slice(int(cu_q[r]), int(cu_q[r + 1]))
        n = int(cu_k[r + 1] - cu_k[r])
        pages = table[r].long()
        keys, values = (
            x[pages].flatten(0, 1)[:n].double().repeat_interleave(group, 1) for x in (k, v)
        )
        s = torch.einsum("qhd,khd->hqk", q[own].double(), keys) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        ahead = torch.arange(n) - torch.arange(n - (own.stop - own.start), n)[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if causal or right >= 0:
            hidden |= ahead > max(right, 0)
        if left >= 0:
            hidden |= ahead < -left
        w = torch.softmax(s.masked_fill(hidden, float("-inf")), -1)
        out[own] = torch.einsum("hqk,khd->qhd", w, values).to(q.dtype)
    return out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """The signature of flash_attn 2.8."""
    CALLS.append("flash")
    demands(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    assert dropout_p == 0 and alibi_slopes is None and not return_attn_probs
    assert isinstance(softmax_scale, float)
    left, right = window_size
    table = block_table
    return answer(
        q, k, v, cu_seqlens_q, cu_seqlens_k, table, softmax_scale, causal, left, right, softcap
    )


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """The signature of torch 2.13; compared with the installed one below."""
    CALLS.append("varlen")
    demands(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, block_table, seqused_k)
    assert num_splits == 1, "pytorch#194167"
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert return_aux is None and isinstance(scale, float)
    left, right = window_size
    causal = window_size == (-1, 0)
    return answer(
        query, key, value, cu_seq_q, cu_seq_k, block_table, scale, causal, left, right, 0.0
    )


BACKENDS = {"flash": FlashAttention(), "varlen": VarlenAttention()}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The backend with the foreign function replaced, taken to be installed on a GPU of today."""
    module = ModuleType("flash_attn")
    module.__spec__ = inspect.getmodule(pytest).__spec__  # any: find_spec asks only whether
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    CALLS.clear()
    return BACKENDS[request.param]


@pytest.mark.parametrize("shape", ["smollm2, bfloat16", "window 5, bfloat16", "gqa, float16"])
def test_mixed_calls_are_as_the_kernel_demands(backend, shape) -> None:
    check(backend, SHAPES_256[shape], ROWS["mixed"], declared="cuda")
    assert len(CALLS) == 2


@pytest.mark.long
@pytest.mark.parametrize("rows", ROWS_256)
@pytest.mark.parametrize("shape", SHAPES_256)
def test_the_whole_table_agrees_with_the_oracle(backend, shape, rows) -> None:
    check(backend, SHAPES_256[shape], ROWS_256[rows], declared="cuda")
    single_first = [n > 1 for _, n in ROWS_256[rows]]
    name = backend.declaration.name
    mixed = any(single_first) and not single_first[0]
    assert [name] * (2 if mixed else 1) == CALLS


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures_agree_with_the_oracle(backend, seed) -> None:
    shapes = list(SHAPES_256.values())
    check(backend, shapes[seed % len(shapes)], random_rows(seed), seed, declared="cuda")


def test_keys_and_values_are_the_pool_itself(backend, monkeypatch) -> None:
    """No page is copied: what the kernel gets lies inside the pool, strided."""
    shape = SHAPES_256["smollm2, bfloat16"]
    batch, pool = prepare(shape, ROWS["mixed"], 0)
    seen = []
    real = demands

    def recorded(q, k, v, *rest):
        seen.append((k.data_ptr() - pool.data_ptr(), v.data_ptr() - k.data_ptr(), k.stride()))
        real(q, k, v, *rest)

    monkeypatch.setitem(globals(), "demands", recorded)
    layer = layer_inputs(shape, batch, 0)
    plan = backend.plan(batch, shape.geometry, torch.device("cpu"))
    backend.attend(layer.q, layer.k, layer.v, pool, plan, layer.call)
    line = 3 * 64  # KV heads times head size
    half = PAGE * line * 2  # bytes of one layer's keys in one page
    assert seen == [(2 * half, half, (3 * 2 * PAGE * line, line, 64, 1))] * 2  # layer 1 of 3


def test_what_they_cannot_do_is_declared(backend, monkeypatch) -> None:
    declared = backend.declaration
    good = SHAPES_256["gqa, bfloat16"].geometry
    assert why_not(declared, Needs(window=True), good, "cuda") is None
    assert why_not(declared, Needs(), good, "cpu") == "runs on cuda, not on cpu"
    assert why_not(declared, Needs(sinks=True), good, "cuda") == "no sinks"
    softcap = why_not(declared, Needs(softcap=True), good, "cuda")
    assert softcap == (None if declared.name == "flash" else "no softcap")
    small = Shape(dtype="bfloat16", page_size=16).geometry
    assert why_not(declared, Needs(), small, "cuda") == "pages must be a multiple of 256 tokens"
    fp32 = Shape(page_size=256).geometry
    assert why_not(declared, Needs(), fp32, "cuda") == "no dtype float32"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert "8.0" in str(why_not(declared, Needs(), good, "cuda"))


def test_a_package_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setattr("kernels.attn_flash.find_spec", lambda name: None)
    geometry = SHAPES_256["gqa, bfloat16"].geometry
    reason = why_not(FlashAttention.declaration, Needs(), geometry, "cuda")
    assert reason == "the package flash-attn is not installed"


def test_an_older_torch_is_named(monkeypatch) -> None:
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError("never called")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    geometry = SHAPES_256["gqa, bfloat16"].geometry
    reason = why_not(VarlenAttention.declaration, Needs(), geometry, "cuda")
    assert reason is not None and "num_splits" in reason and torch.__version__ in reason


def test_the_recorded_signature_is_that_of_the_installed_torch() -> None:
    from torch.nn.attention import varlen

    def names(function):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    assert names(varlen.varlen_attn) == names(varlen_attn)


def test_the_start_line_on_a_cpu_says_why_gpu_backends_were_passed_over() -> None:
    chosen, line = choose(OFFERED, Needs(), Shape().geometry, "cpu")
    assert "cpu" in chosen.declaration.devices
    for name in ("triton", "flash", "varlen"):
        assert f"{name}: runs on cuda, not on cpu" in line
