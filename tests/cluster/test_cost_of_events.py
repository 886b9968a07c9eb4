"""What an event costs does not grow with the cluster: not in the reconciler, and not in what the scheduler believes of GPUs and jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.fake_workers import STARTED, FakeWorker, local_backend
from tests.cluster.test_local import group, job, submitted
from tests.counted_lines import lines_run
from tests.scheduler.mirror import made_spec, made_state
from tlora.cluster.local import LocalBackend
from tlora.cluster.remote_worker import Held
from tlora.protocol import JobGroup, ParallelPlan, StartGroup, StopGroup
from tlora.scheduler.state import ClusterState
from tlora.worker_protocol import Finished, GpusChanged

FEW, MANY = 8, 64


def training(directory: Path, gpus: int) -> LocalBackend:
    """A job on each GPU and another that waits."""
    backend = local_backend(directory, gpus=tuple(range(gpus)))
    for number in range(gpus + 1):
        backend.submit(submitted(f"j{number}"), job(f"j{number}"))
    while len(backend.reconciler.open) <= gpus:
        backend.poll()
    for number in range(gpus):
        backend.execute(StartGroup(group(f"g{number}", number, f"j{number}")))
    for worker in workers(gpus):
        worker.obey()
    backend.advance()
    return backend


def workers(count: int) -> list[FakeWorker]:
    return STARTED[-count:]


def test_a_job_that_ends_and_the_next_on_its_gpu(tmp_path: Path) -> None:
    counts: list[int] = []
    for gpus in (FEW, MANY):
        with training(tmp_path / f"{gpus}", gpus) as backend:
            workers(gpus)[0].say(Finished("j0", {}))

            def follow(backend: LocalBackend = backend, gpus: int = gpus) -> None:
                backend.advance()
                backend.execute(StopGroup("g0"))
                backend.execute(StartGroup(group(f"g{gpus}", 0, f"j{gpus}")))

            counts.append(lines_run(follow))
            assert [name for name in workers(gpus)[0].asked if name.startswith("+")] == [f"+j{gpus}"]
    assert counts[0] == counts[1]


def test_a_worker_that_comes(tmp_path: Path) -> None:
    counts: list[int] = []
    for gpus in (FEW, MANY):
        with training(tmp_path / f"{gpus}", gpus) as backend:
            backend.worker_pool.start((1000,), "base")
            counts.append(lines_run(backend.reconciler.step))
    assert counts[0] == counts[1]


def test_a_worker_that_comes_while_another_gets_other_gpus_is_seen(tmp_path: Path) -> None:
    """It has a job from before a restart: no other worker may get that job as well."""
    with training(tmp_path, 2) as backend:
        known, _ = workers(2)
        backend.worker_pool.start((1000,), "base")
        STARTED[-1].remote.jobs["j2"] = Held(1)
        known.say(GpusChanged((0,)))  # of all workers it stands last now
        backend.advance()
        known.say(Finished("j0", {}))
        backend.advance()
        backend.execute(StopGroup("g0"))
        backend.execute(StartGroup(group("g2", 0, "j2")))
        assert "+j2" not in known.asked
        del STARTED[-1].remote.jobs["j2"]
        known.say(GpusChanged((0,)))
        backend.advance()
        assert "+j2" in known.asked


def full(nodes: int) -> ClusterState:
    """Nodes of four GPUs of 80 GB, on each of which a job of one GPU trains; and one of two that waits."""
    state = made_state(*[4] * nodes)
    state.find_memory(range(4 * nodes), [80 << 30] * 4 * nodes)
    for gpu in range(4 * nodes):
        state.submit(made_spec(f"j{gpu}"))
        state.place(JobGroup(f"g{gpu}", "north", (gpu,), ParallelPlan(1, 2048), (f"j{gpu}",), (1.0,)))
    state.submit(made_spec("wide", gpus=2))
    return state


@pytest.mark.parametrize(
    "event",
    [
        lambda state: state.submit(made_spec("new")),
        lambda state: state.add_node("more", "r0", (1000, 1001)),
        lambda state: state.find_memory((1000,), (80 << 30,)),
    ],
    ids=["a job", "a host", "its memory"],
)
def test_what_comes_to_a_cluster(event: Callable[[ClusterState], object]) -> None:
    few, many = full(FEW), full(MANY)
    assert lines_run(lambda: event(few)) == lines_run(lambda: event(many))


def test_a_gpu_that_is_lost() -> None:
    def lose(state: ClusterState) -> None:
        assert state.lose_gpus((3,)) == ["g3"]

    few, many = full(FEW), full(MANY)
    assert lines_run(lambda: lose(many)) - lines_run(lambda: lose(few)) <= 2 * (MANY - FEW)  # the size of the largest node left
