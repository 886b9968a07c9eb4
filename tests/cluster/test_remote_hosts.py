"""Workers of other hosts as their controller counts their leases: real TLS on loopback, spoken to by hand."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_workers import local_backend
from tests.cluster.test_listeners import LABELS, REMOTE, TcpStation, wait_for
from tests.cluster.test_local import job as job_of
from tests.cluster.test_local import submitted
from tlora.cluster import worker_pool
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.hosts import STRIDE, Hosts
from tlora.cluster.kept_kind import KeptKind
from tlora.cluster.leased_process import DRIFT_SECONDS
from tlora.cluster.leases import Leases
from tlora.cluster.limits import Limits
from tlora.cluster.listeners import TlsListener
from tlora.cluster.remote_worker import RemoteWorker
from tlora.cluster.worker_pool import WorkerPool
from tlora.link.dialer import NOTICE_SECONDS, Dialer, _now
from tlora.link.endpoint import Endpoint, dial
from tlora.link.lines import Line
from tlora.link.versions import versions
from tlora.protocol import GpusLost, GpusUnheard, GroupKept, JobGroup, NodeAdded, ParallelPlan, StartGroup
from tlora.worker_protocol import Ack, Alive, DesiredState, Ending, Envelope, Farewell, HeldJob, HostLabels, Join, Left, Load, worker_line

LEASE = 600.0  # none ends but where a test shortens it, however slow the machine is
SHORT = 1.0


LINES: list[Line] = []


@pytest.fixture
def station(tmp_path: Path) -> Iterator[TcpStation]:
    made = TcpStation(tmp_path, host_lease=LEASE)
    yield made
    made.close()
    while LINES:
        LINES.pop().close()


def come(station: TcpStation, **changes: Any) -> tuple[Line, dict[str, Any]]:
    line = station.enter_as({"boot": "of another host"})
    LINES.append(line)
    line.send(worker_line(replace(REMOTE, **changes)))
    return line, json.loads(line.read_line(60) or b"{}")


def shorten_lease(worker: RemoteWorker) -> None:
    worker.process.lease_seconds = SHORT


def test_a_silent_host_is_lost_when_its_lease_ends_and_never_before(station: TcpStation) -> None:
    """Its connection is cut at once, and then nothing: only the lease says that it has ended. What comes after is refused."""
    began = _now()
    line, _ = come(station, jobs=(HeldJob("a", 7, 3, True),))
    (worker,) = station.worker_pool.workers.values()
    line.end()
    events = station.worker_pool.remote_hosts.events
    wait_for(lambda: any(isinstance(event, GpusUnheard) for event in events))
    assert not station.reports
    shorten_lease(worker)
    wait_for(lambda: any(report is None for _, report in station.reports))
    assert _now() - began >= SHORT + DRIFT_SECONDS, "its clock may be a little slower"
    assert station.reports == [(worker, None)] and worker.doomed, "no job is to blame"
    assert isinstance(events[-1], GpusLost)
    assert "its lease of 1 s has ended" in worker.process.how_it_ended()
    (unheard,) = [event for event in events if isinstance(event, GpusUnheard)]
    assert unheard.gpus == worker.gpus and "its jobs go on elsewhere 602 s after its last word" in unheard.why
    del station.worker_pool.workers[worker.gpu]  # as the reconciler does
    _, answer = come(station, jobs=(HeldJob("a", 7, 3, True),))
    assert "its lease has ended, and its jobs have gone on elsewhere" in answer["reason"]
    assert come(station, incarnation="begun again")[1]["kind"] == "ack"


def test_a_host_that_comes_again_is_waited_for_no_longer(station: TcpStation) -> None:
    def unheard(gpus: tuple[int, ...], count: int) -> list[bool]:
        events = station.worker_pool.remote_hosts.events
        wait_for(lambda: sum(isinstance(event, GpusUnheard) for event in events) == count)
        return [bool(event.why) for event in events if isinstance(event, GpusUnheard) and event.gpus == gpus]

    line, _ = come(station, jobs=(HeldJob("a", 7, 3, True),))
    (worker,) = station.worker_pool.workers.values()
    line.end()
    assert unheard(worker.gpus, 1) == [True]
    line, _ = come(station, jobs=(HeldJob("a", 7, 3, True),))
    assert unheard(worker.gpus, 2) == [True, False] and not station.reports
    station.do(lambda: worker.stop(begins_anew=True))
    line.end()
    assert unheard(worker.gpus, 3) == [True, False, True]
    shorten_lease(worker)
    wait_for(lambda: (worker, None) in station.reports)
    assert unheard(worker.gpus, 4) == [True, False, True, False], "its GPUs are not lost"


def unheard(station: TcpStation, count: int) -> list[tuple[tuple[int, ...], bool]]:
    """The first `count` times that GPUs were heard no more (True), or again."""
    events = station.worker_pool.remote_hosts.events
    wait_for(lambda: sum(isinstance(event, GpusUnheard) for event in events) >= count)
    return [(event.gpus, bool(event.why)) for event in list(events) if isinstance(event, GpusUnheard)][:count]


def test_a_gpu_without_work_is_not_heard_either_and_one_whose_worker_begins_anew_is_not_missed(station: TcpStation) -> None:
    line, _ = come(station)
    line.end()
    assert unheard(station, 1) == [((STRIDE,), True)]
    line, _ = come(station)
    assert unheard(station, 2)[1] == ((STRIDE,), False)
    (worker,) = station.worker_pool.workers.values()
    station.do(lambda: worker.stop(begins_anew=True))
    line.send(worker_line(Envelope(1, 0, Farewell())))
    wait_for(lambda: (worker, None) in station.reports)
    del station.worker_pool.workers[worker.gpu]  # as the reconciler does
    line.end()
    wait_for(lambda: not worker.connected)
    other, _ = come(station, incarnation="begun anew")
    assert not station.worker_pool.remote_hosts._unheard and len(unheard(station, 2)) == 2
    other.end()
    assert unheard(station, 3)[2] == ((STRIDE,), True)


def test_its_last_word_is_proof_enough(station: TcpStation) -> None:
    """Also of a job that it was about to begin. It may come again at once, before its end is handled."""
    line, _ = come(station, jobs=(HeldJob("a", 7, 0, False),))
    (worker,) = station.worker_pool.workers.values()
    station.do(lambda: worker.stop(begins_anew=True))
    assert b'"begins_anew":true' in (line.read_line(60) or b"")
    line.send(worker_line(Envelope(1, 0, Ending("its controller wants no more of it"))) + worker_line(Envelope(2, 0, Farewell())))
    assert worker.process.wait(600) and worker.process.how_it_ended() == "has ended by itself"
    line.end()
    again = station.enter_as({"boot": "of another host"})
    LINES.append(again)
    again.send(worker_line(replace(REMOTE, incarnation="begun anew")))
    wait_for(lambda: (worker, None) in station.reports)
    with pytest.raises(TimeoutError):
        again.read_line(0.2)
    del station.worker_pool.workers[worker.gpu]  # as the reconciler does
    assert b'"ack"' in (again.read_line(60) or b"")
    assert not any(isinstance(event, GpusLost) for event in station.worker_pool.remote_hosts.events), "its GPUs never went"


def test_one_that_is_about_to_end_does_not_begin_anew(station: TcpStation) -> None:
    line, _ = come(station)
    (worker,) = station.worker_pool.workers.values()
    line.send(worker_line(Envelope(1, 0, Ending("signal 15"))))
    wait_for(lambda: worker.doomed)
    station.do(lambda: worker.stop(begins_anew=True))
    line.send(worker_line(Envelope(2, 0, Farewell())))
    line.end()
    wait_for(lambda: (worker, None) in station.reports)
    assert isinstance(station.worker_pool.remote_hosts.events[-1], GpusLost)


def test_a_host_that_may_still_write_has_not_said_its_last_word(station: TcpStation) -> None:
    line, _ = come(station, jobs=(HeldJob("a", 7, 3, True),))
    (worker,) = station.worker_pool.workers.values()
    line.send(worker_line(Envelope(1, 0, Ending("signal 15"))))
    wait_for(lambda: worker.doomed)
    line.end()
    assert not worker.process.wait(SHORT / 2)


def test_one_that_hangs_is_answered_no_more(station: TcpStation) -> None:
    """No signal reaches it. Its signs of life count for nothing, so that its lease ends here and there."""
    line, _ = come(station)
    (worker,) = station.worker_pool.workers.values()
    shorten_lease(worker)
    worker.given_up = "has been training for 900 s without getting further"
    for _ in range(3):
        line.send(worker_line(Alive(0, "training", 1, said_seconds=1.0)))
    assert worker.process.wait(600) and "its lease of 1 s has ended" in worker.process.how_it_ended()
    with pytest.raises(TimeoutError):
        line.read_line(0.1)


@pytest.mark.parametrize(
    ("old", "kind", "why"),
    [
        (versions() | {"tlora": "0.0.1"}, None, "is of tlora 0.0.1, and this is"),
        (versions() | {"torch": "1.0"}, None, "has torch 1.0, and this is"),
        (versions(), "NVIDIA L4", "has cpu, and this cluster is deterministic: it keeps its jobs on NVIDIA L4"),
    ],
)
def test_one_that_may_not_train_here_saves_its_jobs_first_and_they_are_free_at_its_last_word(
    station: TcpStation, old: dict[str, str], kind: str | None, why: str
) -> None:
    """As after an upgrade, or where another kind of GPU was the first in a deterministic cluster: they would wait for its lease else. Its
    GPUs are not used. A cut line changes nothing.
    """
    held = (HeldJob("a", 7, 3, True),)
    if kind is not None:
        station.worker_pool.remote_hosts.kept_kind = KeptKind(station.directory, kind, print)
    Leases(station.directory).grant("of b", {"a": 7}, LEASE)
    line, answer = come(station, jobs=held, versions=old)
    (worker,) = station.worker_pool.workers.values()
    assert answer["kind"] == "desiredstate" and answer["stop"] and not answer["begins_anew"] and worker.holds("a", 7)
    (note,) = station.notes
    assert f"saves its jobs and ends: it {why}" in note
    line.send(worker_line(Envelope(1, 0, Left("a", 9, "steps/9", 7))))
    wait_for(lambda: bool(station.reports))
    line.end()
    line, answer = come(station, versions=old, last_seq=1)
    assert answer["kind"] == "desiredstate" and answer["stop"], "it may dial again, without jobs too"
    line.send(worker_line(Envelope(2, 0, Farewell())))
    line.end()
    wait_for(lambda: (worker, None) in station.reports)
    assert worker.process.how_it_ended() == "has ended by itself" and not station.worker_pool.remote_hosts.events
    del station.worker_pool.workers[worker.gpu]  # as the reconciler does
    _, answer = come(station, versions=old, incarnation="started again")
    assert answer["kind"] == "refusal", "without jobs it has nothing to save"


def test_what_it_is_told_is_in_its_hosts_numbers_and_on_disk_first(station: TcpStation) -> None:
    line, _ = come(station, gpus=(2, 3), host=replace(LABELS, devices=LABELS.devices * 2))
    (worker,) = station.worker_pool.workers.values()
    group = JobGroup("g", "base", (STRIDE + 2, STRIDE + 3), ParallelPlan(2, 512), ("a",), (1.0,))
    worker.give(Load("b", "o", "cpu", 0.0))
    station.do(lambda: worker.want(group, (Join(job_of("a").spec, attempt=9),), False))
    told = json.loads(line.read_line(60) or b"{}")
    assert told["group"]["gpus"] == [2, 3] and told["leased"] and told["lease_seconds"] == LEASE and worker.wanted_gpus == group.gpus
    (written,) = (station.directory / "leases").iterdir()
    assert json.loads(written.read_text()) == {"attempt": 9, "incarnation": "of b", "lease_seconds": LEASE}
    worker.jobs.clear()
    station.do(station.worker_pool.acknowledge)
    assert not written.exists()


ANY = replace(LABELS, devices=LABELS.devices * 3, any_of=(0, 1, 2))


def nodes(station: TcpStation) -> list[tuple[int, ...]]:
    return [event.gpus for event in station.worker_pool.remote_hosts.events if isinstance(event, NodeAdded | GpusLost)]


def test_a_process_without_gpus_is_given_some_of_its_hosts_and_waits_again(station: TcpStation) -> None:
    hosts, choice = station.worker_pool.remote_hosts, (STRIDE, STRIDE + 1, STRIDE + 2)
    line, _ = come(station, gpus=(), host=ANY)
    station.do(lambda: station.worker_pool.bind((STRIDE + 1, STRIDE + 2)))
    worker = station.worker_pool.workers[STRIDE + 1]
    assert not hosts.spares and station.worker_pool.bind((STRIDE,)) is None, "none waits there"
    worker.give(Load("b", "o", "cpu", 0.0))
    group = JobGroup("g", "base", (STRIDE + 1, STRIDE + 2), ParallelPlan(2, 512), (), ())
    station.do(lambda: worker.want(group, (), False))
    told = json.loads(line.read_line(60) or b"{}")
    assert told["gpus"] == told["group"]["gpus"] == [1, 2]
    station.do(lambda: worker.stop(begins_anew=True))
    line.read_line(60)
    line.send(worker_line(Envelope(1, 0, Farewell())))
    wait_for(lambda: (worker, None) in station.reports)
    del station.worker_pool.workers[worker.gpu]  # as the reconciler does
    assert nodes(station) == [choice], "its GPUs are not lost while it begins anew"
    line, _ = come(station, gpus=(), host=ANY, incarnation="begun anew")
    assert list(hosts.spares) == ["begun anew"]
    line.end()
    wait_for(lambda: not hosts.spares)
    assert nodes(station)[-1] == choice and isinstance(hosts.events[-1], GpusLost), "with the last process they are"


def test_where_no_process_of_a_host_is_heard_none_of_its_gpus_gets_a_job(station: TcpStation) -> None:
    """Those of a worker alone, until the last that waits is silent too; all again with the first that comes."""
    choice = (STRIDE, STRIDE + 1, STRIDE + 2)
    waits, _ = come(station, gpus=(), host=ANY, incarnation="waits")
    works, _ = come(station, gpus=(1,), host=ANY, jobs=(HeldJob("a", 7, 3, True),))
    works.end()
    assert unheard(station, 1) == [((STRIDE + 1,), True)]
    waits.end()
    assert unheard(station, 2)[1] == ((STRIDE, STRIDE + 2), True) and nodes(station) == [choice]
    come(station, gpus=(), host=ANY, incarnation="waits again")
    assert unheard(station, 3)[2] == ((STRIDE, STRIDE + 2), False)
    come(station, gpus=(1,), host=ANY, jobs=(HeldJob("a", 7, 3, True),))
    assert unheard(station, 4)[3] == ((STRIDE + 1,), False)


def test_a_process_that_begins_anew_does_not_speak_for_a_silent_host(station: TcpStation) -> None:
    """It was cut off with the others, and none is heard that can have their GPUs."""
    works, _ = come(station, gpus=(1,), host=ANY, jobs=(HeldJob("a", 7, 3, True),))
    anew, _ = come(station, gpus=(2,), host=ANY, incarnation="begins anew")
    station.do(lambda: station.worker_pool.workers[STRIDE + 2].stop(begins_anew=True))
    anew.end()
    wait_for(lambda: not station.worker_pool.workers[STRIDE + 2].connected)
    works.end()
    assert unheard(station, 1) == [((STRIDE, STRIDE + 1, STRIDE + 2), True)]


def test_a_later_controller_hears_which_gpus_a_process_has_before_it_gives_any_away(station: TcpStation) -> None:
    hosts = station.worker_pool.remote_hosts
    hosts._leases.grant("of b", {"a": 7}, LEASE)
    hosts._leases = Leases(station.directory)
    come(station, gpus=(), host=ANY, incarnation="waits")
    assert hosts.awaits_workers and station.worker_pool.bind((STRIDE,)) is None
    come(station, gpus=(0, 2), host=ANY, jobs=(HeldJob("a", 7, 3, True),))
    assert station.worker_pool.workers[STRIDE].gpus == (STRIDE, STRIDE + 2)
    station.do(lambda: station.worker_pool.bind((STRIDE + 1,)))
    assert station.worker_pool.workers.keys() == {STRIDE, STRIDE + 1} and nodes(station) == [(STRIDE, STRIDE + 1, STRIDE + 2)]


def test_a_later_controller_does_not_wait_for_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is refused comes again and again, as systemd starts it anew, and keeps nobody from what has to follow."""
    monkeypatch.setattr(worker_pool, "_FOUND_SECONDS", 0.5)
    Leases(tmp_path).grant("of a host that is gone", {"a": 7}, LEASE)
    pool, listener = (
        WorkerPool(tmp_path, 5, lambda base: Load(base, "o", "cpu", 0.0), (), Limits(), print),
        TlsListener(tmp_path, ("127.0.0.1", 0)),
    )
    pool.listen_on(listener)
    over, secret = threading.Event(), WorkerTokens(tmp_path).create(3600)[1]

    def come_again() -> None:
        while not over.wait(0.05):
            line = dial(Endpoint(listener.address, listener.fingerprint, secret), 0)
            line.send(worker_line(replace(REMOTE, gpus=(), incarnation=uuid.uuid4().hex)))  # without GPUs, nor an agent
            line.read_line(60)
            line.close()

    stranger = threading.Thread(target=come_again)
    stranger.start()
    try:
        pool.find({})
        assert pool.remote_hosts.withheld == {"a"}
    finally:
        over.set()
        while stranger.is_alive():
            pool.listen(0.05)
        pool.abandon()


