"""Checkpoints whose linears GPTQ has packed in 4 bits, as AutoGPTQ and GPTQModel save them, without an order of activations.

`X.qweight` [K / 8, N] has 8 neighbours of a column in an int32, the lowest bits first, `X.scales` is [K / group, N], `X.qzeros`
[K / group, N / 8] has the zero points of 8 columns in an int32, and `X.g_idx` [K] the group of each input. The format `gptq` holds zero
points less 1: 0x11111111 is added to each int32, as GPTQModel subtracts it from them; `gptq_v2` holds them as they are. With `sym` all
are 8. A number is its code less its zero point, times the scale in the scale's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlora.errors import ModelError
from tlora.kernels.packed_weight import unpack_low_first
from tlora.supermodel.packed_format import Format, PackedTensor, check_words, find_packed_words
from tlora.supermodel.tensor_files import StoredTensor

_FORMATS = ("gptq", "gptq_v2")
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_MIDDLE = 8  # the zero point of all groups that are symmetric


def open_format(settings: Mapping[str, Any], base_model: str) -> Format:
    """By the `quantization_config` of the base's config.json. Raises ModelError for all but 4 bits in groups along the inputs."""
    format_name = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    wanted = {"bits": (4,), "desc_act": (False, None), "sym": (True, False), "pack_dtype": ("int32", None), "lm_head": (False, None)}
    refusal = next((f"{key} {settings.get(key)}" for key, allowed in wanted.items() if settings.get(key) not in allowed), None)
    group, parts = settings.get("group_size"), settings.get("modules_in_block_to_quantize") or []
    if settings.get("dynamic"):
        refusal = "other settings for some linears (dynamic)"
    elif format_name not in _FORMATS or settings.get("is_marlin_format"):
        refusal = f"format {format_name if format_name not in _FORMATS else 'marlin'}"
    elif type(group) is not int or (group != -1 and (group < 2 or group % 2)):
        refusal = f"group_size {group}"
    elif not isinstance(parts, list):
        refusal = f"modules_in_block_to_quantize {parts}"
    if refusal is not None:
        raise ModelError(
            f"base_model {base_model}: GPTQ has packed it with {refusal}. Read are 4 bits of linears in layers, in groups of inputs in "
            "their order (desc_act: false), in the formats gptq and gptq_v2. Use the original model (base_precision: nf4 packs it in 4 "
            "bits at load)"
        )
    scheme = _Scheme(format_name == "gptq", settings["sym"], None if group == -1 else group)
    names = [name for part in parts for name in ([part] if isinstance(part, str) else part)]
    return Format("GPTQ int4", "int4", scheme.group, partial(_packs, names), partial(_find, base_model, scheme), not scheme.symmetric)


def _packs(names: Sequence[str], linear: str) -> bool:
    return not linear.endswith("lm_head") and (not names or any(f".{linear}".endswith(f".{name}") for name in names))


@dataclass(frozen=True)
class _Scheme:
    """Whether zero points are held less 1, whether all are the middle one, and numbers of a scale (None for all inputs)."""

    less_one: bool
    symmetric: bool
    group: int | None


def _find(base_model: str, scheme: _Scheme, stored: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    return find_packed_words(base_model, "GPTQ", stored, lambda stem: _find_weight(stem, scheme, stored))


def _find_weight(stem: str, scheme: _Scheme, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    """Raises KeyError for what is missing, ValueError for what does not fit together."""
    tensors = {end: stored[stem + end] for end in ("qweight", "qzeros", "scales")}
    codes, scales = tensors["qweight"], tensors["scales"]
    check_words(codes)
    shape = codes.shape[1], 8 * codes.shape[0]
    group = scheme.group or shape[1]
    count = shape[1] // group
    if shape[1] % group or scales.shape != (count, shape[0]) or scales.dtype not in _SCALES:
        raise ValueError(f"scales {list(scales.shape)} in {scales.dtype} for {list(shape)} in groups of {group}")
    if shape[0] % 8 or tensors["qzeros"].shape != (count, shape[0] // 8) or tensors["qzeros"].dtype != torch.int32:
        raise ValueError(f"zero points {list(tensors['qzeros'].shape)} in {tensors['qzeros'].dtype} for {list(shape)} in groups of {group}")
    if (order := stored.get(f"{stem}g_idx")) is not None:
        if not torch.equal(order.whole().long(), torch.arange(shape[1]) // group):
            raise ValueError(f"{order.name} orders the inputs by activations (desc_act), and they are read in their own order")
        tensors["g_idx"] = order
    parts = _Parts(scheme, shape, tensors)
    if scheme.symmetric and not bool((parts.zero_points() == _MIDDLE).all()):
        raise ValueError(f"zero points other than {_MIDDLE}, and by config.json it is symmetric (sym: true)")
    middle = _MIDDLE if scheme.symmetric else 0
    table, names = tuple(float(code - middle) for code in range(16)), frozenset(tensor.name for tensor in tensors.values())
    return PackedTensor(shape, scales.dtype, names, group, table, not scheme.symmetric, parts.read)


@dataclass(frozen=True)
class _Parts:
    """The tensors of one weight [N, K], by the end of their names."""

    scheme: _Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]

    def read(self) -> dict[str, Tensor]:
        """What a `PackedWeight` holds."""
        num_rows, num_columns = self.shape
        by_column = self.tensors["qweight"].whole().view(torch.uint8).view(num_columns // 8, num_rows, 4)
        codes = by_column.transpose(0, 1).flatten()
        tensors = {"weight": (codes << 4) | (codes >> 4), "scale": self.tensors["scales"].whole().float().T.flatten()}
        return tensors | ({} if self.scheme.symmetric else {"zero": self.zero_points()})

    def zero_points(self) -> Tensor:
        """uint8 [N * K / group], below 16."""
        words = self.tensors["qzeros"].whole()
        return unpack_low_first(words + 0x11111111 if self.scheme.less_one else words).T.flatten()
