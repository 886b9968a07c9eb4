"""Workers that train nothing: one process has those of some hosts, each with a connection of its own to the controller.

    python -m bench.scale_workers STORE JOBS FIRST HOSTS RACK

Each is the worker's own reconciler and outbox over the real protocol; only the trainer is made up: a job's step takes what its tokens
take at `TOKENS_PER_SECOND`, with the others on the same GPU in turn. HOSTS are the numbers of the first and the last host, RACK so many
of which fail as one. FIRST is the first worker's number. What a disk would keep of the jobs lies in STORE: steps at the last checkpoint,
ends, and who writes.
"""

from __future__ import annotations

import heapq
import itertools
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from tlora.engine.messages import Leave, SetGpus, Stop
from tlora.engine.worker_reconciler import WorkerReconciler
from tlora.link.address import connect, resolve
from tlora.link.dialer import BEAT_SECONDS
from tlora.link.outbox import Outbox
from tlora.link.versions import versions
from tlora.shape import CPU_SHARE
from tlora.worker_protocol import (
    Ack,
    Alive,
    DesiredState,
    Device,
    Finished,
    FromWorker,
    GpusChanged,
    Hello,
    HostLabels,
    Join,
    Joined,
    Left,
    Load,
    Loaded,
    Refusal,
    Report,
    Stepped,
    parse_controller_line,
    worker_line,
)

TOKENS_PER_SECOND = 11_000.0  # an 8B's on an H200, in steps of so many tokens
LOAD_SECONDS, JOIN_SECONDS = 2.0, 0.5
CHECKPOINT_STEPS = 5
GPUS_PER_HOST, GPU_BYTES = 8, 141e9
_DIAL_SECONDS = 0.5


def host_name(number: int) -> str:
    return f"h{number}"


def job_name(number: int) -> str:
    return f"j{number:05d}"


def work_of(number: int) -> tuple[int, int]:
    """Tokens per step, and steps, of a job."""
    chance = random.Random(number)
    return chance.choice([16_384, 32_768, 65_536]), chance.randrange(100, 400)


class Disk:
    """What outlives a worker: of each job the steps at its last checkpoint, how often it has ended, and the worker that writes."""

    def __init__(self, directory: Path, jobs: int) -> None:
        def array(name: str) -> np.ndarray:
            path = directory / name
            if not path.exists():
                np.zeros(jobs, np.int64).tofile(path)
            return np.memmap(path, np.int64, "r+", shape=(jobs,))

        self.steps, self.ends, self.writer = array("steps"), array("ends"), array("writer")


