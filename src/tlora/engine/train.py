"""The library's front door: from a jobs file (or specs) to one adapter per job, with queue, resume, signals and report."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tlora.adapters.state import AdapterLayout, AdapterState
from tlora.batching.pack import MicroBatch
from tlora.data.prepare import Preparation, WorkerProcess, start_worker
from tlora.engine.driver import Driver, Places
from tlora.engine.job_length import check_lengths
from tlora.engine.run_monitor import RunMonitor
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError, TloraError
from tlora.group.wall import Failure, attempt
from tlora.job import JobSpec, RunSpec
from tlora.jobs_file import explain, read_jobs_file
from tlora.json_file import read_object
from tlora.planning.memory_probe import DeviceMeter, compile_evaluation, probe, probe_key, recall, remember
from tlora.planning.plan import PlannedJob, RunPlan, check_base_fits, describe_plan, pick_device, plan_run, settle
from tlora.planning.start import start_ahead
from tlora.planning.threads import choose_threads, compute_with
from tlora.report.run_page import write_report
from tlora.store import checkpoint
from tlora.store.disk_reserve import DiskReserve
from tlora.store.fingerprint import BaseGuard
from tlora.store.metrics import check_trackers
from tlora.store.recorder import JobResult, RunContext, write_result
from tlora.store.run_directory import check_run_directory, check_tiles, earlier_base, hold_run_directory, pin_base, pin_data, write_run_file
from tlora.store.run_recovery import base_facts, restore_run_file, write_base_file
from tlora.store.serving import ServingFiles
from tlora.supermodel.base_name import public_name
from tlora.supermodel.fp8_linear import check_fp8
from tlora.supermodel.load import find_directory, outline
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
    data_worker: WorkerProcess | None = None,
    **settings: Any,
) -> Results:
    """Train all jobs of a jobs file, a RunSpec, or a list of JobSpecs (then with `base_model=`, `output_dir=` and the rest).

    `resume` goes on from each job's newest whole checkpoint; `overwrite` replaces an earlier run. SIGINT and SIGTERM checkpoint
    every job and return. A job that fails has status "failed" and a reason; the others finish. Raises TloraError for what
    concerns all: a wrong file, a missing base model, an output directory in use. `data_worker`: a process of
    `tlora.data.prepare.start_worker` that has been started ahead.
    """
    run = resolve_run(jobs, settings)
    watcher = watcher or Watcher()
    if resume:
        restore_run_file(run, watcher.note)
    run = pin_base(run, resume)
    run = pin_data(run) if resume else run
    check_trackers(list(run.report_to))
    check_run_directory(run, resume, overwrite)
    place = pick_device(device)
    guard = BaseGuard(run.base_model, find_directory(run.base_model), earlier_base(run, resume))
    monitor = RunMonitor(Path(run.output_dir), {job.name: job.r for job in run.jobs}, watcher, resume)
    loaded = _load(run, place, monitor, resume, data_worker)
    plan, threads = loaded.plan, loaded.threads
    serving = ServingFiles(run.base_model)
    for line in _opening_notes(run, plan, serving, resume):
        watcher.note(line)
    facts = _facts(loaded, place)
    adopted = [job.spec for job in plan.jobs]  # those that start from an adapter have its shape by now
    run = run.model_copy(update={"jobs": adopted, "cpu_threads": threads or run.cpu_threads})
    with hold_run_directory(run, resume, overwrite, watcher.note) as directory, closing(guard), compute_with(threads):

        def record(status: str) -> None:
            lost = {"output_lost": watcher.lost} if watcher.lost else {}
            write_run_file(directory, run, facts | guard.facts() | {"status": status} | lost)

        record("running")
        guard.start()
        session = _Session(run, loaded, monitor, serving, guard, record)
        with _signals(session.describe_interrupt, monitor.note) as received:
            try:
                session.driver.train(lambda: not received and session.admit(), session.look)
                monitor.close(session.driver)
            except BaseException as error:
                quit_at_once = isinstance(error, KeyboardInterrupt)
                session.driver.close(wait=not quit_at_once)
                record("stopped" if quit_at_once else "failed")
                raise
            session.driver.close()
            results = session.results(received)
            try:
                record(results.status)
                results.report = write_report(directory)
            except (OSError, TloraError) as error:  # a full disk: the results are worth more than their page
                watcher.note(str(error))
    return results


def _opening_notes(run: RunSpec, plan: RunPlan, serving: ServingFiles, resume: bool) -> list[str]:
    """What is said before the first step. Raises ConfigError where a resumed job has taken more steps than it shall have."""
    templates = serving.warn([(job.spec, job.data.report) for job in plan.jobs if job.data])
    lengths = check_lengths(plan.jobs, Path(run.output_dir)) if resume else []
    return [*plan.warnings, *plan.job_warnings(), *templates, *lengths, describe_plan(plan)]


@dataclass(frozen=True)
class _Loaded:
    """What a run needs for its first step. `threads`: those of the CPU that it computes with, None on a GPU. `starts`: states that are
    being made ahead, by job.
    """

    plan: RunPlan
    model: SuperModel
    threads: int | None
    starts: dict[str, Future[AdapterState]]
    base_parameters: int


def _load(run: RunSpec, place: torch.device, monitor: RunMonitor, resume: bool, data_worker: WorkerProcess | None) -> _Loaded:
    """Plan all jobs on an outline of the base, then load it, and measure what it takes of the memory."""
    with _data_worker(place) if data_worker is None else nullcontext(data_worker) as worker:
        base = outline(run.base_model, run.dtype, run.base_precision)
        if run.base_precision == "fp8":
            check_fp8(place, base.head.weight_VH.dtype)
        sizes = [(p.numel(), p.element_size()) for p in base.model.parameters()]
        outlined = SuperModel(base)
        compiling = outlined.compile_ahead(place, run.jobs)
        base_bytes = sum(n * size for n, size in sizes)
        plan = plan_run(run, outlined, base_bytes, place, Preparation(monitor.preparing, worker), resume)
    check_base_fits(plan)
    threads = choose_threads(run, plan, outlined.targets().values(), place, resume, monitor.note)
    starts = {} if resume else start_ahead(plan.residents, outlined.bank.sum_dtype)
    monitor.stage(f"loading {run.base_model}")
    model = SuperModel.from_pretrained(run.base_model, run.dtype, str(place), run.deterministic, run.base_precision)
    if resume and (changed := check_tiles(run, model.tiles)):
        monitor.note(changed)
    model.expect(plan.can_run)
    if compiling is not None:
        monitor.stage("compiling kernels")
        compiling.wait()
    monitor.stage("measuring memory")
    plan = _measure_memory(run, plan, model, monitor.note)
    model.recomputed_layers = min(plan.recomputed_layers, model.num_layers)
    if not resume:  # some of a resumed run's jobs have ended
        attempt(model.bank.make_room, plan.resident)  # where it fails, for want of memory, they find room one by one
    return _Loaded(plan, model, threads, starts, base_parameters=sum(n for n, _ in sizes))


def _data_worker(place: torch.device) -> AbstractContextManager[WorkerProcess | None]:
    """Beside a GPU there are cores to spare, so that it loads its libraries while this process loads its own: 3 s of 30."""
    return start_worker() if place.type == "cuda" else nullcontext()


def _facts(loaded: _Loaded, device: torch.device) -> dict[str, Any]:
    """What `run.json` tells of a run beside its order."""
    threads, tiles = loaded.threads, loaded.model.tiles
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"cpu ({threads} thread{'s' * (threads > 1)})" if threads else torch.cuda.get_device_name(device),
        "token_budget": loaded.plan.token_budget,
        "recomputed_layers": loaded.plan.recomputed_layers,
        "base_parameters": loaded.base_parameters,
    } | ({"tiles": tiles} if tiles else {})


def _measure_memory(run: RunSpec, plan: RunPlan, model: SuperModel, note: Callable[[str], None]) -> RunPlan:
    """On a GPU, the plan by what this device takes for this base; elsewhere, and where that cannot be measured, `plan` itself."""
    if model.device.type != "cuda" or not model.num_layers or not plan.can_run:
        return plan
    key = probe_key(model, plan.can_run, run.deterministic, model.device)
    memory = recall(key)
    if memory is None:
        found = probe(model, plan.can_run, plan.memory, DeviceMeter(model.device))
        torch.cuda.empty_cache()  # blocks of the probe's sizes are of no use to the run
        if found is None:
            note("memory could not be measured, there is too little of it: the plan goes by the estimate")
            return plan
        note(f"memory measured and layers compiled in {found.seconds:.0f} s; peaks lie within {found.error_share:.1%} of the model")
        memory = found.memory
        remember(key, memory)
    if any(job.data is not None and job.data.eval is not None for job in plan.jobs):
        compile_evaluation(model, plan.can_run)
    return settle(run, plan, memory, model.device)


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
        raise ConfigError(explain(error)) from None


class _Session:
    """One run of `train`: the jobs that wait, their driver, and what is reported while it goes on."""

    def __init__(
        self, run: RunSpec, loaded: _Loaded, monitor: RunMonitor, serving: ServingFiles, guard: BaseGuard, record: Callable[[str], None]
    ) -> None:
        """`record` writes `run.json` with a status."""
        plan = loaded.plan
        self._run, self._plan, self._directory = run, plan, Path(run.output_dir)
        self._monitor, self._starts, self._guard = monitor, loaded.starts, guard
        self._waiting = list(plan.jobs)
        self._layouts: dict[str, AdapterLayout] = {}
        self._settings = {spec.name: _swept(spec, run.jobs) for spec in run.jobs}
        self._tiles = loaded.model.tiles
        self._opened: list[Path] = []
        self._record = record
        reserve = DiskReserve(self._directory, _last_saves(plan), monitor.note)
        self._context = RunContext(public_name(run.base_model), monitor.seconds, monitor.note, reserve, before_save=guard.wait_for_verdict)
        places = Places(self._directory, serving, run.report_to, self._settings, self._mark)
        self.driver = Driver(loaded.model, self._context, places, plan.token_budget, plan.longest)
        self.driver.listener = monitor.listen

    def look(self, packed: MicroBatch | None) -> None:
        """After each micro-batch."""
        if self._guard.check():
            self._write_hashes()
        self._monitor.update(self.driver, [job.spec.name for job in self._waiting], now_due=packed is None)

    def _write_hashes(self) -> None:
        """The base's sha256 have become known: into `run.json`, and beside each job."""
        if isinstance(failed := attempt(self._record, "running"), Failure):  # a full disk: the run's end writes it once more
            self._monitor.note(failed.reason)
        for directory in self._opened:
            self._context.writer.write(directory.name, partial(self._write_base_file, directory))

    def _write_base_file(self, directory: Path) -> None:
        """Raises CheckpointError. The future of the writer takes it: the file that is there holds all but the sha256."""
        write_base_file(directory, base_facts(self._run, self._tiles, self._guard.facts()))

    def _mark(self, directory: Path) -> None:
        self._write_base_file(directory)
        self._opened.append(directory)

    def admit(self) -> bool:
        """Let waiting jobs in, in their order, while they fit. False when none is left, neither waiting nor training."""
        group, records = self.driver.group, self.driver.records
        while self._waiting:
            job = self._waiting[0]
            taken = group.runs.keys() | records.ending.keys()  # the latter hold memory until their files are written
            resident = [layout for name, layout in self._layouts.items() if name in taken]
            if job.layout is not None and not job.problems and resident and not self._plan.fits([*resident, job.layout]):
                return True
            self._start(self._waiting.pop(0))
        return bool(group.runs)

    def _start(self, job: PlannedJob) -> None:
        name = job.spec.name
        opened = attempt(self.driver.open, job, self._monitor.resume, self._starts.pop(name, None))
        if isinstance(opened, Failure):
            self.driver.refuse(job.spec, opened.reason)
            return
        assert job.layout is not None, f"{name} was opened without a layout"
        self._layouts[name] = job.layout
        self._monitor.track(opened.run)
        self.driver.let_in(opened)

    def describe_interrupt(self, number: int) -> str:
        """What the signal `number` will bring about, as the first that has come."""
        unfinished = len(self.driver.group.runs) + len(self.driver.records.ending)
        jobs = "1 unfinished job" if unfinished == 1 else f"{unfinished} unfinished jobs"
        more = "; press Ctrl-C again to quit at once, without what is not saved by then" if number == signal.SIGINT else ""
        return f"Interrupted: saving {jobs}{more}" if unfinished else "Interrupted: all jobs have ended, the page is written"

    def results(self, received: list[int]) -> Results:
        """In the order of the file; what never started is "stopped"."""
        results = Results()
        for spec in self._run.jobs:
            results[spec.name] = self.driver.records.results.get(spec.name) or self._untouched(spec)
        results.signal_number = received[0] if received else None
        return results

    def _untouched(self, spec: JobSpec) -> JobResult:
        """A job whose turn did not come: as an earlier run left it, or interrupted before it began."""
        directory = self._directory / spec.name
        try:
            return JobResult(**read_object(directory / "result.json"))
        except (OSError, ValueError, TypeError):
            settings = self._settings[spec.name]
            result = JobResult(spec.name, "stopped", "interrupted before it began", spec.r, sweep_of=spec.sweep_of, settings=settings)
            write_result(directory, result, self._monitor.note)
            return result


