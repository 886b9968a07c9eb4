"""Parts of a trace: by launching range, by name, and what is left."""

from __future__ import annotations

from typing import Any

import pytest

from bench import breakdown
from bench.breakdown import HEAD, OPTIMIZER, OTHER, WHOLE, part_of, summarize


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


def test_the_device_is_idle_for_what_its_kernels_leave_of_the_time_without_a_trace():
    events = [_event("user_annotation", WHOLE, 0, 1000), _launch(1, 10), _event("kernel", "gemm_kernel", 20, 300, correlation=1)]
    found = summarize(events, untraced=400e-6)
    assert found["seconds"] == pytest.approx(400e-6) and found["traced_seconds"] == pytest.approx(1000e-6)
    assert {name: part["share"] for name, part in found["parts"].items()} == pytest.approx({"GEMM": 0.75, "idle": 0.25})


def test_on_a_cpu_an_operation_counts_without_those_inside_it():
    events = [
        _event("user_annotation", WHOLE, 0, 200),
        _event("cpu_op", "aten::linear", 10, 100),
        _event("cpu_op", "aten::addmm", 20, 60),
        _event("cpu_op", "aten::copy_", 30, 10),
        _event("cpu_op", "aten::mul", 120, 30),
    ]
    found = summarize(events)
    seconds = {name: part["seconds"] * 1e6 for name, part in found["parts"].items()}
    assert seconds == pytest.approx({"GEMM": 40 + 50, OTHER: 10 + 30, "idle": 70})
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gemm_kernel", "GEMM"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "GEMM"),
        ("triton_tem_fused_mm_0", "GEMM"),
        ("shrink_kernel", "LoRA"),
        ("_MultiLoraLinearBackward", "LoRA"),
        ("tlora::multi_lora_group", "GEMM"),
        ("tlora::packed_attention", "attention"),
        ("sum_kernel", "LoRA"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("dkv_kernel", "attention"),
        ("triton_poi_fused_mul_silu_1", OTHER),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", OTHER),
        ("void at::native::reduce_kernel<512, 1>", OTHER),
        ("update_kernel", "optimizer"),
    ],
)
def test_parts_by_name(name: str, part: str):
    assert part_of(name) == part


def test_a_real_run_is_split_up():
    arguments = "--shape tiny --device cpu --jobs 2 --ranks 4 --batch-size 1 --lengths 16 --token-budget 32 --commit x"
    found = breakdown.run_breakdown(breakdown.throughput.read_options(arguments.split()))
    assert {"GEMM", "attention", "head + loss", "optimizer"} <= set(found["parts"])
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1, abs=1e-3)
    assert "head + loss" in breakdown.format_table(found)
