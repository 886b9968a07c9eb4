"""Causal attention of packed samples as three Triton kernels: forward, dq (with delta), dk and dv. Each program owns its output rows.

Tiles and blocks are counted from a sequence's own first token, so a row's sums have the same terms in the same order wherever the
sequence lies. Rows next door are never read. Nothing is added up between programs: no atomics, no split sums.

A program's blocks come in up to three loops: masked, full, masked. Full blocks are those that every row of the tile sees whole and
that lie inside the sequence whole, so they need neither selection nor predicated loads. The loop at the diagonal comes first: with
it last, ptxas (of Triton 3.6, sm_90a) serializes every wgmma of the kernel (its warning C7515).

The softmax is in base 2: `s * factor` is the score in bits. Without a soft cap s = q.k and factor = scale * log2(e); with one
s = tanh(q.k * inner), inner = scale / cap and factor = cap * log2(e), so that ds/d(q.k) = 1 - s² up to `scale`, which is left to the end.
"""

# pyright: reportGeneralTypeIssues=false
# (a jit function's call is typed NoReturn)

from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_dot import dot

LOG2E = tl.constexpr(1.4426950408889634)
NO_SPECIAL_CASE = ["num_tokens"]  # a kernel of its own for a number of tokens that 16 divides could round otherwise than its sibling


@triton.jit
def _tile(tiles_ptr, tile):
    """(first token of the sequence, its length, the tile's first row counted from there)."""
    return tl.load(tiles_ptr + tile * 4).to(tl.int64), tl.load(tiles_ptr + tile * 4 + 1), tl.load(tiles_ptr + tile * 4 + 2)


