"""What a run will launch, as a value: what `compile_ahead.py` compiles in a process of its own before the first step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tlora.kernels.device import capability_of
from tlora.kernels.head import Head
from tlora.wording.dtypes import dtype_name


@dataclass(frozen=True)
class GroupRequest:
    """Linears that read the same x, as `fused_linear.LinearGroup` has them."""

    in_features: int
    widths: tuple[int, ...]
    bias: bool
    fp8: bool


@dataclass(frozen=True)
class AttentionRequest:
    """Attention of some layers: query heads, kv heads, their size, a window or 0, whether scores are capped, the sinks' dtype."""

    heads: int
    kv_heads: int
    head_size: int
    window: int
    softcap: bool
    sinks: str | None = None


@dataclass(frozen=True)
class HeadRequest:
    """The cross-entropy over so many tokens of a vocabulary, and whether logits are capped."""

    vocabulary: int
    softcap: bool


@dataclass(frozen=True)
class PackedRequest:
    """Weights of 4 bits, as `packed_weight.PackedWeight` has them."""

    group: int
    value_dtype: str
    zero: bool = False


@dataclass(frozen=True)
class ExpertRequest:
    """A parameter of experts: in and out features, how many there are, to how many a token goes, its layout; the router's dtype."""

    in_features: int
    out_features: int
    experts: int
    slots: int
    transposed: bool
    bias: bool
    gathers: bool
    weights_dtype: str


@dataclass(frozen=True)
class RowsRequest:
    """The product of a router: in and out features, whether it has a bias, its dtype."""

    in_features: int
    out_features: int
    bias: bool
    dtype: str


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


@dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled for GPUs like `gpu`: launches of `groups` in `dtype` with S `width` wide, and all others that are named.
    `capability` is 90 for 9.0; `programs` the number of SMs. With `dropout` some job has it.
    """

    gpu: str
    capability: int
    programs: int
    dtype: str
    width: int
    dropout: bool
    groups: tuple[GroupRequest, ...]
    attentions: tuple[AttentionRequest, ...] = ()
    head: HeadRequest | None = None
    packed: tuple[PackedRequest, ...] = ()
    experts: tuple[ExpertRequest, ...] = ()
    routers: tuple[RowsRequest, ...] = ()
    delta_rules: tuple[DeltaRequest, ...] = ()
    convolutions: tuple[ConvolutionRequest, ...] = ()


def request_for(
    device: torch.device,
    head: Head,
    width: int,
    dropout: bool,
    groups: Sequence[GroupRequest],
    attentions: Sequence[AttentionRequest],
) -> CompileRequest:
    """The order for a GPU that is there; the dtype is that of `head`."""
    properties, weight = torch.cuda.get_device_properties(device), head.weight_VH
    name, unlike = dtype_name(weight.dtype), (tuple(dict.fromkeys(groups)), tuple(dict.fromkeys(attentions)))
    loss = HeadRequest(weight.shape[0], bool(head.softcap))
    return CompileRequest(properties.name, capability_of(device), properties.multi_processor_count, name, width, dropout, *unlike, loss)


def read_order(text: str) -> CompileRequest:
    """The inverse of what `compile_ahead.start` writes."""
    row = json.loads(text)
    groups = tuple(GroupRequest(**(group | {"widths": tuple(group["widths"])})) for group in row.pop("groups"))
    head = HeadRequest(**head_row) if (head_row := row.pop("head")) is not None else None
    kinds = {"attentions": AttentionRequest, "packed": PackedRequest, "experts": ExpertRequest, "routers": RowsRequest}
    kinds |= {"delta_rules": DeltaRequest, "convolutions": ConvolutionRequest}
    others: Any = {name: tuple(kind(**each) for each in row.pop(name)) for name, kind in kinds.items()}
    return CompileRequest(**row, groups=groups, head=head, **others)
