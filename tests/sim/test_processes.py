"""Simulations in processes: every task once, errors as they were raised, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest

from tlora.errors import CapacityError, ConfigError
from tlora.sim import sweep
from tlora.sim.sweep import TaskProgress, map_in_processes


def double(number: int) -> tuple[int, int]:
    return 2 * number, os.getpid()


def refuse(number: int) -> int:
    raise ConfigError(f"{number} is refused")


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_for_ever_but_at_0(number: int) -> int:
    if number:
        signal.pause()
    return number


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "num_cores", lambda: 2)


@pytest.mark.slow
def test_each_task_is_done_once_and_none_here(two_cores: None) -> None:
    heard: list[TaskProgress] = []
    found = dict(map_in_processes(double, [5, 6, 7], heard.append))
    assert {number: value for number, (value, _) in found.items()} == {0: 10, 1: 12, 2: 14}
    assert os.getpid() not in {process for _, process in found.values()}
    assert heard[0] == TaskProgress(3, 0, (0, 1)) and heard[-1] == TaskProgress(3, 3, ())
    assert [standing.done for standing in heard] == [0, 1, 2, 3] and all(len(standing.running) <= 2 for standing in heard)
    assert not active_children()


@pytest.mark.slow
def test_an_error_comes_as_it_was_raised(two_cores: None) -> None:
    with pytest.raises(ConfigError, match="is refused"):
        list(map_in_processes(refuse, [1, 2], lambda _: None))
    assert not active_children()


@pytest.mark.slow
def test_a_killed_process_is_told(two_cores: None) -> None:
    with pytest.raises(CapacityError, match="one of 2 processes .*killed.*taskset"):
        list(map_in_processes(die, [1, 2], lambda _: None))


@pytest.mark.slow
def test_closing_ends_what_runs(two_cores: None) -> None:
    results = map_in_processes(wait_for_ever_but_at_0, [0, 1], lambda _: None)
    assert next(results) == (0, 0)
    results.close()
    assert not active_children()


def test_workers_end_when_the_program_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nfrom tlora.sim import sweep\n"
        "def work(number):\n    os.write(1, b'at work\\n')\n    signal.pause()\n"
        "if __name__ == '__main__':\n    sweep.num_cores = lambda: 2\n"
        "    list(sweep.map_in_processes(work, [0, 1], lambda _: None))\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)] == [b"at work\n"] * 2
        program.kill()
        assert program.stdout.read() == b""  # its end comes when no process holds the pipe any more
