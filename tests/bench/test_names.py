"""`python bench/cpu.py` puts bench/ first on the path: no file there may hide a module that Python or a library wants."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench.cpu

BENCH = Path(bench.cpu.__file__).parent


def test_no_benchmark_hides_a_module_of_the_standard_library():
    names = {file.stem for file in BENCH.glob("*.py")}
    assert len(names) > 10 and not names & sys.stdlib_module_names, sorted(names & sys.stdlib_module_names)


@pytest.mark.soak
def test_the_benchmark_of_the_readme_starts_as_the_readme_says():
    run = subprocess.run([sys.executable, str(BENCH / "cpu.py"), "--help"], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "--repeats" in run.stdout, (
        run.stderr
    )  # a bench/kernels.py once hid the package that transformers asks for


@pytest.mark.soak
def test_the_benchmark_of_the_readme_runs_to_its_end(tmp_path: Path):
    command = [sys.executable, str(BENCH / "cpu.py"), "--steps", "1", "--repeats", "2", "--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["tokens_per_second"]) == {"together", "one after another", "PEFT one after another"}
    assert set(found["linears_seconds"]) == {"torch", "bare", "with adapters"}
    assert "repeat 2 of 2" in run.stdout and "x PEFT" in run.stdout and "over F.linear" in run.stdout
