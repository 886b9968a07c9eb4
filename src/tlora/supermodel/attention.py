"""Attention over packed samples: each sequence attends to itself alone, by being cut out, never by a mask over several jobs.

Registered with transformers under `NAME`, so that every family's own layer code (rotary, q/k norm, windows, scaling) stays in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from tlora.errors import ModelError
from tlora.kernels.library_attention import SampleLayout, attend_batch, attend_samples, cut_chunks

NAME = "tlora_packed"
NOTICED = "tlora_noticed"  # the same, of a model that is looked at; only in `noticed`
_calls: ContextVar[list[str]] = ContextVar("calls of packed attention")


def register() -> None:
    """Make the name known to transformers, with no mask: lengths come as the keyword `sequence_lengths` of the model's forward."""
    for name, attend in ((NAME, packed_attention), (NOTICED, _noticed_attention)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, _no_mask)


@contextmanager
def noticed(model: Any) -> Iterator[list[str]]:
    """Within it, the kinds of layers of `model` that call packed attention in this thread, each time that one does. Others may look at
    models of theirs meanwhile.
    """
    calls: list[str] = []
    before = _calls.set(calls)
    model.set_attn_implementation(NOTICED)
    try:
        yield calls
    finally:
        model.set_attn_implementation(NAME)
        _calls.reset(before)


def _noticed_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    _calls.get().append(type(module).__name__)
    return packed_attention(module, *args, **kwargs)


def _no_mask(*_: object, **__: object) -> None:
    return None


def chunk_of(module: Any) -> int:
    """Tokens of a chunk, counted from a sample's start, beyond whose first no query of a layer looks back (Llama 4); 0: there are none.

    Kept in the module: torch.compile takes a layer that reads its own number for another one than all others.
    """
    known: int | None = getattr(module, "tlora_chunk", None)
    if known is not None:
        return known
    kinds, number = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    chunked = kinds is not None and isinstance(number, int) and kinds[number] == "chunked_attention"
    found: int = (module.config.attention_chunk_size or 0) if chunked else 0
    module.tlora_chunk = found
    return found


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sequence_lengths: tuple[int, ...] | SampleLayout | None = None,
    pass_number: Tensor | None = None,
    s_aux: Tensor | None = None,
    query_scales: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each sequence by itself. query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].

    `s_aux` [Hq] are a layer's sinks, by transformers' name. `sequence_lengths` add up to T. Equal neighbours in length run as one batch; a
    layout of samples takes the library's kernels for mixed lengths. The pass behind `pass_number` knows its own lengths, and has kernels.
    Where the layer's attention is chunked, samples are cut at chunk borders. Queries are multiplied by `query_scales` [T], if any.
    """
    chunk = chunk_of(module)
    if query_scales is not None:
        query = (query * query_scales[:, None]).to(query.dtype)
    if pass_number is not None:
        size = value.shape[-1]
        if size < query.shape[-1]:  # as latent attention has them
            value = F.pad(value, (0, query.shape[-1] - size))
        q_THD, k_TGD, v_TGD = (t_1HTD[0].transpose(0, 1) for t_1HTD in (query, key, value))
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        out_THD, _ = torch.ops.tlora.packed_attention(
            q_THD, k_TGD, v_TGD, pass_number, scale, sliding_window or 0, softcap or 0.0, chunk, s_aux
        )
        return out_THD[None, ..., :size], None
    if sequence_lengths is None:
        raise ModelError(f"{type(module).__name__} does not hand keyword arguments to its attention, so samples cannot be packed for it")
    if isinstance(sequence_lengths, SampleLayout):
        q_THD, k_TGD, v_TGE = (t_1HTD[0].transpose(0, 1) for t_1HTD in (query, key, value))
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return attend_samples(q_THD, k_TGD, v_TGE, sequence_lengths.cut(chunk), scale, sliding_window, softcap, s_aux)[None], None
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    runs = [(length, sum(1 for _ in equal)) for length, equal in groupby(cut_chunks(sequence_lengths, chunk))]
    sizes = [length * count for length, count in runs]
    parts = (t_1HTD.squeeze(0).split(sizes, 1) for t_1HTD in (query, key, value))  # one cat in backward; slices would sum T-sized zeros
    outputs: list[Tensor] = []
    for (length, count), *qkv in zip(runs, *parts, strict=True):
        q, k, v = (t_HtD.unflatten(1, (count, length)).transpose(0, 1) for t_HtD in qkv)
        out_nHLD = attend_batch(q, k, v, scaling, sliding_window, softcap, s_aux)
        outputs.append(out_nHLD.transpose(1, 2).reshape(count * length, *out_nHLD.shape[1::2]))
    return torch.cat(outputs)[None], None
