"""Checkpoints whose linears compressed-tensors has packed in 4 bits: int4 with a scale for each group or row, and NVFP4.

int4 (`pack-quantized`): `X.weight_packed` has 8 numbers plus 8 in an int32, the lowest bits first, `X.weight_scale` [N, K / group], and
`X.weight_shape`. NVFP4 (`nvfp4-pack-quantized`): two e2m1 codes in a byte, the low nibble first, scales of 16 numbers in fp8, and
`X.weight_global_scale`, by which they are divided in fp32. The library multiplies int4 in the scales' dtype; a product of 4 and 8 or 11
bits is exact in fp32, so that one rounding of the fp32 product gives the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlora.errors import ModelError
from tlora.kernels.packed_weight import PackedWeight, rounded_to
from tlora.supermodel.packed_format import Format, PackedTensor, find_packed
from tlora.supermodel.tensor_files import StoredTensor

_INT4, _NVFP4 = "pack-quantized", "nvfp4-pack-quantized"
_TABLES = {
    _INT4: tuple(float(code - 8) for code in range(16)),
    _NVFP4: tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
}
_ENDS = {_INT4: ("_packed", "_scale", "_shape"), _NVFP4: ("_packed", "_scale", "_global_scale")}
_SCALES = {_INT4: (torch.bfloat16, torch.float16, torch.float32), _NVFP4: (torch.float8_e4m3fn,)}
_NVFP4_GROUP = 16


def open_format(settings: Mapping[str, Any], base_model: str) -> Format:
    """By the `quantization_config` of the base's config.json. Raises ModelError for all but weights of 4 bits without zero points."""
    try:
        (scheme,) = settings["config_groups"].values()
        found = scheme.get("format") or settings["format"]
        refusal = _refusal(settings, scheme, found)
        group = scheme["weights"].get("group_size") if scheme["weights"]["strategy"] != "channel" else None
        ignored = [re.compile(each[3:] if each.startswith("re:") else f"{re.escape(each)}$") for each in settings.get("ignore") or []]
    except (KeyError, ValueError, TypeError, AttributeError, re.error) as error:
        found, group, ignored = "", None, []
        refusal = f"a quantization_config that is not one group of linears ({type(error).__name__}: {error})"
    if refusal is not None:
        raise ModelError(
            f"base_model {base_model}: compressed-tensors has packed it with {refusal}. Read are {_INT4} (int4, symmetric) and {_NVFP4}, "
            "of the weights of all Linear alone. Use the original model (base_precision: nf4 packs it in 4 bits at load)"
        )
    kind = "int4" if found == _INT4 else "nvfp4"
    return Format(f"compressed-tensors {kind}", kind, group, partial(_packs, ignored), partial(_find, base_model, found, group))


def _packs(ignored: Sequence[re.Pattern[str]], linear: str) -> bool:
    return not any(each.match(linear) for each in ignored)


def _refusal(settings: Mapping[str, Any], scheme: Mapping[str, Any], found: str) -> str | None:
    """What of the settings is not read."""
    if found not in _TABLES:
        return f"format {found}"
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config", "moe_sparsity_config"):
        value = settings.get(key)
        if value and value.get("format") != "dense" and value.get("config_groups", True):
            return key
    for key in ("input_activations", "output_activations"):
        if scheme.get(key):
            return f"{key} quantised too (W4A16 leaves them as they are)"
    if scheme["targets"] != ["Linear"]:
        return f"targets {scheme['targets']}"
    weights = scheme["weights"]
    if weights.get("actorder") not in (None, False, "weight", "static"):
        return f"actorder {weights['actorder']}"  # "weight" orders calibration alone
    strategies = ("group", "channel") if found == _INT4 else ("tensor_group",)
    wanted = {"num_bits": (4,), "type": ("int" if found == _INT4 else "float",), "symmetric": (True,), "strategy": strategies}
    if found == _NVFP4:
        wanted["group_size"] = (_NVFP4_GROUP,)
    elif weights["strategy"] == "group" and (type(weights["group_size"]) is not int or weights["group_size"] < 2):
        return f"group_size {weights['group_size']}"
    return next((f"{key} {weights.get(key)}" for key, allowed in wanted.items() if weights.get(key) not in allowed), None)


def _find(base_model: str, layout: str, group: int | None, stored: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    def find(key: str) -> PackedTensor:
        parts = _Parts.of(key, layout, group, stored)
        names = frozenset(tensor.name for tensor in parts.tensors.values())
        return PackedTensor(parts.shape, parts.value_dtype, names, parts.read)

    keys = [name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")]
    return find_packed(base_model, "compressed-tensors", keys, find)


@dataclass(frozen=True)
class _Parts:
    """The tensors of one weight [N, K], by the end of their names."""

    layout: str
    group: int
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def of(cls, key: str, layout: str, group: int | None, stored: Mapping[str, StoredTensor]) -> _Parts:
        """Raises KeyError for what is missing, ValueError for what does not fit together."""
        for end in ("_zero_point", "_g_idx"):
            if key + end in stored:
                raise ValueError(f"it has {key}{end}, and weights are read without")
        tensors = {end: stored[key + end] for end in _ENDS[layout]}
        codes, scales = tensors["_packed"], tensors["_scale"]
        if len(codes.shape) != 2:
            raise ValueError(f"{codes.name} is {list(codes.shape)}, and no matrix")
        shape = tuple(tensors["_shape"].whole().tolist()) if layout == _INT4 else (codes.shape[0], 2 * codes.shape[1])
        if len(shape) != 2 or min(shape) < 1 or shape[1] % 2:
            raise ValueError(f"the shape {list(shape)} is no matrix with an even number of columns")
        group = group or shape[1]
        dtype, width = (torch.int32, -(-shape[1] // 8)) if layout == _INT4 else (torch.uint8, shape[1] // 2)
        if codes.dtype != dtype or codes.shape != (shape[0], width):
            raise ValueError(f"{list(codes.shape)} in {codes.dtype} is not half a byte for each of {list(shape)}")
        if shape[1] % group or group % 2 or scales.shape != (shape[0], shape[1] // group) or scales.dtype not in _SCALES[layout]:
            raise ValueError(f"scales {list(scales.shape)} in {scales.dtype} for {list(shape)} in groups of {group}")
        if layout == _NVFP4 and (tensors["_global_scale"].shape != (1,) or tensors["_global_scale"].dtype != torch.float32):
            raise ValueError(f"{tensors['_global_scale'].name} is not one number in fp32")
        return cls(layout, group, shape, tensors)

    @property
    def value_dtype(self) -> torch.dtype:
        """That the library dequantises to."""
        return self.tensors["_scale"].dtype if self.layout == _INT4 else torch.bfloat16

    def read(self, dtype: torch.dtype) -> PackedWeight:
        codes = self.tensors["_packed"].whole().view(torch.uint8)[:, : self.shape[1] // 2]
        nibbles = ((codes << 4) | (codes >> 4)).flatten()
        rounded = rounded_to(self.value_dtype, dtype)
        return PackedWeight(nibbles, self._scales(), _TABLES[self.layout], self.shape, self.group, rounded, dtype)

    def _scales(self) -> Tensor:
        scales = self.tensors["_scale"].whole().float().flatten()
        return scales / self.tensors["_global_scale"].whole() if self.layout == _NVFP4 else scales
