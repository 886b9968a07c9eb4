"""Which checkpoints that compressed-tensors has packed are read, by their config.json: int4, NVFP4 and MXFP4
(`compressed_tensors_weights.py`).

What else the library can do is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tlora.errors import ModelError
from tlora.supermodel.compressed_tensors_weights import INT4, MXFP4, NVFP4, Scheme, find_weight
from tlora.supermodel.packed_format import Format, PackedTensor, find_packed
from tlora.supermodel.tensor_files import StoredTensor

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
