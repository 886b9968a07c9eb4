"""A worker whose GPUs come and go while its jobs train: real ranks, one thread each. Every job has the bytes of one process, and no step is
taken twice.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tlora
from tests.engine.tiny_runs import TWO_LINEARS, job, run_spec, same_bytes, save_base, write_rows
from tests.process_hooks import REPORT_EACH_STEP, let_hold, slow_down
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import SetGpus, SetPlan, Stop
from tlora.engine.ranks import rank_group, worker_group
from tlora.engine.ranks.worker_group import WorkerGroup
from tlora.job import JobSpec
from tlora.link.supervisor import SupervisedProcess, start_process
from tlora.worker_protocol import Finished, GpusChanged, Join, Joined, Left, Load, Loaded, Memory, Report, Stepped

PATIENCE_SECONDS = 600.0
STEPS = 60


class Worker:
    """A worker group in this process, and when it reported what."""

    def __init__(self, load: Load, gpus: tuple[int, ...]) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.told: list[Report] = []
        self._news = threading.Condition()
        self.heartbeat = Heartbeat()
        self.group = WorkerGroup(load, gpus, self.inbox, self._hear, self.heartbeat, tuple)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        try:
            self.group.go_on()
        except BaseException as error:
            self.error = error
        with self._news:
            self._news.notify_all()

    def _hear(self, report: Report) -> None:
        with self._news:
            self.told.append(report)
            self._news.notify_all()

    def until(self, holds: Callable[[list[Report]], bool], seconds: float = PATIENCE_SECONDS) -> list[Report]:
        with self._news:
            assert self._news.wait_for(lambda: self.error is not None or holds(self.told), seconds), self.told
            assert self.error is None, self.error
            return list(self.told)

    def change(self, *gpus: int) -> GpusChanged:
        """What it says when it is asked for these."""
        before = len(self.told)
        self.inbox.put(SetGpus(gpus))
        self.until(lambda told: any(isinstance(report, GpusChanged) for report in told[before:]))
        return next(report for report in self.told[before:] if isinstance(report, GpusChanged))

    def steps(self, name: str) -> list[int]:
        return [report.steps for report in self.told if isinstance(report, Stepped) and report.job_id == name]

    def stop(self) -> None:
        self.inbox.put(Stop())
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


class World:
    """A base, orders with their data, and the run of one process that they are measured by."""

    def __init__(self, directory: Path, orders: Callable[[Path], list[dict[str, Any]]], **shape: Any) -> None:
        self.workers: list[Worker] = []
        self.directory, self.base = directory, save_base(directory / "base", hidden_size=64, intermediate_size=128, **shape)
        self.orders = orders(directory)
        tlora.train(run_spec(self.base, directory / "whole", self.orders, deterministic=True), device="cpu")

    def worker(self, out: Path, *gpus: int, **settings: Any) -> Worker:
        """With all jobs on their way in."""
        worker = Worker(Load(str(self.base), str(out), "cpu", time.time(), deterministic=True, **settings), gpus)
        self.workers.append(worker)
        worker.inbox.put(SetPlan(64 * len(gpus)))
        self.join(worker)
        return worker

    def join(self, worker: Worker) -> None:
        for attempt, order in enumerate(self.orders):
            worker.inbox.put(Join(JobSpec.model_validate(order), attempt=attempt + 1))

    def finish(self, worker: Worker, out: Path) -> None:
        names = {order["name"] for order in self.orders}
        ended = lambda told: {report.job_id for report in told if isinstance(report, Finished)} == names  # noqa: E731
        told = worker.until(ended)
        worker.stop()
        assert not any(isinstance(report, Left) for report in told), "nobody above hears of a move"
        same_bytes(out, self.directory / "whole", names)


@pytest.fixture(autouse=True)
def ended(world: World) -> Iterator[None]:
    """No ranks outlive a test that fails."""
    yield
    while world.workers:
        world.workers.pop().stop()


def make_orders(directory: Path, steps: int) -> list[dict[str, Any]]:
    """SFT with dropout and two replicas, one with evaluations, and DPO."""
    data = str(write_rows(directory / "a.jsonl", 26, 1, high=20))
    pairs = directory / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "red boat {n}", "chosen": "sings {n % 3}", "rejected": "falls never"}}\n' for n in range(12)))
    return [
        job("two", data, gpus=2, lora_dropout=0.1, max_steps=steps, batch_size=4, target_modules=TWO_LINEARS),
        job("evaluated", data, max_steps=steps, batch_size=2, r=7, seed=3, eval_size=4, eval_steps=steps // 3, target_modules=TWO_LINEARS),
        job("preferred", str(pairs), objective="dpo", max_steps=steps, batch_size=2, target_modules=TWO_LINEARS),
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("changes")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        let_hold(monkeypatch, directory, REPORT_EACH_STEP)
        yield World(directory, lambda place: make_orders(place, STEPS))


def test_a_group_grows_by_a_gpu(world: World, tmp_path: Path) -> None:
    """From one GPU to two, where one job begins to span them and another moves."""
    with slow_down(STEPS):
        worker = world.worker(tmp_path, 0)
        worker.until(all_joined)
        assert worker.change(0, 1) == GpusChanged((0, 1))
        spans = [job.then or job.span for job in worker.group._jobs.values()]
        assert {rank for span in spans for rank in span.ranks} == {0, 1}
    world.finish(worker, tmp_path)


@pytest.mark.slow
def test_what_grows_takes_a_process_that_was_there_ahead(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker that has one GPU and sees others. What is started ahead after that ends with the worker."""
    monkeypatch.setattr(worker_group, "visible_gpus", lambda device, gpus: [0, 1, 2])
    with slow_down(STEPS):
        worker = world.worker(tmp_path, 0)
        ranks = worker.group._rank_group
        worker.until(lambda told: ranks._ahead is not None)
        assert ranks._ahead is not None
        ahead = ranks._ahead.pid
        assert worker.change(0, 1) == GpusChanged((0, 1))
        assert ranks.hellos[1].pid == ahead
    world.finish(worker, tmp_path)
    assert ranks._ahead is None


