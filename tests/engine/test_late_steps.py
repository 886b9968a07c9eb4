"""On a GPU the engine reads what came of optimizer steps when the next micro-batch is under way. Nothing may come out otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_worker import report_each_step as report_each_step
from tests.engine.test_worker import when, work
from tests.engine.tiny_runs import job, rows, run_spec, sha256, train
from tlora.adapters.adamw import StepStats
from tlora.adapters.state import AdapterState
from tlora.engine.messages import SetPlan, Stop
from tlora.engine.watcher import Watcher
from tlora.group import engine as engine_room
from tlora.group.engine import Engine
from tlora.supermodel.optimizer_steps import QueuedSteps
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Failed, Join, Left, Load, Stepped


def counters(state: AdapterState) -> tuple[int, int, int]:
    return state.step, state.updates, state.skipped


def count(state: AdapterState, values: tuple[int, int, int]) -> None:
    state.step, state.updates, state.skipped = values


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counters of a step stand as before it until it is read, as on a GPU. Returns how many steps were unread at each micro-batch."""
    measure, run_micro_batch = SuperModel.measure_gradients, Engine.run_micro_batch
    waiting: set[str] = set()
    found: list[int] = []

    def measure_late(model: SuperModel, job_ids: Iterable[str]) -> SimpleNamespace:
        states = {name: model.state(name) for name in job_ids}
        assert not waiting & states.keys(), "a job steps again before its last step was read"
        measured = measure(model, states)
        return SimpleNamespace(update=lambda: update_late(model, states, measured.update))

    def update_late(model: SuperModel, states: dict[str, AdapterState], update: Callable[[], QueuedSteps]) -> QueuedSteps:
        before = {name: counters(state) for name, state in states.items()}
        steps = update()
        states = {name: state for name, state in states.items() if name not in steps.errors}
        after = {name: counters(state) for name, state in states.items()}
        for name, state in states.items():
            count(state, before[name])
        waiting.update(states)

        def read() -> dict[str, StepStats]:
            for name, state in states.items():
                assert model.state(name) is state and counters(state) == before[name], f"{name} was touched before its step was read"
                count(state, after[name])
            waiting.difference_update(states)
            return steps.read()

        return replace(steps, read=read, done=False)

    def counted(engine: Engine) -> object:
        found.append(len(waiting))
        return run_micro_batch(engine)

    monkeypatch.setattr(SuperModel, "measure_gradients", measure_late)
    monkeypatch.setattr(Engine, "run_micro_batch", counted)
    return found


def outcome(base: Path, data: Path, out: Path) -> tuple[Any, ...]:
    """Everything that a run of very different jobs leaves, without its times: a dropout and evaluations, checkpoints, a batch of several
    micro-batches, early stopping, a job that is taken out, and one that ends long before the others.
    """
    jobs = [
        job("evaluated", {"path": str(data / "a.jsonl"), "eval_size": 0.2}, lora_dropout=0.1, eval_steps=3, max_steps=9, weight=2.0),
        job("saved", str(data / "d.jsonl"), r=9, batch_size=3, max_steps=11, save_steps=4, save_total_limit=9, logging_steps=2),
        job("large", str(data / "c.jsonl"), batch_size=30, max_steps=4),
        job("short", str(data / "b.jsonl"), max_steps=2),
        job("wild", str(data / "b.jsonl"), learning_rate=1e38, lr_scheduler_type="constant", max_grad_norm=0, max_steps=30),
        job("stopped", {"path": str(data / "a.jsonl"), "eval_size": 0.2}, learning_rate=0.0, eval_steps=1, early_stopping_patience=2),
    ]
    notes: list[str] = []
    results = train(base, out, jobs, deterministic=True, token_budget=256, watcher=Watcher(lambda _: None, notes.append))
    found = {name: replace(r, seconds=0.0, path="", reason=r.reason.replace(str(out), "")) for name, r in results.items()}
    metrics = {
        name: [{k: v for k, v in row.items() if "second" not in k} for row in rows(out / name / "metrics.jsonl")] for name in results
    }
    saved = {str(d.relative_to(out)): sha256(d) for d in sorted(out.glob("*/checkpoint-*"))}
    adapters = {name: sha256(out / name) for name, r in results.items() if r.status == "done"}
    said = [note.replace(str(out), "") for note in notes if not note.startswith(("packing: ", "token budget"))]
    return found, metrics, saved, adapters, said


