"""Which packed checkpoints are read: a table by `quant_method` of config.json's `quantization_config`, and what a reader gives.

A reader is one file with an `open_format`, as `bitsandbytes_format.py`. All else is refused by name. What a reader finds wrong in files is
worded here, once for all.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tlora.errors import ConfigError, ModelError
from tlora.job import BasePrecision
from tlora.kernels.packed_weight import PackedWeight, without_numbers
from tlora.supermodel.tensor_files import StoredTensor

_AGAIN = "Copy the model again, or use the original"


@dataclass(frozen=True)
class PackedTensor:
    """A packed weight in a base's files: the tensors that it takes there, by `names`, the dtype that it stands for, and what a
    `PackedWeight` knows of it. `parts` reads what that holds.

    `shape`: of the plain weight, [N, K] of a linear, [E, K, N] of experts, which are packed as one matrix of E * N rows.
    """

    shape: tuple[int, ...]
    value_dtype: torch.dtype
    names: frozenset[str]
    group: int
    table: tuple[float, ...]
    has_zero: bool
    parts: Callable[[], Mapping[str, Tensor]]
    scale_dtype: torch.dtype = torch.float32

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of what is packed."""
        experts, (rows, columns) = self.shape[:-2], self.shape[-2:]
        return (experts[0] * columns, rows) if experts else (rows, columns)

    def form(self, dtype: torch.dtype) -> PackedWeight:
        """On the meta device, for products in `dtype`."""
        return without_numbers(self.matrix, self.group, self.table, self.value_dtype, dtype, self.has_zero, self.scale_dtype)

    def read(self, dtype: torch.dtype) -> PackedWeight:
        """In memory, for products in `dtype`."""
        return replace(self.form(dtype), **self.parts())

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] of a linear that it stands for."""
        return self.read(dtype).dense(dtype)


@dataclass(frozen=True)
class Format:
    """How a base's files are packed. `group`: numbers of a scale, None for a whole row, and `packs`: whether that linear is packed, both by
    config.json alone, where the files are not here yet. `has_zero`: whether a scale comes with a zero point. `packs_experts`: as `packs`,
    of parameters of experts, in MXFP4.

    `find` gives, of all tensors of the files, the packed ones by the name that the plain weight would have; raises ModelError.
    """

    name: str
    kind: str
    group: int | None
    packs: Callable[[str], bool]
    find: Callable[[Mapping[str, StoredTensor]], dict[str, PackedTensor]]
    has_zero: bool = False
    packs_experts: Callable[[str], bool] = lambda _: False


def format_of(config: Any, base_model: str) -> Format | None:
    """The form of a base's files; None where its weights are plain. Raises ModelError for one that is not read."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method", "unknown method") if isinstance(settings, dict) else type(settings).__name__
    reader = _readers().get(str(method))
    if reader is None:
        raise ModelError(
            f"base_model {base_model}: its weights are quantised ({method}), and are read plain in 16 bits or more, or packed by "
            f"{', '.join(_readers())}. Use the original model (base_precision: nf4 packs it in 4 bits at load)"
        )
    return reader(settings, base_model)


def find_packed(base_model: str, library: str, keys: Iterable[str], find: Callable[[str], PackedTensor]) -> dict[str, PackedTensor]:
    """What a reader's `find` gives of the weights `keys`, which `library` has packed; all that it raises of damaged files becomes a
    ModelError: a KeyError is a tensor that is missing, any other error's text says what does not fit together.
    """
    packed: dict[str, PackedTensor] = {}
    for key in keys:
        try:
            packed[key] = find(key)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"base_model {base_model}: {key} is packed by {library}, and cannot be read: {why}. {_AGAIN}") from None
    if not packed:
        raise ModelError(f"base_model {base_model}: by its config.json {library} packed it, and no tensor of its files is packed. {_AGAIN}")
    return packed


def find_packed_words(
    base_model: str, library: str, stored: Mapping[str, StoredTensor], find: Callable[[str], PackedTensor]
) -> dict[str, PackedTensor]:
    """`find_packed` of the linears X whose codes lie in int32 as `X.qweight`. `find` gets `X.`."""
    keys = [name.removesuffix("qweight") + "weight" for name in stored if name.endswith(".qweight")]
    return find_packed(base_model, library, keys, lambda key: find(key.removesuffix("weight")))


def check_words(codes: StoredTensor) -> None:
    """Raises ValueError where that is no matrix in int32."""
    if len(codes.shape) != 2 or min(codes.shape) < 1 or codes.dtype != torch.int32:
        raise ValueError(f"{codes.name} is {list(codes.shape)} in {codes.dtype}, and no matrix in int32")


def packs_others(kept: tuple[str, ...], linear: str) -> bool:
    """Whether `linear` is packed where a config names the modules that are `kept` as they are, read as transformers does."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return not any(re.match(rf"(?:{key}){boundary}", linear) or linear.endswith(key) for key in kept)


def _readers() -> dict[str, Callable[[Mapping[str, Any], str], Format]]:
    from tlora.supermodel import awq_format, bitsandbytes_format, compressed_tensors_format, gptq_format, mxfp4_format

    return {
        "bitsandbytes": bitsandbytes_format.open_format,
        "compressed-tensors": compressed_tensors_format.open_format,
        "gptq": gptq_format.open_format,
        "awq": awq_format.open_format,
        "mxfp4": mxfp4_format.open_format,
    }


def check_unpacked(form: Format | None, precision: BasePrecision | None, base_model: str) -> None:
    """Raise ConfigError where a base whose files are packed in another form is to be held in `precision`."""
    if form is not None and precision is not None and form.kind != precision:
        raise ConfigError(
            f"base_model {base_model}: its files are packed already ({form.name}), and base_precision {precision} would pack them anew. "
            "Take base_precision out, or use the original model"
        )


def without_packing(config: Any) -> Any:
    """The config of the plain model: transformers would ask for the library that packed it."""
    if getattr(config, "quantization_config", None) is None:
        return config
    plain = copy.copy(config)
    del plain.quantization_config
    return plain
