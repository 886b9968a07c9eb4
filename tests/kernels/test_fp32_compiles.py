"""What the compiler makes of the fp32 kernels for a Hopper GPU that need not be there: tensor cores, few spilled registers, and a block
that fits into an SM.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tlora.kernels.cards import HOPPER

triton = pytest.importorskip("triton")

LINEARS = """
from tlora.kernels import compile_ahead
from tlora.kernels.compile_ahead import GroupOrder, Order
from tlora.kernels.tiles import TileTable

group = GroupOrder(1024, (1024, 512, 512), bias=False, fp8=False)
order = Order("no GPU of this name", 90, 132, "float32", 16, dropout=False, groups=(group,))
wide = Order("no GPU of this name", 90, 132, "float32", 64, dropout=False, groups=(GroupOrder(1024, (1024,), bias=False, fp8=False),))
compile_ahead._without_a_gpu(order.capability)
for name in ("shrink x", "forward", "input gradient", "sum x"):
    compile_ahead._compile(order, compile_ahead._Kernel(name, group, False, False, TileTable()))
compile_ahead._compile(wide, compile_ahead._Kernel("input gradient", wide.groups[0], False, False, TileTable()))
"""
ATTENTION = """
import torch
from tlora.kernels import compile_ahead, varlen_attention
from tlora.kernels.compile_ahead import META

compile_ahead._without_a_gpu(90)
tokens, heads, kv_heads, size = 128, 4, 2, 128
q, dout, out = (torch.empty(tokens, heads, size, device=META) for _ in range(3))
k, v = (torch.empty(tokens, kv_heads, size, device=META) for _ in range(2))
table = torch.empty(4, 4, dtype=torch.int32, device=META)
lists = dict.fromkeys(varlen_attention.TILE_ROWS, table)
plan = varlen_attention.TileLists(tokens, table, lists, lists)
varlen_attention.varlen_attention_forward(q, k, v, plan, size**-0.5)
lse = torch.empty(heads, tokens, device=META)
varlen_attention.varlen_attention_backward(dout, q, k, v, out, lse, plan, size**-0.5)
"""
KERNELS = {
    LINEARS: {"gemm_kernel": 3, "shrink_kernel": 1, "sum_kernel": 1},
    ATTENTION: {"forward_kernel": 1, "dq_kernel": 1, "dkv_kernel": 1},
}
MOST_STACK = 512  # bytes, in dkv (352), whose four warps are faster so than eight that spill nothing. As FMAs these took up to 9,488.


@dataclass(frozen=True)
class Compiled:
    name: str
    stack: int
    shared_memory: int
    tensor_core_products: int


def compiled(code: str, cache: Path) -> list[Compiled]:
    """All kernels that `code` compiles, by one process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [_read(path) for path in sorted(cache.rglob("*.cubin"))]


def _read(cubin: Path) -> Compiled:
    tool = triton.knobs.nvidia.cuobjdump.path
    said = {
        kind: subprocess.run([tool, kind, cubin], capture_output=True, text=True, check=True).stdout for kind in ("-res-usage", "-sass")
    }
    stack = re.search(r"STACK:(\d+)", said["-res-usage"])
    assert stack, said["-res-usage"]
    shared = json.loads(cubin.with_suffix(".json").read_text())["shared"]
    return Compiled(cubin.stem, int(stack[1]), shared, len(re.findall(r"H(?:G)?MMA\S*\.(?:TF32|BF16)", said["-sass"])))


@pytest.mark.soak
@pytest.mark.parametrize("code", [pytest.param(LINEARS, id="linears"), pytest.param(ATTENTION, id="attention")])
def test_each_kernel_runs_on_tensor_cores_without_spilling(tmp_path: Path, code: str) -> None:
    found = compiled(code, tmp_path)
    assert Counter(kernel.name for kernel in found) == KERNELS[code]
    for kernel in found:
        assert kernel.tensor_core_products >= 12 and kernel.stack <= MOST_STACK and kernel.shared_memory <= HOPPER.shared_memory, kernel
