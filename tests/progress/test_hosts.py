"""Which hosts a cluster has, and where their jobs train, out of events and actions."""

from __future__ import annotations

from tlora.progress.cluster import ClusterProgress
from tlora.progress.view import ProgressView
from tlora.protocol import (
    ChangeGroup,
    GpusLost,
    GpusUnheard,
    GroupKept,
    JobDelayed,
    JobGroup,
    JobProfile,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
)


def test_hosts_come_drain_and_go_and_a_job_says_where_it_is() -> None:
    progress = ClusterProgress(ProgressView())
    start = StartGroup(JobGroup("g0", "base", (1001, 1002), ParallelPlan(2, 1024), ("a",), (1.0,)))
    for item in (NodeAdded("local", (0,)), JobSubmitted("a", "base", 2, JobProfile(100.0, 10, 30, 1000)), start):
        progress.see(item)
    assert progress.view.rows["a"].gpus_text == "1001,1002", "one host needs no name"
    for item in (NodeAdded("big", (1001,), "r1"), NodeAdded("big", (1002,), "r1"), StopGroup("g0"), start, NodeDraining("big")):
        progress.see(item)
    assert progress.view.rows["a"].gpus_text == "big:1001,1002"
    host = progress.hosts["big"]
    assert (host.failure_domain, host.gpus, host.draining) == ("r1", {1001, 1002}, True)
    progress.see(StopGroup("g0"))
    assert progress.view.rows["a"].gpus_text == ""
    progress.see(NodeAdded("big", (1001, 1002), "r1"))
    assert not host.draining
    progress.see(GpusLost((1001, 1002)))
    assert list(progress.hosts) == ["local"]


def test_a_group_says_why_it_spans_hosts_or_does_not() -> None:
    progress, group = ClusterProgress(ProgressView()), JobGroup("g0", "base", (0, 1000), ParallelPlan(2, 1024), ("a",), (1.0,))
    for item in (NodeAdded("here", (0,)), NodeAdded("b", (1000,)), StartGroup(group)):
        progress.see(item)
    assert progress.why_there(group) == "on hosts here and b: its base or a job of it needs more GPUs than one has"
    kept = group.on((0,))
    for item in (GroupKept("g0", (0,), "it cannot listen"), ChangeGroup(kept)):
        progress.see(item)
    assert progress.why_there(kept) == "it cannot listen"
    progress.see(ChangeGroup(group))
    assert progress.why_there(group).startswith("on hosts"), "it got them after all"
    progress.see(ChangeGroup(kept))
    assert progress.why_there(kept) == ""


def test_a_group_whose_host_is_not_heard_waits_for_the_end_of_its_lease() -> None:
    progress, group = ClusterProgress(ProgressView()), JobGroup("g0", "base", (1000,), ParallelPlan(1, 1024), ("a",), (1.0,))
    progress.see(NodeAdded("b", (1000,)))
    progress.see(StartGroup(group))
    for item, why in ((GpusUnheard((1000,), "its lease"), "its lease"), (GpusUnheard((1000,), ""), "")):
        progress.see(item)
        assert progress.why_there(group) == why
    for event in (NodeAdded("c", (2000, 2001)), GpusUnheard((1000, 2001), "its lease")):
        progress.see(event)
    assert [host.gpus & progress.silent for host in progress.hosts.values()] == [{1000}, {2001}]
    for event in (GpusLost((1000,)), GpusUnheard((2001,), "")):
        progress.see(event)
    assert not any(progress.unheard.values()) and [host.gpus & progress.silent for host in progress.hosts.values()] == [set()]


def test_a_job_whose_host_is_not_heard_has_no_rate() -> None:
    """The last one that was heard stood there until the lease had ended."""
    progress, group = ClusterProgress(ProgressView()), JobGroup("g0", "base", (1000,), ParallelPlan(1, 1024), ("a",), (1.0,))
    profile = JobProfile(100.0, 10, 30, 1000)
    for item in (NodeAdded("b", (1000,)), JobSubmitted("a", "base", 1, profile), StartGroup(group), StepsDone("a", "g0", 2, 0.5)):
        progress.see(item)
    assert progress.view.rows["a"].tokens_per_second == 200 and progress.view.rows["a"].eta_seconds == 4
    progress.see(JobDelayed("a", "room on the disk"))
    assert progress.why_delayed("a") == "room on the disk" and progress.why_delayed("b") == ""
    assert progress.view.rows["a"].tokens_per_second == 0
    progress.see(GpusUnheard((1000,), "its lease"))
    assert progress.why_delayed("a") == "its lease", "which tells of nothing else then"
    assert progress.jobs_on((1000,)) == ["a"] and progress.jobs_on((0,)) == []
    assert progress.view.rows["a"].tokens_per_second == 0 and progress.view.rows["a"].eta_seconds is None
    progress.see(StopGroup("g0"))
    assert not progress.delayed and progress.why_delayed("a") == ""


def test_a_host_that_is_used_again_is_not_called_free_while_nothing_is_heard_of_it() -> None:
    """GPUs that come to a host that is to be left are told of only when that is taken back, and may be silent by then."""
    progress = ClusterProgress(ProgressView())
    for item in (NodeAdded("a", (0,)), NodeDraining("a"), GpusUnheard((1,), "its lease"), NodeAdded("a", (0, 1))):
        progress.see(item)
    assert progress.hosts["a"].gpus & progress.silent == {1}
    progress.see(GpusUnheard((1,), ""))
    progress.see(NodeAdded("a", (0, 1)))
    assert not (progress.hosts["a"].gpus & progress.silent)
