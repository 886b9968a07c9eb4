"""Turns the scheduler's groups into the desired state of each worker, and interprets the workers' reports.

Starts no process, reads no clock and does not wait: `local.py` does. A worker reaches its desired state by itself
(`engine/worker_reconciler.py`); this module ensures that a job is in one worker at a time. The scheduler decides which job trains where.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tlora.cluster.crash_attribution import CrashAttribution
from tlora.cluster.gpu_owners import GpuOwners
from tlora.cluster.job_holders import JobHolders
from tlora.cluster.lenders import Lenders
from tlora.cluster.remote_worker import NUMBERS_PER_EPOCH, Held, RemoteWorker
from tlora.job import JobSpec
from tlora.protocol import (
    BaseMeasured,
    BaseSpeed,
    Event,
    GroupKept,
    GroupLost,
    GroupReady,
    JobDelayed,
    JobFailed,
    JobFinished,
    JobGroup,
    MemoryFound,
    ParallelPlan,
    StepsDone,
)
from tlora.worker_protocol import (
    Delayed,
    Failed,
    Finished,
    GpusChanged,
    JobReport,
    Join,
    Joined,
    Left,
    Measured,
    Memory,
    Refused,
    Report,
    Settled,
    Stepped,
)


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job and the directories of its tokenized data; without them its worker prepares the data again. Its profile's `tokens_per_step`
    is filled in by the back end.
    """

    spec: JobSpec
    train_set: str | None = None
    eval_set: str | None = None
    tokens_per_step: float | None = None


