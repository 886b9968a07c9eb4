"""The gated delta rule's backward as five Triton kernels, with the names of `triton_delta_rule.py`.

dS is the gradient of the state behind a chunk, dP and dnew those of P and new. With Y = inv^T dnew, new = inv (beta v - beta exp(c) k~ S)
gives dA = -Y new^T, dv = beta Y and, for the keys that read S, -beta exp(c) Y S^T: neither u, w nor the gradient of `inv` is needed. Heads
of v that share a key have gradients of q and k of their own, which the last kernel adds up in the heads' order.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_delta_rule import (
    CHUNK,
    EPSILON,
    chunk_of,
    decays,
    load_numbers,
    load_queries_and_keys,
    load_rows,
    load_state,
    one_over_length,
    scores_of,
    store_numbers,
    store_rows,
    store_state,
)
from tlora.kernels.triton_dot import dot


@triton.jit
def within_kernel(q_ptr, k_ptr, c_ptr, dout_ptr, read_ptr, dnew_ptr, chunks_ptr, scale, stride_qt, stride_qh, stride_kt, stride_kh,
                  G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  NORMALIZE: tl.constexpr):  # fmt: skip
    """What a chunk's own outputs ask of new, P^T dout [T, G, V], and exp(c) scale / |q| as `read` [T, G]. Grid (chunks * G)."""
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, _slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    row = first * G + head
    q, k, rq, rk, c = load_queries_and_keys(q_ptr, k_ptr, c_ptr, first, head, count, scale, stride_qt, stride_qh, stride_kt, stride_kh,
                                            G, GROUP, K, BK, NORMALIZE)  # fmt: skip
    store_numbers(read_ptr + row, rq * tl.exp(c), G, count)
    scores = scores_of(q, k, rq, rk, c, count)
    for column in range(0, V, BV):
        dout = load_rows(dout_ptr + row * V, G * V, count, column, V, BV)
        store_rows(dnew_ptr + row * V, dot(tl.trans(scores), dout), G * V, count, column, V, BV)


