"""From what is wanted of each GPU to what its worker is told: one step at a time, and what a worker's answers mean.

Starts no process, reads no clock and waits for nothing: `local.py` does. Who trains where is the scheduler's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tlora.job import JobSpec
from tlora.protocol import Event, GroupLost, GroupReady, JobFailed, JobFinished, JobGroup, StepsDone
from tlora.worker_protocol import Command, Failed, Finished, Join, Joined, Leave, Left, Load, Loaded, Report, Share, Stepped

Membership = Literal["joining", "resident", "leaving"]
MOST_DEATHS = 3  # of workers in a row, without progress of a job: then it fails, if it was alone in the last
_MORE_STEPS_ALONE = 4  # to its nth power: the steps that a job must get further alone after it was among others in n workers that died


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job and the directories of its tokenized data; without them its worker prepares the data again."""

    spec: JobSpec
    train_set: str | None = None
    eval_set: str | None = None


class Worker(Protocol):
    """What the reconciler needs of a worker. `jobs` were told to join and have neither left nor ended; `told` is the last Share.

    `doomed`: it lets jobs go by itself, as something else has told it to end.
    """

    gpu: int
    load: Load
    loaded: bool
    stopping: bool
    doomed: bool
    jobs: dict[str, Membership]
    told: Command | None

    @property
    def obeys(self) -> bool: ...
    def send(self, command: Command) -> None: ...
    def stop(self) -> None: ...
    def reap(self, timeout_seconds: float) -> None: ...
    def how_it_ended(self) -> str: ...


