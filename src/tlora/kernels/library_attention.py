"""Attention over packed samples by the library's own kernels: a number of calls that does not depend on the number of samples.

FlashAttention-2 or the memory-efficient kernel, both of which take samples of any lengths in one call, where the GPU and the layer allow
it. Elsewhere samples of about one length are one padded batch of `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.device import likely_capability, to_device

Kind = Literal["flash", "efficient", "padded"]
_FLASH_HEAD = 192  # up to which its backward runs on every card since sm_80
_CAUSAL = 1  # of the memory-efficient kernel's masks: a query sees the keys up to its own place
_STEP = 64  # padded lengths are this times 1, 2, 3, 4, 6, 8, 12, ...


@dataclass(frozen=True)
class SampleLayout:
    """Samples of `lengths` one after another on `device`, which need not be where tensors lie that only have shapes."""

    lengths: tuple[int, ...]
    device: torch.device
    tables_on: torch.device

    @cached_property
    def bounds(self) -> Tensor:
        """int32 [samples + 1]: where each begins, and the last one ends."""
        return to_device(np.array([0, *accumulate(self.lengths)], np.int32), self.tables_on)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def cut(self, chunk: int) -> SampleLayout:
        """That of the samples' chunks, each of which is attended to by itself; 0 cuts nothing."""
        if not 0 < chunk < self.longest:
            return self
        if chunk not in self._cut:
            self._cut[chunk] = SampleLayout(cut_chunks(self.lengths, chunk), self.device, self.tables_on)
        return self._cut[chunk]

    @cached_property
    def _cut(self) -> dict[int, SampleLayout]:
        return {}

    @cached_property
    def batches(self) -> tuple[tuple[int, Tensor], ...]:
        """Padded lengths, each with the tokens of its samples, int64 [samples * length]. The padding is the sample's last token again."""
        starts, sample_batches = [0, *accumulate(self.lengths)], list[tuple[int, Tensor]]()
        for size in sorted({_padded(length) for length in self.lengths}):
            own = [i for i, length in enumerate(self.lengths) if _padded(length) == size]
            inside = np.minimum(np.arange(size)[None, :], np.array([self.lengths[i] - 1 for i in own])[:, None])
            rows = np.array([starts[i] for i in own])[:, None] + inside
            sample_batches.append((size, to_device(rows.reshape(-1), self.tables_on)))
        return tuple(sample_batches)

    @cached_property
    def places(self) -> Tensor:
        """int64 [T]: where each token lies in all `batches` one after another."""
        first, places = 0, [0] * len(self.lengths)
        for size in sorted({_padded(length) for length in self.lengths}):
            for i, length in enumerate(self.lengths):
                if _padded(length) == size:
                    places[i], first = first, first + size
        rows = [np.arange(place, place + length) for place, length in zip(places, self.lengths, strict=True)]
        return to_device(np.concatenate(rows), self.tables_on)


