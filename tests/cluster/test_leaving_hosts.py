"""Hosts that drain, and a rack that is lost at once: the jobs go on elsewhere, under the scheduler and the back end of a live cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_workers import STARTED, FakeCrew, FakeProcess, FakeWorker, local_backend
from tests.cluster.test_local import group, job, submitted
from tlora.cluster.local import LocalBackend
from tlora.cluster.nodes import Nodes
from tlora.cluster.remote_worker import RemoteWorker
from tlora.errors import ConfigError
from tlora.protocol import GpusLost, NodeAdded, NodeDraining, StopGroup
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants
from tlora.worker_protocol import Finished, HeldJob, Hello

HOSTS = {"a": (1000, 1001), "b": (2000, 2001), "c": (3000, 3001, 3002, 3003)}  # of different sizes; the first two fail together
RACKS = {"a": "r1", "b": "r1", "c": "r2"}

CONSTANTS = dict.fromkeys(("base", "other"), live_constants(16e9))


@dataclass
class Cluster:
    """Hosts a, b and c beside the controller's own, whose workers do what they are told."""

    backend: LocalBackend
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(LIVE_POLICIES["residual_capacity"](), CostModel(CONSTANTS)))
    dead: list[FakeWorker] = field(default_factory=list)

    def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            for event in self.backend.poll():
                for action in self.scheduler.handle(event, self.backend.now()):
                    self.backend.execute(action)
            for worker in STARTED:
                if worker not in self.dead:
                    worker.obey()

    @property
    def where(self) -> dict[str, int]:
        """The GPU of each job that trains, as its worker has it."""
        living = [worker for worker in STARTED if worker not in self.dead]
        held = [(here.job_id, worker.gpu) for worker in living for here in worker.worker_reconciler.held if here.resident]
        assert len(held) == len({name for name, _ in held}), f"a job is in two workers: {held}"
        return dict(held)

    def lose(self, *hosts: str) -> None:
        """All workers of the hosts end at once, and an engine says that the hosts are gone."""
        gpus = [gpu for host in hosts for gpu in HOSTS[host]]
        self.backend.worker_pool.remote_hosts.events.append(GpusLost(tuple(gpus), "their rack is lost"))
        for worker in STARTED:
            if worker.gpu in gpus:
                self.dead.append(worker)
                worker.say(None)

    def submit(self, *names: str) -> None:
        for name in names:
            self.backend.submit(submitted(name), job(name))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with local_backend(tmp_path, gpus=(0,), tick_seconds=0.02) as backend:
        for host, gpus in HOSTS.items():
            backend.worker_pool.remote_hosts.events.append(NodeAdded(host, gpus, RACKS[host]))
        yield Cluster(backend)


NAMES = ("j0", "j1", "j2", "j3", "j4")  # by best fit: one beside the controller, two each on a and b


def test_a_rack_that_is_lost_at_once_costs_no_job(cluster: Cluster) -> None:
    cluster.submit(*NAMES)
    cluster.until(lambda: sorted(cluster.where.values()) == [0, *HOSTS["a"], *HOSTS["b"]])
    before = cluster.where
    cluster.lose("a", "b")
    cluster.until(lambda: sorted(cluster.where.values()) == [0, *HOSTS["c"]])
    stayed = [name for name in NAMES if before[name] == cluster.where[name]]
    assert set(cluster.where) == set(NAMES) and len(stayed) == 1 and cluster.scheduler.state.pool.num_gpus == 5


