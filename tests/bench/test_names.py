"""`python bench/cpu.py` puts bench/ first on the path: no file there may hide a module that Python or a library wants."""

from __future__ import annotations

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
