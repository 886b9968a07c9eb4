"""Which hosts of an engine get workers, and what of the engine's word counts as a proof. The engine is a fake, the clock the test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tlora.cluster.engine_hosts import Demand
from tlora.cluster.host_engine import (
    ENGINE_MESSAGES,
    AgentReport,
    EngineHost,
    EngineLostError,
    HostsSeen,
    HostsWanted,
    WorkerEnd,
    WorkerOrder,
)
from tlora.cluster.host_keeper import HostKeeper, HostLimits, KnownHosts, choose_hosts

ORDER = WorkerOrder("tcp://127.0.0.1:1", "sha256:00", "tlw-secret", "cpu")


def hosts(**places: int) -> dict[str, EngineHost]:
    return {name: EngineHost(name, count) for name, count in places.items()}


@pytest.mark.parametrize(
    ("kept", "demand", "limits", "expected"),
    [
        ([], Demand(), HostLimits(), ((), (), None)),
        ([], Demand(waiting={1: 1}), HostLimits(), (("b",), (), None)),  # the largest first
        ([], Demand(waiting={1: 9}), HostLimits(), (("b", "a", "c"), (), None)),
        ([], Demand(waiting={1: 9}), HostLimits(max_hosts=2), (("b", "a"), (), 2)),
        (["a"], Demand(waiting={1: 2}), HostLimits(), (("a",), (), None)),  # an idle one covers it
        (["a"], Demand(frozenset("a"), {1: 2}), HostLimits(), (("a", "b"), (), None)),
        ([], Demand(), HostLimits(min_hosts=2), (("b", "a"), (), None)),
        (["a", "b"], Demand(), HostLimits(), ((), ("a", "b"), None)),
        (["a", "b"], Demand(), HostLimits(min_hosts=1), (("b",), ("a",), None)),
        (["a", "b"], Demand(frozenset("a")), HostLimits(), (("a",), ("b",), None)),
        (["gone", "a"], Demand(frozenset("a")), HostLimits(), (("a",), (), None)),
        (["a"], Demand(frozenset("a"), {1: 100}), HostLimits(max_hosts=40), (("a", "b", "c"), (), 26)),  # more than there are: asked for
        (["a"], Demand(), HostLimits(min_hosts=1, max_hosts=40), (("a",), (), 1)),
    ],
)
def test_hosts_follow_the_queue_within_their_limits(
    kept: list[str], demand: Demand, limits: HostLimits, expected: tuple[tuple[str, ...], tuple[str, ...], int | None]
) -> None:
    idle = {name: 0.0 for name in kept if name not in demand.busy}
    choice = choose_hosts(KnownHosts(hosts(a=2, b=4, c=1), kept, idle), demand, limits, 1000.0)
    assert (choice.keep, choice.drain, choice.request) == expected


def test_a_host_is_given_back_only_after_its_time_and_never_while_jobs_wait() -> None:
    live, idle = hosts(a=1, b=1), {"a": 900.0, "b": 100.0}
    limits = HostLimits(idle_seconds=300.0)
    assert choose_hosts(KnownHosts(live, ["a", "b"], idle), Demand(), limits, 1000.0).drain == ("b",)
    assert choose_hosts(KnownHosts(live, ["a", "b"], idle), Demand(waiting={1: 1}), limits, 1000.0).drain == ()


@pytest.mark.parametrize(("most", "sizes"), [(None, (8, 9)), (1, (5,)), (2, (9,))])
def test_a_job_that_no_hosts_can_hold_keeps_none_and_asks_for_none(most: int | None, sizes: tuple[int, ...]) -> None:
    """Of 4, 2 and 1 GPUs: a host more than may be taken never comes."""
    live, idle, limits = hosts(a=2, b=4, c=1), {"a": 0.0, "b": 0.0}, HostLimits(max_hosts=most)
    for gpus in sizes:
        choice = choose_hosts(KnownHosts(live, ["a", "b"], idle), Demand(waiting={gpus: 1}), limits, 1000.0)
        assert (choice.keep, choice.drain, choice.request) == ((), ("a", "b"), None if most is None else 0)
    fits = choose_hosts(KnownHosts(live, [], {}), Demand(waiting={5: 1, 99: 1}), limits, 1000.0)
    assert (fits.keep, fits.request) == {None: (("b", "a"), None), 1: ((), 0), 2: (("b", "a"), 2)}[most], "others count"


def test_before_a_host_was_seen_a_wide_job_asks_for_hosts() -> None:
    assert choose_hosts(KnownHosts({}), Demand(waiting={4: 1}), HostLimits(max_hosts=2), 0.0).request == 2


@pytest.mark.parametrize(
    ("late", "demand", "limits", "expected"),
    [
        ("b", Demand(waiting={1: 1}), HostLimits(), (("a",), ("b",), None)),  # another covers it
        ("b", Demand(waiting={1: 9}), HostLimits(), (("a", "c", "b"), (), None)),  # all are needed
        ("b", Demand(waiting={4: 1}), HostLimits(), (("a", "c", "b"), (), None)),  # it alone has room
        ("b", Demand(), HostLimits(), ((), ("b",), None)),
        ("b", Demand(waiting={1: 1}), HostLimits(max_hosts=1), (("a",), ("b",), 1)),
        ("b", Demand(waiting={1: 1}), HostLimits(max_hosts=4), (("a",), ("b",), 2)),  # it is one of those that are asked for
        ("b", Demand(frozenset("a"), {1: 4}), HostLimits(max_hosts=4), (("a", "c", "b"), (), 3)),
        ("b", Demand(frozenset("a")), HostLimits(max_hosts=4), (("a",), ("b",), 1)),  # none has to come
        ("b", Demand(), HostLimits(min_hosts=1, max_hosts=4), (("a",), ("b",), 2)),
        ("abc", Demand(waiting={1: 4}), HostLimits(max_hosts=9), (("b", "a"), (), 4)),  # two GPUs of each are held
    ],
)
def test_late_hosts_are_taken_last_and_count_among_those_that_are_asked_for(
    late: str, demand: Demand, limits: HostLimits, expected: tuple[tuple[str, ...], tuple[str, ...], int | None]
) -> None:
    kept = [*sorted(demand.busy), "b"]
    choice = choose_hosts(KnownHosts(hosts(a=2, b=4, c=1), kept, late=dict.fromkeys(late, 2)), demand, limits, 0.0)
    assert (choice.keep, choice.drain, choice.request) == expected


@pytest.mark.parametrize(
    ("late", "others", "jobs", "most", "request_"),
    [
        ("a", "", 1, 1, 2),  # it was the one of one, and no other was asked for
        ("a", "b", 1, 1, 1),  # the other has come
        ("ab", "", 1, 1, 2),  # once
        ("a", "b", 3, 2, 3),
        ("ab", "c", 9, 3, 5),
        ("a", "", 0, 1, 0),
    ],
)
def test_late_hosts_are_none_of_the_most_where_they_keep_others_from_coming(
    late: str, others: str, jobs: int, most: int, request_: int
) -> None:
    known = KnownHosts(hosts(**dict.fromkeys(late + others, 1)), late=dict.fromkeys(late, 0))
    demand, limits = Demand(waiting={1: jobs} if jobs else {}), HostLimits(max_hosts=most)
    choice = choose_hosts(known, demand, limits, 0.0)
    assert choice.request == request_ and len(choice.keep) <= most


@dataclass
class Engine:
    """Hosts are what the test says; agents start at once. Those of `occupied` hosts wait for GPUs, those of `spent` have drained, and those
    of `slow` take one more sync to do so.
    """

    name: str = "the engine"
    live: dict[str, EngineHost] = field(default_factory=dict[str, EngineHost])
    ended: dict[str, tuple[WorkerEnd, ...]] = field(default_factory=dict[str, tuple[WorkerEnd, ...]])
    agents: set[str] = field(default_factory=set[str])
    occupied: set[str] = field(default_factory=set[str])
    spent: set[str] = field(default_factory=set[str])
    slow: set[str] = field(default_factory=set[str])
    lost: str = ""
    heard: list[HostsWanted] = field(default_factory=list[HostsWanted])
    closed: bool = False

    def sync(self, wanted: HostsWanted) -> HostsSeen:
        if self.lost:
            raise EngineLostError(self.lost)
        self.heard.append(wanted)
        self.agents = ((self.agents | set(wanted.keep)) - (set(wanted.drain) - self.slow)) & set(self.live)
        self.slow -= set(wanted.drain)
        self.spent &= self.agents
        heard = sorted(self.agents - self.occupied)
        running = {name: 0 if name in self.spent else self.live[name].places for name in heard}
        reports = tuple(AgentReport(name, running[name], self.ended.get(name, ())) for name in heard)
        seen = HostsSeen(tuple(self.live.values()), reports)
        assert ENGINE_MESSAGES.decode(ENGINE_MESSAGES.encode(seen)) == seen  # as over a driver's line
        return seen

    def close(self) -> None:
        self.closed = True


class Kept:
    def __init__(self, engine: Engine, **limits: float) -> None:
        self.engine, self.now = engine, 0.0
        self.proofs: list[tuple[str, int | None, str]] = []
        self.notes: list[str] = []
        prove: Callable[[str, int | None, str], None] = lambda *proof: self.proofs.append(proof)  # noqa: E731
        self.keeper = HostKeeper(engine, ORDER, HostLimits(**limits), prove, self.notes.append)  # type: ignore[arg-type]

    def step(self, demand: Demand | None = None, seconds: float = 1.0) -> HostsWanted | None:
        if demand is not None:
            self.keeper.want(demand)
        self.now += seconds
        before = len(self.engine.heard)
        self.keeper.step(self.now)
        return self.engine.heard[-1] if len(self.engine.heard) > before else None

    def told(self, demand: Demand | None = None, seconds: float = 1.0) -> HostsWanted:
        """What the engine hears of a step, where it hears something."""
        order = self.step(demand, seconds)
        assert order is not None, "the engine heard nothing"
        return order


def test_a_host_comes_works_idles_and_is_given_back() -> None:
    engine = Engine(live=hosts(a=2))
    kept = Kept(engine, idle_seconds=60.0)
    kept.step(Demand(waiting={1: 1}))
    assert kept.told().keep == ("a",) and engine.agents == {"a"}
    kept.step(Demand(frozenset("a")))
    assert kept.told(seconds=600).keep == ("a",)
    kept.step(Demand())
    assert kept.told(seconds=59).keep == ("a",)
    engine.slow.add("a")
    assert kept.told(seconds=2).drain == ("a",) and engine.agents == {"a"}
    assert kept.told().drain == ("a",) and not engine.agents
    assert kept.notes == ["host a has come, with 2 GPUs", "host a is given back: it was idle for 60 s"]


def test_for_a_job_that_lacks_another_kind_of_gpu_each_host_is_tried_once() -> None:
    engine = Engine(live=hosts(a=2, b=2, c=1))
    kept = Kept(engine, idle_seconds=60.0, max_hosts=3)
    kept.step(Demand(waiting={1: 1}))
    kept.step(Demand(waiting={1: 1}))
    workers: dict[str, tuple[int, ...]] = {}
    taken: list[str] = []
    for _ in range(3):
        lacking = Demand(lacks_another=True, workers=workers)
        for _ in range(2):
            wanted = kept.step(lacking)
            assert wanted is not None and wanted.request == 0, "more of what there is would not do"
        new = sorted(engine.agents - set(taken))
        assert len(new) == 1, "the next when all GPUs of the one before are known"
        taken += new
        workers |= {name: tuple(range(engine.live[name].places)) for name in new}
    assert taken == ["a", "b", "c"]
    for _ in range(4):
        kept.step(Demand(lacks_another=True, workers=workers), seconds=61)
    assert not engine.agents, "they are given back, and not tried again"
    engine.live |= hosts(d=1)
    kept.step(), kept.step()
    assert engine.agents == {"d"}, "but what has come since is"


def test_for_a_job_that_lacks_another_kind_a_host_with_part_of_its_workers_is_known_in_the_end() -> None:
    """It trains other jobs, so that it is never given back: the next was not tried as long as one worker was missing."""
    engine = Engine(live=hosts(a=4, b=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 1}))
    kept.step(Demand(waiting={1: 1}))
    lacking = Demand(frozenset("a"), lacks_another=True, workers={"a": (1, 2, 3)})
    for seconds in (1.0, 590.0):
        kept.step(lacking, seconds=seconds)
    assert engine.agents == {"a"}
    kept.step(seconds=20.0)
    assert engine.agents == {"a", "b"}


def late_host(engine: Engine, demand: Demand, **limits: float) -> Kept:
    """Workers have not come from a host in ten minutes."""
    kept = Kept(engine, **limits)
    for seconds in (1.0, 1.0, 1.0, 590.0, 20.0, 1.0):
        kept.step(demand, seconds=seconds)
    return kept


def test_a_host_from_which_no_worker_comes_is_none_that_covers_what_waits() -> None:
    """It starts none, or a deterministic cluster refuses its kind: the job waited for it, and the next host was not taken."""
    engine = Engine(live=hosts(a=1, b=1))
    kept = late_host(engine, Demand(waiting={1: 1}))
    assert engine.agents == {"b"} and "no worker of host a has come in 600 s: other hosts are taken before it" in kept.notes
    for seconds in (590.0, 590.0):
        kept.step(Demand(waiting={1: 1}, workers={"b": (7,)}), seconds=seconds)
    assert engine.agents == {"b"} and kept.keeper.most_gpus == 1
    kept.step(Demand(waiting={2: 1}, workers={"b": (7,)}))
    assert engine.agents == {"a", "b"}, "what the others do not suffice for"
    kept.step(Demand(waiting={1: 1}, workers={"b": (7,)}))
    assert engine.agents == {"b"}
    del engine.live["a"]
    kept.step()
    engine.live |= hosts(a=1)
    kept.step()
    assert kept.keeper.most_gpus == 2, "it is another one by now"


def test_a_host_whose_gpus_others_hold_is_used_when_they_are_free() -> None:
    """Ray reports its GPUs as there; its agent waits for them."""
    engine = Engine(live=hosts(a=2), occupied={"a"})
    kept = late_host(engine, Demand(waiting={1: 1}))
    kept.step(seconds=5000.0), kept.step(seconds=5000.0)
    assert engine.agents == {"a"} and all("a" not in wanted.drain for wanted in engine.heard), "there is no other"
    assert len(kept.notes) == 2 and kept.keeper.most_gpus == 2, "it may come still"
    engine.live |= hosts(b=1)
    kept.step(), kept.step()
    assert engine.agents == {"b"} and kept.keeper.most_gpus == 1
    kept.step(Demand(frozenset("b"), {1: 1}, workers={"b": (7,)}))
    assert engine.agents == {"a", "b"}
    engine.occupied.clear()
    kept.step(Demand(frozenset("b"), {1: 1}, workers={"a": (1, 2), "b": (7,)}))
    assert engine.agents == {"a", "b"} and kept.keeper.most_gpus == 3, "it is late no more"


def test_hosts_whose_gpus_others_hold_are_all_waited_for() -> None:
    engine = Engine(live=hosts(a=1, b=1), occupied={"a", "b"})
    kept = late_host(engine, Demand(waiting={1: 1}))
    kept.step(seconds=600.0), kept.step(seconds=600.0)
    assert engine.agents == {"a", "b"}
    engine.occupied = {"b"}
    for _ in range(3):
        kept.step(Demand(waiting={1: 1}, workers={"a": (1,)}))
    assert engine.agents == {"a"}


def test_a_late_host_that_was_given_back_is_as_others_after_a_while() -> None:
    engine = Engine(live=hosts(a=1, b=1))
    kept = late_host(engine, Demand(waiting={1: 1}))
    working = Demand(frozenset("b"), workers={"b": (7,)})
    kept.step(working, seconds=3500.0)
    assert kept.keeper.most_gpus == 1
    kept.step(seconds=200.0)
    assert kept.keeper.most_gpus == 2
    for seconds, gpus in ((1.0, 2), (1.0, 2), (1190.0, 2), (20.0, 1)):
        kept.step(Demand(frozenset("b"), {1: 1}, workers={"b": (7,)}), seconds=seconds)
        assert engine.agents == {"a", "b"} and kept.keeper.most_gpus == gpus, "it has twice the time"


def test_an_engine_is_asked_for_a_host_beside_one_that_is_late() -> None:
    """It takes the late host, which it has, for the one that is asked for."""
    kept = late_host(engine := Engine(live=hosts(a=4)), Demand(waiting={1: 1}), max_hosts=4)
    assert (engine.heard[-1].request, engine.heard[-1].request_places) == (2, 4)
    engine.live |= hosts(b=4)
    kept.step(), kept.step()
    assert engine.agents == {"b"} and kept.keeper.most_gpus == 12, "three beside it"


def test_an_agent_that_has_drained_makes_room_for_another() -> None:
    """Its host was given back and taken again meanwhile, or its GPUs came free only then: it starts no worker any more."""
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 1}))
    kept.step()
    engine.spent = {"a"}
    kept.step()
    kept.step()
    assert not engine.agents and not engine.spent
    kept.step()
    assert engine.agents == {"a"} and "a" not in engine.heard[-1].drain


def test_a_job_may_ask_for_what_its_hosts_have_and_may_get() -> None:
    for most, gpus in ((None, 5), (1, 4), (3, 12)):
        kept = Kept(Engine(live=hosts(a=4, b=1)), max_hosts=most)  # type: ignore[arg-type]
        assert kept.keeper.most_gpus == 0, "nothing was seen yet"
        kept.step()
        assert kept.keeper.most_gpus == gpus


def test_a_process_that_an_agent_saw_end_is_proven_once() -> None:
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 1}))
    engine.ended["a"] = (WorkerEnd(7, "ended with exit status 143"),)
    kept.step()
    kept.step()
    assert kept.proofs == [("a", 7, "ended with exit status 143")]
    engine.ended["a"] += (WorkerEnd(0, "could not be started: no room"), WorkerEnd(8, "was killed by signal 9 (SIGKILL)"))
    kept.step()
    assert kept.proofs[1:] == [("a", 8, "was killed by signal 9 (SIGKILL)")]


def test_a_process_with_the_number_of_an_earlier_one_is_proven_too() -> None:
    """In a container an agent that is started again gives its first worker the number of the last one's."""
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 1}))
    for _ in range(2):
        engine.ended["a"] = (WorkerEnd(7, "ended with exit status 1"),)
        kept.step()
        del engine.ended["a"]  # another agent has seen none
        kept.step()
    assert kept.proofs == [("a", 7, "ended with exit status 1")] * 2