def _last_saves(plan: RunPlan) -> dict[str, int]:
    """What each job writes at its end, in bytes: its last checkpoint (and its best, where that is what it hands over) and its adapter."""
    element = plan.memory.sum_bytes
    return {
        job.spec.name: checkpoint.adapter_bytes(job.layout, element)
        + (2 if job.spec.load_best_model_at_end else 1) * checkpoint.checkpoint_bytes(job.layout, element)
        for job in plan.jobs
        if job.layout is not None and not job.problems
    }


def _swept(spec: JobSpec, jobs: Sequence[JobSpec]) -> dict[str, Any]:
    """The fields in which the jobs of one sweep differ, with this job's values."""
    if spec.sweep_of is None:
        return {}
    family = [job.model_dump() for job in jobs if job.sweep_of == spec.sweep_of]
    mine = spec.model_dump()
    found = {key: mine[key] for key in mine if key not in ("name", "data") and any(job[key] != mine[key] for job in family)}
    return found | {key: mine["data"][key] for key in mine["data"] if any(job["data"][key] != mine["data"][key] for job in family)}


@contextmanager
def _signals(describe: Callable[[int], str], note: Callable[[str], None]) -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying, and notes how things stood at the first; a second SIGINT raises KeyboardInterrupt.
    Only the main thread can.
    """
    received: list[int] = []
    noted = threading.Event()

    def tell(message: str) -> None:
        try:
            note(message)
        finally:
            noted.set()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_signal(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1:
            try:  # what was interrupted may hold stdout's lock, or one of threading.Thread
                _thread.start_new_thread(tell, (describe(number),))
            except RuntimeError:  # no more threads for this process
                noted.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
        if received:
            noted.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
