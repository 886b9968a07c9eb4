"""The controller of `bench.scale`: the scheduler, the back end and the pool of workers of `tlora cluster`, over hosts of fake workers.

    python -m bench.scale_controller STORE SHAPE

SHAPE is a `Shape` in JSON. Only where a worker starts is made up: in one of the processes of `bench.scale_workers`. Prints a line of JSON
each quarter of a second; where it ends, as after a kill, the next one on the same store goes on.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scale_workers import job_name, work_of
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.cluster.remote_worker import RemoteWorker
from tlora.cluster.session import Gone
from tlora.cluster.worker_pool import WorkerPool
from tlora.job import JobSpec
from tlora.link.process_identity import ProcessIdentity, identify
from tlora.protocol import Action, Event, GpusLost, GroupReady, JobFinished, JobProfile, JobSubmitted, NodeAdded, StepsDone
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.hardware import live_cost_model

BASE, BASE_BYTES = "llama-3-8b", 16.06e9
_STATUS_SECONDS = 0.25


@dataclass(frozen=True)
class Shape:
    """`fleets`: the processes of workers, each with its pid, the socket for its orders, and the hosts that it has, first and last."""

    hosts: int
    gpus_per_host: int
    hosts_per_rack: int
    jobs: int
    fleets: tuple[tuple[int, str, int, int], ...] = ()

    @property
    def gpus(self) -> int:
        return self.hosts * self.gpus_per_host

    def gpus_of(self, first: int, last: int) -> tuple[int, ...]:
        """Of those hosts."""
        return tuple(range(first * self.gpus_per_host, (last + 1) * self.gpus_per_host))

    def nodes(self) -> Iterator[NodeAdded]:
        for host in range(self.hosts):
            yield NodeAdded(f"h{host}", self.gpus_of(host, host), f"r{host // self.hosts_per_rack}")


class FleetProcess:
    """A worker as a process: it ends with all of its hosts, or by its own last word."""

    is_stopped, exit_status = False, None

    def __init__(self, identity: ProcessIdentity) -> None:
        self.identity, self.pid = identity, identity.pid
        self.ended = threading.Event()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return self.ended.wait(timeout_seconds)

    def kill(self, timeout_seconds: float | None = None) -> None:
        raise SystemExit("no fake worker is to be killed by its controller")

    def how_it_ended(self) -> str:
        return "has ended with its rack" if not self.identity.is_alive else "has ended by itself"


class Fleets:
    """The processes that have the workers, and which GPUs have been lost with them."""

    def __init__(self, shape: Shape) -> None:
        self.lost: list[GpusLost] = []
        self.messages = 0
        self.processes: dict[ProcessIdentity, list[FleetProcess]] = {}
        self._of: list[tuple[frozenset[int], ProcessIdentity, socket.socket]] = []
        for pid, orders, first, last in shape.fleets:
            identity = identify(pid)
            if identity is not None and identity.is_alive:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                line.connect(orders)
                self._of.append((frozenset(shape.gpus_of(first, last)), identity, line))
                self.processes[identity] = []
                threading.Thread(target=self._watch, args=(identity, shape.gpus_of(first, last)), daemon=True).start()

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(sorted(gpu for gpus, _, _ in self._of for gpu in gpus))

    def process(self, identity: ProcessIdentity) -> FleetProcess:
        self.processes[identity].append(FleetProcess(identity))
        return self.processes[identity][-1]

    def order(self, gpus: tuple[int, ...]) -> ProcessIdentity:
        """Have a worker started on these."""
        identity, line = next((identity, line) for own, identity, line in self._of if gpus[0] in own)
        line.sendall(json.dumps(gpus).encode() + b"\n")
        return identity

    def _watch(self, identity: ProcessIdentity, gpus: tuple[int, ...]) -> None:
        """What an engine says of nodes: that they are gone."""
        identity.wait(None)
        self.lost.append(GpusLost(gpus, "its rack is lost"))
        for process in self.processes[identity]:
            process.ended.set()


def pool_of(fleets: Fleets) -> type[WorkerPool]:
    """A pool whose workers those processes have."""

    class FleetPool(WorkerPool):
        def start(self, gpus: tuple[int, ...], base_model: str) -> RemoteWorker | None:
            try:
                identity = fleets.order(gpus)
            except OSError:  # the rack is lost, which the back end is about to hear
                return None
            return super()._take_on(gpus, self._loads(base_model), fleets.process(identity))  # type: ignore[arg-type]

        def _take_on(self, gpus: tuple[int, ...], load: Any, process: Any) -> RemoteWorker:
            return super()._take_on(gpus, load, fleets.process(process.identity))  # type: ignore[arg-type]

        def _hear(self, heard: Any) -> Any:
            fleets.messages += heard is not None
            if isinstance(heard, Gone) and (worker := self._sessions.get(heard.session)) is not None and worker.doomed:
                worker.process.ended.set()  # type: ignore[attr-defined]
            return super()._hear(heard)

    return FleetPool


@dataclass
class Stopwatch:
    """The scheduler and the back end, with the milliseconds that each event takes: until it is decided, and until all is told that follows.

    Without reports of steps, on which nothing is decided. By the clock, and by the processor's time of this thread.
    """

    scheduler: Scheduler
    backend: LocalBackend
    shape: Shape
    fleets: Fleets
    log: EventLog
    decided: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    answered: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    finished: int = 0
    _began: tuple[float, float] | None = None

    def now(self) -> float:
        return self.backend.now()

    def poll(self) -> list[Event]:
        self._stop()
        events: list[Event] = []
        for event in self.backend.poll():
            events += self.shape_nodes() if isinstance(event, NodeAdded) else [event]
        lost, self.fleets.lost[:] = list(self.fleets.lost), []
        return [*lost, *events]

    def shape_nodes(self) -> list[NodeAdded]:
        there = set(self.fleets.gpus)
        return [node for node in self.shape.nodes() if there.issuperset(node.gpus)]

    def execute(self, action: Action) -> None:
        self.backend.execute(action)

    def record(self, seconds: float, item: Event | Action) -> None:
        if isinstance(item, Event):
            self._stop()
            if not isinstance(item, StepsDone | GroupReady):
                self._began = time.perf_counter(), time.thread_time()
            self.finished += isinstance(item, JobFinished)
        self.log.write(seconds, item)

    def handle(self, event: Event, now: float) -> list[Action]:
        began = time.perf_counter(), time.thread_time()
        actions = self.scheduler.handle(event, now)
        if self._began is not None:
            self.decided.append(_since(began))
        return actions

    def _stop(self) -> None:
        if self._began is not None:
            self.answered.append(_since(self._began))
            self._began = None


def _since(began: tuple[float, float]) -> tuple[float, float]:
    return 1e3 * (time.perf_counter() - began[0]), 1e3 * (time.thread_time() - began[1])


def say_status(watch: Stopwatch) -> None:
    told = 0
    while True:
        time.sleep(_STATUS_SECONDS)
        groups = list(watch.scheduler.state.groups.values())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        count = len(watch.answered)
        status = {
            "seconds": time.monotonic(),
            "gpus": watch.scheduler.state.num_gpus,
            "gpus_that_train": sum(len(known.group.gpus) for known in groups if known.ready),
            "groups": len(groups),
            "submitted": watch.scheduler.state.jobs_submitted,
            "workers": len(watch.backend.worker_pool.workers),
            "waiting": len(watch.scheduler.state.pending),
            "finished": watch.finished,
            "messages": watch.fleets.messages,
            "processor_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": peak_bytes(),
            "decided": watch.decided[told:count],
            "answered": watch.answered[told:count],
        }
        told = count
        print(json.dumps(status), flush=True)


def peak_bytes() -> int:
    """Of this program's memory; what `getrusage` says counts the program before the exec too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def submit_all(backend: LocalBackend, jobs: int, ended: set[int]) -> None:
    """The jobs that have not ended, as a server does that starts on its store; in the order in which they were accepted."""
    for number in range(jobs):
        if number not in ended:
            tokens, steps = work_of(number)
            profile = JobProfile(tokens, steps, 2048, 20_000_000)
            name = job_name(number)
            spec = JobSpec.model_validate({"name": name, "data": "d.jsonl"})
            backend.submit(JobSubmitted(name, BASE, 1, profile), LocalJob(spec), -1.0 if backend.began_at_seconds else None)


def ended_in(log: Path) -> set[int]:
    """Jobs whose end an earlier controller has recorded."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {int(json.loads(line)["job_id"][1:]) for line in lines if '"JobFinished"' in line}


def main() -> None:
    store, made = Path(sys.argv[1]), json.loads(sys.argv[2])
    shape = Shape(**{**made, "fleets": tuple(map(tuple, made["fleets"]))})
    fleets = Fleets(shape)
    ended = ended_in(store / "events.jsonl")
    scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), live_cost_model({BASE: BASE_BYTES}))
    machine = LocalMachine(fleets.gpus, "cpu", {BASE: f"/models/{BASE}"}, store)
    note = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with (
        LocalBackend(machine, note, pool=pool_of(fleets)) as backend,
        closing(EventLog(store / "events.jsonl", backend.began_at_seconds)) as log,
    ):
        watch = Stopwatch(scheduler, backend, shape, fleets, log)
        submit_all(backend, shape.jobs, ended)
        threading.Thread(target=say_status, args=(watch,), daemon=True).start()
        while events := watch.poll():
            for event in events:
                now = watch.now()
                watch.record(now, event)
                for action in watch.handle(event, now):
                    watch.record(now, action)
                    watch.execute(action)


if __name__ == "__main__":
    main()
