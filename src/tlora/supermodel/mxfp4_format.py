"""Checkpoints whose experts are in MXFP4, as gpt-oss has them: how their `*_blocks` and `*_scales` are read. All else is plain there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlora.errors import ModelError
from tlora.kernels.packed_weight import E2M1, PackedWeight, without_numbers
from tlora.supermodel.packed_format import Format, PackedTensor, find_packed, packs_others
from tlora.supermodel.tensor_files import StoredTensor

GROUP = 32  # numbers of a scale, in 16 bytes
_NO_NUMBER = 255  # an exponent


def open_format(settings: Mapping[str, Any], base_model: str) -> Format:
    """By the `quantization_config` of the base's config.json. Raises ModelError for names of modules that are none."""
    kept = settings.get("modules_to_not_convert") or []
    if not isinstance(kept, list | tuple) or not all(isinstance(name, str) for name in kept):
        raise ModelError(
            f"base_model {base_model}: modules_to_not_convert of its quantization_config is {kept!r}, and must be a list of names. "
            "Compare its config.json with the original's"
        )
    names = tuple(kept)
    return Format(
        "MXFP4", "mxfp4", GROUP, lambda _: False, partial(_find, base_model), packs_experts=lambda name: packs_others(names, name)
    )


def packed_form(experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> PackedWeight:
    """On the meta device: what a parameter [E, K, N] of experts is held as, for products in `dtype`."""
    return without_numbers((experts * out_features, in_features), GROUP, E2M1, torch.bfloat16, dtype, False, torch.uint8)


def _find(base_model: str, stored: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    keys = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    return find_packed(base_model, "MXFP4", keys, lambda key: find_experts(key, stored))


def find_experts(key: str, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    """A parameter [E, K, N] of experts, packed along K. Raises KeyError for what is missing, ValueError for what does not fit together."""
    blocks, scales = stored[f"{key}_blocks"], stored[f"{key}_scales"]
    if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[3] != GROUP // 2 or min(blocks.shape) < 1:
        raise ValueError(f"{blocks.name} is {list(blocks.shape)} in {blocks.dtype}, and no blocks of {GROUP // 2} bytes of experts")
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
        raise ValueError(f"scales {list(scales.shape)} in {scales.dtype} for blocks {list(blocks.shape)}")
    experts, rows, groups, _ = blocks.shape

    def read() -> dict[str, Tensor]:
        codes, exponents = blocks.whole(), scales.whole()
        if bool(exponents.eq(_NO_NUMBER).any()):
            raise ModelError(f"{scales.name} has a scale of {_NO_NUMBER}, which is no number in MXFP4. Copy the checkpoint again")
        swapped = torch.empty_like(codes)
        for of_expert, found in zip(codes, swapped, strict=True):  # all at once would take four times the tensor
            torch.bitwise_or(of_expert << 4, of_expert >> 4, out=found)
        return {"weight": swapped.flatten(), "scale": exponents.flatten()}

    names, shape = frozenset({blocks.name, scales.name}), (experts, groups * GROUP, rows)
    return PackedTensor(shape, torch.bfloat16, names, GROUP, E2M1, False, read, scale_dtype=torch.uint8)
