"""Why the proof that a load makes of packed samples fails, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlora.errors import ModelError, first_line
from tlora.supermodel.inject import find_linears
from tlora.supermodel.row_products import width_that_mixes
from tlora.supermodel.text_model import has_other_modalities, text_class
from tlora.wording.dtypes import dtype_name


class UnpackedError(ModelError):
    """Samples of a base cannot share a pass, and might go one by one (`one_by_one.py`)."""


def why_not_finite(base: Any) -> str:
    """Of the logits of some random tokens, that are not."""
    dtype = base.head.weight_VH.dtype
    name = dtype_name(dtype)
    broken = [key for key, weight in base.model.named_parameters() if not weight.is_meta and not bool(weight.isfinite().all())]
    if broken:
        held = f"{len(broken)} of its tensors hold NaN or Inf in {name} ({broken[0]})"
        wider = (
            "Set dtype: float32, if the files hold finite numbers beyond that, or" if dtype == torch.float16 else "Copy the model again, or"
        )
        return f"{held}, so no loss of it is finite. {wider} take another base"
    if dtype == torch.float16:
        return (
            "it overflows in float16, which ends at 65,504: the logits of plain tokens are not finite. "
            "Set dtype: bfloat16, or float32 where the device has no bfloat16"
        )
    return f"its logits of plain tokens are not finite in {name}. Set dtype: float32, or take another base"


def why_of_other_tokens(base: Any, given: int, tokens: int) -> str:
    """Of a model that gives logits of so many tokens for those that it gets, as an encoder-decoder may."""
    kind = type(base.model).__name__
    return f"{kind} gives logits of {given} tokens for {tokens}, so it is no decoder of these. Use a causal language model"


def why_not_packed(base: Any, packed: Tensor, alone: Tensor, leaks: bool, tolerance: float) -> ModelError:
    """Of packed samples whose logits `packed` are not those that each has `alone`, or where `leaks` says that NaN gets into another: an
    UnpackedError where it is the packing.
    """
    start = f"base_model {base.name}: "
    weight, kind = base.head.weight_VH, type(base.model).__name__
    widths = (linear.in_features for linear in find_linears(base.model).values())
    if leaks and (width := width_that_mixes(widths, weight.dtype, weight.device)):
        said = f"products of {width} numbers in {str(weight.dtype).removeprefix('torch.')} let a NaN of one row into another"
        return ModelError(f"{start}this processor's {said}, so jobs cannot share it. Set dtype: float32")
    scale = base.head.scale
    if not leaks and has_other_modalities(base.model.config) and scale != 1.0 and relative_difference(packed / scale, alone) <= tolerance:
        return ModelError(
            f"{start}{kind} of transformers leaves out the logit_scale {scale:g} of its text model, so its logits are not the "
            "checkpoint's. "
            f"Save the text model by itself, as {text_class(base.model.config)}, and take that"
        )
    return UnpackedError(
        f"{start}{kind} gives packed samples other logits than single ones (relative difference {relative_difference(packed, alone):.1e}), "
        "so they cannot share a pass"
    )


def why_neither(base: Any, packed: UnpackedError, alone: Exception) -> ModelError:
    """Of a base whose samples can neither share a pass nor go one by one: where both fail alike, as in models that read images or a second
    text too, it is said once.
    """
    why, config = first_line(alone).rstrip("."), base.model.config
    remedy = "" if isinstance(alone, ModelError) else ". Use a causal language model"
    if why not in str(packed):
        return ModelError(f"{packed}. Nor do samples one by one: {why}{remedy}")
    dtype = base.head.weight_VH.dtype
    if dtype.itemsize == 2 and "dtype" in why:  # of code that mixes them
        name = dtype_name(dtype)
        return ModelError(f"base_model {base.name}: {type(base.model).__name__} does not run in {name}: {why}. Set dtype: float32")
    what = "is an encoder-decoder, and " if getattr(config, "is_encoder_decoder", False) else ""
    return ModelError(f"base_model {base.name}: {type(base.model).__name__} {what}does not run over a text alone: {why}{remedy}")


def relative_difference(packed: Tensor, alone: Tensor) -> float:
    """In fp64: logits that are masked (Chameleon's, of images) have squares beyond fp32."""
    packed, alone = packed.double(), alone.double()
    return float((packed - alone).norm() / alone.norm())
