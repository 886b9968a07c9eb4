"""Who gets how much of a run: no job waits for a big neighbour, for an evaluation, or for ever in the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.tiny_runs import job, rows, run_spec, steps_taken, train, write_rows
from tlora.batching.pack import MicroBatch
from tlora.engine.check import check
from tlora.engine.watcher import RunProgress, Watcher
from tlora.group.engine import Engine


@dataclass(frozen=True)
class Tick:
    """One micro-batch, and how many jobs were in, and each job's step after it."""

    packed: MicroBatch
    runnable: int
    steps: dict[str, int]

    def tokens(self, name: str) -> int:
        return sum(row.tokens for row in self.packed.rows if row.job_id == name)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[Tick]:
    found: list[Tick] = []
    run_micro_batch: Callable[[Engine], MicroBatch | None] = Engine.run_micro_batch

    def watched(engine: Engine) -> MicroBatch | None:
        runs = dict(engine.runs)
        runnable = sum(run.flow.runnable for run in runs.values())
        packed = run_micro_batch(engine)
        if packed is not None:
            found.append(Tick(packed, runnable, {name: run.progress.step for name, run in runs.items()}))
        return packed

    monkeypatch.setattr(Engine, "run_micro_batch", watched)
    return found


def test_a_tiny_batch_is_never_held_up_by_a_big_one(base: Path, tmp_path: Path, ticks: list[Tick]) -> None:
    """Batches of 1 short sample next to batches of 64 long ones: the small job steps in every micro-batch, about 16 for each big step."""
    write_rows(tmp_path / "short.jsonl", 20, 1, high=4)
    write_rows(tmp_path / "long.jsonl", 64, 2, low=40, high=80)
    jobs = [
        job("big", str(tmp_path / "long.jsonl"), batch_size=64, max_steps=3),
        job("small", str(tmp_path / "short.jsonl"), batch_size=1, max_steps=40),
    ]
    results = train(base, tmp_path / "out", jobs, token_budget=1024)
    assert [r.status for r in results.values()] == ["done", "done"]
    both = [tick for tick in ticks if set(tick.steps) == {"big", "small"}]
    first_step = next(i for i, tick in enumerate(both) if tick.steps["big"] == 1)
    print(f"{both[first_step].steps['small']} small steps in one big step of {first_step + 1} micro-batches")
    assert both[first_step].steps["small"] >= 10
    assert [tick.steps["small"] for tick in both] == list(range(1, len(both) + 1))  # one in each micro-batch
    assert both[-1].steps == {"big": both[-1].steps["big"], "small": 40}  # and leaves when it is done
    assert all(tick.packed.tokens >= 0.9 * 1024 for tick in both[: first_step - 1])  # without wasting the budget


def test_more_jobs_than_fit_wait_and_all_finish(base: Path, data: Path, tmp_path: Path, ticks: list[Tick]) -> None:
    jobs = [job(f"q{n}", str(data / "ab"[n % 2]) + ".jsonl", r=8, max_steps=1 + n % 3, seed=n) for n in range(7)]
    pair = check(run_spec(base, tmp_path, jobs[:2], token_budget=256))
    limit = pair.predicted_bytes + pair.jobs[0].memory_bytes // 2
    seen: list[RunProgress] = []
    results = train(base, tmp_path / "out", jobs, memory_limit=limit, token_budget=256, watcher=Watcher(seen.append))
    assert [(r.status, r.steps) for r in results.values()] == [("done", 1 + n % 3) for n in range(7)]
    assert max(len(tick.steps) for tick in ticks) == 2
    order = list(dict.fromkeys(name for tick in ticks for name in tick.steps))
    assert order == [fields["name"] for fields in jobs]  # first come, first served
    queued = [sum(j.status == "queued" for j in state.jobs) for state in seen if not state.stage]
    assert queued[0] == 5 and queued[-1] == 0


@pytest.mark.slow
def test_a_long_evaluation_stalls_nobody(base: Path, data: Path, tmp_path: Path, ticks: list[Tick]) -> None:
    write_rows(tmp_path / "much.jsonl", 300, 3, low=10, high=30)
    own = {"path": str(data / "a.jsonl"), "eval_path": str(tmp_path / "much.jsonl")}
    jobs = [job("watched", own, eval_steps=1, max_steps=3), job("other", str(data / "b.jsonl"), batch_size=8, max_steps=60)]
    results = train(base, tmp_path / "out", jobs, token_budget=512)
    assert [row["step"] for row in rows(tmp_path / "out" / "watched" / "metrics.jsonl") if "eval_loss" in row] == [0, 1, 2, 3]
    assert {row["eval_num_tokens"] for row in rows(tmp_path / "out" / "watched" / "metrics.jsonl") if "eval_loss" in row} == {
        sum(tick.tokens("watched") for tick in ticks if tick.packed.kind == "eval") // 4
    }
    evaluating = [i for i, tick in enumerate(ticks) if tick.packed.kind == "eval" and tick.steps["watched"] == 0]
    inside = [tick for tick in ticks[evaluating[0] : evaluating[-1]] if tick.packed.kind == "train"]
    print(f"{len(inside)} training micro-batches of the other job within an evaluation of {len(evaluating)}")
    assert len(inside) >= len(evaluating) / 2 and all(tick.tokens("other") for tick in inside)
    gaps = [i for i, tick in enumerate(ticks) if tick.tokens("other")]
    assert max(b - a for a, b in pairwise(gaps)) <= 3
    assert results["other"].steps == 60


@pytest.mark.slow
def test_every_sample_of_an_epoch_counts_once(base: Path, data: Path, tmp_path: Path, ticks: list[Tick]) -> None:
    """Whatever the packing: two epochs of each job are each of its samples twice, and the batches follow one another."""
    jobs = [job(name, str(data / f"{name}.jsonl"), batch_size=size) for name, size in (("a", 5), ("b", 2), ("c", 16), ("d", 17))]
    jobs = [{k: v for k, v in fields.items() if k != "max_steps"} | {"num_train_epochs": 2} for fields in jobs]
    for budget in (64, 300, 5000):
        ticks.clear()
        train(base, tmp_path / str(budget), jobs, token_budget=budget)
        for name, count, batch in (("a", 24, 5), ("b", 9, 2), ("c", 40, 16), ("d", 17, 17)):
            taken = [row.sample for tick in ticks for row in tick.packed.rows if row.job_id == name]
            assert sorted(taken[:count]) == sorted(taken[count:]) == list(range(count)), (budget, name)
            assert steps_taken(tmp_path / str(budget) / name) == list(range(1, 1 + 2 * -(-count // batch)))
