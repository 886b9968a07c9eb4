"""Groups that are wider than a host, as the controller has them: one worker leads, those of other hosts lend. Nothing trains here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.fake_workers import STARTED, FakeProcess, FakeWorker, local_backend
from tests.cluster.test_listeners import LABELS
from tests.cluster.test_local import submitted
from tests.cluster.test_wide_groups import until, wide
from tlora.cluster.hosts import STRIDE
from tlora.cluster.listeners import Peer
from tlora.cluster.local import LocalBackend
from tlora.cluster.reconciler import LocalJob
from tlora.cluster.remote_worker import RemoteWorker
from tlora.engine.messages import Listen, SetGpus
from tlora.job import JobSpec
from tlora.link.versions import versions
from tlora.live.cluster_run import submit_all
from tlora.protocol import ChangeGroup, GroupKept, GroupReady, NodeAdded, StartGroup, StopGroup
from tlora.worker_protocol import GpusChanged, Hello, Lending, Listening, Loaded

SPANNING = wide("g", (0, 1, STRIDE), "a")
DOOR = Listening("tcp://10.0.0.1:7000", "sha256:" + "0" * 64, "key")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """Of two GPUs, with a host that has one, and a job that orders three."""
    with local_backend(tmp_path) as made:
        made._hosts_may_come = True
        specs = {name: JobSpec.model_validate({"name": name, "data": "d.jsonl", "gpus": gpus}) for name, gpus in (("a", 3), ("b", 1))}
        arrivals = [(0.0, submitted(name, gpus=spec.gpus)) for name, spec in specs.items()]
        submit_all(made, {name: LocalJob(spec) for name, spec in specs.items()}, arrivals)
        made.poll(), made.poll()
        made.worker_pool.remote_hosts.events.append(NodeAdded("b", (STRIDE,)))
        yield made


def come(backend: LocalBackend, first: int = STRIDE) -> FakeWorker:
    """A worker of another host, which has loaded nothing."""
    worker = RemoteWorker((first,), None, FakeProcess(), 1, 180.0, LABELS, first)
    worker.reached_at = "10.0.0.1"
    backend.worker_pool.workers[first] = worker
    return FakeWorker(worker, backend.worker_pool.inbox)


def wait_there(backend: LocalBackend, gpus: tuple[int, ...]) -> list[FakeWorker]:
    """A process for each of these GPUs of another host with an agent, of which it can have any."""
    hosts, first = backend.worker_pool.remote_hosts, gpus[0] // STRIDE * STRIDE
    labels = replace(LABELS, name=f"agent {first}", devices=LABELS.devices * len(gpus), any_of=tuple(gpu - first for gpu in gpus))
    hosts.hosts._first[labels.name] = first
    found = list[FakeWorker]()
    for number in range(len(gpus)):
        hello = Hello(f"process {number} of {first}", (), {}, host=labels)
        peer = Peer(4711 + number, None, is_remote=True, address="10.0.0.2", reached_at="10.0.0.1")
        remote = hosts.take_on((), replace(hello, versions=versions()), labels, peer, 1)
        found.append(FakeWorker(remote, backend.worker_pool.inbox, hello.incarnation))
    return found


def test_a_group_has_a_process_of_a_host_with_an_agent_whichever_gpus_it_has(backend: LocalBackend) -> None:
    """Then another group has one of these GPUs, and the same process, which has begun anew, may have others."""
    waiting = wait_there(backend, (STRIDE, STRIDE + 1, STRIDE + 2))
    backend.execute(StartGroup(wide("h", (STRIDE + 1, STRIDE + 2), "b")))
    (worker,) = [each for each in waiting if each.remote.gpus]
    want = worker.worker_reconciler.want
    assert want is not None and want.gpus == (1, 2) == worker.worker_reconciler.gpus and worker.asked == ["+b"] and not worker.changes
    worker.obey()
    until(backend, GroupReady("h"))
    backend.execute(ChangeGroup(wide("h", (STRIDE, STRIDE + 2), "b")))
    assert worker.changes == [(0, 2)] and not worker.stopping, "it keeps a GPU, and so its jobs train on"
    worker.obey()
    backend.advance()
    backend.execute(StopGroup("h"))
    backend.execute(StartGroup(wide("i", (STRIDE + 2,), "a")))
    assert worker.stopping and worker.remote.begins_anew, "its base is the same, but it has more GPUs than this group"
    worker.say(None)
    backend.advance()
    other = next(each for each in waiting if each is not worker and each.remote.gpus)
    assert other.remote.gpus == (STRIDE + 2,) and other.worker_reconciler.gpus == (2,)


def test_a_process_of_a_host_with_an_agent_lends(backend: LocalBackend) -> None:
    waiting = wait_there(backend, (STRIDE, STRIDE + 1))
    backend.execute(StartGroup(SPANNING))
    leader = next(worker for worker in STARTED if worker not in waiting)
    assert not any(worker.remote.load for worker in waiting)
    leader.say(Loaded(), DOOR)
    backend.advance()
    (lender,) = [worker for worker in waiting if worker.remote.gpus]
    assert lend(lender) == Lending(DOOR.address, DOOR.fingerprint, DOOR.key, {STRIDE: 0}) and lender.worker_reconciler.gpus == (0,)
    assert leader.changes == [SPANNING.gpus]


def lend(worker: FakeWorker) -> Lending | None:
    assert worker.worker_reconciler.want is not None
    return worker.worker_reconciler.want.lend


def led(backend: LocalBackend) -> tuple[FakeWorker, FakeWorker]:
    """The leader, which listens, and the lender, which was told where."""
    lender = come(backend)
    backend.execute(StartGroup(SPANNING))
    leader = next(worker for worker in STARTED if worker is not lender)
    assert leader.remote.gpus == (0, 1) and leader.asked == ["+a"], "it begins on what it has"
    assert [command.address for command in leader.commands if isinstance(command, Listen)] == ["10.0.0.1"]
    assert not leader.changes, "nobody can lend it anything yet"
    leader.say(Loaded(), DOOR)
    backend.advance()
    return leader, lender


def test_a_group_is_led_on_its_first_host_and_the_others_lend(backend: LocalBackend) -> None:
    leader, lender = led(backend)
    assert lend(lender) == Lending(DOOR.address, DOOR.fingerprint, DOOR.key, {STRIDE: 0})
    assert leader.changes == [SPANNING.gpus]
    assert next(command.lent for command in leader.commands if isinstance(command, SetGpus)) == (STRIDE,)
    assert [join.job.name for join in lender.remote.reads] == ["a"] and not lender.asked
    leader.obey()
    until(backend, GroupReady("g"))
    assert leader.remote.gpus == (0, 1) and leader.remote.lent == (STRIDE,)
    assert leader.worker_reconciler.claimed == (0, 1), "what is lent is another's, also to the next controller"
    backend.execute(ChangeGroup(wide("g", (0, 1), "a")))
    backend.execute(StartGroup(wide("h", (STRIDE,), "b")))
    assert not lender.stopping, "it is let go when its leader has let it go"
    leader.obey()
    backend.advance()
    assert leader.remote.lent == () and lender.stopping


def test_no_lender_is_told_anything_before_all_are_there(backend: LocalBackend) -> None:
    """Else the first would load the base as a worker of its own."""
    backend.worker_pool.remote_hosts.events.append(NodeAdded("c", (2 * STRIDE,)))
    lender = come(backend)
    backend.execute(StartGroup(wide("g", (0, 1, STRIDE, 2 * STRIDE), "a")))
    leader = next(worker for worker in STARTED if worker is not lender)
    leader.say(Loaded(), DOOR)
    backend.advance()
    assert lender.worker_reconciler.want is None and lender.remote.load is None
    other = come(backend, 2 * STRIDE)
    backend.execute(ChangeGroup(replace(wide("g", (0, 1, STRIDE, 2 * STRIDE), "a"), weights=(2.0,))))
    assert lend(lender) is not None and lend(other) is not None and leader.changes == [(0, 1, STRIDE, 2 * STRIDE)]


def test_a_leader_without_a_group_lets_go_and_a_lender_that_comes_again_is_asked_again(backend: LocalBackend) -> None:
    leader, lender = led(backend)
    leader.obey()
    until(backend, GroupReady("g"))
    del backend.worker_pool.workers[STRIDE]  # it is gone, and here again, before its leader has noticed
    again = come(backend)
    backend.execute(ChangeGroup(replace(SPANNING, weights=(2.0,))))
    assert lend(again) == lend(lender)
    backend.execute(StopGroup("g"))
    assert leader.changes == [(0, 1)] and leader.asked == ["-a"]
    leader.obey()
    backend.advance()
    assert leader.remote.lent == () and not leader.stopping and leader.remote.group_id == ""


def test_a_leader_that_cannot_listen_keeps_its_group_on_its_host(backend: LocalBackend) -> None:
    lender = come(backend)
    backend.execute(StartGroup(SPANNING))
    leader = next(worker for worker in STARTED if worker is not lender)
    leader.say(Loaded(), Listening("", "", "", "it cannot listen at 10.0.0.1"))
    until(backend, GroupKept("g", (0, 1), "it cannot listen at 10.0.0.1"))
    assert not lender.remote.lends_to and lender.remote.load is None


def test_a_base_in_parts_stays_on_one_host(backend: LocalBackend) -> None:
    leader, _ = led(backend)
    order = next(command.order for command in leader.commands if isinstance(command, SetGpus))
    leader.say(GpusChanged((0, 1), "the base is held in parts", fixed=True, order=order))
    until(backend, GroupKept("g", (0, 1), "the base is held in parts"))
    assert not leader.stopping and backend.reconciler.groups["g"].gpus == (0, 1)


def test_a_job_that_fits_one_host_spans_none(backend: LocalBackend) -> None:
    come(backend)
    backend.execute(StartGroup(replace(SPANNING, gpus=(1, STRIDE), job_ids=("b",))))
    assert backend.reconciler.groups["g"].gpus == (1,)
    kept = next(event for event in backend.poll() if isinstance(event, GroupKept))
    assert kept.gpus == (1,) and "unless its base or a job of it needs more than the 2 of the widest" in kept.reason


def test_a_base_that_no_host_holds_is_cut_over_the_group(backend: LocalBackend) -> None:
    backend._wide.see(replace(submitted("a"), least_gpus=3))
    leader, lender = led(backend)
    assert leader.remote.load is not None and leader.remote.load.stages == 3
    leader.obey()
    until(backend, GroupReady("g"))
    backend.execute(ChangeGroup(replace(SPANNING, weights=(2.0,))))
    assert not leader.stopping and leader.remote.lent == (STRIDE,)
    backend.execute(StopGroup("g"))
    backend.advance()
    assert leader.stopping and not lender.stopping, "its stages stay where they are: it would keep the other host's GPU"
