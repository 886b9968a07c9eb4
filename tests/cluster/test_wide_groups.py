"""Groups of several GPUs: each is one worker, a GPU is in one worker at a time, and other GPUs are another worker. Nothing trains here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.fake_workers import STARTED, FakeWorker, local_backend
from tests.cluster.test_local import group, job, submitted
from tlora.cluster.local import LocalBackend
from tlora.engine.messages import SetGpus
from tlora.live.cluster_run import submit_all
from tlora.protocol import (
    ChangeGroup,
    Event,
    GroupKept,
    GroupLost,
    GroupReady,
    JobGroup,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
)
from tlora.worker_protocol import GpusChanged, Left, Stepped


def wide(name: str, gpus: tuple[int, ...], *jobs: str) -> JobGroup:
    return replace(group(name, 0, *jobs), gpus=gpus, plan=ParallelPlan(len(gpus), 1024 * len(gpus)))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """Of three GPUs, with a, b and c just submitted; the first asks for two GPUs."""
    with local_backend(tmp_path, gpus=(0, 1, 2)) as made:
        arrivals = [(0.0, submitted("a", gpus=2)), (0.0, submitted("b")), (0.0, submitted("c"))]
        submit_all(made, {name: job(name) for name in "abc"}, arrivals)
        made.poll(), made.poll()
        yield made


def ready(backend: LocalBackend, group_id: str) -> list[Event]:
    for worker in STARTED:
        worker.obey()
    return until(backend, GroupReady(group_id))


def until(backend: LocalBackend, event: Event) -> list[Event]:
    found: list[Event] = []
    while event not in found:
        found += backend.poll()
    return found


def end(backend: LocalBackend, worker: FakeWorker, checkpointed: tuple[str, ...] = ()) -> None:
    """It has let its jobs go, and its process has ended."""
    worker.say(*(Left(name, 1, None) for name in checkpointed), None)
    while backend.reconciler.workers.get(worker.gpu) is worker.remote:
        backend.advance()


def test_a_wide_group_is_one_worker(backend: LocalBackend) -> None:
    backend.execute(StartGroup(wide("g", (2, 0), "a", "b")))
    (worker,) = STARTED
    assert worker.remote.gpus == (0, 2) and worker.asked == ["+a", "+b"]
    ready(backend, "g")
    worker.say(Stepped("a", 3, 0.5))
    assert until(backend, StepsDone("a", "g", 3, 0.5))


def test_a_gpu_is_in_one_worker_at_a_time(backend: LocalBackend) -> None:
    backend.execute(StartGroup(group("g0", 1, "b")))
    ready(backend, "g0")
    narrow = STARTED[0]
    backend.execute(StopGroup("g0"))
    backend.execute(StartGroup(wide("g1", (1, 2), "a", "b")))
    assert narrow.stopping and len(STARTED) == 1, "the new one is started while the old one has its GPU"
    end(backend, narrow, ("b",))
    assert [worker.remote.gpus for worker in STARTED] == [(1,), (1, 2)]
    assert STARTED[1].asked == ["+a", "+b"]


@pytest.mark.parametrize(("before", "after"), [((0,), (0, 1)), ((0, 1), (0,)), ((0, 1), (1, 2)), ((0, 1), (1,))])
def test_a_change_of_gpus_is_one_of_the_worker(backend: LocalBackend, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    backend.execute(StartGroup(wide("g", before, "a")))
    ready(backend, "g")
    (worker,) = STARTED
    backend.execute(ChangeGroup(wide("g", after, "a", "b")))
    assert not worker.stopping and worker.changes == [after] and worker.asked == ["+b"]
    assert worker.remote.gpus == tuple(sorted({*before, *after})), "until it has given them back"
    assert not any(isinstance(event, GroupLost) for event in ready(backend, "g"))
    assert [worker] == STARTED and worker.remote.gpus == after and backend.reconciler.workers == {after[0]: worker.remote}


@pytest.mark.parametrize(("before", "after"), [((0,), (0, 1)), ((0, 1), (0,)), ((0, 1), (1, 2))])
def test_where_a_base_is_held_in_parts_it_is_another_worker(backend: LocalBackend, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    backend.execute(StartGroup(wide("g", before, "a")))
    ready(backend, "g")
    old = STARTED[0]
    backend.execute(ChangeGroup(wide("g", after, "a", "b")))
    old.say(GpusChanged(before, "the base is held in parts", fixed=True))
    backend.advance()
    assert old.stopping and len(STARTED) == 1
    old.say(Stepped("a", 4, 0.5))  # its last step before it lets go
    end(backend, old, ("a",))
    assert STARTED[1].remote.gpus == after and STARTED[1].asked == ["+a", "+b"]
    assert not any(isinstance(event, GroupLost) for event in ready(backend, "g"))


def test_a_gpu_goes_to_another_group_when_it_is_given_back(backend: LocalBackend) -> None:
    backend.execute(StartGroup(wide("g0", (0, 1), "a")))
    ready(backend, "g0")
    wide_one = STARTED[0]
    backend.execute(ChangeGroup(wide("g0", (0,), "a")))
    backend.execute(StartGroup(wide("g1", (1, 2), "b")))
    assert not wide_one.stopping and len(STARTED) == 1
    wide_one.obey()
    while len(STARTED) == 1:
        backend.advance()
    assert (wide_one.remote.gpus, STARTED[1].remote.gpus) == ((0,), (1, 2))


def test_groups_that_exchange_gpus_wait_for_each_other_and_do_not_stop(backend: LocalBackend) -> None:
    backend.execute(StartGroup(wide("g0", (0, 1), "a")))
    backend.execute(StartGroup(wide("g1", (2,), "b")))
    if GroupReady("g1") not in ready(backend, "g0"):
        until(backend, GroupReady("g1"))
    for gpus, group_id, name in (((0,), "g0", "a"), ((1, 2), "g1", "b"), ((0,), "g0", "a")):
        backend.execute(ChangeGroup(wide(group_id, gpus, name)))
    first, second = STARTED
    assert (first.changes, second.changes) == ([(0,)], [])
    first.obey()
    while not second.changes:
        backend.advance()
    assert second.changes == [(1, 2)] and not first.stopping
    ready(backend, "g1")
    assert sorted(backend.reconciler.workers) == [0, 1]


def test_a_group_that_cannot_grow_runs_on_as_it_is(backend: LocalBackend) -> None:
    backend.execute(StartGroup(wide("g", (0,), "a")))
    ready(backend, "g")
    (worker,) = STARTED
    backend.execute(ChangeGroup(wide("g", (0, 1), "a")))
    assert worker.remote.gpus == (0, 1)
    (order,) = [command.order for command in worker.commands if isinstance(command, SetGpus)]
    worker.commands.clear()
    worker.say(GpusChanged((0,), "the rank on GPU 1 has ended", order=order))
    assert GroupReady("g") not in until(backend, GroupKept("g", (0,), "the rank on GPU 1 has ended"))
    backend.execute(ChangeGroup(wide("g", (0,), "a")))  # the scheduler's answer
    ready(backend, "g")
    assert not worker.stopping and worker.remote.gpus == (0,)


def test_an_answer_to_an_earlier_wish_gives_back_no_gpu_of_a_later_one(backend: LocalBackend) -> None:
    backend.execute(StartGroup(wide("g", (0,), "a")))
    ready(backend, "g")
    (worker,) = STARTED
    for gpus in ((0, 1), (0,), (0, 1)):
        backend.execute(ChangeGroup(wide("g", gpus, "a")))
    first, *_, last = [command.order for command in worker.commands if isinstance(command, SetGpus)]
    worker.commands.clear()
    worker.say(GpusChanged((0,), "no memory", order=first))
    backend.advance()
    assert worker.remote.gpus == (0, 1), "it may be taking GPU 1 now"
    worker.say(GpusChanged((0,), "no memory", order=last))
    until(backend, GroupKept("g", (0,), "no memory"))


def test_a_job_waits_until_its_old_worker_of_other_gpus_has_let_go(backend: LocalBackend) -> None:
    """The new GPUs are free at once; the job is not."""
    backend.execute(StartGroup(group("g", 0, "a")))
    ready(backend, "g")
    old = STARTED[0]
    backend.execute(ChangeGroup(wide("g", (1, 2), "a")))
    new = STARTED[1]
    assert new.remote.gpus == (1, 2) and new.asked == [] and old.asked == ["-a"]
    old.obey()
    while not new.asked:
        backend.advance()
    assert new.asked == ["+a"]
