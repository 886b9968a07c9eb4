"""What an engine, or `tlora worker` of several GPUs, runs on a host: it starts as many workers as there are GPUs, of which each can have
any, holds a line to each that ends with it, and reports pids and ends.

No engine is imported here. A worker that has ended is started again, later and later while it ends at once.
"""

from __future__ import annotations

import _thread
import os
import platform
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence

from tlora.cluster.gpus import left_visible, list_gpus, see_only
from tlora.cluster.host_engine import WorkerOrder
from tlora.cluster.hosts import ANY_OF, ENDED, FAILURE_DOMAIN, HOST, PROCESS
from tlora.cluster.worker_process import device_environment
from tlora.link.endpoint import TOKEN, Endpoint
from tlora.link.lines import Line
from tlora.link.process_identity import identify, wait_for_session
from tlora.link.supervisor import SupervisedProcess, describe_exit, start_talking
from tlora.worker_protocol import REFUSED

PAUSE_SECONDS = (1.0, 15.0)  # before a worker is started again
_LONG_SECONDS = 60.0  # after which a worker has not ended at once
_TRIED_SECONDS = 3.0  # that the first worker of a command has, before the others are started, to be refused
_REMEMBERED = 64  # ends
_UNSEEN = "ended with its agent"
_MODULE = "tlora.cli.tethered_worker"


class HostAgent:
    """The methods may be called from any thread."""

    def __init__(self, host: str, failure_domain: str, gpus: Sequence[int], order: WorkerOrder, *, while_wanted: bool = False) -> None:
        """`gpus`: by nvidia-smi's numbers on this host; a worker is started for each. With `while_wanted` none is started again that was
        told to end, or once all are refused; and the first is tried alone.
        """
        self._host, self._failure_domain, self._order, self._while_wanted = host, failure_domain, order, while_wanted
        self._gpus = tuple(sorted(gpus))
        self._ended: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._over: deque[str] = deque(maxlen=_REMEMBERED)  # what those are called
        self._running: dict[int, tuple[SupervisedProcess, Line]] = {}
        self._statuses: dict[int, int] = {}  # by number, how the last has ended; of none that runs for long
        self._lock, self._draining, self._tried = threading.Lock(), threading.Event(), threading.Event()
        self._left = len(gpus)  # threads
        numbers = range(len(gpus))
        self._threads = [threading.Thread(target=self._keep, args=(number,), name=f"worker-{number}", daemon=True) for number in numbers]
        for thread in self._threads:
            thread.start()

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
        self._tried.set()
        with self._lock:
            lines = [line for _, line in self._running.values()]
        for line in lines:
            line.end()

    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process, _ in self._running.values()]

    def wait(self) -> int:
        """Until no worker runs, nor is started any more. The exit status of a command: the least of the last ones."""
        for thread in self._threads:
            thread.join()
        return min(self._statuses.values(), default=0)

    def _keep(self, number: int) -> None:
        pause = PAUSE_SECONDS[0]
        if self._while_wanted and number:
            self._tried.wait()
        while not self._draining.is_set():
            began = time.monotonic()
            self._run(number)
            if self._while_wanted and self._is_over(number):
                break
            self._tried.set()
            if time.monotonic() - began > _LONG_SECONDS:
                pause = PAUSE_SECONDS[0]
            self._draining.wait(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])
        self._tried.set()
        with self._lock:
            self._left -= 1

    def _is_over(self, number: int) -> bool:
        """Whether it is not to be started again. Where all are refused, none is."""
        with self._lock:
            last, statuses = self._statuses.get(number), list(self._statuses.values())
        if last == REFUSED and (len(statuses) == len(self._gpus) or not self._tried.is_set()) and set(statuses) <= {0, REFUSED}:
            self._draining.set()
        return last == 0

    def _run(self, number: int) -> None:
        """One worker, from its start to its end."""
        order = self._order
        arguments = ["--connect", order.connect, "--fingerprint", order.fingerprint]
        called = uuid.uuid4().hex
        names = {TOKEN: order.token, HOST: self._host, FAILURE_DOMAIN: self._failure_domain}
        with self._lock:
            names |= {ANY_OF: ",".join(map(str, self._gpus)), PROCESS: called, ENDED: ",".join(self._over)}
        environment = names if order.device == "cuda" else names | device_environment(order.device, "")
        with open(os.dup(2), "ab") as log:  # noqa: PTH123 # the engine keeps what its processes print
            try:
                process, line = start_talking(_MODULE, log, arguments, environment)
            except OSError as error:  # no process or file to spare now
                self._ended.append((0, f"could not be started: {error}"))
                return
        process.whole_session = True  # its ranks write files too
        with self._lock:
            self._running[number] = process, line
        if self._draining.is_set():
            line.end()
        if not process.wait(_TRIED_SECONDS):
            self._tried.set()
            with self._lock:
                self._statuses.pop(number, None)
        process.wait()
        with self._lock:
            del self._running[number]
            self._statuses[number] = status = process.exit_status or 0
            self._ended.append((process.pid, describe_exit(status)))
            self._over.append(called)
        line.close()


def keep_workers(endpoint: Endpoint, gpus: tuple[int, ...]) -> int:
    """`tlora worker` of several GPUs of this host: until the controller wants no worker more, refuses them, or a signal comes, at which
    they save their jobs. Returns the exit status. Raises ConfigError for GPUs that CUDA_VISIBLE_DEVICES hides.
    """
    device = "cpu" if left_visible() == () or not list_gpus() else "cuda"
    if device == "cuda":
        see_only(gpus)
    order = WorkerOrder(endpoint.address, endpoint.fingerprint, endpoint.token, device)
    host, failure_domain = os.environ.get(HOST) or platform.node(), os.environ.get(FAILURE_DOMAIN, "")
    received: list[int] = []
    agent = HostAgent(host, failure_domain, gpus, order, while_wanted=True)

    def on_signal(number: int, _: object) -> None:
        received.append(number)
        _thread.start_new_thread(agent.drain, ())  # what was interrupted may hold a lock

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, on_signal)
    status = agent.wait()
    return 128 + received[0] if received else status


def _is_gone(pid: int) -> bool:
    """Whether neither that process of this host is there, nor one of its session."""
    process = identify(pid)
    return (process is None or not process.is_alive) and wait_for_session(pid, time.monotonic())
