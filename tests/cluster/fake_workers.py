"""Workers that do nothing by themselves: they write down what they are told, and say what a test lets them say."""

from __future__ import annotations

import queue
from pathlib import Path

from tlora.cluster.reconciler import Membership
from tlora.worker_protocol import Command, Join, Joined, Leave, Left, Load, Loaded, Report


class FakeWorker:
    """Stands in for `WorkerProcess`."""

    def __init__(
        self, gpu: int, load: Load, log: Path, inbox: queue.SimpleQueue[tuple[FakeWorker, Report | None]], hold: int | None = None
    ) -> None:
        self.gpu, self.load, self._inbox = gpu, load, inbox
        self.loaded = self.stopping = self.doomed = False
        self.jobs: dict[str, Membership] = {}
        self.told: Command | None = None
        self.commands: list[Command] = []
        STARTED.append(self)

    @property
    def obeys(self) -> bool:
        return not (self.stopping or self.doomed)

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def stop(self) -> None:
        self.stopping = True

    def reap(self, timeout_seconds: float) -> None:
        self.reaped = timeout_seconds

    def how_it_ended(self) -> str:
        return f"the worker of GPU {self.gpu} was killed by signal 9"

    def say(self, *reports: Report | None) -> None:
        for report in reports:
            self._inbox.put((self, report))

    def obey(self) -> None:
        """Answer everything that it was told since the last time as a healthy worker does."""
        if not self.loaded:
            self.say(Loaded())
        for command in self.commands:
            if isinstance(command, Join):
                self.say(Joined(command.job.name, 0))
            if isinstance(command, Leave):
                self.say(Left(command.job_id, 0, None))
        self.commands.clear()

    @property
    def asked(self) -> list[str]:
        """Who was told to join (+) and to leave (-), in this order."""
        names = {Join: "+", Leave: "-"}
        return [
            names[type(command)] + (command.job.name if isinstance(command, Join) else command.job_id)
            for command in self.commands
            if isinstance(command, Join | Leave)
        ]


STARTED: list[FakeWorker] = []
