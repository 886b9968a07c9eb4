"""Messages between controllers and workers are lost, doubled, late and out of order; workers and controllers are killed. Nothing but the
line, the processes and the training is made up here.

In every schedule each job ends exactly once, and is never in two workers at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_workers import FakeProcess, local_backend
from tests.cluster.test_local import job
from tlora.cluster.controller import run
from tlora.cluster.remote_hosts import RemoteHosts
from tlora.cluster.remote_worker import RemoteWorker
from tlora.engine.messages import Leave, SetGpus, Stop
from tlora.engine.worker_reconciler import WorkerReconciler
from tlora.link.outbox import Outbox
from tlora.protocol import Action, Event, JobFailed, JobFinished, JobGroup, JobProfile, JobSubmitted, ParallelPlan
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.state import ClusterState
from tlora.shape.hardware import cost_model
from tlora.worker_protocol import (
    Ack,
    Alive,
    DesiredState,
    Finished,
    FromController,
    FromWorker,
    GpusChanged,
    Hello,
    Join,
    Joined,
    Left,
    Loaded,
    Refused,
    Report,
    Stepped,
)

MOST_UNDER_WAY = 40  # messages, above which nothing is said again: more than a line holds
MOST_TURNS = 50_000  # hundreds of times what a schedule takes
NAMES, STEPS, BASE = ("a", "b", "c", "d", "e"), 6, "llama-3-8b"


@dataclass
class Disk:
    """What is there of each job: its steps, and which worker writes."""

    steps: Counter[str] = field(default_factory=Counter)
    writer: dict[str, FarWorker] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)  # as controllers have recorded it


class FarWorker:
    """A worker's settler and outbox, and a trainer that counts."""

    def __init__(self, world: World, gpus: tuple[int, ...]) -> None:
        self.world, self.gpus, self.process = world, gpus, FakeProcess()
        self.incarnation = f"{gpus}-{world.random.random()}"
        self.worker_reconciler, self.outbox = WorkerReconciler(gpus), Outbox()
        self.changing: SetGpus | None = None
        self.steps: dict[str, int] = {}
        self.joining: list[str] = []
        self.alive = True
        self.load: Any = None

    def hello(self) -> Hello:
        want, held = self.worker_reconciler.want, self.worker_reconciler.held
        ends = [end for end in self.outbox.ends() if all(end.job_id != one.job_id for one in held)]
        given = (want.group, want.epoch, want.generation) if want is not None else (None, 0, 0)
        return Hello(
            self.incarnation,
            self.worker_reconciler.claimed,
            {},
            self.load,
            self.worker_reconciler.loaded,
            given[0],
            (*held, *ends),
            *given[1:],
            self.outbox.last_taken,
        )

    def hear(self, message: FromController) -> None:
        if isinstance(message, Ack):
            self.outbox.taken(message.seq)
        elif isinstance(message, DesiredState) and self.worker_reconciler.hear_want(message):
            self.load = self.load or message.load
        self.obey()

    def tell(self, report: Report) -> None:
        self.worker_reconciler.hear_report(report)

    def obey(self) -> None:
        while self.worker_reconciler.commands:
            command = self.worker_reconciler.commands.pop(0)
            if isinstance(command, Join):
                self.joining.append(command.job.name)
            elif isinstance(command, Leave):
                self.let_go(command.job_id)
            elif isinstance(command, SetGpus):
                self.changing = command
            elif isinstance(command, Stop):
                for name in [*self.joining, *self.steps]:
                    self.let_go(name)
                self.world.end(self)
        for report in self.worker_reconciler.reports:
            self.outbox.put(report, self.worker_reconciler.want.generation if self.worker_reconciler.want else 0)
        self.worker_reconciler.reports.clear()

    def let_go(self, name: str) -> None:
        if name in self.joining:
            self.joining.remove(name)
            self.tell(Left(name, 0, None))
        elif name in self.steps:
            self.world.disk.steps[name] = self.steps.pop(name)
            del self.world.disk.writer[name]
            self.tell(Left(name, self.world.disk.steps[name], None))

    def change_gpus(self, gpus: tuple[int, ...], order: int) -> None:
        """It has them now, or cannot."""
        self.changing = None
        if self.world.random.random() < 0.1:
            self.tell(GpusChanged(self.gpus, "the rank that came has ended", order=order))
            return
        others = [far for far in self.world.far.values() if far is not self and not set(far.gpus).isdisjoint(gpus)]
        assert not others, f"{self.incarnation} is to have {gpus}, and {others[0].incarnation} has some of them"
        del self.world.far[self.gpus[0]]
        self.gpus = gpus
        self.world.far[gpus[0]] = self
        self.world.shapes[gpus] += 1
        self.tell(GpusChanged(gpus, order=order))

    def work(self) -> None:
        """Something happens: the base is loaded, GPUs come or go, a job is let in, or a step is done."""
        disk, chance = self.world.disk, self.world.random
        if self.load is not None and not self.worker_reconciler.loaded:
            self.tell(Loaded())
        elif self.changing is not None and self.worker_reconciler.loaded and chance.random() < 0.5:
            self.change_gpus(self.changing.gpus, self.changing.order)
        elif self.joining and self.worker_reconciler.loaded and chance.random() < 0.5:
            name = self.joining.pop()
            if chance.random() < 0.1:
                self.tell(Refused(name, "no memory now"))
            else:
                assert name not in disk.writer, f"{name} is written by {disk.writer[name].incarnation} and {self.incarnation}"
                if disk.steps[name] >= STEPS:
                    self.tell(Finished(name, {}))
                else:
                    disk.writer[name], self.steps[name] = self, disk.steps[name]
                    self.tell(Joined(name, self.steps[name]))
        elif self.steps:
            name = chance.choice(sorted(self.steps))
            self.steps[name] += 1
            self.tell(Stepped(name, self.steps[name], 1.0))
            if self.steps[name] == STEPS:
                disk.steps[name] = self.steps.pop(name)
                del disk.writer[name]
                self.tell(Finished(name, {}))
        self.obey()


