"""What the first jobs of a run will launch, seen of a base on the meta device and handed to `kernels/compile_ahead.py`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tlora.cache_directory import share_compiled_kernels
from tlora.job import LoraConfig
from tlora.kernels.compile_request import (
    AttentionRequest,
    ConvolutionRequest,
    DeltaRequest,
    GroupRequest,
    PackedRequest,
    RowsRequest,
    request_for,
)
from tlora.kernels.lora_tables import rank_width
from tlora.kernels.packed_weight import PackedWeight
from tlora.supermodel.experts import Experts
from tlora.supermodel.fast_path import linears_in_passes
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import Base
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.routers import routers_of
from tlora.supermodel.structure import PassCalls, find_calls, find_groups
from tlora.wording.dtypes import dtype_name


def compile_ahead(
    base: Base,
    linears: Mapping[str, LoraLinear],
    experts: Experts,
    device: torch.device,
    loras: Sequence[LoraConfig],
    deterministic: bool,
) -> subprocess.Popen[bytes] | None:
    """Start compiling the kernels that `loras` over a base on the meta device will need on `device`, which takes the fused path."""
    from tlora.kernels.compile_ahead import start  # brings triton
    from tlora.kernels.varlen_attention import LARGEST_HEAD

    share_compiled_kernels()
    linears = linears_in_passes(base, linears, deterministic)
    members = [[linears[name] for name in names] for names in find_groups(base, linears)]
    groups = [
        GroupRequest(m[0].in_features, tuple(x.out_features for x in m), m[0].bias is not None, m[0].form.row_scale_N is not None)
        for m in members
    ]
    width = rank_width(max((lora.largest_rank for lora in loras), default=1))
    dropout = any(lora.lora_dropout > 0 for lora in loras)
    try:
        calls = find_calls(base)
    except Exception:  # of a family whose attention takes no such pass: the run itself will say so, or needs none
        calls = PassCalls()
    attentions = [
        AttentionRequest(q.shape[1], k.shape[1], q.shape[2], window, softcap > 0, None if sinks is None else dtype_name(sinks.dtype))
        for q, k, _, _, _, window, softcap, _, sinks in calls.attentions
        if q.shape[2] <= LARGEST_HEAD
    ]
    forms = [linear.form for linear in linears.values()]
    packed = dict.fromkeys(
        PackedRequest(form.group, dtype_name(form.value_dtype), form.zero is not None) for form in forms if isinstance(form, PackedWeight)
    )
    order = request_for(device, base.head, width, dropout, groups, attentions)
    repeats = deterministic and bool(expert_modules(base.model))
    adapted = experts.requests(device) if repeats or any(lora.target_parameters for lora in loras) else ()
    products = [RowsRequest(*key[:3], dtype_name(key[3])) for key in routers_of(base, experts).products] if repeats else []
    rules = dict.fromkeys(
        DeltaRequest(q.shape[1], q.shape[2], v.shape[1], v.shape[2], normalize, dtype_name(g.dtype))
        for q, _, v, g, _, normalize, _ in calls.delta_rules
    )
    convolutions = dict.fromkeys(
        ConvolutionRequest(weight_CW.shape[0], weight_CW.shape[1], bias is not None, silu)
        for _, weight_CW, bias, silu, _ in calls.convolutions
    )
    order = replace(order, packed=tuple(packed), experts=adapted, routers=tuple(products))
    return start(replace(order, delta_rules=tuple(rules), convolutions=tuple(convolutions)))
