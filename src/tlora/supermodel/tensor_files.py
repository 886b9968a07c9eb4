"""Rows of the tensors in safetensors files, read and not mapped: pages of a mapped file that were read count as memory of the process.

The format: 8 bytes with the header's length, the header in JSON with each tensor's dtype, shape and place, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from tlora.errors import ModelError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Of weights, of what packed checkpoints are made of and of buffers, by safetensors' names."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes are."""

    name: str
    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def map(self) -> Tensor:
        """The whole tensor in its mapped file, as transformers loads it."""
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(self.name)

    def whole(self) -> Tensor:
        """All of it, read. Raises ModelError for a file that is cut off."""
        return self.read(0, self.shape[0]) if self.shape else self._read(0, self.dtype.itemsize).view(self.dtype)[0]

    def read(self, first: int, last: int) -> Tensor:
        """Rows [first, last), along dim 0. Raises ModelError for a file that is cut off."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._read(first * row_bytes, (last - first) * row_bytes).view(self.dtype).view(last - first, *self.shape[1:])

    def _read(self, first: int, count: int) -> Tensor:
        start = self.start + first
        content = np.fromfile(self.file, np.uint8, count, offset=start)
        if len(content) != count:
            raise ModelError(f"{self.file}: cut off: {len(content)} of {count} bytes from {start} on are there. Copy the model again")
        return torch.from_numpy(content)


def find_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """All tensors of safetensors files by name. Raises ModelError for a file that cannot be read and for numbers of another kind."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    start = 8 + size + entry["data_offsets"][0]
                    tensors[name] = StoredTensor(name, file, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors ({type(error).__name__}: {error}). Copy the model again") from None
    return tensors


def unmapped(tensor: Tensor) -> Tensor:
    """A copy of a CPU tensor that does not lie in a mapped file: cutting the file would kill the process, and writing to it would change
    the weights. torch puts it at a multiple of 64 bytes, wherever the file had it: a CPU's BLAS gives other bits for another remainder,
    and products are then those of a weight that is fetched or unpacked.
    """
    return tensor.clone()