def cut_chunks(lengths: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Lengths of the pieces of samples that are cut after every `chunk` tokens from their start; 0 cuts nothing."""
    if not chunk:
        return tuple(lengths)
    return tuple(min(chunk, length - start) for length in lengths for start in range(0, length, chunk))


def lay_out_samples(lengths: Sequence[int], device: torch.device, tables_on: torch.device | None = None) -> SampleLayout:
    """For samples of `lengths`, none of them empty, on `device`. `tables_on` the meta device counts what `device` would keep."""
    return SampleLayout(tuple(lengths), device, tables_on or device)


def _padded(length: int) -> int:
    """The least step that holds `length`: at most half of it is padding, from two steps on a third."""
    size = _STEP
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > _STEP else -(-size * 4 // 3 // _STEP) * _STEP
    return size


def kind_for(q: Tensor, v: Tensor, device: torch.device, softcap: float | None, sinks: bool = False) -> Kind:
    """What runs attention of these heads, [..., D], on `device`."""
    size, alike = q.shape[-1], q.shape[-1] == v.shape[-1]
    if softcap or sinks or device.type != "cuda" or torch.version.hip or q.dtype == torch.float64 or size % 8 or v.shape[-1] % 8:
        return "padded"
    half, since = q.dtype != torch.float32, likely_capability(device)
    if half and since >= 80 and size <= _FLASH_HEAD and alike and torch.backends.cuda.is_flash_attention_available():
        return "flash"
    return "padded" if since < (80 if q.dtype == torch.bfloat16 else 50) else "efficient"


def attend_samples(
    q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, layout: SampleLayout, scale: float, window: int | None, softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of each sample by itself: out [T, H, E]. `window`: keys that a query sees, itself included."""
    window = window if window is not None and window < layout.longest else None
    kind = kind_for(q_THD, v_TGE, layout.device, softcap, sinks_H is not None)
    if kind == "flash":
        return _Flash.apply(q_THD, k_TGD, v_TGE, layout, scale, window)  # type: ignore[no-any-return]
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    if repeat > 1:
        k_TGD, v_TGE = k_TGD.repeat_interleave(repeat, 1), v_TGE.repeat_interleave(repeat, 1)
    if kind == "efficient":
        return _Efficient.apply(q_THD, k_TGD, v_TGE, layout, scale, window)  # type: ignore[no-any-return]
    parts: list[Tensor] = []
    for size, rows in layout.batches:
        q, k, v = (t_THD.index_select(0, rows).unflatten(0, (-1, size)).transpose(1, 2) for t_THD in (q_THD, k_TGD, v_TGE))
        parts.append(attend_batch(q, k, v, scale, window, softcap, sinks_H).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, layout.places)


def attend_batch(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, softcap: float | None, sinks_H: Tensor | None = None
) -> Tensor:
    """Causal attention of samples of one length: q [n, H, L, D], k and v with as many heads.

    `sinks_H` are scores of one key more for each head, neither scaled nor capped, whose v is 0 (gpt-oss).
    """
    length = q.shape[2]
    windowed = window is not None and length > window
    if not softcap and not windowed and sinks_H is None:
        return _library(q, k, v, None, scale)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)[None, :]
    visible_LL = (distance >= 0) & (distance < window) if windowed and window is not None else distance >= 0
    if not softcap and sinks_H is None:
        return _library(q, k, v, visible_LL, scale)
    scores = (q @ k.transpose(2, 3)) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible_LL, float("-inf"))
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.to(q.dtype)[None, :, None, None].expand(len(q), -1, length, 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype)[..., :length] @ v


def _library(q: Tensor, k: Tensor, v: Tensor, visible_LL: Tensor | None, scale: float | None) -> Tensor:
    """PyTorch's attention, causal where it has no mask. For tensors without numbers it would keep the scores, which on devices it does not
    where heads of q and v are alike. Raises RuntimeError where they are not as many.
    """
    if q.is_meta and q.shape[-1] == v.shape[-1] and q.shape[:2] == k.shape[:2] == v.shape[:2]:
        mask_LL = visible_LL.to(q.dtype) if visible_LL is not None else None
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask_LL is None, attn_mask=mask_LL, scale=scale)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible_LL, is_causal=visible_LL is None, scale=scale)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: SampleLayout, scale: float, window: int | None) -> Tensor:
        ctx.how = {"scale": scale, "window_size_left": None if window is None else window - 1}  # none to the right: it is causal
        bounds, longest = layout.bounds, layout.longest
        out, lse, *seeds, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False, **ctx.how
        )
        ctx.save_for_backward(q, k, v, out, lse, *seeds)
        ctx.layout = layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        bounds, longest = ctx.layout.bounds, ctx.layout.longest
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True, *seeds, **ctx.how
        )
        return dq, dk, dv, None, None, None


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: SampleLayout, scale: float, window: int | None) -> Tensor:
        ctx.how = {"scale": scale, "window_size": window}
        bounds, longest = layout.bounds, layout.longest
        q, k, v = q[None], k[None], v[None]
        out, lse, *seeds, _, _ = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, bounds, bounds, longest, longest, 0.0, _CAUSAL, True, **ctx.how
        )
        ctx.save_for_backward(q, k, v, out, lse, *seeds)
        ctx.layout = layout
        return out[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        bounds, longest = ctx.layout.bounds, ctx.layout.longest
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            dout.contiguous()[None], q, k, v, None, out, bounds, bounds, longest, longest, lse, 0.0, *seeds, _CAUSAL, False, **ctx.how
        )
        return dq[0], dk[0], dv[0], None, None, None
