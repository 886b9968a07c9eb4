"""Hosts of unequal sizes and GPUs come, drain and are lost: a job that cannot run on what is left keeps none behind it waiting."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from tests.scheduler.mirror import Mirror, made_spec, tell
from tests.scheduler.test_hosts_that_may_come import Cluster, cut, host
from tests.scheduler.test_unequal_gpus import GB, costs, small
from tlora.protocol import Event, GpusLost, GroupReady, JobFinished, JobSubmitted, MemoryFound, NodeAdded, NodeDraining, Tick
from tlora.scheduler.draft import may_lie_apart
from tlora.scheduler.job import Job
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.service.waiting_queue import QueuePlace, WaitingQueue

LARGE = {"parameters": 2 * 10**9}  # for 80 GB
# Stories of 40 in which some policy held back jobs behind one that the hosts left could not hold, and three of 300 in which
# `residual_capacity` stopped no groups for a job whose GPUs lie on several hosts.
FOUND = (0, 1, 5, 11, 18, 20, 21, 24, 26, 34, 35, 36, 38, 159, 163)


@pytest.mark.parametrize("how", [GpusLost((1000,)), NodeDraining("b"), NodeDraining("b", finish=True)])
@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_none_waits_behind_a_wide_job_whose_host_is_gone_and_it_starts_when_one_comes(policy: str, how: Event) -> None:
    """It waits when its host goes, or trains there and is stopped, or comes later. Under fifo all behind it waited for ever."""
    cluster = Cluster(policy)
    state = cluster.scheduler.state
    cluster.tell(*host("a", 0), *host("b", 1000))
    cluster.tell(cut("trains", steps=10**6, priority=1.0))
    cluster.tell(cut("waits"))
    assert state.jobs["trains"].group_id is not None and "waits" in state.pending
    cluster.tell(how)
    if how == NodeDraining("b", finish=True):
        assert state.jobs["trains"].group_id is not None
        cluster.tell(JobFinished("trains"))
    aside = {"waits", "late"} | ({"trains"} & state.jobs.keys())
    assert cluster.tell(cut("late")) == ([], [])
    assert cluster.parked == aside == {name for name, _ in cluster.told} and len(cluster.told) == len(aside)
    why = "it asks for 2 GPUs, and the 1 that is there now does not hold so many"
    assert {why} == {lack.reason for lack in state.parked.values()} == {why for _, why in cluster.told}
    assert cluster.tell(small("behind")) == ([("behind",)], [])
    shown: list[Mapping[str, QueuePlace]] = []
    WaitingQueue(policy, shown.append, ("GPU", "GPUs")).look(cluster.scheduler)
    assert {name: place.reason for name, place in shown[0].items()} == dict.fromkeys(aside, why)
    cluster.tell(JobFinished("behind"), *host("c", 2000))
    assert not cluster.parked and state.jobs[min(aside, key=lambda name: state.jobs[name].number)].group_id is not None


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_none_waits_behind_a_job_that_the_lost_host_alone_has_room_for(policy: str) -> None:
    cluster = Cluster(policy)
    state = cluster.scheduler.state
    cluster.tell(*host("a", 0), *host("b", 1000, 1001, room=80 * GB))
    cluster.tell(small("pair", gpus=2, **LARGE), small("one", **LARGE), GpusLost((1000,)))
    assert cluster.parked == {"pair"} and state.parked["pair"].more_would_do
    assert state.parked["pair"].reason == "it asks for 2 GPUs, and of the 2 that are there now 1 has room for it"
    assert state.jobs["one"].group_id is not None and cluster.tell(small("small")) == ([("small",)], [])
    cluster.tell(GpusLost((1001,)))
    assert cluster.parked == {"pair", "one"} and not state.parked["one"].more_would_do, "more GPUs of the small ones are no use"
    assert state.parked["one"].reason == "it asks for 1 GPU, and of the 1 that is there now 0 have room for it"
    assert cluster.tell(*host("b", 1000, room=80 * GB))[0] == [("one",)] and cluster.parked == {"pair"}


def test_what_is_said_of_a_job_that_waits_aside_follows_hosts_that_go_and_come() -> None:
    cluster = Cluster()
    said = list[str]()
    cluster.tell(*host("a", 0), *host("b", 1000), small("wide", gpus=3))
    for event in (NodeDraining("b"), NodeDraining("a", finish=True), NodeAdded("b", (1000,)), GpusLost((1000,)), NodeAdded("a", (0,))):
        cluster.tell(event)
        said.append(cluster.scheduler.state.parked["wide"].reason)
    one, none = "the 1 that is there now does not hold so many", "none is there now"
    assert said == [f"it asks for 3 GPUs, and {which}" for which in (one, none, one, none, one)] and len(cluster.told) == 1
    cluster.tell(NodeAdded("b", (1000,)))
    assert cluster.scheduler.state.parked["wide"].reason == "it asks for 3 GPUs and the cluster has 2. Ask for fewer"


# -- whatever happens ------------------------------------------------------------------------------------------------------


class Story:
    """Hosts of one to eight GPUs, some of two kinds, come and go; jobs of one to eight GPUs, some for large ones alone, come and end."""

    def __init__(self, policy: str, seed: int) -> None:
        self.draw, self.policy, self.seed, self.now, self.jobs = random.Random(seed), policy, seed, 0.0, 0
        self.waited = 0.0  # for the last tick
        self.scheduler, self.mirror = Scheduler(LIVE_POLICIES[policy](), costs(), on_wait=lambda *_: None), Mirror()
        self.hosts = {f"h{index}": self._host(index) for index in range(self.draw.randint(1, 4))}
        self.up = set[str]()

    def _host(self, index: int) -> tuple[MemoryFound, NodeAdded]:
        gpus = tuple(range(10 * index, 10 * index + self.draw.choice((1, 2, 2, 3, 4, 8))))
        rooms = (24 * GB, 80 * GB) if self.draw.random() < 0.3 else (self.draw.choice((24 * GB, 80 * GB)),)
        return MemoryFound(gpus, tuple([self.draw.choice(rooms) for _ in gpus])), NodeAdded(f"h{index}", gpus)

    @property
    def state(self) -> ClusterState:
        return self.scheduler.state

    @property
    def training(self) -> list[str]:
        return sorted(name for known in self.state.groups.values() for name in known.group.job_ids)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.now += 1.0
            tell(self.scheduler, self.mirror, event, self.now)

    def add(self, name: str) -> None:
        self.up.add(name)
        self.tell(*self.hosts[name])

    def move(self) -> None:
        kind, away = self.draw.random(), sorted(self.hosts.keys() - self.up)
        if kind < 0.45:
            self.tell(self._job())
        elif kind < 0.65 and self.training:
            self.tell(JobFinished(self.draw.choice(self.training)))
        elif kind < 0.78 and self.up:
            self.up.remove(name := self.draw.choice(sorted(self.up)))
            self.tell(self.draw.choice([GpusLost(self.hosts[name][1].gpus), NodeDraining(name), NodeDraining(name, finish=True)]))
        elif kind < 0.9 and away:
            self.add(self.draw.choice(away))
        elif self.state.groups:
            self.tell(GroupReady(self.draw.choice(sorted(self.state.groups))))
        self.waited = self.draw.choice((0.0, 60.0, 4000.0))
        self.now += self.waited
        self.tell(Tick())

    def _job(self) -> JobSubmitted:
        self.jobs += 1
        gpus, values = self.draw.choice((1, 1, 1, 2, 2, 3, 4, 6, 8)), LARGE if self.draw.random() < 0.3 else {"parameters": 10**7}
        return made_spec(
            f"j{self.jobs}",
            gpus,
            8000.0 * gpus,
            self.draw.choice((10, 1000, 10**5)),
            least_gpus=self.draw.choice((1, gpus)),
            on_one_host=self.draw.random() < 0.1,
            priority=self.draw.choice((0.0, 0.0, 1.0)),
            **values,
        )

    def end_all(self) -> None:
        """No job comes, and those that train end, until none does."""
        while self.training:
            self.tell(JobFinished(self.draw.choice(self.training)), Tick())
            for wait in (60.0, 400.0, 4000.0, 90_000.0):
                if not self.training:
                    self.now += wait
                    self.tell(Tick())

    def finds_idle_gpus(self, job: Job) -> bool:
        """Enough of one host that are free and have room for it, or of any where it fits on the large ones alone."""
        memory, pool = self.state.memory, self.state.pool
        free = [sum(memory.has_room(gpu, job.least_room) for gpu in node.free) for node in pool.lasting_nodes.values()]
        apart = job.least_room and not job.spec.on_one_host
        return max(free, default=0) >= job.spec.gpus or bool(apart and sum(free) >= job.spec.gpus)

    def waits_though_others_give_way(self) -> bool:
        """Whether the one job of the highest priority that waits lacks only GPUs of any nodes that are free, or of groups of jobs which all
        are of a lower one, and have rested by now. After a short time it may not have been looked at again.
        """
        state, rests = self.state, Settings().min_residence_seconds
        most = max([state.jobs[name].spec.priority for name in state.pending], default=0.0)
        first, *others = [job for name in state.pending if (job := state.jobs[name]).spec.priority == most] or [None]
        if first is None or others or self.waited < rests or not may_lie_apart(state.pool, first):
            return False
        gpus = {gpu for node in state.pool.lasting_nodes.values() for gpu in node.free}
        for known in state.groups.values():
            if state.now - known.changed_at >= rests and all(state.jobs[name].spec.priority < most for name in known.group.job_ids):
                gpus.update([gpu for gpu in known.group.gpus if state.pool.node_of[gpu] not in state.pool.draining])
        return sum(state.memory.has_room(gpu, first.least_room) for gpu in gpus) >= first.spec.gpus


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_no_job_waits_for_ever_whatever_hosts_come_and_go(policy: str) -> None:
    """None is lost or doubled, which `tell` checks after each event."""
    for seed in FOUND:
        live_through(Story(policy, seed))


def live_through(story: Story) -> None:
    policy = story.policy
    for name in story.hosts:
        story.add(name)
    for _ in range(story.draw.randint(10, 60)):
        story.move()
        if policy in ("sjf", "backfill", "srtf", "las"):
            assert not [name for name in story.state.pending if story.finds_idle_gpus(story.state.jobs[name])], story.seed
        assert policy != "residual_capacity" or not story.waits_though_others_give_way(), story.seed
    story.end_all()
    assert not (story.up and story.state.pending), f"it holds back those behind it: {story.seed}"
    for name in sorted(story.hosts.keys() - story.up):
        story.add(name)
    story.end_all()
    assert not story.state.pending and set(story.state.jobs) == set(story.state.parked)
    assert not [name for name, job in story.state.jobs.items() if story.finds_idle_gpus(job)], story.seed
