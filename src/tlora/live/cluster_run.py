"""`tlora cluster`: the jobs of a jobs file under the online scheduler, on the GPUs of this machine, as they arrive.

The scheduler decides who shares which GPU, when, and with whom; each GPU has a worker process (`engine/worker.py`). The process that the
user started runs the controller's loop. It may be killed: the workers train on, and the same command takes them over. Workers that have
ended too left checkpoints, from which their jobs go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path

import torch

from tlora import durable
from tlora.cache_directory import open_caches
from tlora.cluster.controller import run as run_controller
from tlora.cluster.engine_hosts import OpenKeeper
from tlora.cluster.event_log import EventLog, not_told
from tlora.cluster.gpus import Gpu, host_room, larger_room, list_gpus, numbers_of, room_of
from tlora.cluster.learned_costs import LearnedCosts, learned_of
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.ray_keeper import RayOptions, open_ray
from tlora.cluster.reconciler import LocalJob
from tlora.data.base_download import fetch_base
from tlora.engine.earlier_run import earlier_ends
from tlora.engine.interrupts import describe_interrupt, interrupts, recorded_end
from tlora.engine.job_opening import refuse
from tlora.engine.ranks.devices import rank_devices
from tlora.engine.results import Results, all_results, swept
from tlora.engine.run_monitor import row_of
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError, TloraError
from tlora.job import JobSpec, RunSpec
from tlora.link.address import tcp_place
from tlora.live.arrivals import Arrival, Deadlines, arrival_of
from tlora.planning.base_parts import count_parts, counted_adapters
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.planning.memory import count_base, memory_limit
from tlora.progress.cluster import ClusterProgress
from tlora.progress.view import JobProgress, ProgressView, logged_values
from tlora.protocol import (
    Action,
    BaseAdded,
    Event,
    GpusUnheard,
    JobDelayed,
    JobFailed,
    JobFinished,
    JobRequest,
    JobSubmitted,
    RejectJob,
    StepsDone,
    Tick,
)
from tlora.report.rows import read_rows
from tlora.report.run_page import write_report
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.base_parts import BaseParts, with_stages
from tlora.shape.cost import CostModel
from tlora.shape.gpu_files import slowest_here, speed_here
from tlora.shape.hardware import nearest_base
from tlora.shape.memory import BaseMemory, least_gpus
from tlora.shape.predicted_constants import is_predicted, live_constants, live_stage_rates
from tlora.shape.stages import LEAST_STAGES
from tlora.store.fingerprint import BaseGuard
from tlora.store.job_result import JobResult
from tlora.store.metrics import check_trackers
from tlora.store.run_directory import earlier_base, pin_base, pin_dtype, write_run_file
from tlora.supermodel.load import Base, find_directory, layers_of, load_config, outline
from tlora.supermodel.stage_base import check_stages
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused
from tlora.wording.numbers import gib, place_names, quantity
from tlora.worker_protocol import settings_of
from tlora.writable_directory import check_writable


def submit_all(backend: LocalBackend, jobs: Mapping[str, LocalJob], arrivals: Iterable[Arrival]) -> None:
    """Ask for all `arrivals`, each with its time on the back end's clock, and seal the back end. Raises ConfigError for one of them."""
    for seconds, event in sorted(arrivals, key=lambda arrival: arrival[0]):
        match event:
            case JobSubmitted(name):
                if name not in jobs:
                    raise ConfigError(f"unknown job {name!r}. Give its spec too")
                backend.submit(event, jobs[name], seconds)
            case JobRequest():
                backend.ask(event, seconds)
    backend.seal()


_BASE = "base"  # the base's name in all groups
_SHOW_SECONDS, _TICK_SECONDS = 0.25, 10.0
_TAIL_BYTES = 16384  # of metrics.jsonl: holds the rows of its last steps, with the metrics of pairs


