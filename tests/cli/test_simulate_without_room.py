"""What `tlora simulate` does where its files find no room, or its streams are closed or full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.small_traces import write_trace
from tlora.scheduler.policies import POLICIES


@pytest.mark.slow
def test_results_that_find_no_room_leave_the_old_ones(tmp_path: Path) -> None:
    write_trace(tmp_path)
    (tmp_path / "metrics.csv").write_text("old")
    (tmp_path / "rows.csv").touch()
    simulate = f"ulimit -f 2; exec {sys.executable} -B -m tlora simulate --trace small.csv --policy {','.join(POLICIES)} --quiet"
    for options, told in (
        ("--csv .", "error: metrics.csv cannot be written (File too large). Free space or change its mode there, or give another path\n"),
        ("--sweep load=0.5 --out rows.csv", "and run the same command again: it goes on from the rows that it has\n"),
    ):
        done = subprocess.run(["bash", "-c", f"{simulate} {options}"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.endswith(told) and "--resume" not in done.stderr
    rows = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    assert (tmp_path / "metrics.csv").read_text() == "old" and 0 < len(rows) < len(POLICIES)
    assert {path.name for path in tmp_path.iterdir()} == {"small.csv", "metrics.csv", "rows.csv"}


@pytest.mark.parametrize(
    "shell, facts",
    [
        (">/dev/full", ("stdout", "No space left on device", "Free space")),
        (">&-", ("stdout is closed", "/dev/null")),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_stdout_that_takes_nothing_is_one_message(tmp_path: Path, shell: str, facts: tuple[str, ...], unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = f"{sys.executable} -m tlora simulate --trace {write_trace(tmp_path)} --policy fifo --quiet {shell}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert all(fact in done.stderr for fact in facts)


def test_a_stderr_that_is_closed_costs_its_lines_only(tmp_path: Path) -> None:
    command = f"{sys.executable} -m tlora simulate --trace {write_trace(tmp_path)} --policy fifo 2>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "4 jobs of" in done.stdout