@triton.jit
def scan_back_kernel(q_ptr, k_ptr, w_ptr, carry_ptr, read_ptr, whole_ptr, dout_ptr, dnew_ptr, dstate_ptr, samples_ptr,
                     stride_qt, stride_qh, stride_kt, stride_kh,
                     G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                     BV: tl.constexpr):  # fmt: skip
    """dS [slots, G, K, V]; to dnew [T, G, V] is added what the states behind a chunk ask. Grid as `scan_kernel`'s."""
    NV: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % NV * BV
    head = (tl.program_id(0) // NV % G).to(tl.int64)
    start, length, slot = chunk_of(samples_ptr, tl.program_id(0) // (NV * G))
    dstate = tl.zeros((BK, BV), tl.float32)
    chunks = (length + CHUNK - 1) // CHUNK
    for back in range(chunks):
        at = (chunks - 1 - back) * CHUNK
        count, first, own = tl.minimum(length - at, CHUNK), start + at, (slot + at // CHUNK) * G + head
        row = first * G + head
        store_state(dstate_ptr + own * (K * V), dstate, column, K, V, BK, BV)
        k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
        q = load_rows(q_ptr + first * stride_qt + head // GROUP * stride_qh, stride_qt, count, 0, K, BK)
        w = load_rows(w_ptr + row * K, G * K, count, 0, K, BK)
        dout = load_rows(dout_ptr + row * V, G * V, count, column, V, BV)
        dnew = load_rows(dnew_ptr + row * V, G * V, count, column, V, BV).to(tl.float32)
        dnew += dot(k, dstate.to(k.dtype)) * load_numbers(carry_ptr + row, G, count)[:, None]
        store_rows(dnew_ptr + row * V, dnew, G * V, count, column, V, BV)
        asked = dout.to(tl.float32) * load_numbers(read_ptr + row, G, count)[:, None]
        dstate = dstate * tl.load(whole_ptr + own) + dot(tl.trans(q), asked.to(q.dtype)) - dot(tl.trans(w), dnew.to(w.dtype))


@triton.jit
def output_back_kernel(q_ptr, k_ptr, c_ptr, whole_ptr, state_ptr, dstate_ptr, new_ptr, dout_ptr, dq_ptr, dk_ptr, dc_ptr, chunks_ptr,
                       scale, stride_qt, stride_qh, stride_kt, stride_kh,
                       G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                       NORMALIZE: tl.constexpr):  # fmt: skip
    """Through out and the state behind a chunk: the gradients of q~ and k~, fp32 [T, G, K], and of c, fp32 [T, G]. Grid (chunks * G)."""
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    row, own, i = first * G + head, slot * G + head, tl.arange(0, CHUNK)
    dp = tl.zeros((CHUNK, CHUNK), tl.float32)
    dq = tl.zeros((CHUNK, BK), tl.float32)
    dk = tl.zeros((CHUNK, BK), tl.float32)
    whole_back = tl.zeros((BV,), tl.float32)
    for column in range(0, V, BV):
        dout = load_rows(dout_ptr + row * V, G * V, count, column, V, BV)
        new = load_rows(new_ptr + row * V, G * V, count, column, V, BV)
        state = load_state(state_ptr + own * (K * V), column, K, V, BK, BV)
        dstate = load_state(dstate_ptr + own * (K * V), column, K, V, BK, BV)
        dp = dot(dout, tl.trans(new), dp)
        dq = dot(dout, tl.trans(state), dq)
        dk = dot(new, tl.trans(dstate), dk)
        whole_back += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
    q, k, rq, rk, c = load_queries_and_keys(q_ptr, k_ptr, c_ptr, first, head, count, scale, stride_qt, stride_qh, stride_kt, stride_kh,
                                            G, GROUP, K, BK, NORMALIZE)  # fmt: skip
    whole, last = tl.load(whole_ptr + own), tl.sum(tl.where(i == count - 1, c, 0.0), 0)
    dq *= tl.exp(c)[:, None]
    dk *= tl.exp(last - c)[:, None]
    read, kept = tl.sum(q.to(tl.float32) * dq, 1) * rq, tl.sum(k.to(tl.float32) * dk, 1) * rk
    dp *= decays(c, count)
    pairs = dp * dot(q, tl.trans(k)) * rq[:, None] * rk[None, :]
    dc = read - kept + tl.sum(pairs, 1) - tl.sum(pairs, 0)
    dc += tl.where(i == count - 1, tl.sum(kept, 0) + whole * tl.sum(whole_back, 0), 0.0)
    dq = dot((dp * rk[None, :]).to(k.dtype), k, dq)
    dk = dot(tl.trans(dp * rq[:, None]).to(q.dtype), q, dk)
    store_rows(dq_ptr + row * K, dq, G * K, count, 0, K, BK)
    store_rows(dk_ptr + row * K, dk, G * K, count, 0, K, BK)
    store_numbers(dc_ptr + row, dc, G, count)


@triton.jit
def prepare_back_kernel(k_ptr, v_ptr, beta_ptr, c_ptr, inverse_ptr, state_ptr, new_ptr, dnew_ptr, dc_ptr, dk_ptr, dv_ptr, dg_ptr,
                        dbeta_ptr, chunks_ptr, stride_kt, stride_kh, stride_vt, stride_vh,
                        G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                        NORMALIZE: tl.constexpr):  # fmt: skip
    """Through new: dv [T, G, V], dbeta and dg [T, G]; to dk is added. Grid (chunks * G)."""
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    row, own, i = first * G + head, slot * G + head, tl.arange(0, CHUNK)
    inverse = load_rows(inverse_ptr + row * CHUNK, G * CHUNK, count, 0, CHUNK, CHUNK).to(k_ptr.dtype.element_ty)
    beta = load_numbers(beta_ptr + row, G, count)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    reads = tl.zeros((CHUNK, BK), tl.float32)
    dbeta = tl.zeros((CHUNK,), tl.float32)
    for column in range(0, V, BV):
        dnew = load_rows(dnew_ptr + row * V, G * V, count, column, V, BV)
        new = load_rows(new_ptr + row * V, G * V, count, column, V, BV)
        v = load_rows(v_ptr + first * stride_vt + head * stride_vh, stride_vt, count, column, V, BV)
        state = load_state(state_ptr + own * (K * V), column, K, V, BK, BV)
        y = dot(tl.trans(inverse), dnew)
        store_rows(dv_ptr + row * V, y * beta[:, None], G * V, count, column, V, BV)
        dbeta += tl.sum(y * v.to(tl.float32), 1)
        y = y.to(new.dtype)
        pairs = dot(y, tl.trans(new), pairs)
        reads = dot(y, tl.trans(state), reads)
    c = load_numbers(c_ptr + row, G, count)
    k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
    rk = one_over_length(k, NORMALIZE)
    reads *= tl.exp(c)[:, None]
    read = tl.sum(k.to(tl.float32) * reads, 1) * rk
    pairs = tl.where(i[:, None] > i[None, :], -pairs, 0.0) * decays(c, count)
    of_a = pairs * dot(k, tl.trans(k)) * rk[:, None] * rk[None, :]
    dbeta += tl.sum(of_a, 1) - read
    of_a *= beta[:, None]
    dc = load_numbers(dc_ptr + row, G, count) + tl.sum(of_a, 1) - tl.sum(of_a, 0) - beta * read
    pairs *= beta[:, None]
    dk = load_rows(dk_ptr + row * K, G * K, count, 0, K, BK) - reads * beta[:, None]
    dk = dot(((pairs + tl.trans(pairs)) * rk[None, :]).to(k.dtype), k, dk)
    store_rows(dk_ptr + row * K, dk, G * K, count, 0, K, BK)
    store_numbers(dbeta_ptr + row, dbeta, G, count)
    store_numbers(dg_ptr + row, tl.sum(tl.where(i[:, None] >= i[None, :], dc[:, None], 0.0), 0), G, count)


@triton.jit(do_not_specialize=["T"])
def fold_kernel(x_ptr, d_ptr, dx_ptr, T, scale, stride_xt, stride_xh, H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
                BK: tl.constexpr, BT: tl.constexpr, NORMALIZE: tl.constexpr):  # fmt: skip
    """dx [T, H, K] of x, q or k: the sum of d [T, H * GROUP, K], the gradients of x at length 1 times `scale`. Grid (T / BT * H)."""
    head = (tl.program_id(0) % H).to(tl.int64)
    t, column = (tl.program_id(0) // H * BT + tl.arange(0, BT)).to(tl.int64), tl.arange(0, BK)
    mask = (t < T)[:, None] & (column < K)[None, :]
    d = tl.zeros((BT, BK), tl.float32)
    for member in tl.static_range(GROUP):
        d += tl.load(d_ptr + (t[:, None] * H + head) * (GROUP * K) + member * K + column[None, :], mask=mask, other=0.0)
    d *= scale
    if NORMALIZE:
        x = tl.load(x_ptr + t[:, None] * stride_xt + head * stride_xh + column[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 1) + EPSILON)
        x *= r[:, None]
        d = (d - x * tl.sum(x * d, 1)[:, None]) * r[:, None]
    tl.store(dx_ptr + (t[:, None] * H + head) * K + column[None, :], d.to(dx_ptr.dtype.element_ty), mask=mask)
