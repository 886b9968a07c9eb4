"""What an engine runs on each host: it starts a worker for each GPU, holds a line to each that ends with it, and reports pids and ends.

No engine is imported here. A worker that has ended is started again, later and later while it ends at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from tlora.cluster.host_engine import WorkerOrder
from tlora.cluster.worker_process import device_environment
from tlora.link.lines import Line
from tlora.link.process_identity import identify, wait_for_session
from tlora.link.supervisor import SupervisedProcess, describe_exit, start_talking

PAUSE_SECONDS = (1.0, 15.0)  # before a worker is started again
_LONG_SECONDS = 60.0  # after which a worker has not ended at once
_REMEMBERED = 64  # ends
_UNSEEN = "ended with its agent"
_MODULE = "tlora.cli.tethered_worker"


class HostAgent:
    """The methods may be called from any thread."""

    def __init__(self, host: str, failure_domain: str, gpus: Sequence[int], order: WorkerOrder) -> None:
        """`gpus`: by nvidia-smi's numbers on this host; one worker is started for each."""
        self._host, self._failure_domain, self._order = host, failure_domain, order
        self._ended: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._running: dict[int, tuple[SupervisedProcess, Line]] = {}
        self._lock, self._draining = threading.Lock(), threading.Event()
        self._left = len(gpus)  # threads
        for gpu in gpus:
            threading.Thread(target=self._keep, args=(gpu,), name=f"worker-{gpu}", daemon=True).start()

    def report(self, workers: Sequence[int] = ()) -> tuple[int, list[tuple[int, str]]]:
        """How many workers run, or are about to; pid and end, in words, of each of the last 64 that have ended, and of those of `workers`,
        pids of this host, that are no more, nor any process that they have started.
        """
        with self._lock:
            left, ended = self._left, list(self._ended)
            known = {pid for pid, _ in ended} | {process.pid for process, _ in self._running.values()}
        return left, [*ended, *((pid, _UNSEEN) for pid in workers if pid not in known and _is_gone(pid))]

    def follow(self, order: WorkerOrder) -> None:
        """Workers that start from now on obey this; those that run dial the address that they know."""
        self._order = order

    def drain(self) -> None:
        """No worker is started any more; those that run save their jobs and end."""
        self._draining.set()
        with self._lock:
            lines = [line for _, line in self._running.values()]
        for line in lines:
            line.end()

    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process, _ in self._running.values()]

    def _keep(self, gpu: int) -> None:
        pause = PAUSE_SECONDS[0]
        while not self._draining.is_set():
            began = time.monotonic()
            self._run(gpu)
            if time.monotonic() - began > _LONG_SECONDS:
                pause = PAUSE_SECONDS[0]
            self._draining.wait(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])
        with self._lock:
            self._left -= 1

    def _run(self, gpu: int) -> None:
        """One worker, from its start to its end."""
        order = self._order
        arguments = ["--connect", order.connect, "--fingerprint", order.fingerprint, "--gpus", str(gpu)]
        names = {"TLORA_WORKER_TOKEN": order.token, "TLORA_HOST": self._host, "TLORA_FAILURE_DOMAIN": self._failure_domain}
        environment = names if order.device == "cuda" else names | device_environment(order.device, "")
        with open(os.dup(2), "ab") as log:  # noqa: PTH123 # the engine keeps what its processes print
            try:
                process, line = start_talking(_MODULE, log, arguments, environment)
            except OSError as error:  # no process or file to spare now
                self._ended.append((0, f"could not be started: {error}"))
                return
        process.whole_session = True  # its ranks write files too
        with self._lock:
            self._running[gpu] = process, line
        if self._draining.is_set():
            line.end()
        process.wait()
        with self._lock:
            del self._running[gpu]
            self._ended.append((process.pid, describe_exit(process.exit_status or 0)))
        line.close()


def _is_gone(pid: int) -> bool:
    """Whether neither that process of this host is there, nor one of its session."""
    process = identify(pid)
    return (process is None or not process.is_alive) and wait_for_session(pid, time.monotonic())