def test_a_dead_hosts_workers_are_declared_dead_until_they_cannot_be_alive() -> None:
    engine = Engine(live=hosts(a=1, b=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 2}))
    kept.step()
    del engine.live["a"]
    kept.step()
    kept.step()  # again: its line may have stood at the first
    assert kept.proofs == [("a", None, "is on a host that the engine has lost")] * 2
    kept.step(seconds=700)
    kept.proofs.clear()
    kept.step()
    assert not kept.proofs and "host a is gone: the engine has lost its node" in kept.notes


def test_a_lost_engine_proves_nothing_and_its_hosts_are_begun_anew_when_it_is_back() -> None:
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 1}))
    kept.step()
    engine.lost, engine.agents = "its head is gone", set()
    assert kept.step() is None and kept.step() is None
    engine.lost, engine.live = "", hosts(a2=1)
    kept.step(Demand(waiting={1: 1}))
    assert kept.told().keep == ("a2",) and not kept.proofs
    assert kept.notes[1:] == [
        "the engine cannot be reached: its head is gone. Its workers save their jobs; it is tried again",
        "the engine is there again",
        "host a2 has come, with 1 GPU",
    ]


def test_agents_of_an_earlier_controller_are_kept_until_they_idle() -> None:
    engine = Engine(live=hosts(a=1), agents={"a"})
    kept = Kept(engine, idle_seconds=60.0)
    kept.step(Demand())
    assert engine.agents == {"a"}
    kept.step()
    kept.step(seconds=61)
    assert not engine.agents


def test_what_is_asked_of_the_engine_is_noted_when_it_changes() -> None:
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine, max_hosts=4)
    for waiting in (3, 3, 9, 0):
        kept.step(Demand(waiting={1: waiting}))
        kept.step()
    asked = [note for note in kept.notes if "asked" in note]
    assert asked == [f"the engine was asked for {count} hosts; there are 1" for count in (3, 4, 0)]


def test_a_server_that_ends_ends_its_agents(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine, max_hosts=2)
    kept.step(Demand(waiting={1: 1}))
    kept.step()
    kept.keeper.drain()
    kept.keeper.close()
    assert not engine.agents and engine.closed and engine.heard[-1].request == 0
    engine = Engine(live=hosts(a=1))
    kept = Kept(engine)
    kept.step(Demand(waiting={1: 1}))
    kept.step()
    kept.keeper.close()
    assert engine.agents == {"a"} and engine.closed


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(ORDER)
