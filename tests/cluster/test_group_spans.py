"""Which groups span hosts, over how many GPUs their base is cut, and which jobs wait for hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tlora.cluster.hosts import by_host
from tlora.cluster.nodes import Nodes
from tlora.cluster.wide_groups import WideGroups
from tlora.job import LayoutSetting
from tlora.protocol import GpusAsked, GpusLost, JobGroup, JobProfile, JobSubmitted, MemoryFound, NodeAdded, ParallelPlan


def submitted(gpus: int, least: int = 1) -> JobSubmitted:
    return JobSubmitted("a", "base", gpus, JobProfile(100.0, 10, 30, 1000), least_gpus=least)


def group_on(*gpus: int) -> JobGroup:
    return JobGroup("g", "base", gpus, ParallelPlan(len(gpus), 1024), ("a",), (1.0,))


def wide(layout: LayoutSetting = "auto") -> tuple[WideGroups, Nodes, list[str]]:
    """Hosts `here` with GPUs 0 and 1, and `b` with 1000."""
    nodes, said = Nodes(), list[str]()
    nodes.see([NodeAdded("here", (0, 1)), NodeAdded("b", (1000,))])
    on_one_host = lambda gpus: tuple(max(by_host(gpus, lambda gpu: gpu // 1000).values(), key=len))  # noqa: E731
    return WideGroups(nodes, on_one_host, layout, said.append), nodes, said


@pytest.mark.parametrize(("orders", "least", "spans"), [(2, 1, False), (3, 1, True), (1, 3, True), (1, 2, False)])
def test_a_group_spans_hosts_where_a_job_or_the_base_needs_it(orders: int, least: int, spans: bool) -> None:
    groups, *_ = wide()
    groups.see(submitted(orders, least))
    group, kept = groups.keep(group_on(0, 1, 1000), [orders])
    assert group.gpus == ((0, 1, 1000) if spans else (0, 1)) and (kept is None) == spans
    assert kept is None or "more than the 2 of the widest" in kept.reason


def test_a_group_keeps_what_its_base_needs_though_a_host_could_hold_it() -> None:
    """As where GPUs are uneven, and those that have room lie on two hosts."""
    groups, *_ = wide()
    groups.see(submitted(1, least=2))
    assert groups.keep(group_on(0, 1000), [1]) == (group_on(0, 1000), None)
    assert groups.stages(group_on(0, 1000)) == 2


def test_a_base_is_cut_where_no_host_holds_it() -> None:
    groups, *_ = wide()
    assert groups.stages(group_on(0, 1, 1000)) == 0, "replicas"
    groups.see(submitted(1, least=3))
    assert groups.stages(group_on(0, 1, 1000)) == 3 and groups.stages(None) == groups.stages(group_on(0)) == 0
    ordered, *_ = wide("stages")
    assert ordered.stages(group_on(0, 1)) == 2 and ordered.stages(group_on(0)) == 0


def test_a_group_grows_onto_no_gpu_of_another_worker_unless_a_job_needs_it() -> None:
    """What two workers of a host exchange goes through a line, which costs a small job more than the GPU brings."""
    _, nodes, said = wide()
    groups = WideGroups(nodes, lambda gpus: gpus, "auto", said.append, worker_of=lambda gpu: gpu)
    group, kept = groups.keep(group_on(0, 1), [1, 1], before=(1,))
    assert group.gpus == (1,) and kept is not None and "a worker of its own" in kept.reason
    assert groups.keep(group_on(0, 1), [1, 1])[0].gpus == (0,)
    assert groups.keep(group_on(0, 1), [1, 2], before=(1,)) == (group_on(0, 1), None)
    together = WideGroups(nodes, lambda gpus: gpus, "auto", said.append)
    assert together.keep(group_on(0, 1), [1, 1], before=(1,)) == (group_on(0, 1), None), "one worker can have both"


def test_a_base_is_cut_where_each_gpu_of_the_host_that_holds_it_has_a_worker_of_its_own() -> None:
    _, nodes, said = wide()
    groups = WideGroups(nodes, lambda gpus: gpus, "auto", said.append, worker_of=lambda gpu: gpu)
    groups.see(submitted(1, least=2))
    assert groups.stages(group_on(0, 1)) == 2, "two processes share no base"
    groups.see(submitted(1, least=1))
    assert groups.stages(group_on(0, 1)) == 0, "replicas"


def test_a_job_asks_for_what_is_there_or_what_its_base_needs() -> None:
    groups, nodes, said = wide()
    assert groups.admit(submitted(8)).gpus == 3, "the rest of its replicas take turns"
    assert said == ["a: some of its 8 replicas run in turn: 3 GPUs are there as it arrives"]
    large = submitted(1, least=4)
    assert groups.admit(large).gpus == 4, "the scheduler lets it wait for hosts"
    nodes.see([NodeAdded("c", (2000,))])
    assert groups.admit(submitted(4)).gpus == 4, "of hosts of 2, 1 and 1"
    groups.see_hosts([MemoryFound((0, 1, 1000), (10**9,) * 3)])
    assert groups.admit(submitted(8)).gpus == 4, "nothing is known of its base"


def test_jobs_that_came_before_the_first_host_ask_for_what_comes() -> None:
    nodes, said = Nodes(), list[str]()
    groups = WideGroups(nodes, lambda gpus: gpus, "auto", said.append)
    orders = {"wide": submitted(4), "base": submitted(4, least=4), "one": submitted(1), "gone": submitted(4), "two": submitted(2)}
    assert [groups.admit(replace(job, job_id=name)).gpus for name, job in orders.items()] == [4, 4, 1, 4, 2]
    there, first, more = {"wide", "base", "one", "two"}, NodeAdded("a", (0,)), NodeAdded("b", (1000, 1001))
    nodes.see([first])
    assert groups.ask_anew([first], there, []) == [GpusAsked("wide", 1), GpusAsked("two", 1)]
    turns = "replicas run in turn: 1 GPU is there as it arrives"
    assert said == [f"wide: some of its 4 {turns}", f"two: some of its 2 {turns}"]
    nodes.see([more])
    asked = [GpusAsked("wide", 3), GpusAsked("two", 2)]
    assert groups.ask_anew([more], there, {"two"}) == asked, "the other trains, and may wait again"
    assert groups.ask_anew([], there, []) == [] and len(said) == 2


def test_jobs_ask_anew_when_hosts_go() -> None:
    """They kept the number that they asked for by hosts that are gone, also those that trained there."""
    nodes, said = Nodes(), list[str]()
    groups = WideGroups(nodes, lambda gpus: gpus, "auto", said.append)
    nodes.see([NodeAdded("a", (0, 1)), NodeAdded("b", (1000, 1001)), NodeAdded("c", (2000,))])
    names = {"waits": 4, "trains": 4, "fits": 2, "one": 1, "gone": 4}
    assert [groups.admit(replace(submitted(gpus), job_id=name)).gpus for name, gpus in names.items()] == [4, 4, 2, 1, 4]
    here = names.keys() - {"gone"}
    nodes.see([lost := GpusLost((1000, 1001))])
    assert groups.ask_anew([lost], here, {"trains"}) == [GpusAsked("waits", 3), GpusAsked("trains", 3)]
    assert said == ["waits: some of its 4 replicas run in turn: 3 GPUs are there as it arrives"]
    drained = nodes.drain("a", finish=True)
    assert groups.ask_anew([drained], here, {"trains"}) == [GpusAsked(name, 1) for name in ("waits", "trains", "fits")]
    back = nodes.take_back("a")
    assert groups.ask_anew([back], here, {"trains"}) == [GpusAsked("waits", 3), GpusAsked("trains", 3), GpusAsked("fits", 2)]


def test_what_jobs_ask_for_costs_nothing_where_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many jobs that ask for what they order a host that comes or goes beside others changes nothing: none is looked at."""
    groups, nodes, _ = wide()
    nodes.see([NodeAdded("c", (2000, 2001))])
    for number in range(200):
        groups.admit(replace(submitted(1 + number % 2), job_id=f"j{number}"))
    monkeypatch.setattr(groups, "_asked", lambda *_: pytest.fail("a job was looked at"))
    for event in (NodeAdded("d", (3000,)), GpusLost((1000,)), GpusLost((2000, 2001))):
        nodes.see([event])
        assert groups.ask_anew([event], set(), []) == []
    assert len(groups._content) <= 64, "jobs that have ended are forgotten"


