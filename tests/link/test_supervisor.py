"""A process that is started, spoken to, watched and ended, with processes that are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tlora.link.process_identity import identify
from tlora.link.supervisor import SupervisedProcess, describe_exit, start_process, start_talking

ECHO = """
import sys
from tlora.link.supervisor import line_to_parent
line = line_to_parent()
print("a library's word", flush=True)
assert sys.stdin.read() == ""
for received in line.lines():
    line.send(received.upper())
print("the other end is gone", flush=True)
"""
SECRET = """
import sys
print("heard", sys.stdin.read(), flush=True)
raise SystemExit(3)
"""
SLEEPS = "import time\nprint('sleeps', flush=True)\ntime.sleep(3600)\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in {"echoes": ECHO, "hears": SECRET, "sleeps": SLEEPS}.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))


def until_it_sleeps(log: Path) -> None:
    while not log.exists() or "sleeps" not in log.read_text():
        pass


def test_a_secret_is_read_and_not_shown_and_the_log_explains_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_process("hears", log, ("--quiet",), {"MARK": "1"}, "tlw-secret")
    assert process.identity is not None and "tlw-secret" not in str(process.identity)
    assert process.wait(600.0) and process.exit_status == 3 and process.has_ended
    assert process.how_it_ended() == f"ended with exit status 3; its log, {log}, ends with 'heard tlw-secret'"
    assert process.why_lost() == process.how_it_ended()


def test_a_line_to_a_child_carries_lines_alone_and_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process, line = start_talking("echoes", log)
    line.send(b"one\n")
    line.send(b"two\n")
    assert [line.read_line(600.0), line.read_line(600.0)] == [b"ONE\n", b"TWO\n"]
    line.end()
    assert process.wait(600.0) and process.exit_status == 0
    assert log.read_text().splitlines() == ["a library's word", "the other end is gone"]
    line.close()


def test_a_killed_child_ends_its_line(tmp_path: Path) -> None:
    process, line = start_talking("echoes", tmp_path / "log")
    process.kill()
    assert line.read_line(600.0) is None and process.exit_status == -signal.SIGKILL
    line.send(b"nobody hears it\n")
    line.close()


def test_a_child_that_is_stopped_for_several_looks_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_process("sleeps", log)
    until_it_sleeps(log)
    assert process.how_it_ended() == "has not ended" and not process.wait(0.0)
    os.kill(process.pid, signal.SIGSTOP)
    while not process.is_stopped:
        pass
    assert [process.why_lost() for _ in range(5)] == ["", "", "", "", "was stopped for 5 s"]
    os.kill(process.pid, signal.SIGCONT)
    while process.is_stopped:
        pass
    assert process.why_lost() == ""
    process.kill()
    assert process.how_it_ended() == f"was killed by signal 9 (SIGKILL); its log, {log}, ends with 'sleeps'"


def test_a_process_of_somebody_else_is_known_by_its_identity(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as child:
        found = SupervisedProcess(identify(child.pid))
        assert found.pid == child.pid and not found.has_ended and not found.wait(0.0)
        found.kill()  # a zombie, which this test has not waited for, has ended
        assert found.has_ended and found.exit_status is None
        assert found.how_it_ended() == "has ended; its launcher knows how" and found.last_line() == ""
    assert SupervisedProcess(None).has_ended and SupervisedProcess(None).wait(0.0) and SupervisedProcess(None).pid == 0


def test_a_program_that_cannot_be_started_leaves_no_line_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(FileNotFoundError):
        start_talking("echoes", tmp_path / "log")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize(("mode", "ends_with"), [("w+b", "; its log, {}, ends with 'sleeps'"), ("wb", "")])
def test_how_it_ended_writes_over_nothing_in_a_log_that_several_share(mode: str, ends_with: str, tmp_path: Path) -> None:
    """As stderr is, where a user has it in a file: one place to write for all, which only reading it may not move."""
    with (tmp_path / "log").open(mode, 0) as log:
        log.write(b"first\n")
        process = start_process("sleeps", log)
        until_it_sleeps(tmp_path / "log")
        process.kill()
        assert process.how_it_ended() == "was killed by signal 9 (SIGKILL)" + ends_with.format(log)
        log.write(b"last\n")
    assert (tmp_path / "log").read_text() == "first\nsleeps\nlast\n"


def test_an_end_for_a_person() -> None:
    assert describe_exit(0) == "ended with exit status 0" and describe_exit(-9) == "was killed by signal 9 (SIGKILL)"
    assert describe_exit(-40) == "was killed by signal 40"
