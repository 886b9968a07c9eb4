"""Kernels compiled ahead by the process that does it, for a GPU that need not be there; and what its order says."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import tlora.kernels
from tests.kernels.interpreter import interpreted

MODULES = [m.name for m in pkgutil.iter_modules(tlora.kernels.__path__) if m.name.startswith("triton_") or m.name in ("fp8", "packed")]
with interpreted():
    WITH_KERNELS = [importlib.import_module(f"tlora.kernels.{name}") for name in MODULES]
    from tlora.kernels import compile_ahead
    from tlora.kernels.compile_request import AttentionRequest, CompileRequest, GroupRequest, HeadRequest, PackedRequest, read_order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same with real launches")
NARROW = GroupRequest(32, (32,), bias=False, fp8=False)
ORDER = CompileRequest("no GPU of this name", 90, 132, "bfloat16", 16, dropout=False, groups=(NARROW,))
WINDOWED = AttentionRequest(4, 2, 64, 100, softcap=True)
PACKED = (PackedRequest(64, "bfloat16"), PackedRequest(128, "float16", zero=True))


class Started:
    """A process, as far as `start` knows one."""

    def __init__(self) -> None:
        self.stdin = io.BytesIO()


@pytest.mark.slow
def test_every_kernel_of_a_plan_is_in_the_cache_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    order = replace(ORDER, attentions=(WINDOWED,), head=HeadRequest(500, False), packed=PACKED)
    text = json.dumps(asdict(order))
    command = [sys.executable, "-m", "tlora.kernels.compile_ahead"]
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = sorted(path.stem for path in tmp_path.rglob("*.cubin"))
    # Forward and input gradient for one run in a tile and for many; the shrink of x and of dy, and the sums of both, are other kernels.
    linears = ["gemm_kernel"] * 4 + ["shrink_kernel"] * 2 + ["sum_kernel"] * 2
    step = ["norm_kernel", "verdict_kernel", "check_kernel", "update_kernel", "gather_kernel", "scatter_kernel", "write_kernel"]
    assert found == sorted(
        [*linears, "forward_kernel", "dq_kernel", "dkv_kernel", *step, *["cross_entropy_kernel", "dequantize_kernel"] * 2]
    )

    # The next launch of the same starts no process; another order does, and so does this one in another cache.
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command) or Started())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compile_ahead.start(order) is None and not started
    assert compile_ahead.start(replace(order, width=32)) is not None and len(started) == 1
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    assert compile_ahead.start(order) is not None and len(started) == 2


def test_an_order_survives_its_way_to_the_process() -> None:
    for order in (
        ORDER,
        replace(ORDER, attentions=(WINDOWED, replace(WINDOWED, sinks="bfloat16")), head=HeadRequest(500, True), packed=PACKED),
    ):
        assert read_order(json.dumps(asdict(order))) == order


def test_groups_that_launch_the_same_kernels_are_compiled_once() -> None:
    from tlora.kernels.tiles import TileTable

    wide = replace(NARROW, widths=(256,))
    groups = [NARROW, wide, replace(NARROW, bias=True), replace(NARROW, widths=(32, 32)), replace(NARROW, in_features=80)]
    like = [NARROW, replace(NARROW, in_features=112)]  # of 80 and of 112 columns an input gradient takes the same tile
    assert compile_ahead._unlike([*groups, *like], TileTable(), torch.bfloat16) == groups


KEYS = """
import importlib, json, os, sys
from triton.runtime.jit import JITFunction

found = [each for name in sys.argv[1:] for each in vars(importlib.import_module("tlora.kernels." + name)).items()]
kernels = {name: kernel for name, kernel in found if isinstance(kernel, JITFunction) and name.endswith("_kernel")}
for order in (*([name] for name in kernels), sorted(kernels), sorted(kernels, reverse=True)):
    if not os.fork():  # no kernel has been looked at here yet
        print(json.dumps({name: kernels[name].cache_key for name in order}), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_kernel_has_one_key_in_the_cache_whichever_was_first() -> None:
    """Or what was compiled ahead, by processes that take kernels as they come, is compiled again by the run."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", KEYS, *MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *alone, together, reverse = [json.loads(line) for line in done.stdout.splitlines()]
    first = {name: key for each in alone for name, key in each.items()}
    assert {"gemm_kernel", "scan_kernel", "expert_gemm_kernel", "update_kernel"} < {*first} and {*together} == {*reverse} == {*first}
    assert {name for name, key in first.items() if not key == together[name] == reverse[name]} == set()


def test_the_constants_of_shared_functions_are_those_of_their_modules() -> None:
    """Which they cannot read: a key would or would not have them."""
    compared = 0
    for module in WITH_KERNELS:
        for shared in vars(module).values():
            for name, parameter in inspect.signature(getattr(shared, "fn", len)).parameters.items():
                known = getattr(module, name, None)
                if parameter.default is not inspect.Parameter.empty and hasattr(known, "value"):
                    assert parameter.default == known.value, f"{shared.fn.__name__}: {name}"
                    compared += 1
    from tlora.kernels import delta_rule, triton_delta_rule

    assert compared > 10 and triton_delta_rule.CHUNK.value == delta_rule.CHUNK


def test_gemms_are_compiled_with_each_size_of_their_tiles_and_the_others_once() -> None:
    from tlora.kernels.tiles import MOST_SIZES, TileTable

    wide = GroupRequest(4096, (4096,), bias=False, fp8=False)

    def counts(sized: bool = True, **changes: object) -> list[int]:
        kernels = compile_ahead._kernels(replace(ORDER, **changes), TileTable(sized=sized))  # type: ignore[arg-type]
        tiles = [(kernel.name, kernel.many, kernel.dropout, tuple(kernel.table.entries.items())) for kernel in kernels]
        assert len(set(tiles)) == len(tiles), "each once"
        gemms = [kernel.name in ("forward", "input gradient") for kernel in kernels]
        return [sum(gemms), len(gemms) - sum(gemms)]

    assert counts() == [4, 8]
    assert counts(groups=(wide,)) == [4 * MOST_SIZES, 8]
    assert counts(groups=(wide,), sized=False) == [4, 8]
    assert counts(groups=(wide,), dropout=True) == [8 * MOST_SIZES, 16]
    assert counts(groups=(replace(wide, fp8=True),)) == counts(groups=(wide,), dtype="float32") == [4, 8]
