"""The gated delta rule over packed samples by chunks of 64 tokens: forward as five Triton kernels (WY form, arXiv 2412.06464).

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
def sums_up_to(g, CHUNK: tl.constexpr = 64):
    """fp32 [64]: of g [64], the sum up to each."""
    i = tl.arange(0, CHUNK)
    return tl.sum(tl.where(i[:, None] >= i[None, :], g[None, :], 0.0), 1)


@triton.jit
def load_queries_and_keys(q_ptr, k_ptr, c_ptr, first, head, count, scale, stride_qt, stride_qh, stride_kt, stride_kh,
                          G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NORMALIZE: tl.constexpr):  # fmt: skip
    """Of a chunk and a head of v: q and k [64, BK] as they are, what their rows are multiplied with, and c."""
    q = load_rows(q_ptr + first * stride_qt + head // GROUP * stride_qh, stride_qt, count, 0, K, BK)
    k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
    rq, rk = one_over_length(q, NORMALIZE) * scale, one_over_length(k, NORMALIZE)
    return q, k, rq, rk, load_numbers(c_ptr + first * G + head, G, count)


@triton.jit
def scores_of(q, k, rq, rk, c, count):
    """P [64, 64], in q's dtype."""
    return (dot(q, tl.trans(k)) * decays(c, count) * rq[:, None] * rk[None, :]).to(q.dtype)


@triton.jit
def system_kernel(k_ptr, g_ptr, beta_ptr, a_ptr, chunks_ptr, stride_kt, stride_kh,
                  G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  NORMALIZE: tl.constexpr):  # fmt: skip
    """A in fp32 [T, G, 64]: of each token its row in that of its chunk. Grid (chunks * G)."""
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, _slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    i, row = tl.arange(0, CHUNK), first * G + head
    k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
    g, beta = load_numbers(g_ptr + row, G, count), load_numbers(beta_ptr + row, G, count)
    rk = one_over_length(k, NORMALIZE)
    a = dot(k, tl.trans(k)) * decays(sums_up_to(g), count) * (beta * rk)[:, None] * rk[None, :]
    store_rows(a_ptr + row * CHUNK, tl.where(i[:, None] > i[None, :], a, 0.0), G * CHUNK, count, 0, CHUNK, CHUNK)


@triton.jit
def _load_tile(ptr, stride, count, row, column, TILE: tl.constexpr = 16, CHUNK: tl.constexpr = 64):
    """[16, 16] of a chunk's [64, 64]."""
    return load_rows(ptr + row * TILE * stride, stride, count - row * TILE, column * TILE, CHUNK, TILE, TILE)


@triton.jit
def _store_tile(ptr, values, stride, count, row, column, TILE: tl.constexpr = 16, CHUNK: tl.constexpr = 64):
    store_rows(ptr + row * TILE * stride, values, stride, count - row * TILE, column * TILE, CHUNK, TILE, TILE)


@triton.jit
def _substitute(solved, a, row, TILE: tl.constexpr = 16):
    """`solved` [16, 16], whose rows before `row` are those of (1 + a)^-1, with that row too."""
    i = tl.arange(0, TILE)[:, None]
    factors = tl.sum(tl.where(i == row, a, 0.0), 0)
    known = tl.sum(factors[:, None] * solved, 0)
    return tl.where(i == row, solved - known[None, :], solved)


