"""Checkpoints whose linears bitsandbytes has packed in 4 bits (NF4 or FP4, scales nested or not), as transformers and unsloth save them.

`X.weight` (nibbles) comes with `X.weight.absmax`, `X.weight.quant_map` and a JSON text in bytes,
`X.weight.quant_state.bitsandbytes__nf4`; with nested scales also with `X.weight.nested_absmax` and `X.weight.nested_quant_map`. The
files say which linears are packed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlora.errors import ModelError
from tlora.supermodel.packed_format import Format, PackedTensor, find_packed, packs_others
from tlora.supermodel.tensor_files import StoredTensor

_STATE = ".quant_state.bitsandbytes__"
_DEFAULT_GROUP = 64
_KEPT = ("lm_head",)  # what transformers leaves as it is where the config names nothing


def open_format(settings: Mapping[str, Any], base_model: str) -> Format:
    """By the `quantization_config` of the base's config.json. Raises ModelError for 8 bits."""
    if not settings.get("load_in_4bit"):
        raise ModelError(
            f"base_model {base_model}: bitsandbytes has packed its weights in 8 bits, and 4 bits are read alone. Use the original model "
            "(base_precision: nf4 packs it in 4 bits at load)"
        )
    kind = str(settings.get("bnb_4bit_quant_type", "fp4"))
    kept = tuple(settings.get("llm_int8_skip_modules") or _KEPT)
    return Format(f"bitsandbytes {kind}", kind, _DEFAULT_GROUP, partial(packs_others, kept), partial(_find, base_model))


def _find(base_model: str, stored: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    states = {key: name for name in stored for key, is_state, _ in [name.partition(_STATE)] if is_state}

    def find(key: str) -> PackedTensor:
        parts = _Parts.of(key, stored[states[key]], stored)
        table = tuple(parts.tensors[".quant_map"].whole().float().tolist())
        return PackedTensor(parts.shape, parts.value_dtype, parts.names, parts.group, table, has_zero=False, parts=parts.read)

    return find_packed(base_model, "bitsandbytes", states, find)


@dataclass(frozen=True)
class _Parts:
    """The tensors of one weight, by the end of their names, and what its state says."""

    tensors: Mapping[str, StoredTensor]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, key: str, state_tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> _Parts:
        """Raises KeyError for what is missing, ValueError, TypeError, AttributeError for what does not fit together."""
        state = json.loads(bytes(state_tensor.whole().view(torch.uint8).tolist()))
        wanted = ["", ".absmax", ".quant_map", *([".nested_absmax", ".nested_quant_map"] if "nested_blocksize" in state else [])]
        parts = cls({end: stored[key + end] for end in wanted} | {"state": state_tensor}, state)
        parts.check()
        return parts

    def check(self) -> None:
        """Raises ValueError, KeyError, TypeError, AttributeError."""
        count = math.prod(self.shape)
        groups = -(-count // self.group)
        nibbles, scales = self.tensors[""], self.tensors[".absmax"]
        if math.prod(nibbles.shape) * nibbles.dtype.itemsize != -(-count // 2):
            raise ValueError(f"{list(nibbles.shape)} in {nibbles.dtype} is not half a byte for each of {list(self.shape)}")
        if math.prod(scales.shape) != groups or len(self.shape) != 2 or self.group % 2:
            raise ValueError(f"{math.prod(scales.shape)} scales for {list(self.shape)} in groups of {self.group}")
        assert isinstance(self.value_dtype, torch.dtype)

    @property
    def names(self) -> frozenset[str]:
        """Of the files' tensors."""
        return frozenset(tensor.name for tensor in self.tensors.values())

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.state["shape"])  # type: ignore[return-value]

    @property
    def group(self) -> int:
        return int(self.state["blocksize"])

    @property
    def value_dtype(self) -> torch.dtype:
        return getattr(torch, self.state["dtype"])

    def read(self) -> dict[str, Tensor]:
        """What a `PackedWeight` holds."""
        return {"weight": self.tensors[""].whole().view(torch.uint8).flatten(), "scale": self._scales()}

    def _scales(self) -> Tensor:
        """fp32. Nested ones are a code's value times the scale of its group, and then plus the offset: rounded twice."""
        scales = self.tensors[".absmax"].whole().flatten()
        if "nested_blocksize" not in self.state:
            return scales.float()
        values = self.tensors[".nested_quant_map"].whole().float()[scales.long()]
        outer = self.tensors[".nested_absmax"].whole().float().flatten()
        product = values * outer.repeat_interleave(int(self.state["nested_blocksize"]))[: len(values)]
        return product + torch.tensor(self.state["nested_offset"], dtype=torch.float32)
