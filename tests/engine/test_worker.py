"""A worker obeys between micro-batches: jobs join, leave and go on elsewhere as if they had never moved; one job's trouble is its own."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import TWO_LINEARS, job, rows, run_spec, save_base, sha256, steps_taken, train
from tlora.base_digest import trained_over
from tlora.data.request import PrepareRequest
from tlora.engine import driver
from tlora.engine import trainer as trainer_room
from tlora.engine.messages import Command, Leave, SetPlan, Stop
from tlora.engine.trainer import StepTimer, Trainer
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.stream import Stream
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.planning.planned_job import PlannedJob
from tlora.store import checkpoint
from tlora.store.checkpoint import read_progress
from tlora.store.recorder import Recorder
from tlora.worker_protocol import Failed, Finished, Join, Joined, Left, Load, Loaded, Memory, Refused, Report, Stepped

PATIENCE_SECONDS = 600.0
Answer = Callable[[Report], list[Command]]


def orders(data: Path) -> list[dict[str, Any]]:
    """One with dropout and evaluation, of several micro-batches a step; one whose checkpoints are rare; a short one."""
    evaluated = {"path": str(data / "c.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    return [
        job("mover", evaluated, lora_dropout=0.1, eval_steps=5, max_steps=14, logging_steps=3, save_steps=4, target_modules=TWO_LINEARS),
        job("stays", str(data / "d.jsonl"), batch_size=5, max_steps=12, r=9, target_modules=TWO_LINEARS),
        job("short", str(data / "b.jsonl"), max_steps=3),
    ]


class Orders:
    """The orders of this file (`made` in all files of this room), their tokenized data, and what `tlora.train` makes of them."""

    def __init__(self, base: Path, data: Path, out: Path) -> None:
        self.base, self.whole = base, out
        self.run = run_spec(base, out, orders(data), deterministic=True)
        self.shas = {name: sha256(Path(result.path)) for name, result in train(base, out, orders(data), deterministic=True).items()}
        self.sets = profile_jobs(self.run)

    def join(self, name: str) -> Join:
        spec = next(spec for spec in self.run.jobs if spec.name == name)
        made = self.sets[name]
        assert isinstance(made, ProfiledJob)
        return Join(spec, made.train_set, made.eval_set)

    def load(self, out: Path) -> Load:
        return Load(str(self.base), str(out), "cpu", time.time(), deterministic=True)


@pytest.fixture(autouse=True)
def report_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_room, "REPORT_SECONDS", 0.0)


def work(load: Load, first: list[Command], answer: Answer = lambda _: [], *, together: bool = False) -> list[Report]:
    """A worker in this process: it gets `first`, and after each report what `answer` says to it; with all jobs gone, Stop.

    With `together` none of the first jobs trains before all of them are in, in whatever order their threads have opened them.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    told: list[Report] = []
    inside = {command.job.name for command in first if isinstance(command, Join)}
    expected = set(inside) if together else set[str]()

    class Gathering(Trainer):
        def turn(self) -> bool:
            while expected:
                self.obey(inbox.get())
            return super().turn()

    def send(report: Report) -> None:
        told.append(report)
        if isinstance(report, Joined | Failed | Refused):
            expected.discard(report.job_id)
        for command in answer(report):
            if isinstance(command, Join):
                inside.add(command.job.name)
            inbox.put(command)
        if isinstance(report, Finished | Failed | Left):
            inside.discard(report.job_id)
            if not inside:
                inbox.put(Stop())

    for command in first:
        inbox.put(command)
    Gathering(load, inbox, send).go_on()
    return told


def when(kind: type[Report], job_id: str, steps: int, *commands: Command) -> Answer:
    """Say `commands` at the first report of that kind of the job at `steps` or later."""
    left = [list(commands)]

    def answer(report: Report) -> list[Command]:
        if isinstance(report, kind) and getattr(report, "job_id", "") == job_id and getattr(report, "steps", 0) >= steps and left:
            return left.pop()
        return []

    return answer


def of(told: list[Report], kind: type[Report], job_id: str) -> list[Any]:
    return [report for report in told if isinstance(report, kind) and getattr(report, "job_id", None) == job_id]


def test_a_job_that_moves_ends_as_if_it_had_stayed(made: Orders, tmp_path: Path) -> None:
    first: list[Command] = [SetPlan(90), made.join("mover"), made.join("stays")]
    told = work(made.load(tmp_path), first, when(Stepped, "mover", 6, Leave("mover")))
    assert isinstance(told[0], Memory) and told[1] == Loaded()
    (left,) = of(told, Left, "mover")
    assert left.steps >= 6 and read_progress(Path(left.checkpoint)).step == left.steps
    assert [report.steps for report in of(told, Joined, "mover")] == [0]
    assert sha256(tmp_path / "stays") == made.shas["stays"] and of(told, Finished, "stays")[0].result["status"] == "done"

    told = work(made.load(tmp_path), [SetPlan(300, weights={"mover": 3.0}), made.join("short"), made.join("mover")])
    assert [report.steps for report in of(told, Joined, "mover")] == [left.steps]
    assert [report.steps for report in of(told, Stepped, "mover")] == list(range(left.steps + 1, 15))
    assert sha256(tmp_path / "mover") == made.shas["mover"] and sha256(tmp_path / "short") == made.shas["short"]
    for name in ("mover", "stays", "short"):
        assert steps_taken(tmp_path / name) == steps_taken(made.whole / name)
        files, of_train = ({path.name for path in directory.iterdir()} for directory in (tmp_path / name, made.whole / name))
        assert files == of_train
        here, of_run = trained_over(tmp_path / name), trained_over(made.whole / name)
        assert here and of_run and here.files and of_run.files
        assert (here.name, here.files.quick) == (of_run.name, of_run.files.quick)


