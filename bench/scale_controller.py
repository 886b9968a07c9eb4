"""The controller of `bench.scale`: the scheduler, the back end and the pool of workers of `tlora cluster`, over hosts of fake workers.

    python -m bench.scale_controller STORE SHAPE

SHAPE is a `Shape` in JSON. The workers dial by themselves, from the processes of `bench.scale_workers`; that a rack is lost, as an engine
says of hosts, is seen here by the end of its process. Prints a line of JSON each quarter of a second; where it ends, as after a kill, the
next one on the same store goes on.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scale_workers import GPUS_PER_HOST, host_name, job_name, work_of
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.cluster.remote_hosts import ProvenEnd
from tlora.cluster.session import Arrived, Spoke
from tlora.cluster.worker_pool import WorkerPool
from tlora.job import JobSpec
from tlora.link.process_identity import identify
from tlora.protocol import Action, Event, GroupReady, JobFinished, JobProfile, JobSubmitted, StepsDone
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants

RACK_LOST = "is on a rack that is lost"
BASE, BASE_BYTES = "llama-3-8b", 16.06e9
_STATUS_SECONDS = 0.25


@dataclass(frozen=True)
class Shape:
    """`fleets`: the processes of workers, each with its pid and the hosts that it has, first and last."""

    hosts: int
    hosts_per_rack: int
    jobs: int
    fleets: tuple[tuple[int, int, int], ...] = ()

    @property
    def gpus(self) -> int:
        return self.hosts * GPUS_PER_HOST


_REPEATED_SECONDS = 0.5  # between two of an engine's words on a host that is lost


def watch_fleet(pool: WorkerPool, pid: int, first: int, last: int) -> None:
    """Say of the hosts of a process, as an engine does, that they are gone."""
    identity = identify(pid)
    if identity is not None:
        identity.wait(None)
    while True:
        for host in range(first, last + 1):
            pool.inbox.put(ProvenEnd(host_name(host), None, RACK_LOST))
        pool.wake()
        time.sleep(_REPEATED_SECONDS)


class CountingPool(WorkerPool):
    """A pool that counts what workers say."""

    messages = 0

    def _hear(self, heard: Any) -> Any:
        CountingPool.messages += isinstance(heard, Arrived | Spoke)
        return super()._hear(heard)


@dataclass
class Stopwatch:
    """The scheduler and the back end, with the milliseconds that each event takes: until it is decided, and until all is told that follows.

    Without reports of steps, on which nothing is decided. By the clock, and by the processor's time of this thread.
    """

    scheduler: Scheduler
    backend: LocalBackend
    log: EventLog
    decided: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    answered: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    finished: int = 0
    _began: tuple[float, float] | None = None

    def now(self) -> float:
        return self.backend.now()

    def poll(self) -> list[Event]:
        self._stop()
        return self.backend.poll()

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
            "gpus": watch.scheduler.state.pool.num_gpus,
            "gpus_that_train": sum(len(known.group.gpus) for known in groups if known.ready),
            "groups": len(groups),
            "submitted": watch.scheduler.state.jobs_submitted,
            "workers": len(watch.backend.worker_pool.workers),
            "waiting": len(watch.scheduler.state.pending),
            "finished": watch.finished,
            "messages": CountingPool.messages,
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
    ended = ended_in(store / "events.jsonl")
    scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), CostModel({BASE: live_constants(BASE_BYTES)}))
    machine = LocalMachine((), "cpu", {BASE: f"/models/{BASE}"}, store)
    note = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with (
        LocalBackend(machine, note, pool=CountingPool) as backend,
        closing(EventLog(store / "events.jsonl", backend.began_at_seconds)) as log,
    ):
        for fleet in shape.fleets:
            threading.Thread(target=watch_fleet, args=(backend.worker_pool, *fleet), daemon=True).start()
        watch = Stopwatch(scheduler, backend, log)
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