def test_the_word_of_its_agent_proves_an_end_and_silent_ones_are_counted(station: TcpStation) -> None:
    one = replace(ANY, devices=LABELS.devices, any_of=(0,), process="second")
    line, _ = come(station, gpus=(0,), host=replace(one, process="first"), jobs=(HeldJob("a", 7, 3, True),))
    (worker,) = station.worker_pool.workers.values()
    line.end()
    come(station, gpus=(), host=one, incarnation="another")
    assert not worker.process.wait(0.2), "it holds a job, and its end is not proven"
    (spare,) = station.worker_pool.remote_hosts.spares.values()
    assert not spare.process.wait(0.0), "nor has the one that has just come"
    come(station, gpus=(), host=replace(one, process="third", ended=("first",)), incarnation="a third")
    wait_for(lambda: (worker, None) in station.reports)
    assert worker.process.how_it_ended() == "has ended, as its host's agent says"


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (LABELS, ANY),
        (ANY, LABELS),
        (ANY, replace(ANY, devices=LABELS.devices * 2, any_of=(0, 1))),
        (ANY, replace(ANY, boot="of another host of that name")),
    ],
)
def test_no_gpu_is_of_two_commands(station: TcpStation, first: HostLabels, other: HostLabels) -> None:
    come(station, gpus=() if first.any_of else (0,), host=first)
    _, answer = come(station, gpus=() if other.any_of else (0,), host=other, incarnation="another")
    assert answer["kind"] == "refusal" and "already. End one of the two, or name their hosts apart with --host" in answer["reason"]