def test_nothing_is_kept_of_a_job_that_has_ended(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may serve thousands."""
    runs: list[weakref.ref[Any]] = []

    class Noted(Recorder):
        def __init__(self, run: JobRun, *others: Any) -> None:
            runs.append(weakref.ref(run))
            super().__init__(run, *others)

    monkeypatch.setattr(driver, "Recorder", Noted)
    gone: list[bool] = []

    def answer(report: Report) -> list[Command]:
        if isinstance(report, Stepped) and report.job_id == "stays" and report.steps >= 3 and len(runs) == 2:
            gc.collect()
            gone.append(runs[0]() is None)
        return []

    first = when(Finished, "short", 0, made.join("stays"))
    told = work(made.load(tmp_path), [made.join("short")], lambda report: first(report) + answer(report))
    assert of(told, Finished, "stays") and gone and all(gone)


def test_a_job_may_leave_before_it_is_in(made: Orders, tmp_path: Path) -> None:
    told = work(made.load(tmp_path), [made.join("short"), Leave("short"), Leave("nobody"), made.join("stays")])
    assert of(told, Left, "short") == [Left("short", 0, None)] and not of(told, Joined, "short")
    assert not of(told, Left, "nobody") and of(told, Finished, "stays")


@pytest.mark.parametrize("leaves", [False, True], ids=["it joins then", "it was told to leave meanwhile"])
def test_others_train_while_a_job_is_opened(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Its checkpoint is read beside the training. Until that is over its directory is not another worker's: only then it has left."""
    go, open_run = threading.Event(), driver.open_run

    def slowly(planned: PlannedJob, *args: Any) -> Any:
        if planned.spec.name == "short":
            assert go.wait(PATIENCE_SECONDS), "nobody trained meanwhile"
        return open_run(planned, *args)

    def free(report: Report) -> list[Command]:
        steps = report.steps if isinstance(report, Stepped) and report.job_id == "stays" else 0
        if steps == 6:  # what was said at step 4 has been obeyed
            go.set()
        return [Leave("short")] if leaves and steps == 4 else []

    monkeypatch.setattr(driver, "open_run", slowly)
    told = work(made.load(tmp_path), [made.join("short"), made.join("stays")], free)
    fourth = next(at for at, report in enumerate(told) if isinstance(report, Stepped) and report.steps == 4)
    ended = next(at for at, report in enumerate(told) if report == Left("short", 0, None) or report == Joined("short", 0))
    assert ended > fourth and bool(of(told, Left, "short")) == leaves == (not of(told, Joined, "short"))
    assert sha256(tmp_path / "stays") == made.shas["stays"] and (leaves or sha256(tmp_path / "short") == made.shas["short"])


def test_a_job_may_be_at_its_end_when_it_joins(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker was killed between the checkpoint that was due at the last step and the end."""
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda path, state, progress, *args: save(path, state, replace(progress, finished=False), *args)
    )
    work(made.load(tmp_path), [made.join("short")])
    (tmp_path / "short" / "adapter_model.safetensors").unlink()
    monkeypatch.setattr(checkpoint, "save", lambda *args: (time.sleep(0.3), save(*args)))
    told = work(made.load(tmp_path), [made.join("stays"), made.join("short")])
    for name in ("stays", "short"):
        assert of(told, Finished, name) and sha256(tmp_path / name) == made.shas[name]


def test_a_worker_that_breaks_ends_its_writes(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is lost takes what was on it, and not what had left it. The process exits at once when `go_on` returns."""
    save, begun, broken = checkpoint.save, threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        begun.set()
        assert broken.wait(PATIENCE_SECONDS)
        save(*args)

    def lost(engine: Engine) -> None:
        if begun.is_set():
            broken.set()
            raise RuntimeError("the device is gone")
        settle(engine)

    settle = Engine._settle
    monkeypatch.setattr(checkpoint, "save", slowly)
    monkeypatch.setattr(Engine, "_settle", lost)
    with pytest.raises(RuntimeError, match="the device is gone"):
        work(made.load(tmp_path), [made.join("mover")])
    assert read_progress(tmp_path / "mover" / "checkpoint-4").step == 4


def test_a_finished_job_hands_over_again(made: Orders, tmp_path: Path) -> None:
    work(made.load(tmp_path), [made.join("short")])
    (tmp_path / "short" / "adapter_model.safetensors").unlink()
    told = work(made.load(tmp_path), [made.join("short")])
    assert of(told, Finished, "short") and not of(told, Joined, "short") and sha256(tmp_path / "short") == made.shas["short"]


@pytest.mark.slow  # a worker that is stopped in a process of its own is in every run
def test_stop_checkpoints_all(made: Orders, tmp_path: Path) -> None:
    told = work(made.load(tmp_path), [made.join("mover"), made.join("stays")], when(Stepped, "stays", 5, Stop()), together=True)
    for name in ("mover", "stays"):
        (left,) = of(told, Left, name)
        assert left.steps == of(told, Stepped, name)[-1].steps and read_progress(Path(left.checkpoint)).step == left.steps
        assert rows(tmp_path / name / "metrics.jsonl")[-1]["seconds"] < 1e6  # since the start of the run, not since 1970
    work(made.load(tmp_path), [made.join("mover"), made.join("stays")])
    assert {name: sha256(tmp_path / name) for name in ("stays", "mover")} == {name: made.shas[name] for name in ("stays", "mover")}


def test_the_budget_follows_the_plan_and_holds_the_longest_sample(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    compute = Stream.compute
    monkeypatch.setattr(Stream, "compute", lambda self, *what: (used.append(what[0].budget), compute(self, *what))[1])
    work(made.load(tmp_path), [SetPlan(1), made.join("mover")], when(Stepped, "mover", 5, SetPlan(300)))
    profile = made.sets["mover"]
    assert isinstance(profile, ProfiledJob)
    assert used[0] == profile.profile.longest_sample_tokens and used[-1] == 300 and set(used) == {used[0], 300}


def test_a_bad_job_fails_alone(made: Orders, data: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 7}\n')
    bad = run_spec(
        made.base, tmp_path, [job("bad", str(tmp_path / "bad.jsonl")), job("wrong", str(data / "a.jsonl"), target_modules=["no"])]
    )
    told = work(made.load(tmp_path / "out"), [made.join("stays"), *(Join(spec) for spec in bad.jobs)])
    assert "line 2" in of(told, Failed, "bad")[0].reason and "no" in of(told, Failed, "wrong")[0].reason
    assert sha256(tmp_path / "out" / "stays") == made.shas["stays"]
    assert '"failed"' in (tmp_path / "out" / "bad" / "result.json").read_text()


def test_another_order_of_the_same_name_does_not_go_on_from_its_checkpoints(made: Orders, tmp_path: Path) -> None:
    work(made.load(tmp_path), [made.join("stays")], when(Stepped, "stays", 2, Leave("stays")))
    join = made.join("stays")
    other = Join(join.job.model_copy(update={"learning_rate": 0.5}), join.train_set)
    assert "learning_rate" in of(work(made.load(tmp_path), [other]), Failed, "stays")[0].reason


def test_a_job_goes_on_over_the_base_that_it_began_over_and_no_other(made: Orders, tmp_path: Path) -> None:
    told = work(made.load(tmp_path), [made.join("stays")], when(Stepped, "stays", 2, Leave("stays")))
    (left,) = of(told, Left, "stays")
    began = trained_over(tmp_path / "stays")
    other = replace(made.load(tmp_path), base_model=str(save_base(tmp_path / "other", rms_norm_eps=1e-3)))
    told = work(other, [made.join("stays"), made.join("short")])
    reason = of(told, Failed, "stays")[0].reason
    assert f"base_model {tmp_path / 'other'}: is not the base that the job was trained over" in reason and "submit the job again" in reason
    assert of(told, Finished, "short"), "what begins there may"
    assert trained_over(tmp_path / "stays") == began

    told = work(made.load(tmp_path), [made.join("stays")])
    assert [report.steps for report in of(told, Joined, "stays")] == [left.steps] and sha256(tmp_path / "stays") == made.shas["stays"]


def test_data_is_prepared_where_it_was_not_before(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PrepareRequest] = []
    prepare = trainer_room.prepare
    monkeypatch.setattr(trainer_room, "prepare", lambda requests: (asked.extend(requests), prepare(requests))[1])
    short, mover = made.join("short"), made.join("mover")
    told = work(made.load(tmp_path), [Join(short.job, train_set=str(tmp_path / "gone")), Join(mover.job, mover.train_set)])
    for name in ("short", "mover"):
        assert of(told, Finished, name) and sha256(tmp_path / name) == made.shas[name]
    assert (tmp_path / Path(str(short.train_set)).name / "meta.json").is_file(), "where it was meant to be, so that its owner can remove it"
    assert asked and not any(request.keep_unfinished for request in asked), "the owner does not know of unfinished sets"


def test_steps_are_paced_by_the_moment_that_they_were_through() -> None:
    pace = StepTimer(4, 10.0)
    pace.see(4, 11.0)
    assert pace.take() is None
    pace.see(5, 12.0)
    pace.see(6, 13.0)
    pace.see(6, 20.0)
    assert pace.take() == (6, 1.5)
    assert pace.take() is None
    pace.see(7, 21.0)
    assert pace.take() == (7, 8.0)