class World:
    """Two GPUs with their workers, which outlive controllers, and the messages under way in both directions."""

    def __init__(self, seed: int) -> None:
        self.random, self.disk = random.Random(seed), Disk()
        self.far: dict[int, FarWorker] = {}  # by the first of their GPUs
        self.worker_pool: LossyCrew | None = None
        self.log: list[Event | Action] = []
        self.shapes: Counter[tuple[int, ...]] = Counter()  # GPUs that workers were started with or got
        self.under_way: list[tuple[FarWorker, RemoteWorker, FromWorker | FromController]] = []
        self.kills = self.controllers = self.turns = 0
        chance = self.random.random
        self.drop, self.double, self.disorder = 0.4 * chance(), 0.4 * chance(), chance()
        self.deadly = 0.02 * chance() if chance() < 0.5 else 0.0

    def end(self, worker: FarWorker) -> None:
        """Its process is gone."""
        worker.alive = False
        self.disk.writer = {name: writer for name, writer in self.disk.writer.items() if writer is not worker}
        if self.far.get(worker.gpus[0]) is worker:
            del self.far[worker.gpus[0]]

    def send(self, far: FarWorker, near: RemoteWorker, message: FromWorker | FromController) -> None:
        if self.random.random() >= self.drop:
            self.under_way += [(far, near, message)] * (2 if self.random.random() < self.double else 1)

    def turn(self) -> list[tuple[RemoteWorker, Report | None]]:
        """One thing happens. What the controller hears by it."""
        chance, worker_pool = self.random, self.worker_pool
        self.turns += 1
        assert worker_pool is not None and self.turns < MOST_TURNS, "nothing happens any more"
        what = chance.random()
        if what < self.deadly and self.far and self.kills < 2:
            self.kills += 1
            self.end(chance.choice(list(self.far.values())))
            return []
        if what < 0.35 and self.far:
            chance.choice(list(self.far.values())).work()
            return []
        if what < 0.85 and self.under_way:
            place = chance.randrange(len(self.under_way)) if chance.random() < self.disorder else 0
            return self.deliver(*self.under_way.pop(place))
        return worker_pool.time_passes()

    def deliver(self, far: FarWorker, near: RemoteWorker, message: Any) -> list[tuple[RemoteWorker, Report | None]]:
        if isinstance(message, DesiredState | Ack):
            # what an earlier controller said came over a connection that had ended before the last Hello
            if far.alive and self.worker_pool is not None and self.worker_pool.owner.get(near) is far:
                far.hear(message)
            return []
        if self.worker_pool is None or self.worker_pool.workers.get(near.gpu) is not near or self.worker_pool.owner.get(near) is not far:
            return []
        if isinstance(message, Alive):
            near.hear_alive(message)
        elif isinstance(message, Hello):
            near.attach(message, self.worker_pool.sender(far, near))
        elif (report := near.take(message)) is not None:
            return [(near, report)]
        return []


