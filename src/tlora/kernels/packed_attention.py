"""Which attention a packed micro-batch takes on a GPU: the fastest that computes what the layer asks for, by measurement on one H200.

cuDNN for samples of one length (1.19 ms forward and backward at 4 x 2048, 32 heads of 128, where FlashAttention-2 takes 1.92),
FlashAttention-2 for mixed lengths, and our own kernel for soft caps, sliding windows, fp32, and wherever bits must repeat: the others
sum dQ with atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tlora.kernels import varlen_attention
from tlora.kernels.device import to_device
from tlora.kernels.lora_tables import LONGEST_PADDING

_SAMPLES = 16

Kind = Literal["cudnn", "flash", "own"]


@dataclass(frozen=True)
class AttentionPlan:
    """The samples of one micro-batch, as each of the kernels wants to know them.

    Micro-batches with the same `shape` launch the same kernels with the same arguments, but for what the tensors hold.
    """

    kind: Kind  # for plain causal attention in 16 bits; everything else is our own kernel's
    count: int
    longest: int  # tokens; where they differ, rounded up to a power of two that is no less than a piece of padding
    starts_S: Tensor  # int32 [S + 1]
    own: varlen_attention.TileLists

    @property
    def shape(self) -> tuple[Kind, int, int]:
        return self.kind, self.count, self.longest


def _alike(lengths: Sequence[int]) -> bool:
    return len(set(lengths)) == 1 and lengths[0] % 64 == 0


def padded(lengths: Sequence[int]) -> tuple[int, ...]:
    """`lengths`, with empty samples up to a multiple of `_SAMPLES` where they differ: fewer shapes."""
    return (*lengths, *[0] * (0 if _alike(lengths) else -len(lengths) % _SAMPLES))


def plan_attention(lengths: Sequence[int], device: torch.device, deterministic: bool) -> AttentionPlan:
    """For samples of `lengths` one after another."""
    kind, count, longest = attention_shape(lengths, device, deterministic)
    starts = to_device(np.cumsum([0, *lengths], dtype=np.int32), device)
    return AttentionPlan(kind, count, longest, starts, varlen_attention.list_tiles(lengths, device))


def attention_shape(lengths: Sequence[int], device: torch.device, deterministic: bool) -> tuple[Kind, int, int]:
    """The shape of the plan for samples of `lengths`. They count as no shorter than a piece of padding, also beside a window."""
    kind: Kind = "own" if deterministic or device.type != "cuda" else "cudnn" if _alike(lengths) else "flash"
    longest = max(lengths) if kind == "cudnn" else 1 << (max(*lengths, LONGEST_PADDING) - 1).bit_length()
    return kind, len(lengths), longest


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: AttentionPlan, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """out [T, H, D], and what backward needs of the softmax, [H, T] in fp32."""
    kind = _kind(q_THD, plan, window, softcap)
    if kind == "own":
        return varlen_attention.varlen_attention_forward(q_THD, k_TGD, v_TGD, plan.own, scale, window or None, softcap or None)
    if kind == "flash":
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TGD, v_TGD, plan.starts_S, plan.starts_S, plan.longest, plan.longest, 0.0, True, False, scale=scale
        )
        return out_THD.contiguous(), lse_HT  # it comes as q lies, which in latent attention is head by head
    q, k, v = (_batched(t, plan) for t in (q_THD, k_TGD, v_TGD))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return _flat(out), lse.reshape(q_THD.shape[1], q_THD.shape[0])  # its own order of elements, which only its backward reads


def attend_backward(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, plan: AttentionPlan,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [T, H, D], k and v [T, G, D]."""
    kind = _kind(q_THD, plan, window, softcap)
    if kind == "own":
        return varlen_attention.varlen_attention_backward(
            dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_HT, plan.own, scale, window or None, softcap or None
        )
    seed = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)  # of a dropout that there is not
    if kind == "flash":
        grads = torch.ops.aten._flash_attention_backward(
            dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_HT, plan.starts_S, plan.starts_S, plan.longest, plan.longest, 0.0, True,
            seed, seed[:0], scale=scale,
        )  # fmt: skip
        dq, dk, dv = (grad.contiguous() for grad in grads)
        return dq, dk, dv
    dout, q, k, v, out = (_batched(t, plan) for t in (dout_THD, q_THD, k_TGD, v_TGD, out_THD))
    lse = lse_HT.view(plan.count, q.shape[1], plan.longest, 1)
    seed = torch.zeros((), dtype=torch.int64, device=q_THD.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, plan.longest, plan.longest, 0.0, True, scale=scale
    )
    return _flat(dq), _flat(dk), _flat(dv)


def _kind(q_THD: Tensor, plan: AttentionPlan, window: int, softcap: float) -> str:
    plain = not softcap and not 0 < window < plan.longest
    fits = q_THD.element_size() == 2 and q_THD.shape[2] <= 128 and q_THD.shape[2] % 8 == 0
    return plan.kind if plain and fits else "own"


def _batched(t_THD: Tensor, plan: AttentionPlan) -> Tensor:
    return t_THD.unflatten(0, (plan.count, plan.longest)).transpose(1, 2)


def _flat(t_nHLD: Tensor) -> Tensor:
    return t_nHLD.transpose(1, 2).flatten(0, 1).contiguous()
