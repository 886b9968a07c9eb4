"""Checkpoints whose linears AWQ has packed in 4 bits, in its GEMM layout, as AutoAWQ and GPTQModel save them.

`X.qweight` [K, N / 8] has 8 neighbours of a row in an int32, `X.qzeros` [K / group, N / 8] their zero points, both in the order of
`_ORDER`, the lowest bits first, and `X.scales` is [K / group, N]. A number is its code less its zero point, times the scale in the scale's
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlora.errors import ModelError
from tlora.kernels.packed_weight import pack, unpack_low_first
from tlora.supermodel.packed_format import Format, PackedTensor, check_words, find_packed_words, packs_others
from tlora.supermodel.tensor_files import StoredTensor

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in an int32
_PLACES = tuple(_ORDER.index(column) for column in range(8))
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_KEPT = ("lm_head",)


def open_format(settings: Mapping[str, Any], base_model: str) -> Format:
    """By the `quantization_config` of the base's config.json. Raises ModelError for all but 4 bits in the GEMM layout."""
    layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits, group = (settings.get(key, settings.get(old)) for key, old in (("bits", "w_bit"), ("group_size", "q_group_size")))
    kept = settings.get("modules_to_not_convert") or []
    scheme = {"bits": bits, "version": layout, "zero_point": settings.get("zero_point", True), "lm_head": settings.get("lm_head", False)}
    wanted = {"bits": 4, "version": "gemm", "zero_point": True, "lm_head": False}
    refusal = next((f"{key} {scheme[key]}" for key, only in wanted.items() if scheme[key] != only), None)
    if settings.get("dynamic") or settings.get("backend") == "llm-awq":
        refusal = "other settings for some linears (dynamic)" if settings.get("dynamic") else "version llm-awq"
    elif type(group) is not int or (group != -1 and (group < 2 or group % 2)):
        refusal = f"group_size {group}"
    elif not isinstance(kept, list):
        refusal = f"modules_to_not_convert {kept}"
    if refusal is not None:
        raise ModelError(
            f"base_model {base_model}: AWQ has packed it with {refusal}. Read are 4 bits with zero points in the layout of version gemm. "
            "Use the original model (base_precision: nf4 packs it in 4 bits at load)"
        )
    length = None if group == -1 else group
    return Format("AWQ int4", "int4", length, partial(packs_others, (*_KEPT, *kept)), partial(_find, base_model, length), has_zero=True)


def _find(base_model: str, group: int | None, stored: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    return find_packed_words(base_model, "AWQ", stored, lambda stem: _find_weight(stem, group, stored))


def _find_weight(stem: str, group: int | None, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    """Raises KeyError for what is missing, ValueError for what does not fit together."""
    tensors = {end: stored[stem + end] for end in ("qweight", "qzeros", "scales")}
    codes, zeros, scales = tensors.values()
    check_words(codes)
    shape = 8 * codes.shape[1], codes.shape[0]
    length = group or shape[1]
    count = shape[1] // length
    if shape[1] % length or length % 2 or scales.shape != (count, shape[0]) or scales.dtype not in _SCALES:
        raise ValueError(f"scales {list(scales.shape)} in {scales.dtype} for {list(shape)} in groups of {length}")
    if zeros.shape != (count, codes.shape[1]) or zeros.dtype != torch.int32:
        raise ValueError(f"zero points {list(zeros.shape)} in {zeros.dtype} for {list(shape)} in groups of {length}")

    def read() -> dict[str, Tensor]:
        scale = scales.whole().float().T.flatten()
        return {"weight": pack(_rows(codes.whole())), "scale": scale, "zero": _rows(zeros.whole())}

    names, table = frozenset(tensor.name for tensor in tensors.values()), tuple(map(float, range(16)))
    return PackedTensor(shape, scales.dtype, names, length, table, has_zero=True, parts=read)


def _rows(words: Tensor) -> Tensor:
    """uint8 [N * rows] of int32 [rows, N / 8]: the codes of each column in turn."""
    return unpack_low_first(words).view(len(words), -1, 8)[:, :, _PLACES].flatten(1).T.flatten()
