"""Frozen head and cross-entropy on a GPU: per chunk of rows one GEMM, one kernel that turns logits into their gradient, one GEMM.

Same mathematics as `linear_cross_entropy`, which dispatches here; nothing waits for the device. Every chunk has the same number of rows,
the last one padded: cuBLAS picks its kernel by the shape, and at one shape a row's bits depend on that row alone.
"""

# Triton's own annotations say nothing of tuples and launch options:
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora.kernels.head import Head, gpu_chunk_rows

_BLOCK_V, _WARPS = 8192, 16  # 16 elements a thread; two rows an SM, so that most of the second pass hits the L2 cache


@triton.jit
def _capped(x, scale, softcap, HAS_CAP: tl.constexpr):
    """z = softcap * tanh(scale * x / softcap) and dz/d(scale * x), in fp32. exp of a negative number only: never overflows."""
    z, slope = x.to(tl.float32) * scale, 1.0
    if HAS_CAP:
        u = z / softcap
        e = tl.exp(-2.0 * tl.abs(u))
        tanh = (1.0 - e) / (1.0 + e)
        z = tl.where(u < 0, -tanh, tanh) * softcap  # a NaN compares as false and stays NaN
        slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    return z, slope


@triton.jit
def cross_entropy_kernel(logits_ptr, labels_ptr, losses_ptr, grad_weights_ptr, scale, softcap, V, stride_row,
                         HAS_CAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Loss of each row and, if GRADIENT, d(grad_weight * loss)/d logits in the logits' place. Grid (rows,).

    One pass for maximum and sum, one for the gradient, blocks in ascending order. A label outside 0..V-1 makes its row NaN. A row owns
    all of its `stride_row` elements: what lies past V is read, not used, and overwritten, since loads under a mask that ends at an odd
    V would be of one element each.
    """
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    label = tl.load(labels_ptr + row)
    is_valid = (label >= 0) & (label < V)
    at_label = tl.load(row_ptr + label, mask=is_valid, other=float("nan"))
    z_label, _slope_label = _capped(at_label, scale, softcap, HAS_CAP)
    columns = tl.arange(0, BLOCK_V)
    peak, total = tl.full((), -3.4e38, tl.float32), tl.full((), 0.0, tl.float32)  # finite: a block of -inf must not give inf - inf
    for v0 in range(0, V, BLOCK_V):
        v = v0 + columns
        x = tl.load(row_ptr + v, mask=v < stride_row, other=0.0)
        z, slope = _capped(x, scale, softcap, HAS_CAP)
        z = tl.where(v < V, z, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(z, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(z - new_peak), 0)
        peak = new_peak
    lse = peak + tl.log(total)
    tl.store(losses_ptr + row, lse - z_label)
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the label's logit before one overwrites it
        factor = tl.load(grad_weights_ptr + row).to(tl.float32) * scale
        lse = tl.where(is_valid, lse, float("nan"))
        for v0 in range(0, V, BLOCK_V):
            v = v0 + columns
            x = tl.load(row_ptr + v, mask=v < stride_row, other=0.0)
            z, slope = _capped(x, scale, softcap, HAS_CAP)
            p = tl.exp(z - lse)
            dx = tl.where(v == label, p - 1.0, p) * slope * factor
            tl.store(row_ptr + v, dx.to(logits_ptr.dtype.element_ty), mask=v < stride_row)


def fused_linear_cross_entropy(
    hidden_TH: Tensor, head: Head, labels_T: Tensor, grad_weights_T: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`linear_cross_entropy` for fp32, bf16 and fp16 on a GPU: losses [T] fp32 and, with weights, d/d hidden [T, H] in hidden's dtype."""
    num_tokens, vocab = hidden_TH.shape[0], head.weight_VH.shape[0]
    rows = gpu_chunk_rows(head)
    num_chunks = -(-num_tokens // rows)
    hidden_TH, labels_T = hidden_TH.contiguous(), labels_T.contiguous()
    losses_T = hidden_TH.new_empty(num_tokens, dtype=torch.float32)
    padded_dh_TH = None
    if grad_weights_T is not None:
        grad_weights_T = grad_weights_T.contiguous()
        padded_dh_TH = hidden_TH.new_empty(num_chunks * rows, hidden_TH.shape[1])
    # GEMMs want rows that start at multiples of 16 bytes, which no tokenizer promises (50,257; 32,001); Triton wants 16 elements
    logits_CV = hidden_TH.new_empty(rows if num_tokens else 0, -(-vocab // 16) * 16)[:, :vocab]
    for t0 in range(0, num_tokens, rows):
        t1 = min(t0 + rows, num_tokens)
        _logits_into(logits_CV, _padded(hidden_TH[t0:t1], rows), head)
        weights = None if grad_weights_T is None else grad_weights_T[t0:t1]
        _losses_and_gradient_(logits_CV[: t1 - t0], head, labels_T[t0:t1], losses_T[t0:t1], weights)
        if padded_dh_TH is not None:
            torch.mm(logits_CV, head.weight_VH, out=padded_dh_TH[t0 : t0 + rows])
    return losses_T, None if padded_dh_TH is None else padded_dh_TH[:num_tokens]


def _padded(hidden_tH: Tensor, rows: int) -> Tensor:
    """`hidden_tH` with rows of zeros up to `rows`; itself where it has as many."""
    if hidden_tH.shape[0] == rows:
        return hidden_tH
    padded_CH = hidden_tH.new_zeros(rows, hidden_tH.shape[1])
    padded_CH[: hidden_tH.shape[0]] = hidden_tH
    return padded_CH


def _logits_into(logits_CV: Tensor, hidden_CH: Tensor, head: Head) -> None:
    """hidden @ weight.T + bias; scale and softcap are the kernel's."""
    if head.bias_V is None:
        torch.mm(hidden_CH, head.weight_VH.t(), out=logits_CV)
    else:
        torch.addmm(head.bias_V, hidden_CH, head.weight_VH.t(), out=logits_CV)


def _losses_and_gradient_(logits_tV: Tensor, head: Head, labels_t: Tensor, losses_t: Tensor, grad_weights_t: Tensor | None) -> None:
    """Fill `losses_t`; with weights, `logits_tV` becomes its gradient."""
    num_rows, vocab = logits_tV.shape
    cross_entropy_kernel[(num_rows,)](
        logits_tV,
        labels_t,
        losses_t,
        losses_t if grad_weights_t is None else grad_weights_t,  # not read without GRADIENT
        float(head.scale),
        float(head.softcap or 1.0),
        vocab,
        logits_tV.stride(0),
        HAS_CAP=bool(head.softcap),
        GRADIENT=grad_weights_t is not None,
        BLOCK_V=_BLOCK_V,
        num_warps=_WARPS,
    )