@pytest.mark.slow
def test_a_rank_that_dies_while_it_joins_changes_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_kill(*given: Any, **options: Any) -> SupervisedProcess:
        process = start_process(*given, **options)
        os.kill(process.pid, signal.SIGKILL)
        return process

    with slow_down(STEPS):
        worker = world.worker(tmp_path, 0)
        worker.until(all_joined)
        before = len(worker.told)
        with monkeypatch.context() as of_the_second:
            of_the_second.setattr(rank_group, "start_process", start_and_kill)
            refused = worker.change(0, 1)
        assert refused.gpus == (0,) and "was killed by signal 9" in refused.refused
        assert {type(report) for report in worker.told[before:]} <= {GpusChanged, Stepped}, "no job has left or joined"
        assert worker.change(0, 2) == GpusChanged((0, 2)), "another GPU may be better"
    world.finish(worker, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_walk_over_gpus_has_the_bytes_of_one_process(world: World, tmp_path: Path, seed: int) -> None:
    """Also where a change is taken back before it is through."""
    chance = random.Random(seed)
    gpus, changes = (0,), 0
    with slow_down(STEPS) as go_on:
        worker = world.worker(tmp_path, 0)
        worker.until(all_joined)
        for order in range(1, 31):
            gpus = tuple(sorted({gpus[-1], *chance.sample(range(3), chance.randint(1, 2))} if chance.random() < 0.7 else {gpus[0]}))
            worker.inbox.put(SetGpus(gpus, order))
            if chance.random() < 0.7:
                done = GpusChanged(gpus, order=order)
                told = worker.until(lambda told, done=done: done in told or len(worker.group._jobs) < 2)
                changes += done in told
            if changes == 6:
                go_on()
            if len(worker.group._jobs) < 2:
                break
    assert changes > 2
    world.finish(worker, tmp_path)


def all_joined(told: list[Report]) -> bool:
    return len({report.job_id for report in told if isinstance(report, Joined)}) == 3


@pytest.mark.slow
def test_a_group_grows_by_a_gpu_and_shrinks_to_the_other(world: World, tmp_path: Path) -> None:
    """From one GPU to two, where one job begins to span them and another moves; then the first is taken back."""
    with slow_down(STEPS):
        worker = world.worker(tmp_path, 0)
        worker.until(all_joined)
        grown = worker.change(0, 1)
        assert grown == GpusChanged((0, 1))
        worker.until(lambda told: Memory in map(type, told[told.index(grown) :]))
        ranks = {name: job.span.ranks for name, job in worker.group._jobs.items() if job.then is None}
        assert set(ranks.get("two", (0, 1))) == {0, 1}
        assert worker.change(1) == GpusChanged((1,))
        assert worker.group._rank_group.living == [1]
    world.finish(worker, tmp_path)
    assert sum(isinstance(report, Loaded) for report in worker.told) == 1, "the base is loaded once for those above"