def test_the_next_controller_gives_no_job_away_that_may_be_held(tmp_path: Path) -> None:
    earlier = Leases(tmp_path)
    earlier.grant("of b", {"a": 3, "c": 4}, 5.0)
    earlier.grant("of d", {"e": 1}, 7.0)
    later = Leases(tmp_path)
    assert later.withheld == {"a", "c", "e"} and later.longest_seconds == 7.0
    later.arrive("of b")
    assert later.withheld == {"e"}
    later.grant("of b", {"a": 3}, 5.0)
    later.keep("of b", ["a"])
    assert Leases(tmp_path).withheld == {"a", "e"}
    assert later.release_withheld() == ["e"] and not later.withheld
    assert Leases(tmp_path).withheld == {"a"}
    later.grant("of f", {"a": 5}, 5.0)
    later.keep("of b", ())
    assert Leases(tmp_path).withheld == {"a"}, "another has it by now"


def test_a_group_has_gpus_of_one_host(tmp_path: Path) -> None:
    hosts = Hosts((0, 1))
    assert hosts.first_number(LABELS) == STRIDE and hosts.first_number(replace(LABELS, name="c")) == 2 * STRIDE
    assert hosts.on_one_host((0, STRIDE, STRIDE + 1)) == (STRIDE, STRIDE + 1) and hosts.on_one_host((0, 1, STRIDE)) == (0, 1)
    with local_backend(tmp_path) as backend:
        backend.submit(submitted("a"), job_of("a"))
        backend.execute(StartGroup(JobGroup("g", "base", (0, 1, STRIDE), ParallelPlan(3, 768), ("a",), (1.0,))))
        kept = next(event for event in backend.poll() + backend.poll() if isinstance(event, GroupKept))
        assert kept.gpus == (0, 1) and backend.reconciler.groups["g"].gpus == (0, 1)


