"""The library's entry point: from a jobs file (or specs) to one adapter per job, with queue, resume, signals and report."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tlora.cache_directory import open_caches
from tlora.data.base_download import fetch_base
from tlora.data.prepare import DataWorker
from tlora.engine.earlier_run import describe_resume, earlier_ends, with_ends, with_plans
from tlora.engine.interrupts import describe_interrupt, interrupts, recorded_end
from tlora.engine.job_length import check_lengths
from tlora.engine.launch_facts import launch_facts
from tlora.engine.messages import JobReport, Stop
from tlora.engine.ranks.attempts import train_on_ranks
from tlora.engine.ranks.checked_run import CheckedRun
from tlora.engine.ranks.devices import rank_devices
from tlora.engine.ranks.external import digest_of
from tlora.engine.ranks.rank_group import RankGroup
from tlora.engine.results import Results, all_results
from tlora.engine.run_monitor import RunMonitor
from tlora.engine.session import Loaded, Session, load
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError, TloraError
from tlora.job import SCHEDULED, JobSpec, RunSpec
from tlora.jobs_file import explain, read_jobs_file
from tlora.json_file import read_object
from tlora.planning.allocator import tight_allocator
from tlora.planning.job_plan import job_warnings
from tlora.planning.plan import RunPlan, describe_plan, pick_device
from tlora.planning.threads import compute_with
from tlora.report.run_page import write_report
from tlora.store.fingerprint import BaseGuard
from tlora.store.job_result import JobResult
from tlora.store.metrics import check_trackers
from tlora.store.run_directory import (
    check_run_directory,
    check_same_jobs,
    earlier_base,
    hold_run_directory,
    pin_base,
    pin_data,
    pin_dtype,
    write_run_file,
)
from tlora.store.run_recovery import restore_run_file
from tlora.store.serving import ServingFiles
from tlora.supermodel.load import find_directory, load_config
from tlora.worker_protocol import Finished
from tlora.writable_directory import check_writable

__all__ = ["JobResult", "Jobs", "Results", "resolve_run", "train"]

Jobs = str | os.PathLike[str] | RunSpec | Sequence[JobSpec]


def train(
    jobs: Jobs,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    gpus: str | int | None = None,
    watcher: Watcher | None = None,
    data_worker: DataWorker | None = None,
    rank_group: RankGroup | None = None,
    **settings: Any,
) -> Results:
    """Train all jobs of a jobs file, a RunSpec, or a list of JobSpecs (then with `base_model=`, `output_dir=` and the rest).

    `resume` goes on from each job's newest whole checkpoint; `overwrite` replaces an earlier run. SIGINT and SIGTERM checkpoint
    every job and return. A job that fails has status "failed" and a reason; the others finish. Raises TloraError for what
    concerns all: a wrong file, a missing base model, an output directory in use.

    `gpus`: "all", a number of GPUs, or their indices ("0,2"): each job is trained on one of them, by a process for each
    (`engine/ranks/attempts.py`). With `device="cpu"` it is a number of processes. `data_worker` and `rank_group`:
    processes of `tlora.data.prepare.start_worker` and of `tlora.engine.ranks.rank_group.start_ranks` that have been started ahead.
    """
    run, watcher = resolve_run(jobs, settings), watcher or Watcher()
    open_caches(watcher.note)
    ranks = rank_devices(rank_group.count if rank_group is not None and gpus is None else gpus, device)
    order = _settle(run, ranks or [device], resume, overwrite, watcher)
    if len(order.ended) == len(run.jobs):
        return _nothing_to_train(order)
    if len(ranks) > 1:
        return train_on_ranks(order, ranks, data_worker, rank_group)
    place, monitor = pick_device(ranks[0] if ranks else device), _monitor(order)
    with tight_allocator(place, order.run.memory_limit):
        loaded, serving = load(order.run, place, monitor, resume, data_worker), ServingFiles(run.base_model)
        _say_what_begins(order, loaded.plan, serving)
        run, facts = _as_planned(order.run, loaded), launch_facts(loaded, place)
        with hold_run_directory(run, resume, overwrite, watcher.note) as held, closing(order.guard), compute_with(loaded.threads):
            record = _run_file_writer(order, run, facts, held.path)
            record("running")
            order.guard.start()
            inbox: queue.SimpleQueue[Stop] = queue.SimpleQueue()
            hear = _stop_with_last({job.name for job in run.jobs} - order.ended.keys(), inbox)

            def stop(number: int) -> str:
                inbox.put(Stop())  # a SimpleQueue may be entered again by a handler
                return describe_interrupt(number, session.unfinished)

            session = Session(run, loaded, monitor, serving, order.guard, inbox, hear, record)
            with interrupts(stop, monitor.note) as received:
                with recorded_end(record):
                    try:
                        session.driver.train(inbox, session)
                        monitor.close(session.driver)
                    except BaseException as error:
                        session.driver.close(wait=not isinstance(error, KeyboardInterrupt))
                        raise
                    session.driver.close()
                results = all_results(run, session.driver.records.results | dict(order.ended), received, watcher.note)
                _finish(results, record, held.path, watcher)
    return results


def _settle(run: RunSpec, devices: Sequence[str | None], resume: bool, overwrite: bool, watcher: Watcher) -> CheckedRun:
    """The run with all that an earlier launch or the device decides; its base's files are there then."""
    check_writable(Path(run.output_dir), "output_dir")
    if resume:
        restore_run_file(run, watcher.note)
    if run.layout in ("shared", "stages") and len(devices) < 2:
        watcher.note(f"layout: {run.layout} is of several GPUs, and here is one: the base lies as with layout: auto")
    digest = digest_of(run)
    if scheduled := sorted({field for job in run.jobs for field in job.model_fields_set & set(SCHEDULED)}):
        watcher.note(f"{', '.join(scheduled)}: has a meaning for `tlora cluster` alone; here all jobs begin as soon as there is room")
    run = pin_dtype(pin_base(run, resume), devices[0], resume, watcher.note)
    run = pin_data(run) if resume else run
    check_trackers(list(run.report_to))
    check_run_directory(run, resume, overwrite)
    ends = earlier_ends(run.jobs, Path(run.output_dir)) if resume else {}
    for line in describe_resume(run, ends) if resume else []:
        watcher.note(line)
    run = with_ends(run, ends)
    if resume:  # of those that start from an adapter its shape is known later
        check_same_jobs(Path(run.output_dir), [job for job in run.jobs if not job.adapter_path])
    if len(ends) < len(run.jobs):
        load_config(run.base_model)  # else it is refused only after its download
        fetch_base(run.base_model, watcher.stages(run.jobs))
    guard = BaseGuard(run.base_model, find_directory(run.base_model), earlier_base(run, resume))
    return CheckedRun(run, resume, overwrite, watcher, guard, digest, ended={name: end.result for name, end in ends.items()})


