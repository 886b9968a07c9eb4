"""`tlora` as process 1, as in a container without an init: there a signal without a handler is lost, so that handlers stand at once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
PROGRAM = """
import os, sys, types
from tlora.cli import main

def app():
    os.kill(os.getpid(), {number})  # while the command imports its own modules
    os.write(1, b"goes on as process %d" % os.getpid())

sys.modules["tlora.cli.commands"] = types.SimpleNamespace(app=app)
main()
"""


def may_unshare() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="needs a PID namespace of its own")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_a_command_has_its_handlers_ends_process_1(number: signal.Signals) -> None:
    program = [*UNSHARE, sys.executable, "-c", PROGRAM.format(number=int(number))]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 128 + number)


@pytest.mark.skipif(not may_unshare(), reason="needs a PID namespace of its own")
def test_process_1_ignores_what_nohup_ignores() -> None:
    program = [*UNSHARE, "nohup", sys.executable, "-c", PROGRAM.format(number=int(signal.SIGHUP))]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (ended.stdout, ended.returncode) == ("goes on as process 1", 0)