def test_a_job_asks_for_what_an_engine_can_bring() -> None:
    nodes, can_bring, said = Nodes(), 0, list[str]()
    groups = WideGroups(nodes, lambda gpus: gpus, "auto", said.append, lambda: can_bring)
    assert groups.admit(submitted(8)).gpus == 8, "nothing is known yet"
    nodes.see([NodeAdded("b", (1000,))])
    assert groups.admit(submitted(8)).gpus == 1
    can_bring = 4
    assert groups.admit(submitted(8)).gpus == 4 and groups.admit(submitted(3)).gpus == 3
    assert said[1:] == ["a: some of its 8 replicas run in turn: 4 GPUs are there as it arrives"]


def test_a_job_that_waits_for_what_an_engine_no_longer_brings_asks_anew() -> None:
    """It waited for hosts from which no worker comes, beside one that it could train on."""
    nodes, can_bring = Nodes(), 8
    groups = WideGroups(nodes, lambda gpus: gpus, "auto", lambda _line: None, lambda: can_bring)
    nodes.see([first := NodeAdded("b", (1000, 1001, 1002, 1003))])
    assert groups.admit(submitted(8)).gpus == 8
    assert groups.ask_anew([first], {"a"}, []) == groups.ask_anew([], {"a"}, []) == []
    can_bring = 4
    assert groups.ask_anew([], {"a"}, []) == [GpusAsked("a", 4)] and groups.ask_anew([], {"a"}, []) == []
    can_bring = 8
    assert groups.ask_anew([], {"a"}, []) == [GpusAsked("a", 8)]
