"""Plain `python -m pytest` with this project's settings, in environments with other plugins than `make setup` installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
# pytest-benchmark before 5.3, under `-n 2`: warns as pytest is configured.
BENCHMARK = """
import warnings, pytest
class PytestBenchmarkWarning(pytest.PytestWarning): pass
def pytest_configure():
    warnings.warn(PytestBenchmarkWarning("Benchmarks are automatically disabled because xdist plugin is active.Benchmarks cannot be"))
"""
TORCH_SAYS = "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context..."


def run_pytest(directory: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(REPOSITORY / "pyproject.toml", directory)
    (directory / "tests").mkdir()
    (directory / "tests" / "test_one.py").write_text(test)
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600, check=False)


def test_other_plugins_and_torchs_warning_about_its_own_threads_are_no_errors(tmp_path: Path) -> None:
    """With pytest-benchmark, without pytest-timeout."""
    (tmp_path / "stand_in.py").write_text(BENCHMARK)
    test = f"import warnings\ndef test_one(): warnings.warn({TORCH_SAYS!r})"
    done = run_pytest(tmp_path, test, "-p", "stand_in", "-p", "no:timeout")
    assert done.returncode == 0, done.stdout + done.stderr


def test_any_other_warning_is_an_error(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "import warnings\ndef test_one(): warnings.warn('CUDA is old')")
    assert done.returncode == 1 and "UserWarning: CUDA is old" in done.stdout, done.stdout + done.stderr
