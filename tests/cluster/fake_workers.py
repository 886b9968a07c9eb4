"""Workers that train nothing: each is the worker's own settler behind what the controller knows of it, and says what a test lets it say."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora.cluster.engine_hosts import OpenKeeper
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.remote_hosts import RemoteHosts
from tlora.cluster.remote_worker import RemoteWorker
from tlora.cluster.session import Inbox
from tlora.engine.messages import Command, Leave, SetGpus, SetPlan, Stop
from tlora.engine.worker_reconciler import WorkerReconciler
from tlora.worker_protocol import (
    Ack,
    DesiredState,
    Ending,
    Envelope,
    FromController,
    GpusChanged,
    Hello,
    Join,
    Joined,
    Left,
    Load,
    Loaded,
    Report,
)


class FakeProcess:
    pid, is_stopped, exit_status, identity = 4711, False, -9, None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return True

    def kill(self, timeout_seconds: float | None = None) -> None:
        pass

    def how_it_ended(self) -> str:
        return "was killed by signal 9"


class FakeWorker:
    """`commands` are those that its trainer would be told and has not answered."""

    def __init__(self, remote: RemoteWorker, inbox: queue.SimpleQueue[Any] | Inbox[Any], incarnation: str = "") -> None:
        self.remote, self._inbox = remote, inbox
        self.worker_reconciler = WorkerReconciler(remote.gpus)
        self.commands: list[Command] = []
        self.taken = self._seq = 0
        remote.attach(Hello(incarnation or f"incarnation of {id(self)}", remote.gpus, {}), self.hear)
        STARTED.append(self)

    @property
    def gpu(self) -> int:
        return self.remote.gpu

    @property
    def load(self) -> Load:
        assert self.remote.load is not None
        return self.remote.load

    @property
    def stopping(self) -> bool:
        return self.remote.stopping

    def hear(self, message: FromController) -> None:
        if isinstance(message, Ack):
            self.taken = message.seq
        if isinstance(message, DesiredState):
            self.worker_reconciler.hear_want(message)
        self._go_on()

    def say(self, *reports: Report | None) -> None:
        """Reports of its trainer, with what the settler says to that; None: its process has ended."""
        for report in reports:
            if report is None:
                self._inbox.put((self.remote, None))
            elif isinstance(report, Ending):
                self._tell(report)
            else:
                self.worker_reconciler.hear_report(report)
                self._go_on()

    def _go_on(self) -> None:
        for report in self.worker_reconciler.reports:
            self._tell(report)
        self.worker_reconciler.reports.clear()
        self.commands += self.worker_reconciler.commands
        self.worker_reconciler.commands.clear()

    def _tell(self, report: Report) -> None:
        self._seq += 1
        self._inbox.put((self.remote, Envelope(self._seq, 0, report)))

    def obey(self) -> None:
        """Answer everything that it was told since the last time as a healthy worker does."""
        if not self.worker_reconciler.loaded:
            self.say(Loaded())
        told, self.commands = self.commands, []
        for command in told:
            if isinstance(command, Join):
                self.say(Joined(command.job.name, 0))
            if isinstance(command, Leave):
                self.say(Left(command.job_id, 0, None))
            if isinstance(command, SetGpus):
                self.say(GpusChanged(command.gpus, order=command.order))

    @property
    def asked(self) -> list[str]:
        """Who was told to join (+) and to leave (-), in this order."""
        names = {Join: "+", Leave: "-"}
        return [
            names[type(command)] + (command.job.name if isinstance(command, Join) else command.job_id)
            for command in self.commands
            if isinstance(command, Join | Leave)
        ]

    @property
    def changes(self) -> list[tuple[int, ...]]:
        """The GPUs that it was told to have, and has not answered for."""
        return [command.gpus for command in self.commands if isinstance(command, SetGpus)]

    @property
    def shares(self) -> list[SetPlan]:
        return [command for command in self.commands if isinstance(command, SetPlan)]


class FakeCrew:
    """Stands in for `WorkerPool`."""

    address = "unix:/nowhere"

    @classmethod
    def read_records(cls, directory: Path) -> dict[tuple[int, ...], Any]:
        return {}

    def __init__(self, directory: Path, epoch: int, loads: Any, gpus: tuple[int, ...], limits: Any, note: Any) -> None:
        self._epoch, self._loads = epoch, loads
        self.workers: dict[int, RemoteWorker] = {}
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.remote_hosts = RemoteHosts(directory, gpus, 180.0, lambda: "cpu", note)

    def find(self, records: Any) -> None:
        pass

    def listen_on(self, listener: Any) -> None:
        pass

    def start(self, gpus: tuple[int, ...], base_model: str) -> RemoteWorker:
        if (bound := self.bind(gpus)) is not None:
            return bound
        worker = self.workers[gpus[0]] = RemoteWorker(gpus, self._loads(base_model), FakeProcess(), self._epoch)
        FakeWorker(worker, self.inbox)
        return worker

    def bind(self, gpus: tuple[int, ...]) -> RemoteWorker | None:
        worker = self.remote_hosts.take_spare(gpus)
        if worker is not None:
            self.workers[worker.gpu] = worker
        return worker

    def record(self, worker: RemoteWorker, before: tuple[int, ...]) -> None:
        pass

    def wake(self) -> None:
        self.inbox.put(None)

    def listen(self, timeout_seconds: float) -> list[tuple[RemoteWorker, Report | None]]:
        found: list[tuple[RemoteWorker, Report | None]] = []
        try:
            heard = self.inbox.get(timeout=timeout_seconds)
            while True:
                if heard is not None:
                    worker, said = heard
                    if said is None:
                        found.append((worker, None))
                    elif (report := worker.take(said)) is not None:
                        found.append((worker, report))
                heard = self.inbox.get_nowait()
        except queue.Empty:
            return found

    def acknowledge(self) -> None:
        for worker in self.workers.values():
            worker.acknowledge()

    def abandon(self) -> None:
        pass

    def close(self, stop_seconds: float) -> None:
        for worker in self.workers.values():
            worker.stop()
        self.workers.clear()


def local_backend(
    directory: Path,
    pool: type[Any] = FakeCrew,
    note: Callable[[str], None] = lambda _: None,
    open_keeper: OpenKeeper | None = None,
    listener: Any = None,
    **changes: Any,
) -> LocalBackend:
    """Of two GPUs, two bases and workers that do nothing by themselves; no tick comes between. With any `listener` other hosts may come."""
    machine = LocalMachine((0, 1), "cpu", {"base": "models/base", "other": "models/other"}, directory, tick_seconds=1e6)
    return LocalBackend(replace(machine, **changes), note, listener, pool=pool, open_keeper=open_keeper)


STARTED: list[FakeWorker] = []
__all__ = ["STARTED", "FakeCrew", "FakeWorker", "Stop", "local_backend"]