class LossyCrew:
    """Stands in for `WorkerPool`. A worker is told and heard through the world."""

    world: World
    address = "unix:/nowhere"

    def __init__(self, directory: Path, epoch: int, loads: Any, gpus: Any, limits: Any, note: Any) -> None:
        self._epoch, self._loads = epoch, loads
        self.workers: dict[int, RemoteWorker] = {}
        self.owner: dict[RemoteWorker, FarWorker] = {}
        self.remote_hosts = RemoteHosts(directory, gpus, 180.0, lambda: "cpu", note)
        self.world.worker_pool = self

    def sender(self, far: FarWorker, near: RemoteWorker) -> Any:
        return lambda message: self.world.send(far, near, message)

    @classmethod
    def read_records(cls, directory: Path) -> dict[tuple[int, ...], Any]:
        """What is on the disk of a real worker tells a later controller that there is one."""
        return {far.worker_reconciler.claimed: None for far in cls.world.far.values()}

    def find(self, records: Any) -> None:
        """Those that live have dialled again: a connection begins with a Hello, or is none."""
        for far in self.world.far.values():
            gpus = far.worker_reconciler.claimed
            near = self.workers[gpus[0]] = RemoteWorker(gpus, far.load, far.process, self._epoch)
            self.owner[near] = far
            near.attach(far.hello(), self.sender(far, near))

    def start(self, gpus: tuple[int, ...], base_model: str) -> None:
        there = [far for far in self.world.far.values() if not set(far.worker_reconciler.claimed).isdisjoint(gpus)]
        assert not there, f"{gpus} are to have a worker, and {there[0].incarnation} has some of them"
        self.world.shapes[gpus] += 1
        far = self.world.far[gpus[0]] = FarWorker(self.world, gpus)
        near = self.workers[gpus[0]] = RemoteWorker(gpus, self._loads(base_model), far.process, self._epoch)
        self.owner[near] = far
        near.attach(far.hello(), self.sender(far, near))

    def bind(self, gpus: tuple[int, ...]) -> None:
        """No host has an agent."""

    def record(self, worker: RemoteWorker, before: tuple[int, ...]) -> None:
        """`read_records` asks the workers themselves."""

    def time_passes(self) -> list[tuple[RemoteWorker, Report | None]]:
        """Signs of life, and what has not been acknowledged once more; deaths are seen. Sometimes a connection begins anew."""
        found: list[tuple[RemoteWorker, Report | None]] = []
        for gpu, near in list(self.workers.items()):
            far = self.owner[near]
            if not far.alive:
                found.append((near, None))
                continue
            if self.world.random.random() < 0.1:
                near.detach(self.sender(far, near))
                near.attach(far.hello(), self.sender(far, near))
            if len(self.world.under_way) > MOST_UNDER_WAY:
                continue
            for said in far.outbox.again() + far.outbox.fresh():
                self.world.send(far, near, said)
            want = far.worker_reconciler.want
            self.world.send(far, near, Alive(want.generation if want else 0, "training", 0))
            assert self.workers[gpu] is near
        return found

    def listen(self, timeout_seconds: float) -> list[tuple[RemoteWorker, Report | None]]:
        for _ in range(20):
            if found := self.world.turn():
                return found
        return []

    def wake(self) -> None:
        pass

    def acknowledge(self) -> None:
        for worker in self.workers.values():
            worker.acknowledge()

    def abandon(self) -> None:
        pass

    def close(self, stop_seconds: float) -> None:
        self.workers.clear()


