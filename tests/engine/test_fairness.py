"""Who gets how much of a run: no job waits for a big neighbour, for an evaluation, or for ever in the queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import job, rows, run_spec, steps_taken, train, write_rows
from tlora.batching.pack import MicroBatch, prepared_budget
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


def test_equal_jobs_share_equally_and_weights_count(base: Path, tmp_path: Path, ticks: list[Tick]) -> None:
    for number in range(3):
        write_rows(tmp_path / f"{number}.jsonl", 64, number, low=3, high=30)
    jobs = [job(str(n), str(tmp_path / f"{n}.jsonl"), batch_size=32, max_steps=6, weight=3 if n == 2 else 1) for n in range(3)]
    train(base, tmp_path / "out", jobs, token_budget=400)
    shared = [tick for tick in ticks if len(tick.steps) == 3]
    taken = [sum(tick.tokens(str(n)) for tick in shared) for n in range(3)]
    print(f"tokens while all three were in: {taken}")
    assert taken[0] == pytest.approx(taken[1], rel=0.1) and taken[2] == pytest.approx(3 * taken[0], rel=0.2)


def test_jobs_come_and_go_one_by_one(base: Path, data: Path, tmp_path: Path) -> None:
    jobs = [job(f"j{steps}", str(data / "a.jsonl"), max_steps=steps, seed=steps) for steps in (9, 2, 5, 1)]
    results = train(base, tmp_path / "out", jobs, token_budget=100)
    assert {name: r.steps for name, r in results.items()} == {"j9": 9, "j2": 2, "j5": 5, "j1": 1}
    last = {name: rows(tmp_path / "out" / name / "metrics.jsonl")[-1]["seconds"] for name in results}
    assert sorted(last, key=last.__getitem__) == ["j1", "j2", "j5", "j9"]


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


def test_padding_of_six_jobs_is_small_at_the_default_budget(base: Path, tmp_path: Path, ticks: list[Tick]) -> None:
    """A device with prepared shapes would compute `prepared_budget` tokens; with four or more jobs runnable hardly any are padding."""
    jobs: list[dict[str, Any]] = []
    for n, (batch, high) in enumerate([(2, 10), (4, 40), (8, 20), (16, 60), (8, 30), (3, 80)]):
        write_rows(tmp_path / f"{n}.jsonl", 80, n, high=high)
        jobs.append(job(f"p{n}", str(tmp_path / f"{n}.jsonl"), r=2, batch_size=batch, max_steps=12))
    train(base, tmp_path / "out", jobs)
    busy = [tick.packed for tick in ticks if tick.runnable >= 4]
    assert len(busy) > 20
    computed = sum(prepared_budget(p.tokens, p.budget) for p in busy)
    padding = 1 - sum(p.tokens for p in busy) / computed
    print(f"padding over computed tokens: {padding:.2%} of {len(busy)} micro-batches of {busy[0].budget}")
    assert padding <= 0.03
    written = rows(tmp_path / "out" / "run.jsonl")
    for prefix in ("", "tail_"):
        parts = [row for row in written if row[f"{prefix}micro_batches"]]
        assert parts and all(
            row[f"{prefix}padding"] == 0 and 0 < row[f"{prefix}fill"] <= 1 for row in parts
        )  # a CPU computes what there is
    for key, per_tick in (("tokens", "tokens"), ("offered", "budget")):
        assert sum(row[key] + row[f"tail_{key}"] for row in written) == sum(getattr(tick.packed, per_tick) for tick in ticks)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["token_budget"] == busy[0].budget


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
