"""A worker with several GPUs: one process towards its controller, which computes nothing, and a rank for each GPU, which it leads.

It takes the commands of a worker's trainer and makes its reports (`trainer.py`), so who holds the line knows no difference. A job has its
lead rank; where it has parts on others, what they tell each other goes through here. With a rank, the worker is lost.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tlora.batching.replicas import LEAST_REPLICA_TOKENS, ReplicaPlacement
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import (
    Command,
    Enter,
    Faulty,
    FromRank,
    Hello,
    Leave,
    Meet,
    PartReady,
    SetPlan,
    Spread,
    Stop,
)
from tlora.engine.ranks.rank_group import RANK_OF_WORKER, Lost, RankGroup
from tlora.errors import RankError
from tlora.job import JobSpec
from tlora.link.flight import forget_flight
from tlora.link.log import note
from tlora.worker_protocol import Alive, JobEnd, Join, Joined, Left, Load, Loaded, Measured, Memory, Report, Stepped

_LOOK_SECONDS = 1.0


@dataclass
class _Job:
    """`opened` are the ranks that are ready for it, `numel` the elements of its adapter as its lead rank has them. With `parting` it
    shall go on in one place.
    """

    join: Join
    span: ReplicaPlacement
    opened: set[int] = field(default_factory=set[int])
    numel: int = 0
    parting: bool = False
    leaving: bool = False


class WorkerGroup:
    """Stands in for `Trainer`."""

    def __init__(
        self,
        load: Load,
        gpus: tuple[int, ...],
        inbox: queue.SimpleQueue[Command],
        send: Callable[[Report], None],
        heartbeat: Heartbeat,
        expected: tuple[JobSpec, ...],
    ) -> None:
        """`heartbeat` gets what the rank is at that has been at it for the longest time. `expected` as of `Trainer`."""
        self._load, self._gpus, self._send, self._heartbeat, self._expected = load, gpus, send, heartbeat, expected
        self._rank_group = RankGroup(len(gpus), program=RANK_OF_WORKER)
        self._told: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._loaded: set[int] = set()
        self._beats: dict[int, tuple[Alive, float]] = {}  # the newest of each rank, and when it came
        self._meetings = 0
        self._stopping = False
        threading.Thread(target=self._pass_on, args=(inbox,), name="commands", daemon=True).start()

    def go_on(self) -> None:
        """Run until stopped; then all jobs have been checkpointed and all ranks have ended. Raises RankError when a rank is lost."""
        rank_group = self._rank_group
        try:
            rank_group.start()
            while rank_group.living:
                for rank, report in rank_group.listen(_LOOK_SECONDS):
                    self._hear(rank, report)
                while not self._told.empty() and len(rank_group.hellos) == len(self._gpus):  # what is said to one that is not there is lost
                    self._obey(self._told.get())
        except BaseException:
            rank_group.kill()
            raise
        finally:
            rank_group.close()

    def _pass_on(self, inbox: queue.SimpleQueue[Command]) -> None:
        while True:
            self._told.put(inbox.get())
            self._rank_group.wake()

    # -- commands ------------------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        match command:
            case Join():
                self._take(command)
            case Leave(name):
                if (job := self._jobs.get(name)) is not None and not job.leaving:
                    job.leaving = True
                    if not job.parting:  # else the command was sent already
                        self._rank_group.send(job.span.lead_rank, command)
            case SetPlan(budget):
                self._rank_group.send_all(replace(command, token_budget=max(1, budget // len(self._gpus))))
            case Stop():
                self._stopping = True
                self._rank_group.stop()

    def _take(self, join: Join) -> None:
        name = join.job.name
        assert name not in self._jobs, f"{name} is here already"
        span = choose_span(join, len(self._gpus), [job.span for job in self._jobs.values()], self._load.deterministic)
        self._jobs[name] = _Job(join, span)
        self._rank_group.send(span.lead_rank, Spread(join, span) if span.peers else join)

    # -- what ranks say ------------------------------------------------------------------------------------------------

    def _hear(self, rank: int, report: FromRank | Lost) -> None:
        match report:
            case Lost(reason):
                self._lose(rank, reason)
            case Hello():
                self._rank_group.going.add(rank)  # from now on it is stopped by a command, not killed
                device = f"{self._load.device}:{rank}" if self._load.device == "cuda" else self._load.device
                load = replace(self._load, calibrate=self._load.calibrate and rank == 0)  # all GPUs of a group are alike
                self._rank_group.send(rank, Enter(load, device, self._rank_group.store, os.getpid(), self._expected))
            case Loaded():
                self._loaded.add(rank)
                if len(self._loaded) == len(self._gpus):
                    self._send(Memory(tuple([self._rank_group.memory[each].limit_bytes[0] for each in range(len(self._gpus))])))
                    self._send(report)
            case Alive():
                self._beats[rank] = report, time.monotonic()
                self._show()
            case Joined() | Stepped() | Measured():
                self._send(report)
            case _ if isinstance(report, JobEnd):
                self._end(report)
            case _:
                self._hear_of_parts(rank, report)

    def _hear_of_parts(self, rank: int, report: FromRank | Lost) -> None:
        """Of jobs that several ranks compute."""
        match report:
            case PartReady(name) if name in self._jobs and not self._stopping:
                self._open(rank, self._jobs[name], report)
            case Faulty(name, reason) if (job := self._jobs.get(name)) is not None and job.span.peers:
                if not (job.parting or self._stopping):
                    note(f"{name}: rank {rank} cannot compute its part ({reason}); the job goes on in one place")
                    job.parting = True
                    if not job.leaving:
                        self._rank_group.send(job.span.lead_rank, Leave(name))
            case _:
                pass

    def _open(self, rank: int, job: _Job, opened: PartReady) -> None:
        """A rank is ready for the job. When its lead rank is, the others follow; when all are, they meet."""
        job.opened.add(rank)
        if rank == job.span.lead_rank:
            job.numel = opened.numel
            join = replace(job.join, train_set=opened.train_set, eval_set=opened.eval_set)
            for peer in job.span.peers:
                self._rank_group.send(peer, Spread(join, job.span))
        if job.opened == set(job.span.ranks) and not (job.leaving or job.parting):
            self._rank_group.spans[job.join.job.name] = job.span
            self._meetings += 1
            self._rank_group.send_all(Meet(job.join.job.name, job.span, job.numel, self._meetings))

    def _end(self, report: JobEnd) -> None:
        """The job has ended at its lead rank, or gone; one that parts goes on there, all of it."""
        name = report.job_id
        job = self._jobs[name]
        self._rank_group.spans.pop(name, None)
        for peer in job.span.peers:
            self._rank_group.send(peer, Leave(name))
        if isinstance(report, Left) and job.parting and not (job.leaving or self._stopping):
            self._jobs[name] = _Job(job.join, ReplicaPlacement(job.span.replicas, (job.span.lead_rank,)))
            self._rank_group.send(job.span.lead_rank, job.join)
            return
        del self._jobs[name]
        self._send(report)

    def _show(self) -> None:
        """What the rank is at that has been at it for the longest time, but for those that wait for commands or for others."""
        busy = {rank: since for rank, (beat, since) in self._beats.items() if beat.phase != "waiting"}
        rank = min(busy, key=busy.__getitem__) if busy else min(self._beats)
        beat, heartbeat = self._beats[rank][0], self._heartbeat
        heartbeat.phase, heartbeat.count = beat.phase, beat.count * len(self._gpus) + rank
        heartbeat.in_flight = tuple(dict.fromkeys(name for each, _ in self._beats.values() for name in each.in_flight))

    def _lose(self, rank: int, reason: str) -> None:
        """The others end too, and are not what ended it. Raises RankError."""
        self._rank_group.kill()
        for other in range(len(self._gpus)):
            if other != rank:
                forget_flight(Path(self._load.output_dir), os.getpid(), other)
        raise RankError(f"rank {rank} (GPU {self._gpus[rank]}) is lost: {reason}")


def choose_span(join: Join, count: int, others: Iterable[ReplicaPlacement], deterministic: bool) -> ReplicaPlacement:
    """The job's replicas on ranks that have the least to do; of one rank, all of them there.

    With `deterministic` there are as many replicas as the job orders, so that its bytes do not depend on the group. Otherwise a job fills
    its group, as its scheduler counts on it: it has as many replicas as there are ranks, if its steps have samples and tokens for these
    (`LEAST_REPLICA_TOKENS`), and no fewer than it orders.
    """
    spec = join.job
    spans = list(others)
    loads = [sum(span.part(rank) for span in spans if rank in span.ranks) for rank in range(count)]
    led = [sum(span.lead_rank == rank for span in spans) for rank in range(count)]
    replicas = spec.gpus
    if not deterministic:
        worth = count if join.tokens_per_step is None else int(join.tokens_per_step // LEAST_REPLICA_TOKENS)
        replicas = max(spec.gpus, min(count, spec.batch_size, worth))
    if spec.needs_whole_batch:
        replicas = 1
    ranks = sorted(range(count), key=lambda rank: (loads[rank], led[rank]))[: min(replicas, count)]
    ranks.sort(key=lambda rank: led[rank])  # the lead rank evaluates
    return ReplicaPlacement(replicas, tuple(ranks))
