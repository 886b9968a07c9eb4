"""Kernels through Triton's compiler for a GPU that need not be there: the interpreter accepts more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json
import traceback
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tlora.kernels import fp8, triton_adamw, triton_chunks, triton_gemm, triton_lora
from tlora.kernels.lora_tables import A, DA
from tlora.kernels.triton_cross_entropy import _BLOCK_V, _WARPS, cross_entropy_kernel

POINTERS = {"rows_ptr": "*i64", "scales_ptr": "*fp32", "s_ptr": "*bf16", "column_scale_ptr": "*fp32",
            "scale_ptr": "*fp32", "q_ptr": "*fp8e4nv", "x0_ptr": "*bf16", "x1_ptr": "*bf16", "chunks_ptr": "*i64"}
ROWS, COLUMNS, INNER, WIDTH, SKINNY = 128, 256, 64, 64, 128
tile = lambda *sides: f"tensordesc<bf16[{','.join(map(str, sides))}]>"
GEMM = {"ADAPTERS": True, "MANY": True, "SKIP": True, "R": WIDTH,
        "bias_ptr": None, "x_scale_ptr": None, "w_scale_ptr": None, "x1": None, "x2": None, "w1": None, "w2": None, "M": 1, "W": WIDTH,
        "NK": True, "FIRST": False, "SCALED": False, "HALVES": True, "IMPRECISE": None, "BM": ROWS, "BN": COLUMNS,
        "BK": INNER, "BAND": 8, "PROGRAMS": 132, "LOADS": "descriptor", "MASKED": False}
TILES = {"x0": tile(ROWS, INNER), "w0": tile(COLUMNS, INNER), "y": tile(ROWS, COLUMNS // 2), "s": tile(ROWS, WIDTH),
         "r0": tile(WIDTH, COLUMNS)}
LORA = {"M": 1, "W": WIDTH, "BT": 64, "SPLIT": True, "LOADS": "descriptor"}
CASES = {
    "gemm": (triton_gemm.gemm_kernel, TILES, GEMM | {"r1": None, "r2": None, "MANY": False, "SKIP": False}, 8),
    "many runs": (triton_gemm.gemm_kernel, TILES, GEMM | {"r1": None, "r2": None}, 8),
    "wide": (triton_gemm.gemm_kernel, TILES, GEMM | {"r1": None, "r2": None, "W": 3 * WIDTH}, 8),
    "shrink": (triton_lora.shrink_kernel, {"x": tile(64, SKINNY)}, LORA | {"WHICH": A, "BK": SKINNY, "MASKED": False}, 8),
    "sum": (triton_lora.sum_kernel, {"x": tile(64, SKINNY), "s": tile(64, 16)}, LORA | {"WHICH": DA, "BC": SKINNY, "W": 16, "R": 16}, 4),
    "dropped": (triton_lora.add_dropped_kernel, {"y_ptr": "*bf16"}, {"WHICH": A, "M": 2, "W": WIDTH, "R": WIDTH, "BT": 64,
                "BC": SKINNY}, 4),
    "quantize": (fp8.quantize_kernel, {}, {"x2_ptr": None, "SOURCES": 2, "BLOCK": 4096}, 16),
}

def compile(kernel, given, constants, warps):
    types = given | POINTERS
    kind = lambda name: types.get(name) or ("*i32" if name.endswith("_ptr") else "i32")
    signature = {name: "constexpr" if name in constants else kind(name) for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "num_stages": 3}
    found = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    special = [p.name for p in kernel.params if p.name in triton_lora.PLACES and not p.do_not_specialize]
    assert not special, f"compiled once more for some {special}"

def compile_loss(dtype, has_cap, gradient):
    kinds = ["*" + dtype, "*i64", "*fp32", "*fp32", "fp32", "fp32", "i32", "i32"] + 3 * ["constexpr"]
    signature = dict(zip(cross_entropy_kernel.arg_names, kinds, strict=True))
    constants = {"HAS_CAP": has_cap, "GRADIENT": gradient, "BLOCK_V": _BLOCK_V}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 7)}  # pointers and stride, not the vocabulary
    source = ASTSource(cross_entropy_kernel, signature, constants, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _WARPS}).asm["ptx"]
    assert ptx.count("ld.global.v4") >= 1 + gradient, "an odd vocabulary is read one element at a time"

LOSSES = {"loss bf16": ("bf16", False, True), "loss fp16": ("fp16", True, True), "loss fp32": ("fp32", True, False)}

STATE = {"flat_ptr": "*fp32", "params_ptr": "*fp32", "exp_avg_ptr": "*fp32", "exp_avg_sq_ptr": "*fp32", "largest_ptr": "*fp32",
         "weights_like_ptr": "*bf16", "squares_ptr": "*fp64", "scalars_ptr": "*fp64", "outcome_ptr": "*fp64"}
BY_CHUNK = {"CHUNK": 4096, "ALIGNED": True}
CASES |= {
    "gather": (triton_chunks.gather_kernel, STATE, BY_CHUNK, 8),
    "scatter": (triton_chunks.scatter_kernel, STATE, BY_CHUNK | {"ALIGNED": False}, 8),
    "write": (triton_chunks.write_kernel, STATE, BY_CHUNK, 8),
    "norm": (triton_adamw.norm_kernel, STATE, BY_CHUNK, 8),
    "verdict": (triton_adamw.verdict_kernel, STATE, {"BLOCK": 4096}, 16),
    "check": (triton_adamw.check_kernel, STATE, BY_CHUNK, 8),
    "update": (triton_adamw.update_kernel, STATE, BY_CHUNK, 8),
}
TASKS = [(name, compile, case) for name, case in CASES.items()] + [(name, compile_loss, case) for name, case in LOSSES.items()]
faults = {}
for name, action, case in TASKS:
    try:
        action(*case)
    except Exception:
        faults[name] = traceback.format_exc()
    else:
        faults[name] = ""
print(json.dumps(faults))
"""


@pytest.mark.slow
def test_they_compile(tmp_path: Path) -> None:
    """All by one process, as its start takes longer than a kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    faults = json.loads(done.stdout.splitlines()[-1])
    assert len(faults) == 17 and not any(faults.values()), "\n".join(f"{name}: {fault[-2000:]}" for name, fault in faults.items() if fault)
