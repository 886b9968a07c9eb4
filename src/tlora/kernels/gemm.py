"""x @ weight.T with the fastest exact library for the device and shape. No kernel of our own here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN runs fp32 GEMMs at 250 GFLOP/s on one AVX-512 core of an AMD EPYC where MKL, which F.linear calls, runs at 118; but it
# builds code for each new shape, 0.6 ms, which it keeps. So it is for products that take about as long: 2^25 multiply-adds, 0.6 ms.
_ONEDNN_FROM = 1 << 25


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[T, N] = x [T, K] @ weight [N, K].T + bias. `weight` may be a transposed view: nothing is copied."""
    large = x_TK.shape[0] * weight_NK.numel() >= _ONEDNN_FROM
    if large and x_TK.dtype == torch.float32 and x_TK.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")
    return F.linear(x_TK, weight_NK, bias_N)


def add_product_(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """out += scale * left @ right, where `out` may be of a higher precision: bf16 operands into an fp32 sum."""
    if out.dtype == left.dtype:
        out.addmm_(left, right, alpha=scale)
    else:
        out.add_(left @ right, alpha=scale)