@triton.jit
def invert_kernel(a_ptr, chunks_ptr,
                  G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  NORMALIZE: tl.constexpr):  # fmt: skip
    """inv in place of A [T, G, 64], which is 0 from each chunk's diagonal on. Grid (chunks * G).

    By one warp, in tiles of 16: those on the diagonal by forward substitution, as a series would lose digits where keys are alike, the
    others X_pq = -X_pp sum_m A_pm X_mq. So no step waits for other warps, and an SM has many programs at a time.
    """
    first, count, _slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    a_ptr += (first * G + tl.program_id(0) % G) * 64
    stride, i = G * 64, tl.arange(0, 16)
    a00, a11 = _load_tile(a_ptr, stride, count, 0, 0), _load_tile(a_ptr, stride, count, 1, 1)
    a22, a33 = _load_tile(a_ptr, stride, count, 2, 2), _load_tile(a_ptr, stride, count, 3, 3)
    x00 = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    x11, x22, x33 = x00, x00, x00
    for step in range(1, 16):
        x00, x11 = _substitute(x00, a00, step), _substitute(x11, a11, step)
        x22, x33 = _substitute(x22, a22, step), _substitute(x33, a33, step)
    a10, a21, a32 = (_load_tile(a_ptr, stride, count, 1, 0), _load_tile(a_ptr, stride, count, 2, 1),
                     _load_tile(a_ptr, stride, count, 3, 2))  # fmt: skip
    a20, a31, a30 = (_load_tile(a_ptr, stride, count, 2, 0), _load_tile(a_ptr, stride, count, 3, 1),
                     _load_tile(a_ptr, stride, count, 3, 0))  # fmt: skip
    x10, x21, x32 = -dot(x11, dot(a10, x00)), -dot(x22, dot(a21, x11)), -dot(x33, dot(a32, x22))
    x20 = -dot(x22, dot(a21, x10, dot(a20, x00)))
    x31 = -dot(x33, dot(a32, x21, dot(a31, x11)))
    x30 = -dot(x33, dot(a32, x20, dot(a31, x10, dot(a30, x00))))
    _store_tile(a_ptr, x00, stride, count, 0, 0)
    _store_tile(a_ptr, x10, stride, count, 1, 0)
    _store_tile(a_ptr, x11, stride, count, 1, 1)
    _store_tile(a_ptr, x20, stride, count, 2, 0)
    _store_tile(a_ptr, x21, stride, count, 2, 1)
    _store_tile(a_ptr, x22, stride, count, 2, 2)
    _store_tile(a_ptr, x30, stride, count, 3, 0)
    _store_tile(a_ptr, x31, stride, count, 3, 1)
    _store_tile(a_ptr, x32, stride, count, 3, 2)
    _store_tile(a_ptr, x33, stride, count, 3, 3)


@triton.jit
def prepare_kernel(k_ptr, v_ptr, g_ptr, beta_ptr, inverse_ptr, u_ptr, w_ptr, c_ptr, carry_ptr, whole_ptr, chunks_ptr,
                   stride_kt, stride_kh, stride_vt, stride_vh,
                   G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   NORMALIZE: tl.constexpr):  # fmt: skip
    """What a chunk needs of itself, given its inverse [T, G, 64]: u [T, G, V], w [T, G, K], c [T, G], exp(c_last - c) / |k| as `carry`
    [T, G], and exp(c_last) as `whole` [slots, G]. Grid (chunks * G).
    """
    head = (tl.program_id(0) % G).to(tl.int64)
    first, count, slot = chunk_of(chunks_ptr, tl.program_id(0) // G)
    if count == 0:
        return
    row = first * G + head
    k = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, 0, K, BK)
    inverse = load_rows(inverse_ptr + row * CHUNK, G * CHUNK, count, 0, CHUNK, CHUNK)
    g, beta = load_numbers(g_ptr + row, G, count), load_numbers(beta_ptr + row, G, count)
    c, last = sums_up_to(g), tl.sum(g, 0)
    rk = one_over_length(k, NORMALIZE)
    store_numbers(c_ptr + row, c, G, count)
    store_numbers(carry_ptr + row, rk * tl.exp(last - c), G, count)
    tl.store(whole_ptr + slot * G + head, tl.exp(last))
    of_k, of_v = (inverse * (beta * rk * tl.exp(c))[None, :]).to(k.dtype), (inverse * beta[None, :]).to(k.dtype)
    for column in range(0, K, BV):
        part = load_rows(k_ptr + first * stride_kt + head // GROUP * stride_kh, stride_kt, count, column, K, BV)
        store_rows(w_ptr + row * K, dot(of_k, part), G * K, count, column, K, BV)
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
    q, k, rq, rk, c = load_queries_and_keys(q_ptr, k_ptr, c_ptr, first, head, count, scale, stride_qt, stride_qh, stride_kt, stride_kh,
                                            G, GROUP, K, BK, NORMALIZE)  # fmt: skip
    scores = scores_of(q, k, rq, rk, c, count)
    read = (rq * tl.exp(c))[:, None]
    for column in range(0, V, BV):
        state = load_state(state_ptr + (slot * G + head) * (K * V), column, K, V, BK, BV)
        new = load_rows(new_ptr + row * V, G * V, count, column, V, BV)
        store_rows(out_ptr + row * V, dot(q, state) * read + dot(scores, new), G * V, count, column, V, BV)