class Reconciler:
    """`groups` are as wanted, `workers` as they are, by their first GPU; `open` are the jobs that were submitted and have not ended."""

    def __init__(
        self,
        base_models: Mapping[str, str],
        start: Callable[[tuple[int, ...], str], object],
        workers: dict[int, RemoteWorker],
        epoch: int,
        record: Callable[[RemoteWorker, tuple[int, ...]], object] = lambda _, __: None,
        withheld: Callable[[], set[str]] = set,
        holder_of: Callable[[int], int] = lambda _: 0,
        bind: Callable[[tuple[int, ...]], RemoteWorker | None] = lambda _: None,
    ) -> None:
        """`start` puts a new worker for GPUs and a base (directory or hub id) into `workers`, or tells one that is there to load that.
        `record` hears of a worker whose GPUs were others before. `withheld`: jobs that no worker may be given yet.
        `holder_of`, `bind`: as `Lenders` has them.
        """
        self._base_models, self._start, self._record, self._withheld = base_models, start, record, withheld
        self.workers, self._owners, self._holders = workers, GpuOwners(workers), JobHolders(workers)
        self._lenders = Lenders(workers, self._owners, holder_of, lambda gpus, base: start(gpus, base_models[base]), bind)
        self.groups: dict[str, JobGroup] = {}
        self.jobs: dict[str, LocalJob] = {}
        self.open: set[str] = set()
        self.events: list[Event] = []  # for the back end to take
        self._last_attempt = epoch * NUMBERS_PER_EPOCH
        self.group_of_job: dict[str, str] = {}  # as the groups are wanted
        self._serials, self._numbers = itertools.count(), dict[str, int]()  # of the groups, in the order in which they came
        self._unready: set[str] = set()  # groups whose last change is not through
        self._waiting: set[str] = set()  # groups that could get no worker yet, or lack a job that another worker has still
        self._refused: dict[str, tuple[ParallelPlan, set[str]]] = {}  # under which plan and with which jobs a job could not join
        self._speeds: dict[str, BaseSpeed] = {}  # of bases, as last reported
        self.crash_attribution = CrashAttribution()
        self._arrived: set[str] = set()  # jobs that were submitted, also those that have ended
        self._untold: dict[str, JobFinished | JobFailed] = {}  # ends of jobs that an earlier controller had and that have not arrived here

    def want(self, group: JobGroup) -> None:
        """Run the group as given. Where it keeps a GPU and loses or gets others, its worker does so while its jobs train; else, and where
        that one cannot, another worker continues from the jobs' checkpoints.
        """
        group = replace(group, gpus=tuple(sorted(group.gpus)))
        before = self.groups.get(group.group_id)
        self._owners.want(group, before)
        self.groups[group.group_id] = group
        self._numbers.setdefault(group.group_id, next(self._serials))
        if before is not None:
            self._leave(before)
        self.group_of_job |= dict.fromkeys(group.job_ids, group.group_id)
        self._unready.add(group.group_id)

    def adopt(self, group: JobGroup) -> None:
        """The group runs already."""
        self.want(group)
        self._unready.discard(group.group_id)
        for name, held in self.workers[group.gpus[0]].jobs.items():
            self.crash_attribution.see_steps(name, held.steps)

    def expect(self, base_model: str, spec: JobSpec, gpus: tuple[int, ...]) -> None:
        """The job may come over that base. If no worker has it and one of `gpus` has neither worker nor group, start a worker there that
        loads it; a worker that is loading it compiles meanwhile what the job will launch.
        """
        path = self._base_models.get(base_model)
        if path is None:
            return
        if not (there := self._workers_of(path)):
            taken = {gpu for held in (*self.workers.values(), *self.groups.values()) for gpu in held.gpus}
            if free := [gpu for gpu in gpus if gpu not in taken]:
                self._start((free[0],), path)
            there = self._workers_of(path)
        for worker in there:
            if not worker.loaded and not any(_compiles_for(known, spec) for known in worker.expected):
                worker.expected = (*worker.expected, spec)
                self._owners.mark(worker.gpus)

    def _workers_of(self, path: str) -> list[RemoteWorker]:
        return [worker for worker in self.workers.values() if worker.has_base(path)]

    def arrive(self, job_id: str, *, again: bool) -> None:
        """The job is submitted; with `again`, an earlier controller had it: then its end may have been reported already."""
        self.open.add(job_id)
        self._arrived.add(job_id)
        self._mark_job(job_id)
        end = self._untold.pop(job_id, None)
        if again and end is not None:
            self._end(end)

    def withdraw(self, job_id: str) -> None:
        """The job is cancelled or rejected: no worker is to have it."""
        self.open.discard(job_id)
        self._mark_job(job_id)

    def forget(self, group_id: str) -> None:
        """End the group."""
        group = self.groups.pop(group_id, None)
        if group is not None:
            self._owners.forget(group)
            self._leave(group)
            del self._numbers[group_id]
        self._unready.discard(group_id)

    def _leave(self, group: JobGroup) -> None:
        """The group is no more, or another."""
        for job_id in group.job_ids:
            if self.group_of_job.get(job_id) == group.group_id:
                del self.group_of_job[job_id]

    def _mark_job(self, job_id: str) -> None:
        """Something has changed of the job that concerns the group that wants it."""
        group = self.groups.get(self.group_of_job.get(job_id, ""))
        if group is not None:
            self._owners.mark(group.gpus)

    def forget_job(self, job_id: str) -> None:
        """The job has ended and will not be mentioned again."""
        assert job_id not in self.open, job_id
        self._arrived.discard(job_id)
        self.crash_attribution.forget(job_id)
        self.jobs.pop(job_id, None)
        self._refused.pop(job_id, None)
        self._holders.is_held(job_id)  # forgets who held it

    def hear(self, worker: RemoteWorker, report: Report) -> None:
        """Take in a worker's report; one about an attempt that the worker does not hold is void."""
        self._owners.mark(worker.gpus)
        if isinstance(report, JobReport):
            self._mark_job(report.job_id)
        match report:
            case Delayed(job_id, why, attempt) if worker.holds(job_id, attempt):
                self.events.append(JobDelayed(job_id, why))
            case Joined(job_id, steps) | Stepped(job_id, steps) if worker.holds(job_id, report.attempt):
                self.crash_attribution.see_steps(job_id, steps)  # its checkpoint may be ahead of what was reported before its worker died
                group = self._group_of(worker)
                if isinstance(report, Stepped) and group is not None and job_id in group.job_ids:
                    self.events.append(StepsDone(job_id, group.group_id, steps, report.step_seconds))
            case Finished(job_id) | Failed(job_id) if worker.holds(job_id, report.attempt):
                del worker.jobs[job_id]
                self._end(JobFailed(job_id, report.reason) if isinstance(report, Failed) else JobFinished(job_id))
            case Left(job_id, _, _, attempt) if worker.holds(job_id, attempt):
                del worker.jobs[job_id]
            case Measured(device, speed):
                self._see_speed(worker, device, speed)
            case Memory(limit_bytes) if len(limit_bytes) == len(worker.all_gpus):
                self.events.append(MemoryFound(worker.all_gpus, limit_bytes))
            case GpusChanged() if self.workers.get(worker.gpu) is worker:
                self._see_gpus(worker, report)
            case Settled() if worker.is_settled and self.workers.get(worker.gpu) is worker:
                self._set_gpus(worker, worker.wanted_gpus)
            case Refused(job_id, _, attempt) if worker.holds(job_id, attempt):
                del worker.jobs[job_id]
                group = self._group_of(worker)
                if group is not None:
                    self._refused[job_id] = group.plan, set(worker.jobs)
            case _:
                pass

    def lose(self, worker: RemoteWorker, reason: str) -> None:
        """Its process has ended. Unless it was stopped, its group is lost with it, for `reason`."""
        del self.workers[worker.gpu]
        self._owners.remove(worker)
        if worker.stopping:
            return
        if not worker.doomed:
            self._crash_attribution(worker, reason)
        group = self._group_of(worker)
        if group is not None:
            self.forget(group.group_id)
            self.events.append(GroupLost(group.group_id, reason))

    def step(self) -> None:
        """Send each worker its desired state, as far as others have let go of it; the rest follows when the awaited reports are here.

        Looks at what has changed since the last call alone, and at groups that wait for what is not reported.
        """
        owners = self._owners
        self._holders.enter(*owners.notice())
        waiting, self._waiting = self._waiting, set()
        for group_id in waiting & self.groups.keys():
            owners.mark(self.groups[group_id].gpus)
        changed = owners.take_changed()
        changed.update(*[worker.gpus for worker in owners.workers_on(changed)])  # a group on another GPU of it may wait for it
        names = sorted(owners.groups_on(changed), key=self._numbers.__getitem__)
        for name in names:
            self._provide(self.groups[name])
        changed.update(owners.take_changed(), *[self.groups[name].gpus for name in names])
        for worker in sorted(owners.workers_on(changed), key=lambda worker: worker.gpu):
            group = self._own_group(worker)
            if worker.obeys and group is not None:
                self._let_in(group, worker)
            elif worker.obeys and worker.load is not None and not worker.lends_to:
                worker.give_back()

    def _provide(self, group: JobGroup) -> None:
        """See that the group has a worker on its GPUs, and no other worker is there but those of other hosts that lend it theirs."""
        worker, home = self._worker_of(group), self._lenders.home(group.gpus)
        others = [other for other in self._owners.workers_on(home) if other is not worker]
        for other in others:
            if self._lenders.is_held(other):  # it begins anew when it is let go
                self._waiting.add(group.group_id)
            elif self._own_group(other) is None:  # else it gives them back, or its own group takes them from it
                other.stop(begins_anew=True)
        if not others and (worker is None or worker.load is None):
            self._start(home, self._base_models[group.base_model])
            started = self.workers.get(home[0])
            if started is None:
                self._waiting.add(group.group_id)
            else:
                self._owners.enter(started)
        elif not others and worker is not None and not set(home) <= set(worker.gpus):
            self._set_gpus(worker, {*worker.all_gpus, *home})
        if worker is not None and home != group.gpus:
            lent = self._lenders.borrow(group, worker, lambda other: self._own_group(other) is not None, self.events)
            if lent is None:
                self._waiting.add(group.group_id)
            elif not set(lent) <= set(worker.lent):
                self._set_gpus(worker, {*worker.all_gpus, *lent})

    def _worker_of(self, group: JobGroup) -> RemoteWorker | None:
        """That which has run the group and keeps a GPU of it; else that which has just its GPUs, and keeps none of the group it has run."""
        worker = self._earlier_worker(group)
        if worker is None and len(there := self._able_workers(group)) == 1 and there[0].gpus == self._lenders.home(group.gpus):
            own = self.groups.get(there[0].group_id)
            worker = there[0] if own is None or self._earlier_worker(own) is not there[0] else None
        return worker if worker is not None and worker.can_hold(group.gpus) else None

    def _earlier_worker(self, group: JobGroup) -> RemoteWorker | None:
        there = [worker for worker in self._able_workers(group) if worker.group_id == group.group_id]
        there = [worker for worker in there if worker.can_hold(group.gpus) and (worker.all_gpus == group.gpus or not worker.fixed)]
        if len(there) > 1:  # it was moving to other GPUs when its workers were found
            there = [worker for worker in self.workers.values() if worker in there]
        return there[0] if there else None

    def _able_workers(self, group: JobGroup) -> list[RemoteWorker]:
        """On its GPUs, of the host on which it is led, with its base or none."""
        base, there = self._base_models[group.base_model], self._owners.workers_on(self._lenders.home(group.gpus))
        return [worker for worker in there if worker.obeys and not worker.lends_to and (worker.load is None or worker.has_base(base))]

    def _own_group(self, worker: RemoteWorker) -> JobGroup | None:
        """The group of which this is the worker."""
        groups = [self.groups[name] for name in self._owners.groups_on(worker.gpus)]
        return next((group for group in groups if self._worker_of(group) is worker), None)

    def _group_of(self, worker: RemoteWorker) -> JobGroup | None:
        """The group that the worker runs."""
        group = self.groups.get(worker.group_id)
        return group if group is not None and worker.overlaps(group.gpus) else None

    def _set_gpus(self, worker: RemoteWorker, gpus: Iterable[int]) -> None:
        self._holders.enter(*self._owners.notice())  # who has come since is last in the pool: this one would stand behind
        before = worker.gpus
        del self.workers[worker.gpu]
        worker.gpus, worker.lent = self._lenders.split(worker, gpus)
        self.workers[worker.gpu] = worker
        self._owners.enter(worker)
        if worker.gpus != before:
            self._record(worker, before)

    def _see_gpus(self, worker: RemoteWorker, report: GpusChanged) -> None:
        """The worker has these. What it was told to have since is about to be its own, whatever it has refused before."""
        group, refused = self._group_of(worker), report.refused and (report.fixed or worker.answers(report))
        self._set_gpus(worker, report.gpus if refused else (*report.gpus, *worker.wanted_gpus))
        worker.fixed = report.fixed
        if group is None or not refused:
            return
        if self._lenders.home(group.gpus) != group.gpus and report.fixed:  # its base is shared by copies, on one host
            self.want(group.on(report.gpus))
        elif report.fixed:
            return  # another worker has the GPUs that this one cannot have
        self.events.append(GroupKept(group.group_id, report.gpus, report.refused))

    def _end(self, event: JobFinished | JobFailed) -> None:
        if event.job_id in self.open:
            self.withdraw(event.job_id)
            self.crash_attribution.forget(event.job_id)
            self.events.append(event)
        elif event.job_id not in self._arrived:  # its worker will not report it again
            self._untold[event.job_id] = event

    def _see_speed(self, worker: RemoteWorker, device: str, speed: BaseSpeed) -> None:
        """Record the speed of the worker's base under all names of that base. Workers of one kind report the same."""
        for name, path in list(self._base_models.items()):  # a server's grow at any time
            if worker.has_base(path) and self._speeds.get(name) != speed:
                self._speeds[name] = speed
                self.events.append(BaseMeasured(name, device, speed))

    def _crash_attribution(self, worker: RemoteWorker, reason: str) -> None:
        """Count the death against the worker's jobs. Before its base is loaded it computes no job: being alone would show nothing."""
        for job_id in worker.suspects:  # which may have to be alone from now on
            self._mark_job(job_id)
        for job_id in self.crash_attribution.die(worker.suspects, together=worker.loaded and len(worker.jobs) > 1):
            count = f"{self.crash_attribution.of[job_id].deaths} workers in a row"
            self._end(JobFailed(job_id, f"{count} ended with this job and without progress of it; {reason}"))

    def _residents(self, group: JobGroup) -> tuple[str, ...]:
        """The jobs that the group's worker must have now: all that have not ended, or the first suspect among them alone."""
        living = tuple([job_id for job_id in group.job_ids if job_id in self.open])
        suspect = next((job_id for job_id in living if self.crash_attribution.is_alone(job_id)), None)
        return living if suspect is None else (suspect,)

    def _let_in(self, group: JobGroup, worker: RemoteWorker) -> None:
        """Let the residents that no other worker has join; the group is ready when all are in."""
        residents = self._residents(group)
        joins: list[Join] = []
        for job_id in residents:
            if job_id not in worker.jobs:
                if self._holders.is_held(job_id) or job_id in self._withheld():
                    self._waiting.add(group.group_id)
                    continue
                if self._is_refused(job_id, group, worker):
                    continue
                self._last_attempt += 1
                worker.jobs[job_id] = Held(self._last_attempt)
                self._holders.enter(worker)
            job = self.jobs[job_id]
            joins.append(Join(job.spec, job.train_set, job.eval_set, worker.jobs[job_id].attempt, job.tokens_per_step))
        there = tuple(gpu for gpu in group.gpus if gpu in worker.all_gpus)  # others have the rest, and let go of it first
        self._lenders.tell(group, worker, tuple(joins))
        alone, listen = any(map(self.crash_attribution.is_alone, residents)), self._lenders.listen_at(group, worker)
        worker.want(group.on(there), tuple(joins), alone, listen)
        if group.group_id in self._unready and worker.loaded and worker.is_settled and worker.all_gpus == group.gpus:
            living = [job_id for job_id in group.job_ids if job_id in self.open and job_id not in self._refused]
            if all(job_id in worker.residents for job_id in living):
                self._unready.discard(group.group_id)
                self.events.append(GroupReady(group.group_id))

    def _is_refused(self, job_id: str, group: JobGroup, worker: RemoteWorker) -> bool:
        """True while the plan is the same and all jobs with which it could not join are still there."""
        plan, jobs = self._refused.get(job_id, (None, set[str]()))
        if plan == group.plan and jobs and jobs <= worker.jobs.keys():
            return True
        self._refused.pop(job_id, None)
        return False


def _compiles_for(known: JobSpec, spec: JobSpec) -> bool:
    """Whether all kernels that `spec` will launch are among those of `known`: ten thousand expected jobs need two of them."""
    return known.largest_rank >= spec.largest_rank and (known.lora_dropout > 0 or spec.lora_dropout == 0)
