"""Jobs that span real ranks on a CPU: bytes of one process, through kills, stops and resumes on other counts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.ranks.worlds import Told, World, open_world
from tests.engine.tiny_runs import TWO_LINEARS, job, rows, sha256, train, write_rows
from tlora.engine.ranks.dispatcher import Dispatcher
from tlora.json_file import read_object


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    """One job of three replicas with dropout and batches that are smaller at an epoch's end than replicas, one of two with evaluations,
    and two of one.
    """
    directory = tmp_path_factory.mktemp("spanning")
    for number, (name, count) in enumerate({"a": 26, "b": 9, "c": 24}.items()):
        write_rows(directory / f"{name}.jsonl", count, number, high=20)
    a, b, c = (str(directory / f"{name}.jsonl") for name in "abc")
    small = {"batch_size": 2, "target_modules": TWO_LINEARS}
    orders = [
        job("alone", b, max_steps=10, **small),
        job("three", a, gpus=3, lora_dropout=0.1, max_steps=16, save_steps=4, logging_steps=3, target_modules=TWO_LINEARS),
        job("two", c, gpus=2, max_steps=12, r=7, seed=3, eval_size=4, eval_steps=5, **small),
        job("other", c, max_steps=20, save_steps=100, weight=0.3, **small),
    ]
    with open_world(directory, lambda _: orders) as world:
        yield world


@pytest.mark.parametrize("gpus", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_the_bytes_are_those_of_one_process(world: World, tmp_path: Path, gpus: int) -> None:
    told = Told()
    results = world.train(tmp_path / "out", gpus, watcher=told.watcher)
    assert results.status == "done" and list(results) == world.names, told.lines
    world.same_bytes(tmp_path / "out")
    assert told.said("a part of three") and told.said("a part of two")
    losses = [read_object(out / "three" / "result.json")["train_loss"] for out in (tmp_path / "out", world.whole)]
    assert losses[0] == losses[1]
    facts = read_object(tmp_path / "out" / "run.json")
    assert facts["homes"]["two"] != facts["homes"]["three"]
    assert facts["spans"]["two"] == {"replicas": 2, "gpus": [facts["homes"]["two"], *facts["spans"]["two"]["gpus"][1:]]}
    assert all(each["exchange_wait_seconds"] >= 0 for each in facts["gpus"].values())
    assert facts["status"] == "done" and sorted(facts["gpus"]) == [str(rank) for rank in range(gpus)]
    assert {row["gpu"] for row in rows(tmp_path / "out" / "run.jsonl")} <= set(range(gpus))
    assert told.said("CPU process 0:") and told.said("CPU process 1:") and not told.said("GPU 0:")
    assert told.last is not None and {job.status for job in told.last.jobs} == {"done"}
    assert all(process.has_ended for process in world.processes)
    assert results.report is not None and results.report.is_file()
    assert not list((tmp_path / "out").glob(".*")), "the ranks left something behind"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_a_lost_rank_ends_no_job_that_spans(world: World, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    number = [signal.SIGKILL, signal.SIGTERM][seed % 2]
    gpus = rng.choice([2, 3])
    victim = rng.randrange(gpus)
    told = world.train_with_a_lost_rank(tmp_path / "out", gpus, victim, number, rng.randint(1, 20))
    assert told.said(f"CPU process {victim} is lost"), told.lines


@pytest.mark.slow
def test_a_job_goes_on_where_none_of_it_was(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas on ranks 0 and 1, of which the first is lost: rank 2, which has the least to do, takes all of it."""
    orders = [{**world.orders[2], "max_steps": 20}, {**world.orders[0], "max_steps": 150}, {**world.orders[3], "max_steps": 1}]
    whole = train(world.base, tmp_path / "whole", orders[:1], deterministic=True)
    told = Told(3, lambda: os.kill(world.processes[0].pid, signal.SIGKILL)).before_any_job_ends(monkeypatch)
    lent = Dispatcher._share_out

    def to_the_third(dispatcher: Dispatcher, jobs: list[str]) -> None:
        if "two" in jobs:
            dispatcher._give(2, "two")
        lent(dispatcher, [job for job in jobs if job != "two"])

    monkeypatch.setattr(Dispatcher, "_share_out", to_the_third)
    monkeypatch.setattr(Dispatcher, "balance", lambda _: None)
    results = world.train(tmp_path / "out", 3, orders, watcher=told.watcher)
    assert whole.status == results.status == "done", told.lines
    facts = read_object(tmp_path / "out" / "run.json")
    assert 2 not in facts["spans"]["two"]["gpus"] and facts["homes"]["two"] == 2
    assert sha256(tmp_path / "out" / "two") == sha256(tmp_path / "whole" / "two")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, *range(2, 10)))])
def test_a_stopped_run_resumes_on_another_count(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    told = Told(rng.randint(1, 4), lambda: os.kill(os.getpid(), signal.SIGTERM)).before_any_job_ends(monkeypatch)
    stopped = world.train(tmp_path / "out", rng.choice([2, 3]), watcher=told.watcher)
    assert stopped.status == "stopped"
    results = world.train(tmp_path / "out", [1, 2, 3][seed % 3], resume=True)
    assert results.status == "done"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
def test_without_determinism_a_long_job_spans_by_itself(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.planning.job_work.LEAST_REPLICA_TOKENS", 4)
    told = Told()
    orders = [
        job("long", str(world.data / "a.jsonl"), max_steps=20, batch_size=8),
        job("brief", str(world.data / "b.jsonl"), max_steps=2),
    ]
    results = world.train(tmp_path / "out", 2, orders, deterministic=False, watcher=told.watcher)
    assert results.status == "done"
    assert told.said("a part of long") and not told.said("a part of brief")
    assert results["long"].steps == 20
