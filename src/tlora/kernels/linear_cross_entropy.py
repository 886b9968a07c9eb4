"""Frozen output head and cross-entropy in one go, a few rows at a time: the logits of all tokens never exist at once.

The gradient is computed along with the loss, so no graph is kept. Each row is on its own: a NaN in one stays in that one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora.kernels.device import may_run_kernels, runs_kernels
from tlora.kernels.gemm import linear
from tlora.kernels.head import Head, gpu_chunk_rows

CHUNK_ELEMENTS = 1 << 22  # 16 MiB of fp32 logits a chunk: stays near the caches of a CPU


def chunk_bytes(head: Head, device: torch.device) -> int:
    """What `linear_cross_entropy` holds at its peak on `device`, not counting its arguments and results."""
    (vocab, width), element_bytes = head.weight_VH.shape, head.weight_VH.element_size()
    padding = gpu_chunk_rows(head) * 2 * width * element_bytes  # of the last chunk's rows
    if device.type == "cuda" and head.weight_VH.dtype != torch.float64 and may_run_kernels(device):
        return gpu_chunk_rows(head) * (vocab + 16) * element_bytes + padding
    if device.type != "cpu":
        return gpu_chunk_rows(head) * vocab * (element_bytes + max(element_bytes, 4) * (2 if head.softcap else 1)) + padding
    return 3 * CHUNK_ELEMENTS * max(element_bytes, 4)


@torch.no_grad()
def linear_cross_entropy(
    hidden_TH: Tensor, head: Head, labels_T: Tensor, grad_weights_T: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Token losses [T] and, with `grad_weights_T`, d(sum of grad_weights * losses)/d hidden [T, H].

    `labels_T` int64, each in 0..V-1. Losses come in fp32, or fp64 for an fp64 head. Where a GPU runs our kernels the same by
    `triton_cross_entropy`, but for fp64. A row's bits do not depend on other rows' content; on a GPU nor on how many they are.
    """
    device = hidden_TH.device
    if device.type == "cuda" and hidden_TH.dtype != torch.float64 and runs_kernels(device):
        from tlora.kernels.triton_cross_entropy import fused_linear_cross_entropy  # a CPU needs no triton

        return fused_linear_cross_entropy(hidden_TH, head, labels_T, grad_weights_T)
    if device.type != "cpu":
        return chunked_on_gpu(hidden_TH, head, labels_T, grad_weights_T)
    num_tokens, vocab = hidden_TH.shape[0], head.weight_VH.shape[0]
    losses: list[Tensor] = []
    dh_TH = torch.empty_like(hidden_TH) if grad_weights_T is not None else None
    step = max(16, CHUNK_ELEMENTS // vocab)
    for t0 in range(0, num_tokens, step):
        rows = slice(t0, min(t0 + step, num_tokens))
        z_tV = head.logits(hidden_TH[rows])
        target_t1 = labels_T[rows, None]
        at_target_t1 = z_tV.gather(1, target_t1)
        lse_t1 = z_tV.logsumexp(1, keepdim=True)
        losses.append((lse_t1 - at_target_t1).squeeze(1))
        if dh_TH is None or grad_weights_T is None:
            continue
        slope_tV = 1 - (z_tV / head.softcap).square_() if head.softcap else None
        dz_tV = z_tV.sub_(lse_t1).exp_()
        dz_tV.scatter_add_(1, target_t1, torch.full_like(at_target_t1, -1.0))
        dz_tV = dz_tV.mul_(slope_tV) if slope_tV is not None else dz_tV
        dz_tV.mul_(grad_weights_T[rows, None] * head.scale)
        dh_TH[rows] = linear(dz_tV.to(hidden_TH.dtype), head.weight_VH.t())
    return (torch.cat(losses) if losses else hidden_TH.new_empty(0)), dh_TH


@torch.no_grad()
def chunked_on_gpu(hidden_TH: Tensor, head: Head, labels_T: Tensor, grad_weights_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same with a GPU's larger chunks: all of as many rows, the last one padded, since the library picks a product by its shape. The
    logits become their gradient in place. Does not wait for the device.
    """
    num_tokens, rows = hidden_TH.shape[0], gpu_chunk_rows(head)
    if not num_tokens:
        losses = hidden_TH.new_empty(0, dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
        return losses, None if grad_weights_T is None else torch.empty_like(hidden_TH)
    padding = -num_tokens % rows
    hidden_PH, labels_P = F.pad(hidden_TH, (0, 0, 0, padding)), F.pad(labels_T, (0, padding))
    weights_P = None if grad_weights_T is None else F.pad(grad_weights_T, (0, padding))
    losses, dh_PH = [], None if weights_P is None else torch.empty_like(hidden_PH)
    for t0 in range(0, num_tokens, rows):
        part = slice(t0, t0 + rows)
        z_tV, target_t1 = head.logits(hidden_PH[part]), labels_P[part, None]
        slope_tV = 1 - (z_tV / head.softcap).square_() if head.softcap and dh_PH is not None else None
        at_target_t1, peak_t1 = z_tV.gather(1, target_t1), z_tV.amax(1, keepdim=True)
        total_t1 = z_tV.sub_(peak_t1).exp_().sum(1, keepdim=True)
        losses.append((peak_t1 + total_t1.log() - at_target_t1).squeeze(1))
        if dh_PH is None or weights_P is None:
            continue
        dz_tV = z_tV.div_(total_t1).scatter_add_(1, target_t1, torch.full_like(at_target_t1, -1.0))
        dz_tV = dz_tV.mul_(slope_tV) if slope_tV is not None else dz_tV
        dz_tV.mul_(weights_P[part, None] * head.scale)
        dh_PH[part] = linear(dz_tV.to(hidden_TH.dtype), head.weight_VH.t())
    return torch.cat(losses)[:num_tokens], None if dh_PH is None else dh_PH[:num_tokens]
