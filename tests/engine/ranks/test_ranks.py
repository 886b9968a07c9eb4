"""Real ranks on a CPU: bytes of one process under any placement, through kills, stops and resumes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tlora
from tests.engine.ranks.worlds import Told, World, open_world
from tests.engine.tiny_runs import TWO_LINEARS, job, rows, run_spec, sha256, write_rows
from tests.process_hooks import hold
from tlora import durable
from tlora.engine.ranks import rank_group
from tlora.errors import ConfigError, ModelError
from tlora.json_file import read_object
from tlora.store.checkpoint import read_progress


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("world")
    for number, (name, count) in enumerate({"a": 40, "b": 9, "c": 24}.items()):
        write_rows(directory / f"{name}.jsonl", count, number, high=20)
    a, b, c = (str(directory / f"{name}.jsonl") for name in "abc")
    small = {"batch_size": 2, "target_modules": TWO_LINEARS}
    orders = [
        job("dropout", a, lora_dropout=0.1, max_steps=16, logging_steps=5, save_steps=4, target_modules=TWO_LINEARS),
        job("brief", b, max_steps=4, **small),
        job("long", c, max_steps=24, r=7, save_steps=5, **small),
        job("other", c, max_steps=12, seed=3, eval_size=4, eval_steps=5, **small),
        job("rare", a, max_steps=12, save_steps=100, weight=0.3, **small),
    ]
    with open_world(directory, lambda _: orders) as world, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rank_group, "LOOK_SECONDS", 0.1)  # a stopped rank is lost after five looks
        yield world


@pytest.mark.slow  # `test_spanning_runs` has them of jobs of one replica too, in every run
@pytest.mark.parametrize("gpus", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_the_bytes_are_those_of_one_process(world: World, tmp_path: Path, gpus: int) -> None:
    told = Told()
    results = world.train(tmp_path / "out", gpus, watcher=told.watcher)
    assert list(results) == world.names
    assert results.status == "done"
    world.same_bytes(tmp_path / "out")
    assert {result.status for result in results.values()} == {"done"}
    facts = read_object(tmp_path / "out" / "run.json")
    assert facts["status"] == "done"
    assert sorted(facts["gpus"]) == [str(rank) for rank in range(gpus)]
    assert {row["gpu"] for row in rows(tmp_path / "out" / "run.jsonl")} <= set(range(gpus))
    assert told.said("CPU process 0:") and told.said("CPU process 1:") and not told.said("GPU 0:")
    assert told.last is not None
    assert {job.status for job in told.last.jobs} == {"done"}
    assert all(process.has_ended for process in world.processes)
    assert results.report is not None and results.report.is_file()
    assert not list((tmp_path / "out").glob(".*")), "the ranks left something behind"


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))]
)
def test_a_lost_rank_costs_the_others_nothing_and_its_jobs_go_on(world: World, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    number = [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM][seed % 4]
    victim, gpus = rng.randrange(2), rng.choice([2, 3])
    told = world.train_with_a_lost_rank(tmp_path / "out", gpus, victim, number, rng.randint(1, 40))
    assert told.said(f"CPU process {victim} is lost"), told.lines


@pytest.mark.slow
def test_all_ranks_lost_is_said_and_a_resume_ends_with_the_same_bytes(world: World, tmp_path: Path) -> None:
    def kill() -> None:
        for process in world.processes:
            os.kill(process.pid, signal.SIGKILL)
        release()

    told = Told(20, kill, lambda: any((tmp_path / "out").glob("*/checkpoint-*/MANIFEST.json")))
    with hold(22) as release:
        results = world.train(tmp_path / "out", 2, watcher=told.watcher)
    assert results.status == "stopped"
    assert told.said("all ranks are lost") and told.said("--resume")
    for name, result in results.items():
        found = durable.find_verified(tmp_path / "out" / name)
        assert result.steps == (read_progress(found).step if found is not None else 0), "the table says where a resume goes on"
        assert result.total_steps == next(order["max_steps"] for order in world.orders if order["name"] == name)
    assert any(result.steps for result in results.values())
    assert world.train(tmp_path / "out", 3, resume=True).status == "done"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), *(pytest.param(*counts, marks=pytest.mark.soak) for counts in ((1, 3), (3, 2)))])
def test_saved_under_one_plan_and_resumed_under_another(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, then: int
) -> None:
    told = Told(4, lambda: os.kill(os.getpid(), signal.SIGINT)).before_any_job_ends(monkeypatch)
    results = world.train(tmp_path / "out", first, watcher=told.watcher)
    assert results.signal_number == signal.SIGINT
    assert told.said("Interrupted: saving")
    assert "stopped" in {result.status for result in results.values()}
    assert world.train(tmp_path / "out", then, resume=True).status == "done"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow  # of one process it is in every run
def test_a_finished_job_whose_data_is_gone_stays_done(world: World, tmp_path: Path) -> None:
    """No rank hears of it, and the picture has it as done."""
    own = write_rows(tmp_path / "own.jsonl", 9)
    orders = [job("done", str(own), max_steps=2), job("also", str(world.data / "b.jsonl"), max_steps=2)]
    first = world.train(tmp_path / "out", 2, orders, deterministic=False)
    own.unlink()
    told = Told()
    longer = [orders[0], {**orders[1], "max_steps": 4}, job("new", str(world.data / "b.jsonl"), max_steps=2)]
    results = world.train(tmp_path / "out", 2, longer, deterministic=False, resume=True, watcher=told.watcher)
    assert results["done"] == first["done"] and [result.steps for result in results.values()] == [2, 4, 2]
    assert results.status == "done" and told.said("done: done before, and not trained again")
    assert told.last is not None and [row.status for row in told.last.jobs] == ["done"] * 3


@pytest.mark.slow
def test_a_job_that_cannot_run_fails_alone(world: World, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n')
    orders = [*world.orders[:2], job("bad", str(bad)), job("nan", str(world.data / "a.jsonl"), learning_rate=1e30, max_steps=30)]
    results = world.train(tmp_path / "out", 2, orders)
    assert results["bad"].status == "failed"
    assert results["nan"].status == "failed"
    for name in ("dropout", "brief"):
        assert sha256(tmp_path / "out" / name) == sha256(world.whole / name)


def test_what_is_wrong_for_all_is_raised_as_by_one_process(world: World, tmp_path: Path) -> None:
    spec = run_spec(tmp_path / "nowhere", tmp_path / "out", world.orders[:2])
    with pytest.raises(ModelError):
        tlora.train(spec, device="cpu", gpus=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("gpus", "said"), [("0", "number"), ("two", "number"), ("0,1", "number"), ("all", "number"), ("-1", "number")])
def test_a_wrong_number_of_processes_is_refused(world: World, tmp_path: Path, gpus: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tlora.train(run_spec(world.base, tmp_path / "out", world.orders[:1]), device="cpu", gpus=gpus)