def test_jobs_of_a_host_that_drains_go_on_elsewhere_until_it_is_taken_back(cluster: Cluster) -> None:
    cluster.submit(*NAMES)
    cluster.until(lambda: sorted(cluster.where.values()) == [0, *HOSTS["a"], *HOSTS["b"]])
    before, there = cluster.where, set(HOSTS["a"])
    cluster.backend.drain("a")
    cluster.until(lambda: set(cluster.where) == set(NAMES) and there.isdisjoint(cluster.where.values()))
    assert all(cluster.where[name] == gpu for name, gpu in before.items() if gpu not in there), "the others stay where they are"
    cluster.backend.worker_pool.remote_hosts.events.append(NodeAdded("a", HOSTS["a"], "r1"))  # its worker has dialled again
    cluster.submit("k0", "k1", "k2")
    cluster.until(lambda: {"k0", "k1"} <= set(cluster.where) and not cluster.backend.worker_pool.remote_hosts.events)
    assert there.isdisjoint(cluster.where.values()) and there.isdisjoint(cluster.scheduler.state.pool.node_of)
    cluster.backend.drain("a", undo=True)
    cluster.submit("l0", "l1")
    cluster.until(lambda: not there.isdisjoint(cluster.where.values()))


def test_a_host_that_drains_is_left_by_the_next_controller_too(tmp_path: Path) -> None:
    """Until it is taken back. A controller's own host as well."""
    left = [NodeDraining("local", finish=False), NodeDraining("a", finish=True)]
    for undo, drained in ((False, []), (True, left), (False, [])):
        with local_backend(tmp_path, gpus=(0,), tick_seconds=0.02) as backend:
            added = [NodeAdded(host, gpus) for host, gpus in HOSTS.items()]
            backend.worker_pool.remote_hosts.events += added
            told = backend.poll()
            while added[-1] not in told:
                told += backend.poll()
            assert [event for event in told if isinstance(event, NodeDraining)] == drained
            come = {event.node: number for number, event in enumerate(told) if isinstance(event, NodeAdded)}
            assert all(told[come[each.node] + 1] == each for each in drained), "before anything is placed there"
            backend.drain("local", undo=undo)
            backend.drain("a", finish=True, undo=undo)
            backend.advance()


class FoundHost(FakeCrew):
    """Two workers of an earlier controller, of one GPU each, on a host that it was leaving. Each trains a job."""

    @classmethod
    def read_records(cls, directory: Path) -> dict[tuple[int, ...], Any]:
        return {(gpu,): None for gpu in HOSTS["a"]}

    def find(self, records: Any) -> None:
        for number, gpu in enumerate(HOSTS["a"]):
            load, name = self._loads("models/base"), f"j{number}"
            worker = self.workers[gpu] = RemoteWorker((gpu,), load, FakeProcess(), self._epoch)
            held = (HeldJob(name, 3 + number, 2, resident=True),)
            worker.attach(Hello(f"earlier {gpu}", (gpu,), {}, load, True, group(f"g{number}", gpu, name), held, 1, 7, 0), lambda _: None)
            self.remote_hosts.events.append(NodeAdded("a", (gpu,), "r1"))


@pytest.mark.parametrize("finish", [True, False])
def test_jobs_of_a_host_that_drains_go_on_there_under_the_next_controller(tmp_path: Path, finish: bool) -> None:
    """They were stopped, for the host was left before their groups were taken over; or its second GPU was never told of."""
    with local_backend(tmp_path, gpus=(0,), tick_seconds=0.02) as backend:
        backend.worker_pool.remote_hosts.events.append(NodeAdded("a", HOSTS["a"]))
        while not any(isinstance(event, NodeAdded) and event.node == "a" for event in backend.poll()):
            pass
        backend.drain("a", finish=finish)
        backend.advance()
    with local_backend(tmp_path, FoundHost, gpus=(0,)) as backend:
        scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), CostModel(CONSTANTS))
        for name in ("j0", "j1"):
            backend.submit(submitted(name), job(name), at_seconds=-1.0)
        actions = [action for event in backend.poll() for action in scheduler.handle(event, backend.now())]
        stopped = [action.group_id for action in actions if isinstance(action, StopGroup)]
        assert stopped == ([] if finish else ["g0", "g1"]) and scheduler.state.pool.draining == {"a"}
        assert scheduler.state.pool.node_of.keys() == ({0, *HOSTS["a"]} if finish else {0})


