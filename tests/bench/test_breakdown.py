"""Parts of a trace: by launching range, by name, and what is left."""

from __future__ import annotations

from typing import Any

import pytest

from bench import breakdown
from bench.breakdown import HEAD, OPTIMIZER, OTHER, WHOLE, summarize


def _event(kind: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start, "dur": length, "tid": 1, "args": args}


def _launch(number: int, at: float) -> dict[str, Any]:
    return _event("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=number)


def test_a_kernel_belongs_to_the_range_that_launched_it_however_late_it_runs():
    events = [
        _event("user_annotation", WHOLE, 0, 1000),
        _event("user_annotation", HEAD, 100, 50),
        _event("user_annotation", OPTIMIZER, 200, 50),
        _launch(1, 10),
        _event("kernel", "gemm_kernel", 20, 300, correlation=1),
        _launch(2, 120),
        _event("kernel", "nvjet_tst_128x256", 320, 100, correlation=2),  # when the optimizer's range is over
        _launch(3, 210),
        _event("kernel", "vectorized_elementwise_kernel", 420, 40, correlation=3),
        _event("gpu_memcpy", "Memcpy HtoD", 440, 60, correlation=4),  # its launch was not recorded; 20 of it beside another
    ]
    found = summarize(events)
    seconds = {name: part["seconds"] * 1e6 for name, part in found["parts"].items()}
    assert seconds == pytest.approx({"GEMM": 300, "head + loss": 100, "optimizer": 40, OTHER: 60, "idle": 1000 - 480})
    assert found["kernels"][0] == {"name": "gemm_kernel", "part": "GEMM", "calls": 1, "seconds": pytest.approx(300e-6)}


def test_a_real_run_is_split_up():
    arguments = "--shape tiny --device cpu --jobs 2 --ranks 4 --batch-size 1 --lengths 16 --token-budget 32 --commit x"
    found = breakdown.run_breakdown(breakdown.throughput.read_options(arguments.split()))
    assert {"GEMM", "attention", "head + loss", "optimizer"} <= set(found["parts"])
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1, abs=1e-3)
    assert "head + loss" in breakdown.format_table(found)
