"""The gated delta rule over packed samples by chunks of 64 tokens: forward as three Triton kernels (WY form, arXiv 2412.06464).

A chunk's state before it is S [K, V], c the sum of g in it up to a token, k~ the key of length 1. With
A_ij = beta_i exp(c_i - c_j) k~_i.k~_j below the diagonal and inv = (1 + A)^-1: u = inv (beta v), w = inv (beta exp(c) k~), new = u - w S,
out = exp(c) q~ S + P new with P_ij = exp(c_i - c_j) q~_i.k~_j up to the diagonal, and the state behind it
exp(c_last) S + (exp(c_last - c) k~)^T new. What a chunk computes by itself is one program for each chunk and head; the states are a loop
over a sample's chunks, for each head and block of V's columns.

Factors of a row (lengths, decays, beta) are multiplied in fp32 into what a product gives, or into the operand that is rounded anyway: q, k
and v are read as they are. States and sums are in fp32. A chunk starts at its sample's first token or a multiple of 64 behind it, and reads
tokens of its sample alone, so that a sample's bits do not depend on others. Exponents are never above 0. No atomics.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_dot import dot

CHUNK = tl.constexpr(64)
EPSILON = tl.constexpr(1e-6)  # of transformers' l2norm
# For kernels alone: of a function that several share, Triton (3.6) puts globals into a kernel's key or not by which was compiled before.


@triton.jit
def chunk_of(chunks_ptr, number):
    """(first token, tokens of it, the slot of its state) of a chunk; without tokens one that is not there."""
    at = chunks_ptr + number * 4
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2).to(tl.int64)


@triton.jit
def load_rows(ptr, stride, count, first, WIDTH, BLOCK: tl.constexpr, CHUNK: tl.constexpr = 64):
    """[64, BLOCK]: columns from `first` on of a chunk's rows; 0 beyond its tokens and beyond WIDTH."""
    i, column = tl.arange(0, CHUNK), first + tl.arange(0, BLOCK)
    mask = (i < count)[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + i.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, values, stride, count, first, WIDTH, BLOCK: tl.constexpr, CHUNK: tl.constexpr = 64):
    i, column = tl.arange(0, CHUNK), first + tl.arange(0, BLOCK)
    mask = (i < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + i.to(tl.int64)[:, None] * stride + column[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(ptr, stride, count, CHUNK: tl.constexpr = 64):
    """fp32 [64]: one number of each of a chunk's rows."""
    i = tl.arange(0, CHUNK)
    return tl.load(ptr + i.to(tl.int64) * stride, mask=i < count, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(ptr, values, stride, count, CHUNK: tl.constexpr = 64):
    i = tl.arange(0, CHUNK)
    tl.store(ptr + i.to(tl.int64) * stride, values.to(ptr.dtype.element_ty), mask=i < count)


@triton.jit
def load_state(ptr, first, K, V, BK: tl.constexpr, BV: tl.constexpr):
    """[BK, BV] of a state [K, V], its columns from `first` on."""
    row, column = tl.arange(0, BK), first + tl.arange(0, BV)
    return tl.load(ptr + row[:, None] * V + column[None, :], mask=(row < K)[:, None] & (column < V)[None, :], other=0.0)


@triton.jit
def store_state(ptr, values, first, K, V, BK: tl.constexpr, BV: tl.constexpr):
    row, column = tl.arange(0, BK), first + tl.arange(0, BV)
    mask = (row < K)[:, None] & (column < V)[None, :]
    tl.store(ptr + row[:, None] * V + column[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def one_over_length(x, NORMALIZE: tl.constexpr, EPSILON: tl.constexpr = 1e-6):
    """fp32 [64]: what each row is multiplied with to have length 1."""
    wide = x.to(tl.float32)
    if NORMALIZE:
        return tl.rsqrt(tl.sum(wide * wide, 1) + EPSILON)
    return tl.sum(wide * 0.0, 1) + 1.0


@triton.jit
def decays(c, count, CHUNK: tl.constexpr = 64):
    """[64, 64]: exp(c_i - c_j) for j up to i, 0 above and in rows without a token."""
    i = tl.arange(0, CHUNK)
    seen = (i[:, None] >= i[None, :]) & (i < count)[:, None]
    return tl.exp(tl.where(seen, c[:, None] - c[None, :], float("-inf")))


@triton.jit
def _inverse(a, CHUNK: tl.constexpr = 64, BLOCK: tl.constexpr = 16):
    """(1 + a)^-1 of a [64, 64] in fp32 that is 0 from the diagonal on.

    Blocks of 16 on the diagonal by forward substitution, all four at once, as a series would lose digits where keys are alike; the rest is
    a series of three steps, after which blocks below the diagonal are used up.
    """
    N: tl.constexpr = CHUNK // BLOCK
    block, i = tl.arange(0, N), tl.arange(0, BLOCK)
    same = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(a, (N, BLOCK, N, BLOCK)), 0.0), 2)
    solved = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0) + tl.zeros((N, BLOCK, BLOCK), tl.float32)
    for row in range(1, BLOCK):
        factors = tl.sum(tl.where(i[None, :, None] == row, own, 0.0), 1)
        known = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where(i[None, :, None] == row, solved - known[:, None, :], solved)
    whole = tl.reshape(tl.where(same, solved[:, :, None, :], tl.zeros((N, BLOCK, N, BLOCK), tl.float32)), (CHUNK, CHUNK))
    j = tl.arange(0, CHUNK) // BLOCK
    step = dot(whole, tl.where(j[:, None] > j[None, :], a, 0.0))
    inverse = whole
    for _ in range(1, N):
        inverse = whole - dot(step, inverse)
    return inverse


@triton.jit
def prepare_kernel(k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, w_ptr, c_ptr, carry_ptr, whole_ptr, inverse_ptr, chunks_ptr,
                   stride_kt, stride_kh, stride_vt, stride_vh,
                   G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   NORMALIZE: tl.constexpr):  # fmt: skip
    """What a chunk needs of itself: u [T, G, V], w [T, G, K], c [T, G], exp(c_last - c) / |k| as `carry` [T, G], exp(c_last) as `whole`
    [slots, G] and `inverse` [slots, G, 64, 64]. Grid (chunks * G).
    """
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    i, row = tl.arange(0, CHUNK), first * G + head
    k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
    g, beta = load_numbers(g_ptr + row, G, count), load_numbers(beta_ptr + row, G, count)
    c = tl.sum(tl.where(i[:, None] >= i[None, :], g[None, :], 0.0), 1)
    last = tl.sum(g, 0)
    rk = one_over_length(k, NORMALIZE)
    a = dot(k, tl.trans(k)) * decays(c, count) * (beta * rk)[:, None] * rk[None, :]
    inverse = _inverse(tl.where(i[:, None] > i[None, :], a, 0.0))
    store_numbers(c_ptr + row, c, G, count)
    store_numbers(carry_ptr + row, rk * tl.exp(last - c), G, count)
    tl.store(whole_ptr + slot * G + head, tl.exp(last))
    own = inverse_ptr + (slot * G + head) * (CHUNK * CHUNK)
    tl.store(own + i[:, None] * CHUNK + i[None, :], inverse.to(own.dtype.element_ty))
    w = dot((inverse * (beta * rk * tl.exp(c))[None, :]).to(k.dtype), k)
    store_rows(w_ptr + row * K, w, G * K, count, 0, K, BK)
    of_v = (inverse * beta[None, :]).to(k.dtype)
    for column in range(0, V, BV):
        v = load_rows(v_ptr + first * stride_vt + head * stride_vh, stride_vt, count, column, V, BV)
        store_rows(u_ptr + row * V, dot(of_v, v), G * V, count, column, V, BV)


@triton.jit
def scan_kernel(k_ptr, u_ptr, w_ptr, carry_ptr, whole_ptr, state_ptr, new_ptr, samples_ptr, stride_kt, stride_kh,
                G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """The state before each chunk [slots, G, K, V], and new [T, G, V]. Grid (samples * G * V / BV), the longest sample's programs first."""
    NV: tl.constexpr = (V + BV - 1) // BV
    column = tl.program_id(0) % NV * BV
    head = (tl.program_id(0) // NV % G).to(tl.int64)
    start, length, slot = chunk_of(samples_ptr, tl.program_id(0) // (NV * G))
    state = tl.zeros((BK, BV), tl.float32)
    for at in range(0, length, CHUNK):
        count, first, own = tl.minimum(length - at, CHUNK), start + at, (slot + at // CHUNK) * G + head
        row = first * G + head
        store_state(state_ptr + own * (K * V), state, column, K, V, BK, BV)
        w = load_rows(w_ptr + row * K, G * K, count, 0, K, BK)
        u = load_rows(u_ptr + row * V, G * V, count, column, V, BV)
        k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
        new = u.to(tl.float32) - dot(w, state.to(w.dtype))
        store_rows(new_ptr + row * V, new, G * V, count, column, V, BV)
        carried = new * load_numbers(carry_ptr + row, G, count)[:, None]
        state = state * tl.load(whole_ptr + own) + dot(tl.trans(k), carried.to(k.dtype))


@triton.jit
def output_kernel(q_ptr, k_ptr, c_ptr, state_ptr, new_ptr, out_ptr, chunks_ptr, scale, stride_qt, stride_qh, stride_kt, stride_kh,
                  G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  NORMALIZE: tl.constexpr):  # fmt: skip
    """out [T, G, V]. Grid (chunks * G)."""
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    row = first * G + head
    q = load_rows(q_ptr + first * stride_qt + head // GROUP * stride_qh, stride_qt, count, 0, K, BK)
    k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
    rq, rk = one_over_length(q, NORMALIZE) * scale, one_over_length(k, NORMALIZE)
    c = load_numbers(c_ptr + row, G, count)
    scores = (dot(q, tl.trans(k)) * decays(c, count) * rq[:, None] * rk[None, :]).to(q.dtype)
    read = (rq * tl.exp(c))[:, None]
    for column in range(0, V, BV):
        state = load_state(state_ptr + (slot * G + head) * (K * V), column, K, V, BK, BV)
        new = load_rows(new_ptr + row * V, G * V, count, column, V, BV)
        store_rows(out_ptr + row * V, dot(q, state) * read + dot(scores, new), G * V, count, column, V, BV)
