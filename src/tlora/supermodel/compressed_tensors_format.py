"""Checkpoints that compressed-tensors has packed: which are read, by their config.json, and how int4, NVFP4 and MXFP4 weights are read.

What else the library can do is refused by name.
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
from tlora.kernels.packed_weight import E2M1, powers_of_two, unpack_low_first
from tlora.supermodel.packed_format import Format, PackedTensor, find_packed
from tlora.supermodel.tensor_files import StoredTensor

INT4, NVFP4, MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_ENDS = {INT4: ("_packed", "_scale", "_shape"), NVFP4: ("_packed", "_scale", "_global_scale"), MXFP4: ("_packed", "_scale")}
_SCALES = {INT4: (torch.bfloat16, torch.float16, torch.float32), NVFP4: (torch.float8_e4m3fn,), MXFP4: (torch.uint8,)}


@dataclass(frozen=True)
class Scheme:
    """A library's format, numbers of a scale (None for a row), and whether there are zero points."""

    layout: str
    group: int | None
    has_zero: bool


def find_weight(key: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    """Raises KeyError for what is missing, ValueError for what does not fit together."""
    ends = (*_ENDS[scheme.layout], *(["_zero_point"] if scheme.has_zero else []))
    tensors = {end: stored[key + end] for end in ends}
    for end in {"_zero_point", "_g_idx"} - {*ends}:
        if key + end in stored:
            raise ValueError(f"it has {key}{end}, and by config.json it has none")
    codes, scales = tensors["_packed"], tensors["_scale"]
    if len(codes.shape) != 2:
        raise ValueError(f"{codes.name} is {list(codes.shape)}, and no matrix")
    is_int4 = scheme.layout == INT4
    shape = tuple(tensors["_shape"].whole().tolist()) if is_int4 else (codes.shape[0], 2 * codes.shape[1])
    if len(shape) != 2 or min(shape) < 1 or shape[1] % 2:
        raise ValueError(f"the shape {list(shape)} is no matrix with an even number of columns")
    group = scheme.group or shape[1]
    dtype, width = (torch.int32, -(-shape[1] // 8)) if is_int4 else (torch.uint8, shape[1] // 2)
    if codes.dtype != dtype or codes.shape != (shape[0], width):
        raise ValueError(f"{list(codes.shape)} in {codes.dtype} is not half a byte for each of {list(shape)}")
    if shape[1] % group or group % 2 or scales.shape != (shape[0], shape[1] // group) or scales.dtype not in _SCALES[scheme.layout]:
        raise ValueError(f"scales {list(scales.shape)} in {scales.dtype} for {list(shape)} in groups of {group}")
    if scheme.layout == NVFP4 and (tensors["_global_scale"].shape != (1,) or tensors["_global_scale"].dtype != torch.float32):
        raise ValueError(f"{tensors['_global_scale'].name} is not one number in fp32")
    if scheme.has_zero:
        zeros, wanted = tensors["_zero_point"], (-(-shape[0] // 8), scales.shape[1])
        if zeros.shape != wanted or zeros.dtype != torch.int32:
            raise ValueError(f"zero points {list(zeros.shape)} in {zeros.dtype} for {list(scales.shape)} scales")
    parts = _Parts(scheme, shape, tensors)
    names = frozenset(tensor.name for tensor in tensors.values())
    return PackedTensor(shape, parts.value_dtype, names, group, parts.table, scheme.has_zero, parts.read)


@dataclass(frozen=True)
class _Parts:
    """The tensors of one weight [N, K], by the end of their names."""

    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]

    @property
    def value_dtype(self) -> torch.dtype:
        """That the library dequantises to."""
        return self.tensors["_scale"].dtype if self.scheme.layout == INT4 else torch.bfloat16

    def read(self) -> dict[str, Tensor]:
        """What a `PackedWeight` holds."""
        codes = self.tensors["_packed"].whole().view(torch.uint8)[:, : self.shape[1] // 2]
        tensors = {"weight": ((codes << 4) | (codes >> 4)).flatten(), "scale": self._scales()}
        return tensors | ({"zero": self._zero_points()} if self.scheme.has_zero else {})

    @property
    def table(self) -> tuple[float, ...]:
        middle = 0 if self.scheme.has_zero else 8  # zero points count from the lowest code
        return tuple(float(code - middle) for code in range(16)) if self.scheme.layout == INT4 else E2M1

    def _scales(self) -> Tensor:
        scales = self.tensors["_scale"].whole().flatten()
        if self.scheme.layout == MXFP4:
            return powers_of_two(scales)
        scales = scales.float()
        return scales / self.tensors["_global_scale"].whole() if self.scheme.layout == NVFP4 else scales

    def _zero_points(self) -> Tensor:
        by_group = unpack_low_first(self.tensors["_zero_point"].whole().T)
        return by_group[:, : self.shape[0]].T.flatten()


_KINDS = {INT4: "int4", NVFP4: "nvfp4", MXFP4: "mxfp4"}
_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    INT4: {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel"), "symmetric": (True, False)},
    NVFP4: {"num_bits": (4,), "type": ("float",), "strategy": ("tensor_group",), "symmetric": (True,), "group_size": (16,)},
    MXFP4: {"num_bits": (4,), "type": ("float",), "strategy": ("group",), "symmetric": (True,), "group_size": (32,)},
}


def open_format(settings: Mapping[str, Any], base_model: str) -> Format:
    """By the `quantization_config` of the base's config.json. Raises ModelError for all but weights of 4 bits."""
    try:
        (scheme,) = settings["config_groups"].values()
        format_name = scheme.get("format") or settings["format"]
        refusal = _refusal(settings, scheme, format_name)
        weights = scheme["weights"]
        group = weights.get("group_size") if weights["strategy"] != "channel" else None
        packed = Scheme(format_name, group, not weights.get("symmetric", True))
        ignored = [re.compile(each[3:] if each.startswith("re:") else f"{re.escape(each)}$") for each in settings.get("ignore") or []]
    except (KeyError, ValueError, TypeError, AttributeError, re.error) as error:
        packed, ignored = Scheme("", None, False), []
        refusal = f"a quantization_config that is not one group of linears ({type(error).__name__}: {error})"
    if refusal is not None:
        raise ModelError(
            f"base_model {base_model}: compressed-tensors has packed it with {refusal}. Read are {INT4} (int4), {NVFP4} and {MXFP4}, "
            "of the weights of all Linear alone. Use the original model (base_precision: nf4 packs it in 4 bits at load)"
        )
    kind, find = _KINDS[packed.layout], partial(_find, base_model, packed)
    return Format(f"compressed-tensors {kind}", kind, packed.group, partial(_packs, ignored), find, packed.has_zero)


def _packs(ignored: Sequence[re.Pattern[str]], linear: str) -> bool:
    return not any(each.match(linear) for each in ignored)


def _refusal(settings: Mapping[str, Any], scheme: Mapping[str, Any], found: str) -> str | None:
    """What of the settings is not read."""
    if found not in _KINDS:
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
    if found == INT4 and weights["strategy"] == "group" and (type(weights["group_size"]) is not int or weights["group_size"] < 2):
        return f"group_size {weights['group_size']}"
    return next((f"{key} {weights.get(key)}" for key, allowed in _SETTINGS[found].items() if weights.get(key) not in allowed), None)


def _find(base_model: str, scheme: Scheme, stored: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    keys = [name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")]
    return find_packed(base_model, "compressed-tensors", keys, lambda key: find_weight(key, scheme, stored))