class Restless:
    """A policy that often wants something else: it puts jobs anywhere and moves one now and then, and lets a group have both GPUs for a
    while.
    """

    def __init__(self, chance: random.Random) -> None:
        self.random = chance

    def __call__(self, state: ClusterState) -> list[JobGroup]:
        names = [state.pool.group_on.get(gpu) for gpu in (0, 1)]
        if (wide := self._both(state, names)) is not None:
            return wide
        members = [list(state.groups[name].group.job_ids) if name is not None else [] for name in names]
        waiting = list(state.pending)
        if not waiting and self.random.random() < 0.5:
            return []
        for name in waiting:
            members[self.random.randrange(2)].append(name)
        source = self.random.randrange(2)
        if not waiting and members[source]:
            members[1 - source].append(members[source].pop(self.random.randrange(len(members[source]))))
        wanted: list[JobGroup] = []
        for gpu, own in enumerate(members):
            group_id = names[gpu] or f"g{state.groups_opened + gpu}"
            if own or names[gpu] is not None:
                plan = ParallelPlan(1, self.random.choice((512, 1024)))
                wanted.append(JobGroup(group_id, BASE, (gpu,), plan, tuple(own), tuple(1.0 for _ in own)))
        return wanted

    def _both(self, state: ClusterState, names: list[str | None]) -> list[JobGroup] | None:
        """A group that has both GPUs, or shall have them, or gives one up. None where each GPU is for itself."""
        waiting = list(state.pending)
        alone = next((name for name, other in (names, names[::-1]) if name is not None and other in (None, name)), None)
        if alone is None:
            return None
        group, has_both = state.groups[alone].group, names[0] == names[1]
        goes_on = self.random.random() < (0.8 if has_both else 0.2)
        if not (has_both or goes_on):
            return None
        gpus = (0, 1) if goes_on else (self.random.randrange(2),)
        members = (*group.job_ids, *waiting)
        if gpus == group.gpus and not waiting:
            return []
        return [replace(group, gpus=gpus, plan=ParallelPlan(len(gpus), 1024), job_ids=members, weights=tuple(1.0 for _ in members))]


class KilledError(Exception):
    """The controller's end."""


def controller(world: World, directory: Path, pool: type[LossyCrew]) -> None:
    """One controller's time, over the jobs that have not ended: to the end of all, or to its own."""
    world.controllers += 1
    dies_at = world.random.randint(1, 60) if world.controllers <= 2 and world.random.random() < 0.5 else 10**9
    events = 0
    backend = local_backend(directory, pool, base_models={BASE: "models/base"})
    for name in NAMES:
        if not world.disk.ended[name]:
            profile = JobProfile(100.0, STEPS, 30, 1000)
            backend.submit(JobSubmitted(name, BASE, 1, profile), job(name), at_seconds=-1.0 if world.controllers > 1 else None)
    backend.seal()

    def record(_: float, item: Event | Action) -> None:
        nonlocal events
        events += 1
        if events > dies_at:
            raise KilledError
        world.log.append(item)
        if isinstance(item, JobFinished | JobFailed):
            world.disk.ended[item.job_id] += 1

    try:
        run(Scheduler(Restless(world.random), cost_model(), None), backend, record)
    except KilledError:
        backend.abandon()
        world.worker_pool = None
        controller(world, directory, pool)


def obey_schedule(seed: int, directory: Path) -> World:
    world = World(seed)
    controller(world, directory, type("Lossy", (LossyCrew,), {"world": world}))
    return world


SOME, ALL = 15, 100  # schedules of one test, of which there are three
SEEDS = [(first, SOME) for first in range(0, 300, ALL)]
REST = [pytest.param((first + SOME, ALL - SOME), marks=pytest.mark.soak) for first in range(0, 1000, ALL)]


@pytest.mark.parametrize("seeds", [*SEEDS, *REST], ids=str)
def test_every_job_ends_exactly_once(seeds: tuple[int, int], tmp_path: Path) -> None:
    first, count = seeds
    kills = controllers = 0
    shapes = Counter[int]()
    for seed in range(first, first + count):
        world = obey_schedule(seed, tmp_path / str(seed))
        assert world.disk.ended == Counter(NAMES), f"schedule {seed}: {world.disk.ended}"
        assert not world.disk.writer or all(writer.alive for writer in world.disk.writer.values())
        kills += world.kills
        controllers += world.controllers - 1
        shapes.update({len(gpus): count for gpus, count in world.shapes.items()})
    assert shapes[1] and shapes[2], "no group has changed its GPUs"
    assert controllers and kills, "nothing was killed: nothing was tested"


def test_a_schedule_of_before_comes_again(tmp_path: Path) -> None:
    """Else a failure could not be looked at."""
    states = [obey_schedule(7, tmp_path / str(number)).random.random() for number in range(2)]
    assert states[0] == states[1]
