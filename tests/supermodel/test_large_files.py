"""Headers of weight files that are larger than the memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from tlora.supermodel.weight_files import _read_headers


def test_the_header_of_a_file_larger_than_the_memory(tmp_path: Path) -> None:
    """Its place is reserved, and nothing is written. To map it for writing would be refused."""
    size, file = 2 << 40, tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)
    (tensor,) = _read_headers([file], "base").values()
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((size // 2,), torch.bfloat16, "meta")
