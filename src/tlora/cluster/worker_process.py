"""A worker's process as its controller has it: started here, or found running; watched, and ended for good."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tlora import durable
from tlora.cluster.remote_worker import called
from tlora.errors import CheckpointError
from tlora.json_file import read_object
from tlora.link.process_identity import ProcessIdentity, identify, wait_for_session
from tlora.sharing.multicast import NO_MULTICAST
from tlora.worker_protocol import REFUSED

_TAIL_BYTES = 2000
_GONE_SECONDS = 60.0  # for the kernel to end a process that was killed


class WorkerProcess:
    """`child` is this process' own; one that an earlier controller or a person has started is known by its identity alone."""

    def __init__(
        self, gpus: tuple[int, ...], log: Path, identity: ProcessIdentity | None, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._gpus, self._log, self._identity, self._child = gpus, log, identity, child

    @property
    def pid(self) -> int:
        if self._child is not None:
            return self._child.pid
        return self._identity.pid if self._identity is not None else 0

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger."""
        return self._identity is not None and self._identity.is_stopped

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether it has ended within so many seconds (None: however long it takes)."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_seconds)
            ended = self._child.returncode is not None
        else:
            ended = self._identity is None or self._identity.wait(timeout_seconds)
        return ended and (len(self._gpus) == 1 or wait_for_session(self.pid, deadline))

    def kill(self) -> None:
        """It writes nothing from then on."""
        if self._child is not None:
            self._child.kill()
        elif self._identity is not None:
            self._identity.kill()
        self.wait(_GONE_SECONDS)

    @property
    def was_refused(self) -> bool:
        """It has ended because its controller did not want it (`engine.worker.run`). Of a child of this process alone is that known."""
        return self._child is not None and self._child.returncode == REFUSED

    def how_it_ended(self) -> str:
        """For a person: signal or exit status, where they are known, and the last line of its log."""
        code = self._child.wait() if self._child is not None else None
        ended = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return f"the worker of {called(self._gpus)} {ended}; its log, {self._log}, ends with {self._last_line()!r}"

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""


def launch(gpus: tuple[int, ...], device: str, address: str, log: Path) -> WorkerProcess:
    """A new process, which dials `address`; `log` gets what it and its libraries print."""
    numbers = ",".join(map(str, gpus))
    with log.open("ab") as output:
        # -P: without it a user's queue.py in the current directory would be run; a session of its own: Ctrl-C is the parent's
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tlora.engine.worker", "--connect", address, "--gpus", numbers],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | NO_MULTICAST | _device_environment(device, numbers),
            start_new_session=True,
        )
    return WorkerProcess(gpus, log, identify(child.pid), child)


def file_stem(gpus: tuple[int, ...]) -> str:
    """Of the files of the worker that has these GPUs: gpu0, gpu0-1."""
    return f"gpu{'-'.join(map(str, gpus))}"


def write_record(directory: Path, gpus: tuple[int, ...], identity: ProcessIdentity | None) -> None:
    """So that the next controller of this store knows the worker of those GPUs. A full disk costs its adoption, and no more."""
    if identity is not None:
        with contextlib.suppress(CheckpointError):
            durable.write_file(directory / f"{file_stem(gpus)}.json", json.dumps(asdict(identity)) + "\n")


def read_records(directory: Path) -> dict[tuple[int, ...], ProcessIdentity]:
    """GPUs -> the worker that an earlier controller had there, where it is still alive."""
    found: dict[tuple[int, ...], ProcessIdentity] = {}
    for path in directory.glob("gpu*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            identity = ProcessIdentity(**read_object(path))
            if identity.is_alive:
                found[tuple(map(int, path.stem.removeprefix("gpu").split("-")))] = identity
    return found


def _device_environment(device: str, numbers: str) -> dict[str, str]:
    """A worker sees its own GPUs alone; on a CPU each rank of it is one thread, so that several are like GPUs of their own."""
    if device == "cuda":
        return {"CUDA_VISIBLE_DEVICES": numbers}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
