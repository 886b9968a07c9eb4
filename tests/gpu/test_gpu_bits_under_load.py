"""Bits do not depend on who else computes on the GPU: processes that take it from each other in the middle of kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
_RUNS = 40
_PROCESSES = [("gemma3", "graphs"), ("gemma3", "hooks"), ("llama-tied", "graphs"), ("gemma3", "graphs")]


@pytest.mark.timeout(900)
def test_together_is_alone_while_others_compute() -> None:
    commands = [
        [sys.executable, "-m", "tests.gpu.bits_under_load", family, how, str(_RUNS), str(seed)]
        for seed, (family, how) in enumerate(_PROCESSES)
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(told)
    assert all(f"{_RUNS} runs, 0 differences" in text for text in told), told