def train_on_cluster(
    run: RunSpec,
    *,
    gpus: str | int | None = None,
    device: str | None = None,
    policy: str = "residual_capacity",
    worker_listen: str | None = None,
    ray: RayOptions | None = None,
    watcher: Watcher | None = None,
) -> Results:
    """Train all jobs of `run`, each from its `arrival_seconds` on. `gpus` and `device` as of `train`; by default all GPUs, or one process
    on a CPU. With `worker_listen`, tcp://host:port, workers that are started by hand may come over TLS. With `ray`, workers are
    started by Ray, on the hosts of its cluster or on this one; the jobs are still read here.

    `output_dir` gets `jobs/` with a directory for each job, `events.jsonl` with all that happened and was decided, and `workers/` with
    their logs. The same call goes on after a stop or a kill. SIGINT and SIGTERM checkpoint every job and return. Raises TloraError.
    """
    if policy not in LIVE_POLICIES:
        raise ConfigError(f"--policy {policy}: is not one of {', '.join(LIVE_POLICIES)}. Choose one of these")
    if policy == "residual_capacity-growth" and run.deterministic:
        raise ConfigError(
            f"--policy {policy} with deterministic: a job then has as many replicas as its gpus say, and more GPUs do not make it faster. "
            "Choose residual_capacity"
        )
    if run.layout in ("whole", "shared"):
        raise ConfigError(f"layout: {run.layout} is for `tlora train`; here the scheduler decides which GPUs hold the base. Take it out")
    out, watcher, began = Path(run.output_dir), watcher or Watcher(), time.monotonic()
    check_writable(out, "output_dir")
    open_caches(watcher.note)
    if worker_listen is not None:
        tcp_place(worker_listen)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    places = rank_devices(gpus if gpus is not None else "all" if kind == "cuda" else 1, device)
    check_trackers(list(run.report_to))
    jobs_here = pin_base(run.model_copy(update={"output_dir": str(out / "jobs")}), resume=True)
    jobs_here = pin_dtype(jobs_here, places[0], True, watcher.note)
    durable.make_directory(out / "jobs")
    load_config(jobs_here.base_model)  # else it is refused only after its download
    fetch_base(jobs_here.base_model, watcher.stages(jobs_here.jobs))
    with closing(BaseGuard(run.base_model, find_directory(jobs_here.base_model), earlier_base(jobs_here, resume=True))) as guard:
        guard.start()
        guard.wait_for_verdict()  # resumed jobs must continue over the base that they began with
        with ExitStack() as stack:
            listener, keeper = None, None
            if ray is not None:
                numbers = _numbers(places)
                listener, keeper = open_ray(ray, places[0].partition(":")[0], numbers, out, watcher.note)
                stack.enter_context(listener)
            elif worker_listen is not None:
                listener = stack.enter_context(TlsListener(out / "workers", tcp_place(worker_listen)))
                watcher.note(f"workers may come to {listener.address} over TLS; `tlora worker-token {out}` makes a token for them")
            may_come = worker_listen is not None if ray is None else ray.hosts_may_come
            return _Run(jobs_here, out, places, policy, watcher, began, keeper, listener, hosts_may_come=may_come).train(guard)


