"""Which attention a packed micro-batch takes on a GPU: the fastest that computes what the layer asks for, by measurement on one H200.

cuDNN for samples of one length, and our own kernel for mixed lengths, soft caps, windows, sinks, fp32, and wherever bits must repeat:
cuDNN sums dQ with atomics. Forward and backward of 8,192 tokens of chat lengths, 32 heads of 128, take ours 0.71 ms and
FlashAttention-2 1.09; of 4 x 2048 cuDNN 1.14, ours 1.43 and FlashAttention-2 1.99 (`bench/attention.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tlora.kernels import varlen_attention
from tlora.kernels.library_attention import cut_chunks

_SAMPLES = 16

Kind = Literal["cudnn", "own"]


@dataclass(frozen=True)
class AttentionPlan:
    """The samples of one micro-batch, as each of the kernels wants to know them.

    Micro-batches with the same `shape` launch the same kernels with the same arguments, but for what the tensors hold.
    """

    kind: Kind  # for plain causal attention in 16 bits; everything else is our own kernel's
    count: int
    length: int  # tokens of each, where they are alike
    own: varlen_attention.TileLists
    chunked: Mapping[int, AttentionPlan] = field(default_factory=dict)  # of the samples' pieces, for chunks that cut one of them

    @property
    def shape(self) -> tuple[Kind | int, ...]:
        return self.kind, self.count, self.length, *self.chunked

    @property
    def buffers(self) -> list[Tensor]:
        """All that kernels read of it on the device."""
        return [self.own.buffer, *(plan.own.buffer for plan in self.chunked.values())]

    def cut(self, chunk: int) -> AttentionPlan:
        """For a layer whose attention is chunked; 0: it is not."""
        return self.chunked.get(chunk, self)


def _alike(lengths: Sequence[int]) -> bool:
    return len(set(lengths)) == 1 and lengths[0] % 64 == 0


def padded(lengths: Sequence[int]) -> tuple[int, ...]:
    """`lengths`, with empty samples up to a multiple of `_SAMPLES` where they differ: fewer shapes."""
    return (*lengths, *[0] * (0 if _alike(lengths) else -len(lengths) % _SAMPLES))


def plan_attention(lengths: Sequence[int], device: torch.device, deterministic: bool, chunks: Sequence[int] = ()) -> AttentionPlan:
    """For samples of `lengths` one after another, and for layers with attention in `chunks` of so many tokens."""
    kind, count, length = _whole_shape(lengths, device, deterministic)
    chunked = {chunk: _plan_pieces(lengths, chunk, device) for chunk in _cutting(lengths, chunks)}
    return AttentionPlan(kind, count, length, varlen_attention.list_tiles(lengths, device), chunked)


def attention_shape(
    lengths: Sequence[int], device: torch.device, deterministic: bool, chunks: Sequence[int] = ()
) -> tuple[Kind | int, ...]:
    """The shape of the plan for samples of `lengths`."""
    return *_whole_shape(lengths, device, deterministic), *_cutting(lengths, chunks)


def _whole_shape(lengths: Sequence[int], device: torch.device, deterministic: bool) -> tuple[Kind, int, int]:
    if deterministic or device.type != "cuda" or not _alike(lengths):
        return "own", len(lengths), 0
    return "cudnn", len(lengths), lengths[0]


def _cutting(lengths: Sequence[int], chunks: Sequence[int]) -> list[int]:
    return sorted(chunk for chunk in chunks if chunk < max(lengths))


def _plan_pieces(lengths: Sequence[int], chunk: int, device: torch.device) -> AttentionPlan:
    """Filled up by empty pieces to the most that so many samples of so many tokens can have: the tables' sizes depend on these alone."""
    pieces = cut_chunks(lengths, chunk)
    most = len(lengths) + sum(lengths) // chunk
    filled = (*pieces, *[0] * (most - len(pieces)))
    return AttentionPlan("own", most, 0, varlen_attention.list_tiles(filled, device))


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: AttentionPlan, scale: float, window: int, softcap: float,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [T, H, D], and what backward needs of the softmax, [H, T] in fp32."""
    if _kind(q_THD, plan, window, softcap, sinks_H is not None) == "own":
        return varlen_attention.varlen_attention_forward(q_THD, k_TGD, v_TGD, plan.own, scale, window or None, softcap or None, sinks_H)
    q, k, v = (_batched(t, plan) for t in (q_THD, k_TGD, v_TGD))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return _flat(out), lse.reshape(q_THD.shape[1], q_THD.shape[0])  # its own order of elements, which only its backward reads


def attend_backward(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, plan: AttentionPlan,
    scale: float, window: int, softcap: float, sinks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [T, H, D], k and v [T, G, D]. `sinks`: forward had some."""
    if _kind(q_THD, plan, window, softcap, sinks) == "own":
        return varlen_attention.varlen_attention_backward(
            dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_HT, plan.own, scale, window or None, softcap or None
        )
    dout, q, k, v, out = (_batched(t, plan) for t in (dout_THD, q_THD, k_TGD, v_TGD, out_THD))
    lse = lse_HT.view(plan.count, q.shape[1], plan.length, 1)
    seed = torch.zeros((), dtype=torch.int64, device=q_THD.device)  # of a dropout that there is not
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, plan.length, plan.length, 0.0, True, scale=scale
    )
    return _flat(dq), _flat(dk), _flat(dv)


def _kind(q_THD: Tensor, plan: AttentionPlan, window: int, softcap: float, sinks: bool) -> Kind:
    plain = not softcap and not sinks and not 0 < window < plan.length
    fits = q_THD.element_size() == 2 and q_THD.shape[2] <= 128 and q_THD.shape[2] % 8 == 0
    return plan.kind if plain and fits else "own"


def _batched(t_THD: Tensor, plan: AttentionPlan) -> Tensor:
    return t_THD.unflatten(0, (plan.count, plan.length)).transpose(1, 2)


def _flat(t_nHLD: Tensor) -> Tensor:
    return t_nHLD.transpose(1, 2).flatten(0, 1).contiguous()