def _monitor(order: CheckedRun) -> RunMonitor:
    monitor = RunMonitor(Path(order.run.output_dir), {job.name: job.r for job in order.run.jobs}, order.watcher, order.resume)
    monitor.ended = order.ended
    return monitor


def _run_file_writer(order: CheckedRun, run: RunSpec, facts: dict[str, Any], directory: Path) -> Callable[[str], None]:
    """Writes `run.json` with a status, and with all that is known by then."""

    def record(status: str) -> None:
        lost = {"output_lost": order.watcher.lost} if order.watcher.lost else {}
        write_run_file(directory, run, facts | order.guard.facts() | {"status": status} | lost)

    return record


def _stop_with_last(unfinished: set[str], inbox: queue.SimpleQueue[Stop]) -> Callable[[JobReport], None]:
    """What hears reports, and stops the run when the last of the jobs `unfinished` has ended."""

    def hear(report: JobReport) -> None:
        if isinstance(report, Finished):
            unfinished.discard(report.job_id)
            if not unfinished:
                inbox.put(Stop())

    return hear


def _as_planned(run: RunSpec, loaded: Loaded) -> RunSpec:
    planned = with_plans(run, [job.spec for job in loaded.plan.jobs])
    return planned.model_copy(update={"cpu_threads": loaded.threads or run.cpu_threads})


def _nothing_to_train(order: CheckedRun) -> Results:
    """All jobs of a resumed run are done: no base is loaded, and no data read."""
    run, watcher = order.run, order.watcher
    before = read_object(Path(run.output_dir) / "run.json")
    ordered = RunSpec.model_fields.keys() - {"token_budget", "cpu_threads"}  # run.json keeps the values that they came to
    facts = {key: value for key, value in before.items() if key not in ordered and key != "versions"}
    with hold_run_directory(run, True, False, watcher.note) as held, closing(order.guard):
        results = all_results(run, order.ended, (), watcher.note)
        _finish(results, lambda status: write_run_file(held.path, run, facts | {"status": status}), held.path, watcher)
    return results


def _finish(results: Results, record: Callable[[str], None], directory: Path, watcher: Watcher) -> None:
    """The run's status and its page."""
    try:
        record(results.status)
        results.report = write_report(directory)
    except (OSError, TloraError) as error:  # a full disk: the results are worth more than their page
        watcher.note(str(error))


def _say_what_begins(order: CheckedRun, plan: RunPlan, serving: ServingFiles) -> None:
    """The notes before the first step. Raises ConfigError for a resumed job that has already taken more steps than ordered now."""
    templates = serving.warn([(job.spec, job.data.report) for job in plan.jobs if job.data])
    lengths = check_lengths(plan.jobs_here, Path(order.run.output_dir)) if order.resume else []
    for line in (*plan.warnings, *job_warnings(plan.jobs), *templates, *lengths, describe_plan(plan)):
        order.watcher.note(line)


def resolve_run(jobs: Jobs, settings: dict[str, Any]) -> RunSpec:
    """One RunSpec from any form of `train`'s arguments. Raises ConfigError."""
    if isinstance(jobs, str | os.PathLike):
        jobs = read_jobs_file(jobs)
    given: dict[str, Any] = jobs.model_dump(exclude_unset=True) if isinstance(jobs, RunSpec) else {"jobs": list(jobs)}
    if "base_model" not in given | settings:
        raise ConfigError("train was given job specs without a base model. Add base_model='path or hub id'")
    try:
        return RunSpec.model_validate(given | settings)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