class Reconciler:
    """`groups` are as wanted, `workers` as they are, by GPU; `open` are the jobs that were submitted and have not ended."""

    def __init__(self, base_models: Mapping[str, str], start: Callable[[int, str], Worker]) -> None:
        """`start` gives a new worker for a GPU and a base (directory or hub id)."""
        self._base_models, self._start = base_models, start
        self.workers: dict[int, Worker] = {}
        self.groups: dict[str, JobGroup] = {}
        self.jobs: dict[str, LocalJob] = {}
        self.open: set[str] = set()
        self.events: list[Event] = []  # to be taken by the back end
        self._unready: set[str] = set()  # groups whose last change is not through
        self._furthest: Counter[str] = Counter()  # steps of each job, as far as any worker has reported
        self._deaths: Counter[str] = Counter()  # of workers in a row, without progress of the job (`_see_steps`)
        self._suspicions: Counter[str] = Counter()  # deaths of workers that it shared with others
        self._alone_until: dict[str, int] = {}  # steps to which a suspect is alone in its worker

    def want(self, group: JobGroup) -> None:
        """The group shall run as given, on its one GPU."""
        (gpu,) = group.gpus
        other = self._group_on(gpu)
        assert other is None or other.group_id == group.group_id, f"GPU {gpu} is {other}'s and shall be {group.group_id}'s"
        self.groups[group.group_id] = group
        self._unready.add(group.group_id)

    def forget(self, group_id: str) -> None:
        """The group shall end."""
        self.groups.pop(group_id, None)
        self._unready.discard(group_id)

    def hear(self, worker: Worker, report: Report) -> None:
        """Take in what a worker reports."""
        match report:
            case Loaded():
                worker.loaded = True
            case Joined(job_id):
                if worker.jobs.get(job_id) == "joining":
                    worker.jobs[job_id] = "resident"
            case Stepped(job_id, steps, step_seconds):
                self._see_steps(job_id, steps)
                group = self._group_on(worker.gpu)
                if group is not None and job_id in group.job_ids:
                    self.events.append(StepsDone(job_id, group.group_id, steps, step_seconds))
            case Finished(job_id):
                worker.jobs.pop(job_id, None)
                self._end(JobFinished(job_id))
            case Failed(job_id, reason):
                worker.jobs.pop(job_id, None)
                self._end(JobFailed(job_id, reason))
            case Left(job_id):
                worker.doomed |= worker.jobs.pop(job_id, None) != "leaving"

    def lose(self, worker: Worker, reason: str) -> None:
        """Its process has ended. If it was not told to stop, its group is lost with it, for `reason`."""
        del self.workers[worker.gpu]
        if worker.stopping:
            return
        self._blame(worker, reason)
        group = self._group_on(worker.gpu)
        if group is not None:
            self.forget(group.group_id)
            self.events.append(GroupLost(group.group_id, reason))

    def step(self) -> None:
        """One step from what each GPU has towards what it shall have. What must wait for a worker's answer is done when that has come."""
        for worker in self.workers.values():
            group = self._group_on(worker.gpu)
            if group is not None and worker.load.base_model != self._base_models[group.base_model]:
                worker.stop()
            for job_id, state in worker.jobs.items():
                if state != "leaving" and worker.obeys and (group is None or job_id not in self._residents(group)):
                    worker.jobs[job_id] = "leaving"
                    worker.send(Leave(job_id))
        held = {job_id for worker in self.workers.values() for job_id in worker.jobs}
        for group in list(self.groups.values()):
            (gpu,) = group.gpus
            if gpu not in self.workers:
                self.workers[gpu] = self._start(gpu, self._base_models[group.base_model])
            if self.workers[gpu].obeys:
                self._let_in(group, self.workers[gpu], held)

    def _group_on(self, gpu: int) -> JobGroup | None:
        return next((group for group in self.groups.values() if group.gpus == (gpu,)), None)

    def _end(self, event: JobFinished | JobFailed) -> None:
        if event.job_id in self.open:
            self.open.discard(event.job_id)
            self.events.append(event)

    def _blame(self, worker: Worker, reason: str) -> None:
        """Any job in a worker that died may be what killed it: each is suspected, and has its next worker to itself. One whose workers
        die even so fails. A worker that dies before its base is loaded has not begun with its jobs: being alone would tell nothing.
        """
        together = worker.loaded and len(worker.jobs) > 1
        for job_id in worker.jobs:
            self._deaths[job_id] += 1
            if together:
                self._suspicions[job_id] += 1
                self._alone_until[job_id] = self._furthest[job_id] + _MORE_STEPS_ALONE ** self._suspicions[job_id]
            elif self._deaths[job_id] >= MOST_DEATHS:
                self._end(
                    JobFailed(job_id, f"{self._deaths[job_id]} workers in a row ended with this job and without progress of it; {reason}")
                )

    def _see_steps(self, job_id: str, steps: int) -> None:
        """A job that gets further than it ever was, or a suspect that gets as far as it must alone, is not what killed its workers."""
        if steps >= self._alone_until.get(job_id, self._furthest[job_id] + 1):
            self._alone_until.pop(job_id, None)
            self._deaths.pop(job_id, None)
        self._furthest[job_id] = max(steps, self._furthest[job_id])

    def _residents(self, group: JobGroup) -> tuple[str, ...]:
        """The jobs that shall be in the group's worker now: all that have not ended, or the first of them that is suspected, alone."""
        living = tuple([job_id for job_id in group.job_ids if job_id in self.open])
        suspect = next((job_id for job_id in living if job_id in self._alone_until), None)
        return living if suspect is None else (suspect,)

    def _let_in(self, group: JobGroup, worker: Worker, held: set[str]) -> None:
        """Residents that no worker has join; when all of the group are in, it is ready."""
        share = Share(group.plan.token_budget, group.plan.recomputed_layers, dict(zip(group.job_ids, group.weights, strict=True)))
        if worker.told != share:
            worker.told = share
            worker.send(share)
        residents = self._residents(group)
        others = any(job_id not in residents for job_id in worker.jobs)  # on their way out
        for job_id in residents:
            if job_id not in held and not (others and job_id in self._alone_until):
                worker.jobs[job_id] = "joining"
                job = self.jobs[job_id]
                worker.send(Join(job.spec, job.train_set, job.eval_set))
        living = [job_id for job_id in group.job_ids if job_id in self.open]
        settled = worker.loaded and "leaving" not in worker.jobs.values()
        if group.group_id in self._unready and settled and all(worker.jobs.get(job_id) == "resident" for job_id in living):
            self._unready.discard(group.group_id)
            self.events.append(GroupReady(group.group_id))
