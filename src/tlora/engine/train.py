"""The library's front door: from a jobs file (or specs) to one adapter per job, with queue, resume, signals and report."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tlora.adapters.state import AdapterLayout
from tlora.engine import checkpoint
from tlora.engine.engine import Engine
from tlora.engine.job_run import JobRun
from tlora.engine.memory import memory_limit
from tlora.engine.metrics import Tracker, check_trackers
from tlora.engine.plan import PlannedJob, RunPlan, describe_plan, pick_device, plan_run, start_state, validation_problems
from tlora.engine.progress import Watcher
from tlora.engine.recorder import JobResult, Recorder, write_result
from tlora.engine.run_directory import check_run_directory, find_checkpoint, hold_run_directory, write_run_file
from tlora.engine.run_monitor import RunMonitor
from tlora.errors import CheckpointError, ConfigError, DataError, TloraError
from tlora.job import JobSpec, RunSpec
from tlora.jobs_file import read_jobs_file
from tlora.report.run_page import write_report
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel

Jobs = str | os.PathLike[str] | RunSpec | Sequence[JobSpec]


class Results(dict[str, JobResult]):
    """Results by job name. `report` is the page; `signal_number` says which signal ended the run early, if one did."""

    report: Path | None = None
    signal_number: int | None = None

    @property
    def status(self) -> str:
        """The worst that happened to a job: "failed", "stopped", or "done"."""
        ended = {result.status for result in self.values()}
        return next((status for status in ("failed", "stopped") if status in ended), "done")


def train(
    jobs: Jobs,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Results:
    """Train all jobs of a jobs file, a RunSpec, or a list of JobSpecs (then with `base_model=`, `output_dir=` and the rest).

    `resume` goes on from each job's newest whole checkpoint; `overwrite` replaces an earlier run. SIGINT and SIGTERM checkpoint
    every job and return. A job that fails has status "failed" and a reason; the others finish. Raises TloraError for what
    concerns all: a wrong file, a missing base model, an output directory in use.
    """
    run = resolve_run(jobs, settings)
    watcher = watcher or Watcher()
    check_trackers(list(run.report_to))
    check_run_directory(run, resume, overwrite)
    place = pick_device(device)
    limit = memory_limit(place)
    base = outline(run.base_model, run.dtype)
    sizes = [(p.numel(), p.element_size()) for p in base.model.parameters()]
    monitor = RunMonitor(Path(run.output_dir), {job.name: job.r for job in run.jobs}, watcher, resume)
    plan = plan_run(run, SuperModel(base), sum(n * size for n, size in sizes), place, limit, monitor.preparing)
    monitor.stage(f"loading {run.base_model}")
    model = SuperModel.from_pretrained(run.base_model, run.dtype, str(place), run.deterministic)
    watcher.note(describe_plan(plan))
    engine = Engine(model, plan.token_budget, watcher.note, plan.longest)
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(place),
        "token_budget": plan.token_budget,
        "base_parameters": sum(n for n, _ in sizes),
    }
    run = run.model_copy(update={"jobs": [job.spec for job in plan.jobs]})  # those that start from an adapter have its shape by now
    with hold_run_directory(run, resume, overwrite) as directory, _signals() as received:
        write_run_file(directory, run, facts | {"status": "running"})
        session = _Session(run, plan, engine, directory, monitor, resume)
        try:
            session.go_on(received)
        except BaseException:
            write_run_file(directory, run, facts | {"status": "failed"})
            raise
        results = session.results(received)
        try:
            write_run_file(directory, run, facts | {"status": results.status})
            results.report = write_report(directory)
        except (OSError, TloraError) as error:  # a full disk: the results are worth more than their page
            watcher.note(str(error))
    return results


def resolve_run(jobs: Jobs, settings: dict[str, Any]) -> RunSpec:
    """One RunSpec out of whatever `train` was given. Raises ConfigError."""
    if isinstance(jobs, str | os.PathLike):
        jobs = read_jobs_file(jobs)
    given: dict[str, Any] = jobs.model_dump(exclude_unset=True) if isinstance(jobs, RunSpec) else {"jobs": list(jobs)}
    if "base_model" not in given | settings:
        raise ConfigError("train was given job specs without a base model. Add base_model='path or hub id'")
    try:
        return RunSpec.model_validate(given | settings)
    except ValidationError as error:
        raise ConfigError(validation_problems(error)) from None


class _Session:
    """One run of `train`: the jobs that wait, the engine, and what is reported while it goes on."""

    def __init__(self, run: RunSpec, plan: RunPlan, engine: Engine, directory: Path, monitor: RunMonitor, resume: bool) -> None:
        self._run, self._plan, self._engine, self._directory = run, plan, engine, directory
        self._monitor, self._resume = monitor, resume
        self._waiting = list(plan.jobs)
        self._layouts: dict[str, AdapterLayout] = {}

    def go_on(self, received: list[int]) -> None:
        """Until all jobs have ended or a signal has come."""
        try:
            while not received:
                self._admit()
                packed = self._engine.run_micro_batch()
                self._monitor.update(self._engine, [job.spec.name for job in self._waiting], packed)
                if packed is None and not self._waiting:
                    break
        except Exception:  # nobody's fault: what was learned is kept
            self._engine.stop()
            raise
        if received:
            self._engine.stop()
        self._monitor.close(self._engine)

    def _admit(self) -> None:
        """Let waiting jobs in, in their order, while they fit."""
        while self._waiting:
            job = self._waiting[0]
            resident = [layout for name, layout in self._layouts.items() if name in self._engine.runs]
            if job.layout is not None and not job.problems and resident and not self._plan.fits([*resident, job.layout]):
                return
            self._start(self._waiting.pop(0))

    def _start(self, job: PlannedJob) -> None:
        name = job.spec.name
        for warning in job.warnings:
            self._monitor.note(f"{name}: {warning}")
        if job.problems or job.data is None or job.layout is None:
            self._refuse(job, "; ".join(job.problems))
            return
        directory = self._directory / name
        run = JobRun(job.spec, directory, job.data.train, job.data.eval)
        try:
            state = start_state(job.spec, self._engine.model, job.layout)
            found = find_checkpoint(directory, self._monitor.note) if self._resume else None
            if found is not None:
                model = self._engine.model
                state, run.progress = checkpoint.load(found, job.layout, model.bank.sum_dtype, model.device)
                _check_same_data(run, found)
                self._monitor.note(f"{name}: goes on from {found}")
        except (TloraError, OSError) as error:
            self._refuse(job, str(error))
            return
        tracker = Tracker(self._run, job.spec, directory, self._monitor.note)
        recorder = Recorder(run, self._run.base_model, tracker, self._monitor.seconds, self._monitor.note)
        self._layouts[name] = job.layout
        self._monitor.track(run)
        if not run.progress.finished:
            self._engine.join(run, recorder, state)
            return
        try:
            self._engine.results[name] = recorder.hand_over()
        except CheckpointError as error:
            self._refuse(job, str(error))

    def _refuse(self, job: PlannedJob, reason: str) -> None:
        result = JobResult(job.spec.name, "failed", reason, job.spec.r, path=str(self._directory / job.spec.name))
        self._engine.results[job.spec.name] = result
        write_result(self._directory / job.spec.name, result, self._monitor.note)
        self._monitor.note(f"{job.spec.name} failed: {reason}")

    def results(self, received: list[int]) -> Results:
        """In the order of the file; what never started is "stopped"."""
        results = Results()
        for spec in self._run.jobs:
            ended = self._engine.results.get(spec.name) or self._untouched(spec)
            results[spec.name] = replace(ended, settings=_swept(spec, self._run.jobs))
            write_result(self._directory / spec.name, results[spec.name], self._monitor.note)
        results.signal_number = received[0] if received else None
        return results

    def _untouched(self, spec: JobSpec) -> JobResult:
        """A job whose turn did not come: as an earlier run left it, or interrupted before it began."""
        try:
            return JobResult(**json.loads((self._directory / spec.name / "result.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return JobResult(spec.name, "stopped", "interrupted before it began", spec.r)


def _check_same_data(run: JobRun, found: Path) -> None:
    if run.progress.data != run.data_key:
        raise DataError(f"{run.spec.data.path}: is not the data that {found} was trained on. Put it back, or use a new output_dir")


def _swept(spec: JobSpec, jobs: Sequence[JobSpec]) -> dict[str, Any]:
    """The fields in which the jobs of one sweep differ, with this job's values."""
    if spec.sweep_of is None:
        return {}
    family = [job.model_dump() for job in jobs if job.sweep_of == spec.sweep_of]
    mine = spec.model_dump()
    found = {key: mine[key] for key in mine if key not in ("name", "data") and any(job[key] != mine[key] for job in family)}
    return found | {key: mine["data"][key] for key in mine["data"] if any(job["data"][key] != mine["data"][key] for job in family)}


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying; a second SIGINT ends at once. Only the main thread can."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_signal(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
