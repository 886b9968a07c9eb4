"""One worker's process as its back end sees it: started, spoken to, listened to, ended. What it is told is the reconciler's to decide."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from tlora.cluster.reconciler import Membership
from tlora.worker_protocol import Command, Load, Report, Stop, command_line, parse_report

Message = tuple["WorkerProcess", Report | None] | None
"""A worker and its report; without a report it has ended, and this is its last. None wakes the one who waits."""

_TAIL_BYTES = 2000


class WorkerProcess:
    """A worker for one GPU. `jobs` are those that were told to join and have neither left nor ended."""

    def __init__(self, gpu: int, load: Load, log: Path, inbox: queue.SimpleQueue[Message], hold: int | None = None) -> None:
        """`inbox` gets what it reports, from a thread that waits for it; `log` what it says beside. `hold` is an open file whose lock it
        shares: it is held until the process has ended, whoever else lets it go.
        """
        self.gpu, self.load, self._log = gpu, load, log
        self.loaded = self.stopping = False
        self.doomed = False  # it lets jobs go by itself: it was told to end, and not by us
        self.jobs: dict[str, Membership] = {}
        self.told: Command | None = None  # the last Share
        with log.open("ab") as stderr:
            # -P: without it a user's queue.py in the current directory would be run; a session of its own: Ctrl-C is the parent's
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tlora.engine.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | _device_environment(load.device, gpu),
                start_new_session=True,
                pass_fds=() if hold is None else (hold,),
            )
        assert self.process.stdin and self.process.stdout
        self._stdin = self.process.stdin
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout, inbox), daemon=True)
        self._reader.start()
        self.send(load)

    @property
    def obeys(self) -> bool:
        """Whether there is a point in telling it something."""
        return not (self.stopping or self.doomed)

    def send(self, command: Command) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: the reader tells
            self._stdin.write(command_line(command))
            self._stdin.flush()

    def stop(self) -> None:
        """Ask it to checkpoint its jobs and to exit."""
        if not self.stopping:
            self.stopping = True
            self.send(Stop())

    def reap(self, timeout_seconds: float) -> None:
        """Wait for its end, and bring it about after `timeout_seconds`."""
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def how_it_ended(self) -> str:
        """For a person: signal or exit status, and the last line of its log."""
        code = self.process.wait()
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return f"the worker of GPU {self.gpu} {ended}; its log, {self._log}, ends with {self._last_line()!r}"

    def _last_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _read(self, stdout: IO[bytes], inbox: queue.SimpleQueue[Message]) -> None:
        with stdout:
            for line in stdout:
                if line.endswith(b"\n"):  # a torn line is its last
                    inbox.put((self, parse_report(line)))
        inbox.put((self, None))


def _device_environment(device: str, gpu: int) -> dict[str, str]:
    """A GPU sees itself alone; a CPU's worker is one thread, so that several are like GPUs of their own."""
    if device == "cuda":
        return {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