@triton.jit
def _inside(first, length, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """[ROWS, BD]: which elements are the sequence's own and within the head."""
    inside = (first + tl.arange(0, ROWS) < length)[:, None]
    if D < BD:
        inside = inside & (tl.arange(0, BD) < D)[None, :]
    return inside


@triton.jit
def _load_rows(ptr, first, length, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """[ROWS, BD] from row `first` of a sequence on, zeros beyond its end (only looked for if MASKED) and beyond D."""
    d = tl.arange(0, BD)
    at = ptr + first * tl.cast(stride, tl.int64) + (tl.arange(0, ROWS)[:, None] * stride + d[None, :])
    if MASKED:
        return tl.load(at, mask=_inside(first, length, ROWS, D, BD), other=0.0)
    if D < BD:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _store_rows(ptr, rows, first, length, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    at = ptr + first * tl.cast(stride, tl.int64) + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BD)[None, :])
    tl.store(at, rows.to(ptr.dtype.element_ty), mask=_inside(first, length, ROWS, D, BD))


@triton.jit
def _scores(products, inner, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """s of the module's docstring. `tl` has no tanh that runs interpreted too."""
    if not SOFTCAP:
        return products
    x = products * inner
    e = tl.exp2(tl.abs(x) * (-2 * 1.4426950408889634))  # LOG2E, which all kernels would share: see the test of their keys in the cache
    s = (1 - e) / (1 + e)
    s = tl.where(x < 0, -s, s)
    if EXACT:  # 1 - e leaves 6e-8 for any x: of a cap of 50 that is 3e-6, below what 16-bit p can show, but not below fp32's
        z = x * x
        series = x * (1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
        s = tl.where(tl.abs(x) < 0.25, series, s)
    return s


@triton.jit
def _visible(i, j, WINDOW: tl.constexpr):
    """Whether query i sees key j. Keys beyond the sequence's end come after all of its queries."""
    seen = j <= i
    if WINDOW > 0:
        seen = seen & (i - j < WINDOW)
    return seen


@triton.jit
def _key_bounds(first, length, ROWS: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """Keys of the queries first .. first+ROWS-1: masked up to the first number, from the second to the third full, to the last masked.

    (start, start of full, end of full, end), the first three multiples of BN.
    """
    start, full = 0, 0
    full_end = first // BN * BN
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW + 1, 0) // BN * BN
        full = tl.maximum(first + ROWS - WINDOW + BN - 1, 0) // BN * BN  # seen by the last row, hence by all
        full = tl.minimum(tl.maximum(full, start), full_end)
    return start, full, full_end, tl.minimum(first + ROWS, length)


@triton.jit
def _attend_blocks(acc, total, top, q, k_ptr, v_ptr, i, begin, end, length, stride_k, stride_v, inner, factor,
                   BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                   MASKED: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One loop of the online softmax: sum of p v, sum of p, and the largest score so far in bits, of each query of the tile."""
    for j0 in range(begin, end, BN):
        k = _load_rows(k_ptr, j0, length, stride_k, BN, D, BD, MASKED)
        s = _scores(dot(q, tl.trans(k)), inner, SOFTCAP, EXACT)
        if MASKED:
            s = tl.where(_visible(i[:, None], (j0 + tl.arange(0, BN))[None, :], WINDOW), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * factor)
        base = higher
        if WINDOW > 0 and MASKED:  # a row may see nothing of the first block; without a window it sees the block's first key
            base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s * factor - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v = _load_rows(v_ptr, j0, length, stride_v, BN, D, BD, MASKED)
        acc = dot(p.to(v.dtype), v, acc)
        top = higher
    return acc, total, top


@triton.jit(do_not_specialize=NO_SPECIAL_CASE)
def forward_kernel(q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, tiles_ptr, num_tokens, inner, factor,
                   stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg,
                   H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """out and lse of one tile of queries of one head. Heads run fastest: those of a group share k and v in L2.

    A head's sink (`sinks_ptr`, or None) is one key more that every query sees, of a given score and with v = 0. Backward needs no more than
    an lse with the sink in it.
    """
    head = (tl.program_id(0) % H).to(tl.int64)  # of a whole row of heads, an offset may pass 2^31
    start, length, first = _tile(tiles_ptr, tl.program_id(0) // H)
    q = _load_rows(q_ptr + start * stride_qt + head * stride_qh, first, length, stride_qt, BM, D, BD, True)
    k_ptr += start * stride_kt + head // GROUP * stride_kg
    v_ptr += start * stride_vt + head // GROUP * stride_vg
    i = first + tl.arange(0, BM)
    acc = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    begin, full, full_end, end = _key_bounds(first, length, BM, BN, WINDOW)
    acc, total, top = _attend_blocks(acc, total, top, q, k_ptr, v_ptr, i, full_end, end, length, stride_kt, stride_vt, inner, factor,
                                     BN, D, BD, WINDOW, SOFTCAP, True, EXACT)  # fmt: skip
    acc, total, top = _attend_blocks(acc, total, top, q, k_ptr, v_ptr, i, full, full_end, length, stride_kt, stride_vt, inner, factor,
                                     BN, D, BD, WINDOW, SOFTCAP, False, EXACT)  # fmt: skip
    if WINDOW > 0:
        acc, total, top = _attend_blocks(acc, total, top, q, k_ptr, v_ptr, i, begin, full, length, stride_kt, stride_vt, inner, factor,
                                         BN, D, BD, WINDOW, SOFTCAP, True, EXACT)  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        decay = tl.exp2(top - higher)
        total = total * decay + tl.exp2(sink - higher)
        acc = acc * decay[:, None]
        top = higher
    _store_rows(out_ptr + start * (H * D) + head * D, acc / total[:, None], first, length, H * D, BM, D, BD)
    tl.store(lse_ptr + head * num_tokens + start + i, (top + tl.log2(total)) / LOG2E, mask=i < length)


@triton.jit
def _dq_blocks(dq, q, dout, lse, delta, k_ptr, v_ptr, i, begin, end, length, stride_k, stride_v, inner, factor,
               BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
               MASKED: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """dq + ds k over some blocks of keys, `scale` left out; lse in bits."""
    for j0 in range(begin, end, BN):
        k = _load_rows(k_ptr, j0, length, stride_k, BN, D, BD, MASKED)
        s = _scores(dot(q, tl.trans(k)), inner, SOFTCAP, EXACT)
        p = tl.exp2(s * factor - lse[:, None])
        if MASKED:
            p = tl.where(_visible(i[:, None], (j0 + tl.arange(0, BN))[None, :], WINDOW), p, 0.0)
        v = _load_rows(v_ptr, j0, length, stride_v, BN, D, BD, MASKED)
        ds = p * (dot(dout, tl.trans(v)) - delta[:, None])
        if SOFTCAP:
            ds *= 1 - s * s
        dq = dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=NO_SPECIAL_CASE)
def dq_kernel(dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr, num_tokens, scale, inner, factor,
              stride_dt, stride_dh, stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg,
              H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """dq of one tile of queries of one head, and its delta = sum of out * dout, which the other kernel reads."""
    head = (tl.program_id(0) % H).to(tl.int64)
    start, length, first = _tile(tiles_ptr, tl.program_id(0) // H)
    q = _load_rows(q_ptr + start * stride_qt + head * stride_qh, first, length, stride_qt, BM, D, BD, True)
    dout = _load_rows(dout_ptr + start * stride_dt + head * stride_dh, first, length, stride_dt, BM, D, BD, True)
    out = _load_rows(out_ptr + start * (H * D) + head * D, first, length, H * D, BM, D, BD, True)
    k_ptr += start * stride_kt + head // GROUP * stride_kg
    v_ptr += start * stride_vt + head // GROUP * stride_vg
    i = first + tl.arange(0, BM)
    at = head * num_tokens + start + i
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + at, delta, mask=i < length)
    lse = tl.load(lse_ptr + at, mask=i < length, other=0.0) * LOG2E
    dq = tl.zeros((BM, BD), tl.float32)
    begin, full, full_end, end = _key_bounds(first, length, BM, BN, WINDOW)
    dq = _dq_blocks(dq, q, dout, lse, delta, k_ptr, v_ptr, i, full_end, end, length, stride_kt, stride_vt, inner, factor,
                    BN, D, BD, WINDOW, SOFTCAP, True, EXACT)  # fmt: skip
    dq = _dq_blocks(dq, q, dout, lse, delta, k_ptr, v_ptr, i, full, full_end, length, stride_kt, stride_vt, inner, factor,
                    BN, D, BD, WINDOW, SOFTCAP, False, EXACT)  # fmt: skip
    if WINDOW > 0:
        dq = _dq_blocks(dq, q, dout, lse, delta, k_ptr, v_ptr, i, begin, full, length, stride_kt, stride_vt, inner, factor,
                        BN, D, BD, WINDOW, SOFTCAP, True, EXACT)  # fmt: skip
    _store_rows(dq_ptr + start * (H * D) + head * D, dq * scale, first, length, H * D, BM, D, BD)


@triton.jit
def _query_bounds(first, length, ROWS: tl.constexpr, BM: tl.constexpr, WINDOW: tl.constexpr):
    """Queries of the keys first .. first+ROWS-1: (start, start of full, end of full, end); full blocks also end within the sequence."""
    start, end = first // BM * BM, length
    full = (first + ROWS + BM - 2) // BM * BM  # these see the last key of the tile, first + ROWS - 1
    full_end = length // BM * BM
    if WINDOW > 0:
        end = tl.minimum(length, first + ROWS - 1 + WINDOW)
        full_end = tl.minimum(full_end, (first + WINDOW) // BM * BM)  # the last of them sees the tile's first key
    full = tl.minimum(full, (end + BM - 1) // BM * BM)
    return start, full, tl.maximum(full, full_end), end


@triton.jit
def _dkv_blocks(dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, j, begin, end, length, stride_q, stride_d, inner, factor,
                BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                MASKED: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """dk + ds^T q (`scale` left out) and dv + p^T dout over some blocks of one head's queries. Transposed: p^T stays in registers."""
    for i0 in range(begin, end, BM):
        i = i0 + tl.arange(0, BM)
        q = _load_rows(q_ptr, i0, length, stride_q, BM, D, BD, MASKED)
        if MASKED:
            lse = tl.load(lse_ptr + i, mask=i < length, other=0.0)  # beyond the end p is 1, and what it is multiplied with zero
            delta = tl.load(delta_ptr + i, mask=i < length, other=0.0)
        else:
            lse, delta = tl.load(lse_ptr + i), tl.load(delta_ptr + i)
        s = _scores(dot(k, tl.trans(q)), inner, SOFTCAP, EXACT)
        p = tl.exp2(s * factor - (lse * LOG2E)[None, :])
        if MASKED:
            p = tl.where(_visible(i[None, :], j[:, None], WINDOW), p, 0.0)
        dout = _load_rows(dout_ptr, i0, length, stride_d, BM, D, BD, MASKED)
        dv = dot(p.to(dout.dtype), dout, dv)
        ds = p * (dot(v, tl.trans(dout)) - delta[None, :])
        if SOFTCAP:
            ds *= 1 - s * s
        dk = dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=NO_SPECIAL_CASE)
def dkv_kernel(dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr, num_tokens, scale, inner, factor,
               stride_dt, stride_dh, stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg,
               H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """dk and dv of one tile of BN keys of one kv head: first head of its group first, and of each the queries in their order."""
    G: tl.constexpr = H // GROUP
    kv_head = (tl.program_id(0) % G).to(tl.int64)
    start, length, first = _tile(tiles_ptr, tl.program_id(0) // G)
    k = _load_rows(k_ptr + start * stride_kt + kv_head * stride_kg, first, length, stride_kt, BN, D, BD, True)
    v = _load_rows(v_ptr + start * stride_vt + kv_head * stride_vg, first, length, stride_vt, BN, D, BD, True)
    j = first + tl.arange(0, BN)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    begin, full, full_end, end = _query_bounds(first, length, BN, BM, WINDOW)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        q_at = q_ptr + start * stride_qt + head * stride_qh
        dout_at = dout_ptr + start * stride_dt + head * stride_dh
        at = head * num_tokens + start
        dk, dv = _dkv_blocks(dk, dv, k, v, q_at, dout_at, lse_ptr + at, delta_ptr + at, j, begin, full, length, stride_qt, stride_dt,
                             inner, factor, BM, D, BD, WINDOW, SOFTCAP, True, EXACT)  # fmt: skip
        dk, dv = _dkv_blocks(dk, dv, k, v, q_at, dout_at, lse_ptr + at, delta_ptr + at, j, full, full_end, length, stride_qt, stride_dt,
                             inner, factor, BM, D, BD, WINDOW, SOFTCAP, False, EXACT)  # fmt: skip
        dk, dv = _dkv_blocks(dk, dv, k, v, q_at, dout_at, lse_ptr + at, delta_ptr + at, j, full_end, end, length, stride_qt, stride_dt,
                             inner, factor, BM, D, BD, WINDOW, SOFTCAP, True, EXACT)  # fmt: skip
    stride = G * D
    _store_rows(dk_ptr + start * stride + kv_head * D, dk * scale, first, length, stride, BN, D, BD)
    _store_rows(dv_ptr + start * stride + kv_head * D, dv, first, length, stride, BN, D, BD)
