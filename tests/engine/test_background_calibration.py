"""A base is measured while its worker trains: jobs begin before, keep their bytes, and get the memory that they need."""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_calibration import Made, load_of
from tests.engine.test_crash import fork
from tests.engine.tiny_runs import job, run_spec, sha256, steps_taken
from tlora.batching.recompute_plan import RecomputePlan
from tlora.engine import background_calibration, calibration
from tlora.engine import trainer as trainer_room
from tlora.engine.calibration import Attempt, find_deadly, key_of, recall
from tlora.engine.messages import Command, Leave, Stop
from tlora.engine.trainer import Trainer
from tlora.engine.worker_base import WorkerMemory
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.link.flight import read_flight
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Finished, Join, Joined, Left, Load, Loaded, Measured, Memory, Report, Stepped

ENDLESS = 10**6
Answer = Callable[[Report], Sequence[Command]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trainer_room, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(background_calibration, "PROBES", (128, 512, 1024))
    return tmp_path / "cache" / "speeds"


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What has been told of and measured, in order: gets a "turn" for each micro-batch of the measurement."""
    found: list[object] = []
    one = calibration.time_micro_batch

    def noted(*arguments: Any) -> tuple[int, float]:
        found.append("turn")
        return one(*arguments)

    monkeypatch.setattr(calibration, "time_micro_batch", noted)
    return found


def joins(base: Path, out: Path, orders: Sequence[dict[str, Any]], deterministic: bool = True) -> list[Join]:
    run = run_spec(base, out, list(orders), deterministic=deterministic)
    made = profile_jobs(run)
    found: list[Join] = []
    for spec in run.jobs:
        profiled = made[spec.name]
        assert isinstance(profiled, ProfiledJob)
        found.append(Join(spec, profiled.train_set, profiled.eval_set))
    return found


def work(load: Load, first: Sequence[Command], answer: Answer, told: list[Any] | None = None) -> list[Any]:
    """A worker in this process, with the jobs of `first` expected; what it told, in order."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    told = [] if told is None else told

    def send(report: Report) -> None:
        told.append(report)
        for command in answer(report):
            inbox.put(command)

    for command in first:
        inbox.put(command)
    Trainer(load, inbox, send, expected=[command.job for command in first if isinstance(command, Join)]).go_on()
    return told


def stop_at(kind: type[Report]) -> Answer:
    return lambda report: [Stop()] if isinstance(report, kind) else []


def test_the_first_step_comes_before_the_measurement_and_others_between(
    base: Path, data: Path, tmp_path: Path, turns: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = joins(base, tmp_path, [job("a", str(data / "b.jsonl"), max_steps=ENDLESS)])
    keys = list[str]()

    def counted(load: Load, device: str) -> str:
        keys.append(key_of(load, device))
        return keys[-1]

    monkeypatch.setattr(background_calibration, "key_of", counted)
    told = work(load_of(base, tmp_path / "out"), first, stop_at(Measured), turns)
    steps = [at for at, what in enumerate(told) if isinstance(what, Stepped)]
    measured = [at for at, what in enumerate(told) if what == "turn"]
    assert [type(report) for report in told[:2]] == [Memory, Loaded]
    assert measured and steps[0] < measured[0]
    assert all(any(a < step < b for step in steps) for a, b in itertools.pairwise(measured)), "never two turns in a row"
    assert any(isinstance(what, Measured) for what in told[measured[-1] :])
    assert len(keys) == 1 and recall(*keys, "CPU") in told, "the base's directory is listed once"


@pytest.mark.slow  # of a worker that is killed meanwhile the bytes are compared in every run
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_job_has_the_same_bytes_with_a_measurement_and_without(
    wide_base: Path, data: Path, tmp_path: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that leaves in the middle and comes back."""
    monkeypatch.setattr(background_calibration, "SHARE", 1.0)  # a turn after each micro-batch
    evaluated = {"path": str(data / "c.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    orders = [job("a", evaluated, lora_dropout=0.1, eval_steps=7, save_steps=5, max_steps=45)]
    first = joins(wide_base, tmp_path, orders, deterministic)
    plain = load_of(wide_base, tmp_path / "plain", deterministic=deterministic, calibrate=False)
    assert not [report for report in work(plain, first, stop_at(Finished)) if isinstance(report, Measured)]
    told = work(replace(plain, output_dir=str(tmp_path / "out"), calibrate=True), first, stop_at(Finished))
    kinds = [type(report) for report in told]
    assert kinds.index(Measured) < kinds.index(Finished), "it was measured meanwhile"
    assert sha256(tmp_path / "out" / "a") == sha256(tmp_path / "plain" / "a")
    assert steps_taken(tmp_path / "out" / "a") == steps_taken(tmp_path / "plain" / "a")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {".claims", "a"}


def test_what_is_known_is_told_before_the_first_job(base: Path, data: Path, tmp_path: Path, turns: list[object]) -> None:
    work(load_of(base, tmp_path), [], stop_at(Measured))
    turns.clear()
    first = joins(base, tmp_path, [job("a", str(data / "b.jsonl"), max_steps=2)])
    told = work(load_of(base, tmp_path / "out"), first, stop_at(Finished), turns)
    assert [type(report) for report in told[:3]] == [Memory, Measured, Loaded] and "turn" not in told


def test_an_idle_worker_lets_jobs_that_are_on_their_way_begin(base: Path, data: Path, tmp_path: Path, turns: list[object]) -> None:
    """Its jobs are opened in a thread: meanwhile there is nothing to train, and yet no time for a measurement."""
    first = joins(base, tmp_path, [job("a", str(data / "b.jsonl"), max_steps=3)])
    told = work(load_of(base, tmp_path / "out"), first, lambda report: [Stop()] if isinstance(report, Finished) else [], turns)
    kinds = [what if what == "turn" else type(what) for what in told]
    assert "turn" not in kinds[: kinds.index(Stepped)]


def test_a_worker_that_stops_leaves_nothing(base: Path, data: Path, tmp_path: Path, turns: list[object], own_cache: Path) -> None:
    """In the middle of a probe."""

    def answer(report: Report) -> list[Command]:
        return [Stop()] if isinstance(report, Stepped) and turns.count("turn") >= 2 else []

    first = joins(base, tmp_path, [job("a", str(data / "b.jsonl"), max_steps=ENDLESS)])
    told = work(load_of(base, tmp_path / "out"), first, answer, turns)
    assert isinstance(told[-1], Left) and told[-1].checkpoint and not own_cache.exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_meanwhile_costs_no_job_anything(
    base: Path, data: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No job is suspected of it. The next worker goes on from the checkpoint, and measures nothing until its user wants it."""
    out, load = tmp_path / "out", load_of(base, tmp_path / "out")
    first = joins(base, tmp_path, [job("a", str(data / "b.jsonl"), max_steps=40, save_steps=1)])
    work(replace(load, output_dir=str(tmp_path / "whole"), calibrate=False), first, stop_at(Finished))
    one, count = calibration.time_micro_batch, itertools.count(1)

    def killed(*arguments: Any) -> tuple[int, float]:
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return one(*arguments)

    monkeypatch.setattr(calibration, "time_micro_batch", killed)
    child = fork(lambda: work(load, first, lambda _: []))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert read_flight(out, child).isdisjoint({"a"}) and not own_cache.exists()
    monkeypatch.setattr(calibration, "time_micro_batch", one)
    told = work(load, first, stop_at(Finished))
    assert next(report for report in told if isinstance(report, Joined)).steps > 0
    assert sha256(out / "a") == sha256(tmp_path / "whole" / "a")
    assert not any(isinstance(report, Measured) for report in told)
    (said,) = re.findall(r"an earlier worker was killed while this base's speed was measured, .* remove (.*)", capfd.readouterr().err)
    assert [type(report) for report in work(load, [], stop_at(Loaded))] == [Memory, Loaded], "it is remembered"
    Path(said).unlink()
    assert isinstance(work(load, [], stop_at(Measured))[-1], Measured)
    assert not list((own_cache.parent / "measuring").iterdir())


def test_a_measurement_of_a_living_process_or_of_an_earlier_boot_is_not_deadly(base: Path, tmp_path: Path, own_cache: Path) -> None:
    load = load_of(base, tmp_path)
    key = key_of(load, "CPU")
    with Attempt(key).mark():
        (path,) = (own_cache.parent / "measuring").iterdir()
        assert find_deadly(key) is None, "this process lives"
        identity = json.loads(path.read_text())
        path.write_text(json.dumps(identity | {"start_ticks": 1}))
        assert find_deadly(key) == path and find_deadly(key_of(load, "another card")) is None
        path.write_text("{")
        assert find_deadly(key) is None
        path.write_text(json.dumps(identity | {"start_ticks": 1, "boot": "another"}))
        assert find_deadly(key) is None and not path.exists()


# -- memory ----------------------------------------------------------------------------------------------------------------


def made(base: Path, tmp_path: Path, has_room: Callable[[Sequence[JobRun], int], bool]) -> Made:
    return Made(load_of(base, tmp_path), SuperModel.from_pretrained(str(base), deterministic=True), has_room)


def test_it_waits_for_memory_while_jobs_have_it(base: Path, tmp_path: Path, own_cache: Path) -> None:
    room = [False]
    found = made(base, tmp_path, lambda runs, tokens: room[0])
    found.calibration.turn(found.begun.append, beside_jobs=True)
    assert not found.calibration.over and not found.begun and not found.notes
    assert not found.calibration.is_due(beside_jobs=True), "it does not ask at each micro-batch"
    assert found.calibration.is_due(beside_jobs=False)
    room[0] = True
    found.finish()
    assert found.told and own_cache.exists()


def test_without_memory_for_the_largest_it_does_without_and_the_next_load_tries_again(
    base: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calibration.MOST_SECONDS, "cpu", float("inf"))  # on a busy machine it is left out for its time
    asked: list[int] = []
    found = made(base, tmp_path, lambda runs, tokens: (asked.append(tokens), tokens < 1000)[1])
    points = found.finish(beside_jobs=True).points
    assert found.told and [point.members for point in points] == [1, 1, calibration.MEMBERS] and not own_cache.exists()
    assert max(asked) > 1000, "the tokens are those of the micro-batch"


def test_what_was_being_timed_is_timed_anew_when_it_had_to_step_aside(base: Path, tmp_path: Path) -> None:
    found = made(base, tmp_path, lambda runs, tokens: True)
    for _ in range(2):
        found.calibration.turn(found.begun.append, beside_jobs=True)
    model = found.calibration._model
    assert len(model.bank.jobs()) == 1
    found.calibration.step_aside()
    assert not model.bank.jobs() and not found.calibration.resident and not found.calibration.over
    points = found.finish().points
    assert found.told and [point.members for point in points[-2:]] == [1, calibration.MEMBERS]


def test_recomputation_is_the_groups_again_after_a_turn(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement recomputes nothing, whatever the jobs do."""
    plan = RecomputePlan((100, 200))
    layers, seen = [plan], list[RecomputePlan]()
    monkeypatch.setattr(SuperModel, "recompute", property(lambda _: layers[0], lambda _, count: layers.__setitem__(0, count)))
    one = calibration.time_micro_batch
    monkeypatch.setattr(calibration, "time_micro_batch", lambda *arguments: (seen.append(layers[0]), one(*arguments))[1])
    found = made(base, tmp_path, lambda runs, tokens: True)
    while not found.calibration.over:
        found.calibration.turn(found.begun.append, beside_jobs=True)
        assert layers == [plan]
    assert set(seen) == {RecomputePlan()}


def test_a_job_that_comes_gets_the_memory(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a job and a measurement there is no room for a second job; next to the job there is."""
    has_room = WorkerMemory.has_room_for

    def tight(memory: WorkerMemory, more: Sequence[JobRun], tokens: int = 0) -> bool:
        together = [*memory._group.runs.values(), *more]
        return has_room(memory, more, tokens) and len(together) <= 1 + max(1, len(memory._group.runs))

    resident: list[set[str]] = []
    join = Engine.join

    def joined(engine: Engine, run: JobRun, *others: Any) -> None:
        if run.spec.name == "b":
            resident.append(set(engine.model.bank.jobs()))
        join(engine, run, *others)

    monkeypatch.setattr(WorkerMemory, "has_room_for", tight)
    monkeypatch.setattr(Engine, "join", joined)
    asked: list[Command] = []
    a, b = joins(base, tmp_path, [job(name, str(data / "b.jsonl"), max_steps=ENDLESS) for name in "ab"])
    in_probe: list[bool] = []
    monkeypatch.setattr(calibration, "_MOST_TURNS", {"cpu": 10**9})
    monkeypatch.setattr(
        calibration, "time_micro_batch", lambda engine, device: (in_probe.append(True), (128, 0.9 ** len(in_probe)))[1]
    )  # ever faster

    def answer(report: Report) -> list[Command]:
        if isinstance(report, Stepped) and report.job_id == "a" and len(in_probe) >= 2 and not asked:
            asked.append(b)
            return asked
        return [Leave("a"), Leave("b"), Stop()] if isinstance(report, Joined) and report.job_id == "b" else []

    work(load_of(base, tmp_path / "out"), [a], answer)
    assert resident == [{"a"}]


# -- what is told of the jobs ----------------------------------------------------------------------------------------------


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


def test_the_pace_of_a_job_is_told_without_the_turns_between(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler would else take the measurement for slow steps."""
    clock, run_micro_batch = Clock(), Engine.run_micro_batch

    def a_second(engine: Engine) -> Any:
        clock.now += 1.0
        return run_micro_batch(engine)

    def an_hour(*_: object) -> tuple[int, float]:
        clock.now += 3600.0
        return 128, 0.5

    monkeypatch.setattr(trainer_room, "time", clock)
    monkeypatch.setattr(background_calibration, "time", clock)
    monkeypatch.setattr(background_calibration, "SHARE", 1.0)
    monkeypatch.setattr(Engine, "run_micro_batch", a_second)
    monkeypatch.setattr(calibration, "time_micro_batch", an_hour)
    first = joins(base, tmp_path, [job("a", str(data / "b.jsonl"), max_steps=40)])
    told = work(load_of(base, tmp_path / "out"), first, stop_at(Finished))
    assert any(isinstance(report, Measured) for report in told) and clock.now > 2 * 3600.0
    assert {report.step_seconds for report in told if isinstance(report, Stepped)} == {1.0}
