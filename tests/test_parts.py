"""Parts of the tests: each test is in exactly one, and the GPU's take about the same time each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts import SECONDS, WORKERS, parts_of, read_part, seconds_of

REPOSITORY = Path(__file__).parent.parent
PRETENDED_GPU = """
from types import SimpleNamespace

import bitsandbytes, torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
H100 = {"name": "NVIDIA H100 80GB HBM3", "total_memory": 85_000_000_000, "multi_processor_count": 132}
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(shared_memory_per_block_optin=232448, **H100)
torch.cuda.get_device_name = lambda *_: H100["name"]
"""


def collect(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", *options]
    given = {key: value for key, value in os.environ.items() if key != "PART"}
    given |= {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    return subprocess.run(command, cwd=directory, env=given, capture_output=True, text=True, timeout=500, check=False)


def names_in(collected: subprocess.CompletedProcess[str]) -> list[str]:
    assert collected.returncode == 0, collected.stdout + collected.stderr
    return [line for line in collected.stdout.splitlines() if "::" in line]


@given(st.lists(st.sampled_from([*SECONDS, "tests/other.py"]), max_size=200), st.integers(1, 9))
def test_parts_are_stretches_alike_in_time(files: list[str], count: int) -> None:
    names = [f"{file}::test_{i}" for i, file in enumerate(files)]
    parts = parts_of(names, count)
    assert parts == sorted(parts) and set(parts) <= set(range(1, count + 1))
    share = sum(map(seconds_of, names)) / count
    for part in range(1, count + 1):
        assert abs(sum(seconds_of(name) for name, its in zip(names, parts, strict=True) if its == part) - share) <= max(SECONDS.values())


@pytest.mark.parametrize("part", ["0/3", "4/3", "x", "1", "1/0", "1/3/3", "-1/3", "²/3", ""])
def test_a_part_that_there_is_not_is_one_clear_error(part: str) -> None:
    with pytest.raises(pytest.UsageError) as told:
        read_part(part)
    assert str(told.value) == f"PART or --part is {part!r}: it must be k/n with k from 1 to n. Give for example PART=1/3"


@pytest.mark.soak
def test_the_gpus_own_tests_in_three_parts(tmp_path: Path) -> None:
    """As they are collected where there is a GPU, which is only pretended: bitsandbytes, which reads more of one, is imported before."""
    (tmp_path / "pretended_gpu.py").write_text(PRETENDED_GPU)
    path = f"{REPOSITORY}{os.pathsep}{tmp_path}"
    names = names_in(collect(REPOSITORY, "-m", "gpu", "-p", "pretended_gpu", PYTHONPATH=path))
    assert set(SECONDS) <= {name.split("::")[0] for name in names}
    parts = parts_of(names, 3)
    seconds = [sum(seconds_of(name) for name, its in zip(names, parts, strict=True) if its == part) for part in (1, 2, 3)]
    assert max(seconds) / WORKERS <= 480, f"more than 8 minutes by the estimate: {seconds}"