def test_a_run_is_the_same(wide_base: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    prompt = outcome(wide_base, data, tmp_path / "prompt")
    assert {name: r.status for name, r in prompt[0].items()} == {
        **dict.fromkeys(("evaluated", "saved", "large", "short", "stopped"), "done"), "wild": "failed",
    }  # fmt: skip
    unread: list[int] = request.getfixturevalue("unread")
    late = outcome(wide_base, data, tmp_path / "late")
    assert sum(map(bool, unread)) >= 8, "steps were hardly ever late: nothing was tested"
    for mine, theirs in zip(late, prompt, strict=True):
        assert mine == theirs


@pytest.mark.slow
def test_a_run_that_is_interrupted_goes_on_the_same(
    wide_base: Path, data: Path, tmp_path: Path, unread: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped when a step is under way: it counts, and its batch is not trained twice."""
    jobs = [job("a", str(data / "a.jsonl"), max_steps=9), job("c", str(data / "c.jsonl"), batch_size=10, max_steps=7)]
    whole = {name: sha256(Path(r.path)) for name, r in train(wide_base, tmp_path / "whole", jobs, deterministic=True).items()}
    run_micro_batch = Engine.run_micro_batch
    calls: list[None] = []

    def interrupted(engine: Engine) -> object:
        calls.append(None)
        if len(calls) == 6:
            raise RuntimeError("the cable was pulled")
        return run_micro_batch(engine)

    monkeypatch.setattr(Engine, "run_micro_batch", interrupted)
    with pytest.raises(RuntimeError, match="the cable"):
        train(wide_base, tmp_path / "cut", jobs, deterministic=True)
    resumed = train(wide_base, tmp_path / "cut", jobs, deterministic=True, resume=True)
    assert {name: sha256(Path(r.path)) for name, r in resumed.items()} == whole


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    "part", [pytest.param("read", marks=pytest.mark.slow), *(pytest.param(part, marks=pytest.mark.soak) for part in ("Losses", "queue"))]
)
def test_what_raises_about_a_step_leaves_checkpoints_that_agree(
    part: str, wide_base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for the losses, no queue for the step, or a wait that is interrupted: weights, counters and progress are of one step."""
    jobs = [job("a", str(data / "a.jsonl"), max_steps=9), job("c", str(data / "c.jsonl"), batch_size=10, max_steps=7)]
    whole = {name: sha256(Path(r.path)) for name, r in train(wide_base, tmp_path / "whole", jobs, deterministic=True).items()}
    calls: list[None] = []

    def raising(real: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(None)
            if len(calls) == 3:
                raise RuntimeError("not this time")
            return real(*args)

        return call

    where: Any = {"Losses": engine_room, "queue": SuperModel, "read": engine_room.Losses}[part]
    name = {"queue": "measure_gradients"}.get(part, part)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not this time"):
        patch.setattr(where, name, raising(getattr(where, name)))
        train(wide_base, tmp_path / "cut", jobs, deterministic=True)
    resumed = train(wide_base, tmp_path / "cut", jobs, deterministic=True, resume=True)
    assert {name: sha256(Path(r.path)) for name, r in resumed.items()} == whole


def worker_of(base: Path, data: Path, out: Path) -> tuple[Load, dict[str, Join]]:
    wild: dict[str, Any] = {"learning_rate": 1e38, "lr_scheduler_type": "constant", "max_grad_norm": 0, "batch_size": 16}
    orders = [
        job("calm", str(data / "a.jsonl"), max_steps=900, batch_size=8),
        job("wild", str(data / "c.jsonl"), max_steps=30, **wild),
        job("last", str(data / "a.jsonl"), max_steps=900),
    ]
    specs = run_spec(base, out, orders, deterministic=True).jobs
    return Load(str(base), str(out), "cpu", time.time(), deterministic=True), {spec.name: Join(spec) for spec in specs}


@pytest.mark.slow
@pytest.mark.usefixtures("unread")
def test_a_worker_that_stops_checkpoints_all_though_one_of_them_fails_then(wide_base: Path, data: Path, tmp_path: Path) -> None:
    load, joins = worker_of(wide_base, data, tmp_path / "out")
    told = work(load, [SetPlan(100), *joins.values()], when(Stepped, "wild", 3, Stop()), together=True)
    assert {report.job_id for report in told if isinstance(report, Left)} == {"calm", "last"}
    assert [report.job_id for report in told if isinstance(report, Failed)] == ["wild"]
    for name in ("calm", "last"):
        assert list((tmp_path / "out" / name).glob("checkpoint-*")), name
