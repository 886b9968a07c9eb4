"""Writes safetensors files: the bytes of `safetensors.torch.save_file`, with their sha256 computed on the way.

The library's function leaves a file that must be read again for its hash, and holds Python's lock while it writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PIECE_BYTES = 16 << 20  # written, then hashed while it is in the cache; while another thread computes, each piece waits for Python's lock


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a new file of host tensors of one dtype; return its sha256. Nothing is synced. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for piece in _pieces(tensors, metadata):
            left = piece
            while left:  # a call may write less than it was given
                left = left[file.write(left) :]
            digest.update(piece)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    ordered = sorted(tensors.items())
    yield memoryview(_header(ordered, metadata))
    for _, tensor in ordered:
        content = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]


def _header(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    assert len({tensor.dtype for _, tensor in tensors}) <= 1, "safetensors puts larger dtypes first"
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors:
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