def test_a_host_that_drains_is_none_that_a_job_may_ask_for() -> None:
    nodes = Nodes()
    nodes.see([NodeAdded("a", (0, 1)), NodeAdded("b", (1000,))])
    nodes.drain("a", finish=True)
    assert (nodes.sizes, nodes.widest, nodes.num_gpus) == ([1], 1, 1)
    nodes.take_back("a")
    assert (nodes.sizes, nodes.widest, nodes.num_gpus) == ([2, 1], 2, 3)


def test_jobs_may_end_on_a_host_that_drains(cluster: Cluster) -> None:
    cluster.submit(*NAMES)
    cluster.until(lambda: sorted(cluster.where.values()) == [0, *HOSTS["a"], *HOSTS["b"]])
    before = cluster.where
    cluster.backend.drain("a", finish=True)
    cluster.submit("k0")
    cluster.until(lambda: "k0" in cluster.where)
    assert cluster.where["k0"] in HOSTS["c"] and {name: gpu for name, gpu in cluster.where.items() if name in before} == before
    (ends,) = [worker for worker in STARTED if worker.gpu == HOSTS["a"][0]]
    ends.say(Finished(next(name for name, gpu in before.items() if gpu == ends.gpu), {}))
    cluster.until(lambda: HOSTS["a"][0] not in cluster.scheduler.state.pool.node_of)
    assert HOSTS["a"][1] in cluster.scheduler.state.pool.node_of, "the other job trains on"


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_job_that_came_before_the_first_host_starts_on_fewer_gpus_than_it_orders(tmp_path: Path, policy: str) -> None:
    """It waited aside for as many, where one that came a moment later was trained with replicas in turn."""
    said: list[str] = []
    with local_backend(tmp_path, note=said.append, listener=object(), gpus=(), tick_seconds=0.02) as backend:
        waits: list[str] = []
        scheduler = Scheduler(LIVE_POLICIES[policy](), CostModel(CONSTANTS), on_wait=lambda name, _: waits.append(name))
        cluster = Cluster(backend, scheduler)
        backend.submit(submitted("wide", gpus=8), job("wide"))
        cluster.until(lambda: "wide" in scheduler.state.jobs)
        backend.worker_pool.remote_hosts.events.append(NodeAdded("a", HOSTS["a"], "r1"))
        cluster.until(lambda: bool(scheduler.state.groups))
        (known,) = scheduler.state.groups.values()
        assert known.group.job_ids == ("wide",) and set(known.group.gpus) <= set(HOSTS["a"]) and not waits
        assert said == ["wide: some of its 8 replicas run in turn: 2 GPUs are there as it arrives"]


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_a_job_that_came_while_the_only_host_drained_starts_there_when_it_is_taken_back(tmp_path: Path, policy: str) -> None:
    """It went on waiting for as many GPUs as it orders."""
    with local_backend(tmp_path, listener=object(), gpus=(), tick_seconds=0.02) as backend:
        scheduler = Scheduler(LIVE_POLICIES[policy](), CostModel(CONSTANTS), on_wait=lambda *_: None)
        cluster, state = Cluster(backend, scheduler), scheduler.state
        backend.worker_pool.remote_hosts.events.append(NodeAdded("a", HOSTS["a"], "r1"))
        cluster.until(lambda: state.pool.num_gpus == 2)
        backend.drain("a")
        cluster.until(lambda: not state.pool.num_gpus)
        backend.submit(submitted("wide", gpus=8), job("wide"))
        cluster.until(lambda: "wide" in state.jobs)
        assert state.parked and state.jobs["wide"].spec.gpus == 8
        backend.drain("a", undo=True)
        cluster.until(lambda: state.pool.num_gpus == 2)
        assert not state.parked and [known.group.job_ids for known in state.groups.values()] == [("wide",)]


def test_an_unknown_host_is_refused(cluster: Cluster) -> None:
    cluster.until(lambda: len(cluster.scheduler.state.pool.nodes) == 4)
    with pytest.raises(ConfigError, match="unknown host 'd'. There are a, b, c, local"):
        cluster.backend.drain("d")