class Client:
    """Of a dialer: what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def end(self, reason: str) -> None:
        self.said.append(reason)

    def expire(self) -> None:
        self.said.append("expired")


def test_a_lease_runs_from_the_last_sign_of_life_that_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the answer: a late one must not lengthen it; nor from anything else that is heard, where the other way is cut."""
    now = 1000.0
    monkeypatch.setattr("tlora.link.dialer._now", lambda: now)
    client: Any = Client()
    dialer = Dialer(None, client, 600.0)  # type: ignore[arg-type]
    line: Any = None
    dialer._take(line, DesiredState(1, 1, Load("b", "o", "cpu", 0.0), lease_seconds=180.0, leased=True))
    dialer._take(line, Ack(0, heard=1050.0))  # of a clock that is not its own
    now = 1100.0
    dialer._take(line, Ack(0, heard=1060.0))
    dialer._take(line, Ack(0, heard=1010.0))  # replayed
    dialer._take(line, Ack(5))
    dialer._take(line, DesiredState(1, 2, Load("b", "o", "cpu", 0.0), lease_seconds=180.0, leased=True))
    now = 1060.0 + 180.0 - NOTICE_SECONDS
    assert not dialer._look_at_lease() and not client.said
    now += 1.0
    assert not dialer._look_at_lease() and "the lease is 180 s" in client.said[0], "it saves its jobs while the lease lasts"
    now = 1060.0 + 181.0  # or the host has slept until now
    dialer._look_at_lease()
    assert client.said[1:] == ["expired"]
    dialer.close()
    assert dialer._look_at_lease() and len(client.said) == 2


def test_a_job_that_another_host_may_still_train_waits_for_the_end_of_that_lease(tmp_path: Path) -> None:
    Leases(tmp_path / "workers").grant("of b", {"a": 3}, 5.0)
    with local_backend(tmp_path) as backend:
        backend.submit(submitted("a"), job_of("a"))
        backend.poll()
        backend.execute(StartGroup(JobGroup("g", "base", (0,), ParallelPlan(1, 256), ("a",), (1.0,))))
        (worker,) = backend.worker_pool.workers.values()
        assert not worker.jobs
        backend.worker_pool.remote_hosts._leases.arrive("of b")
        backend.reconciler.step()
        assert worker.jobs.keys() == {"a"}
