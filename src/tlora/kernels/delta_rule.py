"""The gated delta rule over packed samples, all of their chunks at once: as transformers' `torch_chunk_gated_delta_rule` computes it for
one sample (Gated Delta Networks, arXiv 2412.06464, with its UT transform), in PyTorch's own operations: the specification of the kernels
(`delta_kernels.py`), and what fp32, fp64 and GPUs without kernels take.

A sample starts with an empty state in a chunk of its own, so nothing of another sample is read. Backward computes forward again:
what it would keep of a token takes twenty times the token's own q, k and v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.chunk_layout import ChunkLayout, lay_out_chunks

CHUNK = 64
LARGEST_KEY = 128
WIDEST_ELEMENT = 2  # bytes
"""Of what the kernels take, whose sums over a chunk [64, K], and whose operands in three passes for fp32, would not fit into registers."""


def fits_kernels(q_THK: Tensor, v_TGV: Tensor) -> bool:
    """Whether the kernels take these: in 16 bits, with keys of up to `LARGEST_KEY`."""
    return q_THK.element_size() <= WIDEST_ELEMENT and q_THK.shape[-1] <= LARGEST_KEY and v_TGV.shape[1] % q_THK.shape[1] == 0


def gated_delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor, lengths: tuple[int, ...], normalize: bool = False,
    tables_on: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1}), o_t = K^-0.5 q_t^T S_t, from S = 0 at each sample.

    q and k [T, H, K], v [T, G, V], g (log of the decay) and beta [T, G]; G is a multiple of H. `normalize`: q and k to length 1. The
    result [T, G, V] has q's dtype; all is computed in fp32, or fp64 for such inputs. `tables_on`: as for `lay_out_samples`.
    """
    layout = lay_out_chunks(lengths, CHUNK, tables_on or q_THK.device)
    return _GatedDeltaRule.apply(q_THK, k_THK, v_TGV, g_TG, beta_TG, layout, normalize)  # type: ignore[no-any-return]


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: ChunkLayout, normalize: bool) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.layout, ctx.normalize = layout, normalize
        return _compute(q, k, v, g, beta, layout, normalize)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            q, k, v, g, beta = inputs
            out = _compute(q, k, v, g, beta, ctx.layout, ctx.normalize)
        return *torch.autograd.grad(out, inputs, dout), None, None


def _compute(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: ChunkLayout, normalize: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    q_CHSK, k_CHSK, v_CGSV = (layout.fill(x).to(wide).transpose(1, 2) for x in (q, k, v))
    g_CGS, beta_CGS1 = layout.fill(g.to(wide)).transpose(1, 2), layout.fill(beta.to(wide)).transpose(1, 2)[..., None]
    if normalize:
        q_CHSK, k_CHSK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q_CHSK, k_CHSK))
    groups = v.shape[1] // q.shape[1]
    if groups > 1:
        q_CHSK, k_CHSK = q_CHSK.repeat_interleave(groups, 1), k_CHSK.repeat_interleave(groups, 1)
    q_CHSK = q_CHSK * q_CHSK.shape[-1] ** -0.5
    return layout.take(_chunks(q_CHSK, k_CHSK, v_CGSV, g_CGS, beta_CGS1, layout.steps).transpose(1, 2)).to(q.dtype)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, steps: tuple[int, ...]) -> Tensor:
    """All chunks [C, G, S, ...], in the order of `ChunkLayout`: first what each computes by itself, then the scan."""
    decay = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    pairs_SS = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, float("-inf")).exp()
    k_beta = k * beta
    system_SS = (k_beta @ k.transpose(-1, -2)) * pairs_SS
    scores_SS = (q @ k.transpose(-1, -2)) * pairs_SS
    right = torch.cat([v * beta, k_beta * decay.exp()[..., None]], -1)
    u, w = torch.linalg.solve_triangular(system_SS, right, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
    q = q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    whole = decay[..., -1].exp()[..., None, None]
    outputs: list[Tensor] = []
    state_KV = q.new_zeros(steps[0], q.shape[1], k.shape[-1], v.shape[-1])
    parts = (tensor.split(steps) for tensor in (q, k, u, w, scores_SS, whole))
    for count, q_s, k_s, u_s, w_s, scores_s, whole_s in zip(steps, *parts, strict=True):
        state_KV = state_KV[:count]
        new = u_s - w_s @ state_KV
        outputs.append(q_s @ state_KV + scores_s @ new)
        state_KV = state_KV * whole_s + k_s.transpose(-1, -2) @ new
    return torch.cat(outputs)


def shifted_convolution(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool) -> Tensor:
    """y[t] = f(bias + sum_j weight[:, j] x[t - W + 1 + j]) over the taps that lie in the token's own sample; f is SiLU or nothing.

    x [T, C], `positions_T` the place of each token in its sample. The specification of `triton_conv.py`.
    """
    width = weight_CW.shape[1]
    y_TC = torch.zeros_like(x_TC, dtype=torch.promote_types(x_TC.dtype, torch.float32))
    for tap in range(width):
        back = width - 1 - tap
        moved_TC = F.pad(x_TC, (0, 0, back, 0))[: len(x_TC)]
        y_TC = y_TC + torch.where((positions_T >= back)[:, None], moved_TC.to(y_TC.dtype), 0) * weight_CW[:, tap].to(y_TC.dtype)
    y_TC = y_TC if bias_C is None else y_TC + bias_C.to(y_TC.dtype)
    return (F.silu(y_TC) if silu else y_TC).to(x_TC.dtype)
