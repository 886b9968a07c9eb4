"""The specification of a linear with many adapters: segments, and loops over them in plain torch. Also the path for the CPU.

T tokens, K in features, N out features, R rank rows of all slots. A is `a_RK`; B is held transposed, `b_RN`, so that a slot's
rows are contiguous and aligned next to any other slots. Routing selects rows and never multiplies by a mask: 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.kernels.dropout import keep_mask
from tlora.kernels.gemm import add_product_, linear


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `t0:t1` use rank rows `r0:r1` with `scale`; `dropout` is the probability that an input is dropped."""

    t0: int
    t1: int
    r0: int
    r1: int
    scale: float
    dropout: float = 0.0


Segments = tuple[Segment, ...]
"""One micro-batch as a linear sees it, in token order; tokens of no segment have no adapter there."""


def check_segments(segments: Segments, num_tokens: int, num_rows: int) -> None:
    """Assert that token runs are ordered and disjoint and that all pointers lie inside the tensors."""
    end = 0
    for s in segments:
        assert end <= s.t0 <= s.t1 <= num_tokens, f"segment tokens {s.t0}:{s.t1} overlap, or leave 0:{num_tokens}"
        assert 0 <= s.r0 <= s.r1 <= num_rows, f"segment rows {s.r0}:{s.r1} leave 0:{num_rows}"
        end = s.t1


def _dropped(x_tK: Tensor, keys_t: Tensor | None, module_key: int, segment: Segment) -> tuple[Tensor, Tensor | None]:
    if not segment.dropout or keys_t is None:
        return x_tK, None
    keep = keep_mask(keys_t[segment.t0 : segment.t1], module_key, x_tK.shape[1], segment.dropout)
    return torch.where(keep, x_tK, 0).mul_(1 / (1 - segment.dropout)), keep


def lora_forward_(
    y_TN: Tensor, x_TK: Tensor, a_RK: Tensor, b_RN: Tensor, segments: Segments, keys_T: Tensor | None = None, module_key: int = 0
) -> list[Tensor]:
    """y[t0:t1] += scale * (drop(x[t0:t1]) @ a[r0:r1].T) @ b[r0:r1] for every segment; returns the shrunk S, one [t, r] each."""
    shrunk: list[Tensor] = []
    for s in segments:
        x, _ = _dropped(x_TK[s.t0 : s.t1], keys_T, module_key, s)
        s_tr = linear(x, a_RK[s.r0 : s.r1])
        add_product_(y_TN[s.t0 : s.t1], s_tr, b_RN[s.r0 : s.r1], s.scale)
        shrunk.append(s_tr)
    return shrunk


def lora_backward_(
    dx_TK: Tensor | None,
    dy_TN: Tensor,
    x_TK: Tensor,
    shrunk: list[Tensor],
    a_RK: Tensor,
    b_RN: Tensor,
    da_RK: Tensor,
    db_RN: Tensor,
    segments: Segments,
    keys_T: Tensor | None = None,
    module_key: int = 0,
) -> None:
    """Adds each segment's gradients: to `dx` (unless None), and to its own rows of `da`, `db` (full precision)."""
    for s, s_tr in zip(segments, shrunk, strict=True):
        dy = dy_TN[s.t0 : s.t1]
        ds_tr = linear(dy, b_RN[s.r0 : s.r1])  # of S before scaling
        x, keep = _dropped(x_TK[s.t0 : s.t1], keys_T, module_key, s)
        add_product_(db_RN[s.r0 : s.r1], s_tr.t(), dy, s.scale)
        add_product_(da_RK[s.r0 : s.r1], ds_tr.t(), x, s.scale)
        if dx_TK is None:
            continue
        if keep is None:
            add_product_(dx_TK[s.t0 : s.t1], ds_tr, a_RK[s.r0 : s.r1], s.scale)
        else:
            dx = (ds_tr @ a_RK[s.r0 : s.r1]).mul_(s.scale / (1 - s.dropout))
            dx_TK[s.t0 : s.t1].add_(torch.where(keep, dx, 0))
