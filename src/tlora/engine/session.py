"""The jobs of a run on one device: the base loaded, the jobs let in while they fit, and what they leave on the way.

A run in one process has one session (`train.py`); a run on several GPUs has one in each of its ranks (`ranks/rank.py`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from tlora.adapters.layout import AdapterLayout
from tlora.adapters.state import AdapterState
from tlora.batching.pack import MicroBatch
from tlora.batching.replicas import ReplicaPlacement
from tlora.data.prepare import DataWorker, Preparation, start_worker
from tlora.engine.driver import Driver, FilesWritten, RunPaths
from tlora.engine.earlier_run import to_plan
from tlora.engine.messages import BaseFacts, Faulty, Fetched, JobReport, Leave, Published, Sent
from tlora.engine.ranks.last_stage import StagePipeline
from tlora.engine.ranks.spanning import SpanExchange
from tlora.engine.results import swept
from tlora.engine.run_monitor import RunMonitor
from tlora.group.isolation import Failure, try_call
from tlora.job import RunSpec
from tlora.planning.base_parts import memory_in_parts, memory_of_last_stage
from tlora.planning.job_plan import start_ahead
from tlora.planning.memory import bytes_when_shared, can_be_cut
from tlora.planning.memory_probe import DeviceMeter, compile_evaluation, probe, probe_key, recall, rehearse, remember
from tlora.planning.plan import PlacedJobs, RunPlan, check_base_fits, plan_run, settle, take_whole
from tlora.planning.planned_job import PlannedJob
from tlora.planning.streaming import choose_layout, this_machine
from tlora.planning.threads import choose_threads
from tlora.planning.work import known_here
from tlora.shape.memory import MemoryModel
from tlora.shape.stages import LayerRange
from tlora.sharing.peers import Sharing
from tlora.store import checkpoint
from tlora.store.full_disk import DiskReserve
from tlora.store.recorder import RunContext
from tlora.store.run_directory import check_tiles
from tlora.store.run_recovery import base_facts, write_base_file
from tlora.store.serving import ServingFiles
from tlora.store.writer import Writer
from tlora.supermodel.base_name import public_name
from tlora.supermodel.held_linear import check_precision
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused
from tlora.worker_protocol import Finished, Join, Joined, Left, Refused


@dataclass(frozen=True)
class Assignment:
    """What one of several sessions of a run has to do: the `run` as it is by now, the names of the jobs that are led `here`, and,
    where the sessions share the base, who this one is of them. `spans`: jobs with replicas in several sessions; of those in `peer_jobs`
    some are here and the lead rank is not.
    """

    run: RunSpec
    here: frozenset[str] | None = None  # None: all
    sharing: Sharing | None = None
    spans: Mapping[str, ReplicaPlacement] = field(default_factory=dict[str, ReplicaPlacement])
    peer_jobs: frozenset[str] = frozenset()
    stages: tuple[LayerRange, ...] = ()  # of the base, the last of which is here
    kept_out: frozenset[str] = frozenset()  # jobs for which this process has too little memory, and others have not
    rank: int = 0


class Guard(Protocol):
    """The part of `store.fingerprint.BaseGuard` that a session uses."""

    def check(self) -> bool: ...
    def wait_for_verdict(self) -> None: ...
    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Loaded:
    """What a session needs for its first step. `threads`: those of the CPU that it computes with, None on a GPU. `starts`: states that
    are being made ahead, by job. `peer_jobs` as in `Assignment`.
    """

    plan: RunPlan
    model: SuperModel
    threads: int | None
    starts: dict[str, Future[AdapterState]]
    base_parameters: int
    peer_jobs: frozenset[str] = frozenset()
    link_bytes_per_second: float | None = None  # from the host's memory, of a base that is streamed


def load(
    run: RunSpec,
    place: torch.device,
    monitor: RunMonitor,
    resume: bool,
    data_worker: DataWorker | None,
    assigned: Callable[[], Assignment] | None = None,
) -> Loaded:
    """Plan all jobs on an outline of the base, then load it, and measure what it takes of the memory.

    `assigned` is called before any data is read, and may wait for another process to tokenize it.
    """
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # kernels are launched on the current device
    with _data_worker(place) if data_worker is None else nullcontext(data_worker) as worker:
        base = outline(run.base_model, run.dtype, run.base_precision)
        check_precision(run.base_precision, place, base.head.weight_VH.dtype)
        if assigned is None:  # or the owner of the ranks says it
            for line in check_unused(run.base_model, base.model.config, run.unused_weights):
                monitor.note(line)
        parameters, base_bytes = base.num_parameters, base.num_bytes
        outlined = SuperModel(base, run.deterministic)
        if place.type == "cuda" and assigned is None:
            _tell_gpu(outlined, place, run, monitor)
        compiling = outlined.compile_ahead(place, to_plan(run, monitor.ended).jobs)
        assignment = assigned() if assigned is not None else Assignment(run)
        run, sharing = to_plan(assignment.run, monitor.ended), assignment.sharing
        if sharing is not None:
            base_bytes = bytes_when_shared(outlined, base_bytes, sharing.world_size, sharing.slots)
        here = assignment.here if assignment.here is None else assignment.here | assignment.peer_jobs
        if here is None and monitor.ended:
            here = frozenset(job.name for job in run.jobs if job.name not in monitor.ended)
        takes = _taken(run, assignment, outlined, place, base_bytes)
        placed = PlacedJobs(assignment.spans, assignment.kept_out, assignment.rank)
        plan = plan_run(run, outlined, takes, place, Preparation(monitor.preparing, worker), resume, here, placed)
    # several GPUs hold a base whole or in parts
    plan, streamed = choose_layout(run, plan, outlined, place, this_machine(place, run.layout)) if assigned is None else (plan, None)
    check_base_fits(plan)
    threads = choose_threads(run, plan, outlined.targets().values(), place, resume, monitor.note)
    led = [job for job in plan.residents if job.spec.name not in assignment.peer_jobs]
    starts = {} if resume else start_ahead(led, outlined.bank.sum_dtype)
    monitor.stage(f"loading {run.base_model}")
    form = assignment.stages[-1] if assignment.stages else sharing or plan.streaming
    model = SuperModel.from_pretrained(run.base_model, run.dtype, str(place), run.deterministic, run.base_precision, form)
    if resume and (changed := check_tiles(run, model.tiles)):
        monitor.note(changed)
    model.expect(plan.can_run)
    if compiling is not None:
        monitor.stage("compiling kernels")
        compiling.wait()
    monitor.stage("measuring memory")
    if model.base.stage is None:  # else it cannot run by itself
        plan = _measure_memory(run, plan, model, monitor.note)
    model.recompute = plan.recompute
    if streamed is not None:
        monitor.note(f"base: {streamed.describe(streamed.cost(plan, place))}")
    if not resume:  # some of a resumed run's jobs have ended
        try_call(model.bank.make_room, plan.resident)  # where it fails, for want of memory, they find room one by one
    return Loaded(plan, model, threads, starts, parameters, assignment.peer_jobs, streamed.link if streamed is not None else None)


def _taken(run: RunSpec, assignment: Assignment, outlined: SuperModel, place: torch.device, base_bytes: int) -> int | MemoryModel:
    """What the base takes here: its bytes, or where it is a stage or a mixture in parts, what was counted with its activations."""
    if assignment.stages:
        return memory_of_last_stage(run, outlined, place, assignment.stages)
    if assignment.sharing is not None and not can_be_cut(outlined):
        return memory_in_parts(run, outlined, place, base_bytes)
    return base_bytes


def _tell_gpu(outlined: SuperModel, place: torch.device, run: RunSpec, monitor: RunMonitor) -> None:
    monitor.note(f"kernels: {outlined.kernels_on(place, run.deterministic)}")
    if told := known_here(place).told:
        monitor.note(told)


def _data_worker(place: torch.device) -> AbstractContextManager[DataWorker | None]:
    """A data worker that loads its libraries while this process loads its own: saves 3 s of 30 where a GPU leaves cores idle."""
    return start_worker() if place.type == "cuda" else nullcontext()


def _measure_memory(run: RunSpec, plan: RunPlan, model: SuperModel, note: Callable[[str], None]) -> RunPlan:
    """On a GPU, the plan by what this device takes for this base; elsewhere, and where that cannot be measured, `plan` itself."""
    if model.device.type != "cuda" or not plan.can_run or model.units_apart:  # then a peak is no line in the tokens of a batch
        return plan
    key = probe_key(model, plan.can_run, run.deterministic, model.device)
    memory = recall(key)
    if memory is None:
        found = probe(model, plan.can_run, plan.memory, DeviceMeter(model.device))
        model.release_memory()  # blocks of the probe's sizes are of no use to the run
        if found is None:
            note("memory could not be measured, there is too little of it: the plan goes by the estimate")
            return plan
        done = "memory measured and layers compiled" if model.num_layers else "memory measured"
        note(f"{done} in {found.seconds:.0f} s; peaks lie within {found.error_share:.1%} of the model")
        memory = found.memory
        remember(key, memory)
    if any(job.data is not None and job.data.eval is not None for job in plan.jobs):
        compile_evaluation(model, plan.can_run)
    return rehearse(run, settle(run, plan, memory, model.device), model, DeviceMeter(model.device), note)


class Session:
    """`driver.Jobs` of a run: those that wait here, those that train, and what is reported of them. `here` are the names of both."""

    def __init__(
        self,
        run: RunSpec,
        loaded: Loaded,
        monitor: RunMonitor,
        serving: ServingFiles,
        guard: Guard,
        inbox: queue.SimpleQueue[Any],
        send: Callable[[JobReport], None],
        record: Callable[[str], None] = lambda _: None,
        exchange: SpanExchange | None = None,
        pipeline: StagePipeline | None = None,
    ) -> None:
        """`inbox` is that of `Driver.train`. `send` gets the reports on jobs that are led here, `Finished` for each that ends here,
        however it does. `record` writes `run.json` with a status. `exchange`: with the other ranks; `pipeline`: with the stages before.
        """
        plan = loaded.plan
        self._run, self._plan, self._directory = run, plan, Path(run.output_dir)
        self._monitor, self._starts, self._guard = monitor, loaded.starts, guard
        # Jobs that span come first, in one order everywhere: of any two, all sessions let in the same one first, and none waits for ever.
        self._waiting = sorted(plan.jobs_here, key=lambda job: job.span is None)
        self._peer_jobs = set(loaded.peer_jobs)
        self.here = {job.spec.name for job in plan.jobs_here} - self._peer_jobs
        self._begun: set[str] = set()
        self._leaving: set[str] = set()
        self._told: set[str] = set()  # of those that have ended
        self._changed = True  # a job has begun, ended or come to wait since it was last said that one has to wait
        self._send = send
        self._known = {job.spec.name: job for job in plan.jobs}
        self._resumed: set[str] = set()
        self._layouts: dict[str, AdapterLayout] = {}
        settings = {spec.name: swept(spec, run.jobs) for spec in run.jobs}
        self._tiles = loaded.model.tiles
        self._opened: list[Path] = []
        self._record = record
        reserve = DiskReserve(self._directory, _last_saves(plan, loaded.peer_jobs), monitor.note)
        self._context = RunContext(
            public_name(run.base_model),
            monitor.seconds,
            monitor.note,
            reserve,
            Writer(lambda: inbox.put(FilesWritten())),
            before_save=guard.wait_for_verdict,
            base_precision=run.base_precision,
        )
        places = RunPaths(self._directory, serving, run.report_to, settings, self._mark)
        self._exchange = exchange or SpanExchange(0, {}, send)
        self.driver = Driver(loaded.model, self._context, places, plan.token_budget, plan.longest, self._exchange, pipeline)
        self.driver.listener = monitor.listen

    @property
    def waiting(self) -> Sequence[str]:
        """Names of the jobs that have not begun here."""
        return [job.spec.name for job in self._waiting]

    @property
    def unfinished(self) -> int:
        """Jobs that train, or whose files are being written."""
        return len(self.driver.group.runs) + len(self.driver.records.ending)

    # -- between micro-batches -----------------------------------------------------------------------------------------

    def obey(self, command: Any) -> None:
        match command:
            case Join(job):
                self._take(job.name)
            case Leave(name):
                self._let_go(name)
            case Published() | Fetched() | Sent():
                self._exchange.hear(command)
            case BaseFacts():
                pass  # the guard has heard it
            case _:
                raise AssertionError(f"{command} came to a rank that trains")

    def turn(self) -> bool:
        self._admit()
        for name in (self.driver.group.runs.keys() & self.here) - self._begun:
            self._begun.add(name)
            self._changed = True
            self._send(Joined(name, self.driver.group.runs[name].progress.step))
        self.tell_ended()
        if self._changed and self._waiting:
            self._send(Refused(self.waiting[0], "there is no room for it now"))
        self._changed = False
        return False

    def look(self, packed: MicroBatch | None) -> None:
        if self._guard.check():
            self.write_hashes()
        self._monitor.update(self.driver, self.waiting, now_due=not self.driver.group.runs)
        self.tell_ended()

    def tell_ended(self) -> None:
        """Jobs whose files are written. One that was let go has left, unless it came to its end in that very step."""
        results = self.driver.records.results
        if len(results) == len(self._told):
            return
        for name, result in [each for each in results.items() if each[0] not in self._told]:
            moved = name in self._leaving and result.status == "stopped"
            self._told.add(name)
            for names in (self.here, self._begun, self._leaving):
                names.discard(name)
            self._changed = True
            self._send(Left(name, result.steps, None) if moved else Finished(name, asdict(result)))

    def write_hashes(self) -> None:
        """Write the base's sha256, known by now, into `run.json` and each job's directory."""
        if isinstance(failed := try_call(self._record, "running"), Failure):  # a full disk: the run's end writes it once more
            self._monitor.note(failed.reason)
        for directory in self._opened:
            self._context.writer.write(directory.name, partial(self._write_base_file, directory))

    def _write_base_file(self, directory: Path) -> None:
        """Raises CheckpointError. The future of the writer takes it: the file that is there holds all but the sha256."""
        write_base_file(directory, base_facts(self._run, self._tiles, self._guard.facts()))

    def _mark(self, directory: Path) -> None:
        self._write_base_file(directory)
        self._opened.append(directory)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting jobs in, in their order, while they fit."""
        group, records = self.driver.group, self.driver.records
        while self._waiting:
            job = self._waiting[0]
            taken = group.runs.keys() | records.ending.keys()  # the latter hold memory until their files are written
            resident = [layout for name, layout in self._layouts.items() if name in taken]
            if job.layout is not None and not job.problems and resident and not self._plan.fits([*resident, job.layout]):
                return
            self._start(self._waiting.pop(0))

    def _take(self, name: str) -> None:
        """Add one whole job to the waiting ones. It continues from its newest checkpoint, if another session has left one."""
        self._exchange.dissolve(name)  # also one that spanned other ranks
        self._told.discard(name)
        self.driver.records.results.pop(name, None)
        self.here.add(name)
        self._resumed.add(name)
        take_whole(self._known[name], self._plan)
        self._waiting.append(self._known[name])
        self._changed = True

    def _let_go(self, name: str) -> None:
        """Release the job, or the part of it that is here: it waits here no longer, or leaves, saved at its last optimizer step."""
        waits, trains = name in self.waiting, name in self.driver.group.runs
        if name in self.here and not (waits or trains):
            return  # it has come to its end
        self._waiting = [job for job in self._waiting if job.spec.name != name]
        self._peer_jobs.discard(name)
        if trains:
            self._leaving |= {name} & self.here
            self.driver.group.leave(name)
        elif name in self.here:
            self.here.discard(name)
            self._changed = False  # where a job waits elsewhere, this makes no room for it
            self._send(Left(name, 0, None))
        self._exchange.dissolve(name)

    def _start(self, job: PlannedJob) -> None:
        name = job.spec.name
        if name in self._peer_jobs:
            self._follow(job)
            return
        resume = self._monitor.resume or name in self._resumed
        opened = try_call(self.driver.open, job, resume, None if name in self._resumed else self._starts.pop(name, None))
        if isinstance(opened, Failure):
            self.driver.refuse(job.spec, opened.reason)
            return
        assert job.layout is not None, f"{name} was opened without a layout"
        self._layouts[name] = job.layout
        self._monitor.track(opened.run)
        self.driver.let_in(opened)

    def _follow(self, job: PlannedJob) -> None:
        """Compute replicas of the job here. A job that no session can train spans none: where it has problems, memory is short here."""
        if job.layout is None or job.problems:
            self._send(Faulty(job.spec.name, "; ".join(job.problems)))
            return
        self._layouts[job.spec.name] = job.layout
        self._monitor.track(self.driver.follow(job))


def _last_saves(plan: RunPlan, peer_jobs: frozenset[str]) -> dict[str, int]:
    """What each job writes at its end, in bytes: its last checkpoint (and its best, where that is what it hands over) and its adapter."""
    element = plan.memory.sum_bytes
    return {
        job.spec.name: checkpoint.adapter_bytes(job.layout, element)
        + (2 if job.spec.load_best_model_at_end else 1) * checkpoint.checkpoint_bytes(job.layout, element)
        for job in plan.jobs_here
        if job.layout is not None and not job.problems and job.spec.name not in peer_jobs
    }
