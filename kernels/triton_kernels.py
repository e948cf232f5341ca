"""The Triton kernels of our paged attention: one that attends, one that joins split contexts.

This file owns the arithmetic on the device and the addresses inside the pool. It must never read
a pool cell at or beyond the position where a row's own tokens of this step begin: those come from
``k``, ``v`` directly, so the kernel that attends can also write them, with no order between its
programs. Every cell that is read is masked by position, because cells beyond a row's length may
hold NaN. Import it only where Triton is meant to run (a CUDA device, or Triton's interpreter).

One program of ``attend``: up to ``BLOCK_Q`` tokens of one row, all query heads of one KV head, one
part of the positions that they see. Softmax is kept in base 2 with a running maximum (Milakov and
Gimelshein 2018; FlashAttention); parts are joined as in flash-decoding (Dao et al. 2023).

Tables (int32): ``items`` [I, 2] = row, its first token within the row; ``rows`` [R, 4] = first
token in the packed line, tokens, positions (own tokens included; 0: a padding row), first entry in
``table``; ``table`` = pages of all rows.

Shape suffixes: M = BLOCK_Q * BLOCK_G query lines, N key positions, D head size, S parts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


# Triton's interpreter multiplies bfloat16 as the integers that it keeps them in.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _product(a, b, acc):
    """``acc + a @ b`` in fp32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _scores(q_MD, k_ND, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits ``[M, N]`` in base 2."""
    zero_MN = tl.full([q_MD.shape[0], k_ND.shape[0]], 0.0, tl.float32)
    s_MN = _product(q_MD, tl.trans(k_ND), zero_MN) * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), right at both ends: e^2x may be infinite or zero
        s_MN = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s_MN * (2.0 * LOG2E / softcap))))
    return s_MN * LOG2E


@triton.jit
def _fold(s_MN, seen_MN, v_ND, m_M, l_M, acc_MD):
    """Take one block of positions into the running maximum, sum and weighted values."""
    s_MN = tl.where(seen_MN, s_MN, float("-inf"))
    new_m_M = tl.maximum(m_M, tl.max(s_MN, 1))
    base_M = tl.where(new_m_M == float("-inf"), 0.0, new_m_M)  # -inf - -inf is not a number
    p_MN = tl.exp2(s_MN - base_M[:, None])
    shrink_M = tl.exp2(m_M - base_M)
    acc_MD = acc_MD * shrink_M[:, None]
    acc_MD = _product(p_MN.to(v_ND.dtype), v_ND, acc_MD)
    return new_m_M, l_M * shrink_M + tl.sum(p_MN, 1), acc_MD


@triton.jit(do_not_specialize=["layer", "window", "n_parts", "n_tokens"])
def attend(
    q,  # [T, H, D]
    k,  # [T, KV, D]
    v,  # [T, KV, D]
    kv,  # the pool [pages, LAYERS, 2, PAGE, KV, D], contiguous
    out,  # [T, H, D]
    part_acc,  # fp32 [S, n_tokens, H, D], unused unless SPLIT
    part_ml,  # fp32 [2, S, n_tokens, H]: running maximum, sum
    items,
    rows,
    table,
    sinks,  # [H], unused unless SINKS
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    layer,
    scale,
    softcap,
    window,
    n_parts,
    n_tokens,  # items * BLOCK_Q
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    item = tl.program_id(0)
    n = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(items + 2 * item)
    q_first = tl.load(items + 2 * item + 1)
    line = tl.load(rows + 4 * row)
    q_len = tl.load(rows + 4 * row + 1)
    kv_len = tl.load(rows + 4 * row + 2)
    pages = table + tl.load(rows + 4 * row + 3)
    start = kv_len - q_len  # positions that the pool holds already

    d_D = tl.arange(0, BLOCK_D)
    in_D = d_D < HEAD
    m_of = tl.arange(0, BLOCK_Q * BLOCK_G)
    token_M = q_first + m_of // BLOCK_G
    g_M = m_of % BLOCK_G
    live_M = (token_M < q_len) & (g_M < GROUP)
    head_M = n * GROUP + g_M
    at_M = (line + token_M).to(tl.int64)
    pos_M = start + token_M
    q_MD = tl.load(
        q + at_M[:, None] * q_token + head_M[:, None] * q_head + d_D[None, :],
        mask=live_M[:, None] & in_D[None, :],
        other=0.0,
    )

    # This program's part of the positions lo .. hi - 1 that its tokens see.
    lo = 0
    if WINDOW:
        lo = tl.maximum(0, start + q_first - window + 1)
    hi = tl.minimum(kv_len, start + q_first + BLOCK_Q)
    if SPLIT:
        size = (hi - lo + n_parts * BLOCK_N - 1) // (n_parts * BLOCK_N) * BLOCK_N
        lo += part * size
        hi = tl.minimum(hi, lo + size)

    m_M = tl.full([BLOCK_Q * BLOCK_G], float("-inf"), tl.float32)
    l_M = tl.full([BLOCK_Q * BLOCK_G], 0.0, tl.float32)
    acc_MD = tl.full([BLOCK_Q * BLOCK_G, BLOCK_D], 0.0, tl.float32)
    if SINKS:  # noqa: SIM102 (decided when compiling): one more logit, counted in one part
        if part == 0:
            m_M = tl.load(sinks + head_M, mask=live_M, other=0.0).to(tl.float32) * LOG2E
            l_M += 1.0

    n_N = tl.arange(0, BLOCK_N)
    PAGE_SIZE: tl.constexpr = LAYERS * 2 * PAGE * KV * HEAD
    V_AFTER_K: tl.constexpr = PAGE * KV * HEAD
    layer_at = layer.to(tl.int64) * (2 * V_AFTER_K)
    for first in range(lo, tl.minimum(hi, start), BLOCK_N):
        pos_N = first + n_N
        in_N = pos_N < tl.minimum(hi, start)
        page_N = tl.load(pages + pos_N // PAGE, mask=in_N, other=0).to(tl.int64)
        cell_N = page_N * PAGE_SIZE + (pos_N % PAGE) * (KV * HEAD) + n * HEAD
        at_ND = kv + layer_at + cell_N[:, None] + d_D[None, :]
        in_ND = in_N[:, None] & in_D[None, :]
        k_ND = tl.load(at_ND, mask=in_ND, other=0.0)
        seen_MN = in_N[None, :]
        if WINDOW:
            seen_MN = seen_MN & (pos_N[None, :] > pos_M[:, None] - window)
        s_MN = _scores(q_MD, k_ND, scale, softcap, SOFTCAP)
        v_ND = tl.load(at_ND + V_AFTER_K, mask=in_ND, other=0.0)
        m_M, l_M, acc_MD = _fold(s_MN, seen_MN, v_ND, m_M, l_M, acc_MD)

    # The row's own tokens, straight from this step's keys and values.
    for first in range(tl.maximum(lo, start), hi, BLOCK_N):
        pos_N = first + n_N
        in_N = pos_N < hi
        own_N = (line + pos_N - start).to(tl.int64)
        in_ND = in_N[:, None] & in_D[None, :]
        k_ND = tl.load(k + own_N[:, None] * k_token + n * k_head + d_D[None, :], in_ND, 0.0)
        v_ND = tl.load(v + own_N[:, None] * v_token + n * v_head + d_D[None, :], in_ND, 0.0)
        seen_MN = in_N[None, :] & (pos_N[None, :] <= pos_M[:, None])
        if WINDOW:
            seen_MN = seen_MN & (pos_N[None, :] > pos_M[:, None] - window)
        s_MN = _scores(q_MD, k_ND, scale, softcap, SOFTCAP)
        m_M, l_M, acc_MD = _fold(s_MN, seen_MN, v_ND, m_M, l_M, acc_MD)

    live_MD = live_M[:, None] & in_D[None, :]
    if SPLIT:
        slot_M = (part * n_tokens + item * BLOCK_Q + m_of // BLOCK_G).to(tl.int64) * (KV * GROUP)
        tl.store(part_acc + (slot_M + head_M)[:, None] * HEAD + d_D[None, :], acc_MD, live_MD)
        tl.store(part_ml + slot_M + head_M, m_M, live_M)
        behind = n_parts.to(tl.int64) * n_tokens * (KV * GROUP)
        tl.store(part_ml + behind + slot_M + head_M, l_M, live_M)
    else:
        acc_MD = acc_MD / tl.where(l_M == 0.0, 1.0, l_M)[:, None]
        at_MD = out + at_M[:, None] * out_token + head_M[:, None] * out_head + d_D[None, :]
        tl.store(at_MD, acc_MD.to(out.dtype.element_ty), live_MD)

    if part == 0:  # each token's KV goes into its cell once per KV head
        own_Q = q_first + tl.arange(0, BLOCK_Q)
        in_Q = own_Q < tl.minimum(q_len, kv_len)  # nothing for a padding row
        pos_Q = start + own_Q
        page_Q = tl.load(pages + pos_Q // PAGE, mask=in_Q, other=0).to(tl.int64)
        cell_Q = page_Q * PAGE_SIZE + (pos_Q % PAGE) * (KV * HEAD) + n * HEAD
        to_QD = kv + layer_at + cell_Q[:, None] + d_D[None, :]
        in_QD = in_Q[:, None] & in_D[None, :]
        from_Q = (line + own_Q).to(tl.int64)
        k_QD = tl.load(k + from_Q[:, None] * k_token + n * k_head + d_D[None, :], in_QD, 0.0)
        v_QD = tl.load(v + from_Q[:, None] * v_token + n * v_head + d_D[None, :], in_QD, 0.0)
        tl.store(to_QD, k_QD, in_QD)
        tl.store(to_QD + V_AFTER_K, v_QD, in_QD)


@triton.jit(do_not_specialize=["n_parts", "n_tokens"])
def join(
    out,  # [T, H, D]
    part_acc,
    part_ml,
    items,
    rows,
    out_token,
    out_head,
    n_parts,
    n_tokens,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program per token and query head: the weighted sum of its parts."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(items + 2 * (slot // BLOCK_Q))
    token = tl.load(items + 2 * (slot // BLOCK_Q) + 1) + slot % BLOCK_Q
    if token < tl.load(rows + 4 * row + 1):
        d_D = tl.arange(0, BLOCK_D)
        in_D = d_D < HEAD
        s_S = tl.arange(0, BLOCK_S)
        in_S = s_S < n_parts
        at_S = (s_S * n_tokens + slot).to(tl.int64) * HEADS + head
        m_S = tl.load(part_ml + at_S, mask=in_S, other=float("-inf"))
        behind = n_parts.to(tl.int64) * n_tokens * HEADS
        l_S = tl.load(part_ml + behind + at_S, mask=in_S, other=0.0)
        top = tl.max(m_S, 0)
        weight_S = tl.exp2(m_S - tl.where(top == float("-inf"), 0.0, top))
        used_SD = (m_S > float("-inf"))[:, None] & in_D[None, :]  # an empty part has no weight
        acc_SD = tl.load(part_acc + at_S[:, None] * HEAD + d_D[None, :], mask=used_SD, other=0.0)
        total = tl.sum(l_S * weight_S, 0)
        acc_D = tl.sum(acc_SD * weight_S[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        at = (tl.load(rows + 4 * row) + token).to(tl.int64)
        to_D = out + at * out_token + head * out_head + d_D
        tl.store(to_D, acc_D.to(out.dtype.element_ty), in_D)
