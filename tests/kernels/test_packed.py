"""The kernel that unpacks 4 bits: the bits of plain torch operations, for whole groups, groups across rows and a short last one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tlora.kernels.packed_weight import PackedWeight, dequantize_in_torch, table_on

with interpreted():
    from tlora.kernels.packed import dequantize, launch_dequantize

pytestmark = MARKS
# The interpreter cuts where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
TABLE = tuple(torch.randn(16, generator=torch.Generator().manual_seed(1)).tolist())


@pytest.mark.parametrize("with_zero", [False, True], ids=["", "zero"])
@pytest.mark.parametrize("group", [16, 32, 64, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 128), (5, 96), (3, 17), (40, 1024)], ids=str)
def test_the_kernel_gives_the_bits_of_torch(shape: tuple[int, int], dtype: torch.dtype, group: int, with_zero: bool) -> None:
    """Also where fp32 computes over a base in 16 bits."""
    draw, count = torch.Generator().manual_seed(0), shape[0] * shape[1]
    nibbles = torch.randint(0, 256, (-(-count // 2),), generator=draw, dtype=torch.uint8).to(DEVICE)
    scale = torch.randn(-(-count // group), generator=draw).to(DEVICE)
    zero = torch.randint(0, 16, scale.shape, generator=draw, dtype=torch.uint8).to(DEVICE) if with_zero else None
    for computes in {dtype, torch.float32}:
        packed = PackedWeight(nibbles, scale, TABLE, shape, group, dtype, computes, zero)
        found = dequantize(packed, table_on(TABLE, DEVICE), computes)
        assert found.shape == shape and torch.equal(found, dequantize_in_torch(packed, computes))


def test_nothing_is_written_past_the_end() -> None:
    """A short last block ends within the matrix: the numbers behind it belong to another tensor."""
    nibbles, scale = torch.zeros(26, dtype=torch.uint8, device=DEVICE), torch.ones(1, device=DEVICE)
    packed = PackedWeight(nibbles, scale, TABLE, (3, 17), 64, torch.float32, torch.float32)
    whole = torch.full((4096,), torch.nan, device=DEVICE)
    launch_dequantize(packed, table_on(TABLE, DEVICE), whole[:51].view(3, 17))
    assert bool((whole[:51] == TABLE[0]).all()) and bool(whole[51:].isnan().all())
