"""The launches of recurrent layers that a run will make, on tensors without memory: what `compile_ahead.py` compiles before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tlora.kernels import delta_kernels, triton_conv
from tlora.kernels.chunk_layout import list_chunks
from tlora.kernels.delta_rule import CHUNK
from tlora.kernels.expert_launches import META, TOKENS


@dataclass(frozen=True)
class DeltaRequest:
    """A gated delta rule: heads of q and k, their size, heads of v, theirs, whether q and k get length 1, and the dtype of g."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    normalize: bool
    decay_dtype: str


@dataclass(frozen=True)
class ConvolutionRequest:
    """A short convolution: channels, taps, whether there is a bias, and whether SiLU follows."""

    channels: int
    taps: int
    bias: bool
    silu: bool


def delta_launches(request: DeltaRequest, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Forward and backward."""
    empty = partial(torch.empty, dtype=dtype, device=META)
    keys = (TOKENS, request.key_heads, request.key_size)
    q, k, v = empty(keys), empty(keys), empty(TOKENS, request.value_heads, request.value_size)
    g, beta = torch.empty(v.shape[:2], dtype=getattr(torch, request.decay_dtype), device=META), empty(v.shape[:2])
    inputs = q, k, v, g, beta, list_chunks((TOKENS,), CHUNK, META), request.normalize
    return [partial(delta_kernels.backward, empty(v.shape), *inputs), partial(delta_kernels.forward, *inputs)]


def convolution_launches(request: ConvolutionRequest, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Forward and backward."""
    empty = partial(torch.empty, dtype=dtype, device=META)
    x, bias = empty(TOKENS, request.channels), empty(request.channels) if request.bias else None
    rest = x, empty(request.channels, request.taps), bias, torch.empty(TOKENS, dtype=torch.int32, device=META), request.silu
    return [partial(triton_conv.convolve, *rest), partial(triton_conv.convolve_back, empty(x.shape), *rest)]
