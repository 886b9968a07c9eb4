"""What a process says when it is asked where it stands."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

CODE = """
import threading
from tlora.link.log import show_stacks_when_asked

def hangs(say_so):
    say_so()
    threading.Event().wait()

show_stacks_when_asked()
other = threading.Event()
threading.Thread(target=hangs, args=(other.set,), daemon=True).start()
other.wait()
hangs(lambda: print("ready", flush=True))
"""


OTHERS = """
import os, subprocess, sys, time
from tlora.link.log import show_stacks_when_asked
code = "import time; from tlora.link.log import show_stacks_when_asked as show; show(); print('ready', flush=True); time.sleep(3600)"
show_stacks_when_asked()
other = subprocess.Popen([sys.executable, "-c", code])
show_stacks_when_asked(lambda: [other.pid])
time.sleep(3600)
"""


def test_the_stacks_of_others_come_too() -> None:
    with subprocess.Popen([sys.executable, "-c", OTHERS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        current = 0
        while current < 2:
            current += "Current thread" in process.stderr.readline()
        (other,) = psutil.Process(process.pid).children()
        assert process.poll() is None and other.is_running()
        other.kill()
        process.kill()


def test_the_stacks_of_all_threads_come_at_a_signal_and_the_process_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        lines = [process.stderr.readline()]
        while "<module>" not in lines[-1]:
            lines.append(process.stderr.readline())
        assert process.poll() is None
        process.kill()
    assert sum("in hangs" in line for line in lines) == 2 and any("Current thread" in line for line in lines)
