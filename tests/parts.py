"""`--part 1/3`, or PART=1/3 in the environment: one of several parts of the tests that a run selects, alike in time.

A part is a stretch of the tests in their order, so that a file, and what its tests compile, is cut in two at most. Each test is in
exactly one part, and in the same one in every process of a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import pytest

WORKERS = 14  # tests at a time, on 16 cores beside one H200, when the seconds were measured
# Seconds of one test then, on average (`pytest -m gpu -n 14 --durations=0`).
SECONDS = {
    "tests/bench/test_lora_kernels.py": 6.1,
    "tests/planning/test_memory_probe.py": 5.8,
    "tests/gpu/test_fast_path_promises.py": 9.2,
    "tests/gpu/test_gpu.py": 23.2,
    "tests/gpu/test_gpu_allocator.py": 60.0,
    "tests/gpu/test_gpu_compile_ahead.py": 56.1,
    "tests/gpu/test_gpu_nf4.py": 10.0,
    "tests/gpu/test_gpu_peft_plugin.py": 3.7,
    "tests/gpu/test_gpu_plain_path.py": 4.0,
    "tests/gpu/test_gpu_streamed_base.py": 12.0,
    "tests/gpu/test_gpu_tune.py": 8.4,
    "tests/gpu/test_linear_kernels.py": 10.0,
    "tests/kernels/test_fp8.py": 0.9,
    "tests/kernels/test_fused_linear.py": 2.2,
    "tests/kernels/test_packed_attention.py": 4.0,
    "tests/kernels/test_single_lora.py": 1.5,
    "tests/kernels/test_tile_trials.py": 2.1,
    "tests/kernels/test_varlen_attention.py": 7.0,
    "tests/supermodel/test_experts.py": 9.5,
    "tests/supermodel/test_fast_path.py": 8.0,
    "tests/supermodel/test_held_linear.py": 3.4,
}
OTHER_SECONDS = 0.3


def read_part(text: str) -> tuple[int, int]:
    """(k, n) of "k/n"; raises UsageError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    part, count = (int(number) for number in found.groups()) if found else (0, 0)
    if not 1 <= part <= count:
        raise pytest.UsageError(f"PART or --part is {text!r}: it must be k/n with k from 1 to n. Give for example PART=1/3")
    return part, count


def seconds_of(name: str) -> float:
    return SECONDS.get(name.split("::")[0], OTHER_SECONDS)


def parts_of(names: Sequence[str], count: int) -> list[int]:
    """The part, from 1 to `count`, of each test, given their node ids in order."""
    total = sum(map(seconds_of, names))
    found: list[int] = []
    before = 0.0
    for name in names:
        found.append(min(count, 1 + int((before + seconds_of(name) / 2) / total * count)))  # where its middle lies
        before += seconds_of(name)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default=os.environ.get("PART"), metavar="K/N", help="run the K-th of N parts of the tests (default: $PART)")


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (text := config.getoption("part")):
        return
    part, count = read_part(text)
    parts = parts_of([item.nodeid for item in items], count)
    config.hook.pytest_deselected(items=[item for item, its in zip(items, parts, strict=True) if its != part])
    items[:] = [item for item, its in zip(items, parts, strict=True) if its == part]