class FakeWorker:
    """The worker of one GPU of a host."""

    def __init__(self, fleet: Fleet, host: HostLabels, gpus: tuple[int, ...]) -> None:
        self._fleet, self._host, self._gpus = fleet, host, gpus
        self._number = next(fleet.numbers)
        self._reconciler, self._outbox = WorkerReconciler(gpus), Outbox()
        self._load: Load | None = None
        self._steps: dict[str, int] = {}
        self._joining: set[str] = set()
        self._line: socket.socket | None = None
        self._received = bytearray()
        self._answered = self._over = False
        self._count = 0
        fleet.later(_DIAL_SECONDS * random.random(), self._dial)
        fleet.later(BEAT_SECONDS * random.random(), self._beat)

    # -- the line ------------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self._over:
            return
        try:
            self._line = connect(self._fleet.address)
        except OSError:
            self._fleet.later(_DIAL_SECONDS * (1 + random.random()), self._dial)
            return
        self._fleet.watch(self._line, self._read)
        self._answered = False
        want = self._reconciler.want
        held = self._reconciler.held
        ends = [end for end in self._outbox.ends() if all(end.job_id != one.job_id for one in held)]
        given = (want.group, want.epoch, want.generation) if want is not None else (None, 0, 0)
        name, known = f"{self._host.name}-{self._number}", self._fleet.versions
        hello = Hello(name, self._reconciler.claimed, known, self._load, self._reconciler.loaded, given[0], (*held, *ends), *given[1:])
        self._send(replace(hello, last_seq=self._outbox.last_taken, host=self._host))

    def _send(self, message: FromWorker) -> None:
        if self._line is not None:
            try:
                self._line.sendall(worker_line(message))
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._fleet.forget(self._line)
            self._line.close()
            self._line = None
            self._received.clear()
            self._fleet.later(_DIAL_SECONDS * random.random(), self._dial)

    def _read(self) -> None:
        assert self._line is not None
        try:
            chunk = self._line.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._hang_up()
            return
        self._received += chunk
        while (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[: end + 1])
            del self._received[: end + 1]
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        message = parse_controller_line(line)
        if isinstance(message, Refusal):
            raise SystemExit(f"{self._gpus} is refused: {message.reason}")
        if isinstance(message, Ack):
            self._outbox.taken(message.seq)
        elif isinstance(message, DesiredState):
            self._reconciler.hear_want(message)
            if self._load is None and message.load.base_model and not message.stop:
                self._load = message.load
                self._fleet.later(LOAD_SECONDS, self._report, Loaded())
        if not self._answered:
            self._answered = True
            for said in self._outbox.again():
                self._send(said)
        self._obey()

    def _beat(self) -> None:
        if self._over:
            return
        want = self._reconciler.want
        phase = "training" if self._steps else "waiting"
        generation = want.generation if want is not None else 0
        self._send(Alive(generation, phase, self._count, tuple(self._steps), said_seconds=time.monotonic()))
        self._fleet.later(BEAT_SECONDS, self._beat)

    def _report(self, report: Report) -> None:
        self._reconciler.hear_report(report)
        self._obey()

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        while self._reconciler.commands:
            command = self._reconciler.commands.pop(0)
            if isinstance(command, Join):
                self._joining.add(command.job.name)
                self._fleet.later(JOIN_SECONDS, self._join, command.job.name, command.attempt)
            elif isinstance(command, Leave):
                self._let_go(command.job_id)
            elif isinstance(command, SetGpus):
                self._reconciler.hear_report(GpusChanged(self._gpus, "it cannot have others", True, command.order))
            elif isinstance(command, Stop):
                for name in [*self._joining, *self._steps]:
                    self._let_go(name)
                self._over = True
        for report in self._reconciler.reports:
            self._outbox.put(report, self._reconciler.want.generation if self._reconciler.want is not None else 0)
        self._reconciler.reports.clear()
        if self._answered and self._line is not None:
            for said in self._outbox.fresh():
                self._send(said)
        if self._over:
            self._hang_up()

    def _let_go(self, name: str) -> None:
        disk = self._fleet.disk
        if name in self._joining:
            self._joining.remove(name)
        else:
            disk.steps[number_of(name)] = self._steps.pop(name)
            disk.writer[number_of(name)] = 0
        self._reconciler.hear_report(Left(name, int(disk.steps[number_of(name)]), None))

    def _join(self, name: str, attempt: int) -> None:
        if name not in self._joining or self._over:
            return
        self._joining.remove(name)
        disk, number = self._fleet.disk, number_of(name)
        writer = int(disk.writer[number])
        if writer and self._fleet.is_alive(writer):
            raise SystemExit(f"{name} joins worker {self._number} as attempt {attempt}, and worker {writer} writes it")
        disk.writer[number], self._steps[name] = self._number, int(disk.steps[number])
        self._report(Joined(name, self._steps[name]))
        self._fleet.later(self._step_seconds(name), self._step, name, attempt)

    def _step_seconds(self, name: str) -> float:
        return work_of(number_of(name))[0] / TOKENS_PER_SECOND / len(self._gpus) * max(1, len(self._steps))

    def _step(self, name: str, attempt: int) -> None:
        held = next((held for held in self._reconciler.held if held.job_id == name), None)
        if self._over or name not in self._steps or held is None or held.attempt != attempt:
            return
        disk, number = self._fleet.disk, number_of(name)
        self._steps[name] += 1
        self._count += 1
        seconds = self._step_seconds(name)
        if self._steps[name] % CHECKPOINT_STEPS == 0:
            disk.steps[number] = self._steps[name]
        self._report(Stepped(name, self._steps[name], seconds))
        if self._steps[name] < work_of(number)[1]:
            self._fleet.later(seconds, self._step, name, attempt)
            return
        disk.steps[number] = self._steps.pop(name)
        disk.writer[number] = 0
        disk.ends[number] += 1
        self._report(Finished(name, {}))


class Fleet:
    """The workers of one process, and its clock."""

    def __init__(self, store: Path, jobs: int, first: int, hosts: range, hosts_per_rack: int) -> None:
        """`first`: the number of its first worker; those of other processes lie elsewhere."""
        self.address, self.disk, self.versions = resolve(str(store)), Disk(store, jobs), versions()
        self.numbers = itertools.count(first)
        self._first = first
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._serial = itertools.count()
        device = Device("cpu", int(GPU_BYTES / CPU_SHARE))
        labels = [HostLabels(host_name(host), f"r{host // hosts_per_rack}", "of no kernel", (device,)) for host in hosts]
        self._workers = [FakeWorker(self, host, (gpu,)) for host in labels for gpu in range(GPUS_PER_HOST)]

    def watch(self, what: socket.socket, read: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, read)

    def forget(self, what: socket.socket) -> None:
        self._selector.unregister(what)

    def later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._serial), call, arguments))

    def is_alive(self, worker: int) -> bool:
        """Whether a worker of this process has that number: those of a process that was killed write no more."""
        return self._first <= worker < self._first + len(self._workers)

    def run(self) -> None:
        while True:
            left = self._timers[0][0] - time.monotonic() if self._timers else None
            for key, _ in self._selector.select(None if left is None else max(0.0, left)):
                key.data()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                _, _, call, arguments = heapq.heappop(self._timers)
                call(*arguments)


def number_of(name: str) -> int:
    return int(name[1:])


if __name__ == "__main__":
    jobs, first_worker, first_host, last_host, rack = map(int, sys.argv[2:])
    Fleet(Path(sys.argv[1]), jobs, first_worker, range(first_host, last_host + 1), rack).run()