class _Run:
    def __init__(
        self,
        run: RunSpec,
        out: Path,
        places: Sequence[str],
        policy: str,
        watcher: Watcher,
        began: float,
        open_keeper: OpenKeeper | None = None,
        listener: TlsListener | None = None,
        *,
        hosts_may_come: bool = False,
    ) -> None:
        """`run`: its `output_dir` has a directory for each job. With `open_keeper` all workers are an engine's, and none is of `places`.
        `listener`: where workers come that the engine or a person starts; with `hosts_may_come` of other hosts too.
        """
        self._open_keeper, self._listener, self._hosts_may_come = open_keeper, listener, hosts_may_come
        self._run, self._out, self._places, self._policy = run, out, places, policy
        self._watcher, self._began, self._shown = watcher, began, 0.0
        self._ended: dict[str, JobResult] = {}
        self._cluster = ClusterProgress(ProgressView((JobProgress(job.name, "preparing", job.r) for job in run.jobs), places[0]))
        self._faults, (self._one, self._several) = set[str](), place_names(places[0])
        self._facts = {"device": places[0].partition(":")[0] if len(places) == 1 else f"{len(places)} of {places[0].partition(':')[0]}"}

    def train(self, guard: BaseGuard) -> Results:
        ends = earlier_ends(self._run.jobs, Path(self._run.output_dir))
        earlier = {name: end.result for name, end in ends.items()}
        self._ended |= earlier
        for result in earlier.values():
            self._cluster.view.show(row_of(result))
        profiled = self._profile()
        for name, job in profiled.items():
            self._cluster.view.advance(name, total_steps=job.profile.steps)
        on_wait = self._say_what_waits if self._hosts_may_come or self._open_keeper is not None else None
        scheduler = Scheduler(LIVE_POLICIES[self._policy](), self._costs(), self._see_fault, on_wait=on_wait)
        untold = not_told(earlier, self._out / "events.jsonl")
        with (
            LocalBackend(self._machine(), self._watcher.note, self._listener, open_keeper=self._open_keeper) as backend,
            recorded_end(lambda status: self._record(status, guard)),
            closing(EventLog(self._out / "events.jsonl", backend.began_at_seconds)) as log,
            interrupts(lambda number: self._describe(number, backend), self._watcher.note) as received,
        ):
            self._record("running", guard)
            specs = [spec for spec in self._run.jobs if spec.name in profiled]
            jobs = {spec.name: LocalJob(spec, profiled[spec.name].train_set, profiled[spec.name].eval_set) for spec in specs}
            log.write(backend.now(), BaseAdded(_BASE, int(self._base.num_bytes)))
            learned = LearnedCosts(self._out / "workers", self._watcher.note)
            of = learned_of(self._run.base_model, self._places[0].partition(":")[0], self._run.recompute)
            backend.follow(scheduler.state)
            learned.teach(scheduler.state.cost, _BASE, of, backend.now())
            scheduler.state.kinds.begin = lambda kind, cost: learned.teach_kind(kind, cost, backend.now())
            least = self._least_gpus()
            arrivals = [arrival_of(spec, _BASE, profiled[spec.name], self._most_gpus, least) for spec in specs]
            submit_all(backend, jobs, arrivals)
            deadlines = Deadlines(arrivals, self._watcher.note)
            for name in untold:
                log.write(backend.now(), JobFinished(name))

            def see(seconds: float, item: Event | Action) -> None:
                log.write(seconds, item)
                self._see(item)
                deadlines.see(seconds, item)
                if isinstance(item, Tick):
                    learned.see(seconds)

            run_controller(scheduler, backend, see)
            learned.see(backend.now(), at_once=True)
        return self._finish(received, guard)

    @cached_property
    def _base(self) -> Base:
        """The base's outline."""
        base = outline(self._run.base_model, self._run.dtype, self._run.base_precision)
        for line in check_unused(self._run.base_model, base.model.config, self._run.unused_weights):
            self._watcher.note(line)
        return base

    @cached_property
    def _model(self) -> SuperModel:
        """Over the outline, whose linears it replaces: there is one."""
        return SuperModel(self._base, self._run.deterministic)

    @cached_property
    def _memory(self) -> BaseMemory:
        memory = count_base(self._model, torch.device(self._places[0]), self._run.layout, *counted_adapters(self._run.jobs))
        cut = self._run.layout == "stages" and self._most_gpus != 1
        return with_stages(memory, self._parts, ordered=cut) if cut or self._hosts_may_come else memory

    @cached_property
    def _parts(self) -> BaseParts:
        return count_parts(self._model, torch.device(self._places[0]), *counted_adapters(self._run.jobs))

    @property
    def _most_gpus(self) -> int | None:
        """That a job can get: in stages one for each layer. None where other hosts may come with any number."""
        bounds = [] if self._hosts_may_come else [len(self._places)]
        if self._run.layout == "stages":
            bounds.append(len(layers_of(self._base.decoder)))
        return min(bounds, default=None)

    def _least_gpus(self) -> int:
        """The number of GPUs on which the base fits, in parts if it has to. If it fits on none, a worker reports that."""
        cut = self._run.layout == "stages"
        if self._most_gpus == 1:
            if cut:
                self._watcher.note("layout: stages is of several GPUs, and here is one: the base lies as with layout: auto")
            return 1
        if cut:
            check_stages(self._base, torch.device(self._places[0]))
        if self._hosts_may_come and self._run.memory_limit == "auto":
            return LEAST_STAGES if cut else 1  # the back end counts by the hosts' memory, as they come, and by that of this one
        limit = memory_limit(torch.device(self._places[0]), self._run.memory_limit)
        limit = max(limit, larger_room(room_of(self._numbers, self._known, self._run.memory_limit)))
        count = least_gpus(self._memory.bytes_by_gpus[: self._most_gpus], limit)
        if count is not None and count > 1:
            self._watcher.note(f"the base fits on no {self._one} ({gib(limit)}): each job gets {count} or more, which hold it in parts")
        return max(count or 1, LEAST_STAGES if cut else 1)

    def _profile(self) -> dict[str, ProfiledJob]:
        """Profile the jobs that are to be trained; the others are done or have failed."""
        open_jobs = [job for job in self._run.jobs if job.name not in self._ended]
        if not open_jobs:
            return {}
        profiles = profile_jobs(
            self._run.model_copy(update={"jobs": open_jobs}),
            lambda p: self._show(f"tokenizing {p.key}: {p.rows:,} rows"),
        )
        for spec in open_jobs:
            problem = profiles[spec.name]
            if not isinstance(problem, ProfiledJob):
                self._fail(spec, str(problem))
            elif self._most_gpus is not None and spec.gpus > self._most_gpus:
                places = quantity(self._most_gpus, self._one, self._several)
                self._watcher.note(f"{spec.name}: some of its {spec.gpus} replicas run in turn, on {places}")
        return {name: job for name, job in profiles.items() if isinstance(job, ProfiledJob)}

    def _costs(self) -> CostModel:
        """Seconds and bytes of the base, as predicted for the slowest GPU here until workers have measured them."""
        place, base = torch.device(self._places[0]), self._base
        names = [self._known[number].name for number in self._numbers if number in self._known]
        speed, told = speed_here(names)
        slowest = slowest_here(names)
        constants = live_constants(base.num_bytes, self._parts if place.type == "cuda" else None, slowest)
        like = f"those of {nearest_base(base.num_bytes)}" + ("" if speed == 1.0 else f" on an H200, times {speed:.2f}")
        until = "what `tlora plan` predicts" if is_predicted(constants) else like
        for line in (*told, f"{self._policy} on {len(self._places)} x {place.type}; speeds as measured, until then {until}"):
            self._watcher.note(line)
        cost = CostModel({_BASE: constants}, speed=speed, stage_rates=live_stage_rates(slowest, self._run.links))
        cost.memory[_BASE] = self._memory.recomputing(self._run.recompute)
        return cost

    @cached_property
    def _known(self) -> Mapping[int, Gpu]:
        """What the driver says of this machine's GPUs, which it is asked once; nothing where processes on a CPU train."""
        return list_gpus() if self._places[0].partition(":")[0] == "cuda" else {}

    @property
    def _numbers(self) -> tuple[int, ...]:
        """Of the GPUs, as nvidia-smi has them; of processes on a CPU."""
        return _numbers(self._places)

    def _machine(self) -> LocalMachine:
        run, kind, numbers = self._run, self._places[0].partition(":")[0], self._numbers if self._open_keeper is None else ()
        named = tuple(self._known[number].name if number in self._known else "" for number in numbers)
        on_cpu = (host_room(len(self._places), run.memory_limit),) * len(numbers)
        room = room_of(numbers, self._known, run.memory_limit) if kind == "cuda" else on_cpu
        return LocalMachine(
            numbers,
            "cuda" if kind == "cuda" else "cpu",
            {_BASE: run.base_model},
            self._out,
            tick_seconds=_TICK_SECONDS,
            report_to=tuple(run.report_to),
            calibrate=True,
            memory_bytes=room,
            kinds=named if all(named) else (),
            **settings_of(run),
        )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _see(self, item: Event | Action) -> None:
        if isinstance(item, StepsDone | JobFinished):
            rows = read_rows(Path(self._run.output_dir) / item.job_id / "metrics.jsonl", _TAIL_BYTES)
            self._cluster.view.advance(item.job_id, **logged_values(rows))
        if isinstance(item, JobDelayed) and item.why != self._cluster.delayed.get(item.job_id):
            self._watcher.note(f"{item.job_id} waits for {item.why}")
        self._cluster.see(item)
        if isinstance(item, GpusUnheard) and (waiting := self._cluster.jobs_on(item.gpus)):
            self._watcher.note(f"{', '.join(waiting)}: {item.why or 'its host is heard again'}")
        if isinstance(item, JobFailed | RejectJob):
            self._fail(next(spec for spec in self._run.jobs if spec.name == item.job_id), item.reason)
        now = time.monotonic()
        if now - self._shown >= _SHOW_SECONDS or isinstance(item, JobFailed | JobFinished | RejectJob):
            self._shown = now
            self._show()

    def _show(self, stage: str = "") -> None:
        self._watcher.progress(self._cluster.view.progress(self._seconds, stage))

    def _see_fault(self, reason: str) -> None:
        """Note each fault once: the policy is asked again at the next event, and may fail in the same way."""
        if reason not in self._faults:
            self._faults.add(reason)
            self._watcher.note(f"{self._policy} could not decide ({reason}); what runs goes on, and it is asked again at the next event")

    def _say_what_waits(self, job_id: str, reason: str) -> None:
        self._watcher.note(f"{job_id} waits for workers of other hosts: {reason}")

    def _fail(self, spec: JobSpec, reason: str) -> None:
        """Write the job's failure, unless its worker has written it."""
        directory = Path(self._run.output_dir) / spec.name
        self._ended[spec.name] = refuse(spec, directory, reason, swept(spec, self._run.jobs), self._watcher.note)

    def _describe(self, number: int, backend: LocalBackend) -> str:
        backend.stop()
        return describe_interrupt(number, backend.unfinished)

    def _finish(self, received: Sequence[int], guard: BaseGuard) -> Results:
        self._show()
        total_steps = {name: row.total_steps for name, row in self._cluster.view.rows.items()}
        results = all_results(self._run, self._ended, received, self._watcher.note, total_steps)
        try:
            self._record(results.status, guard)
            results.report = write_report(Path(self._run.output_dir))
        except (OSError, TloraError) as error:  # a full disk: the results are worth more than their page
            self._watcher.note(str(error))
        return results

    def _record(self, status: str, guard: BaseGuard) -> None:
        write_run_file(Path(self._run.output_dir), self._run, self._facts | guard.facts() | {"status": status})


def _numbers(places: Sequence[str]) -> tuple[int, ...]:
    """Of the GPUs, as nvidia-smi counts them, or of the processes on a CPU."""
    if places[0].partition(":")[0] == "cuda":
        return numbers_of([int(place.partition(":")[2]) for place in places])
    return tuple(range(len(places)))
