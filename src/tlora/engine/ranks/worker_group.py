"""A worker: one process towards its controller, which computes nothing, and a rank for each of its GPUs, which it leads.

It takes a worker's commands and passes on to ranks what concerns a job (`trainer.py`). A job has its lead rank; where it has parts on
others, what they tell each other goes through here. GPUs may come and go while jobs train (`gpu_change.py`), also those that workers of
other hosts lend (`lent_ranks.py`): these compute parts, and lead no job. With a rank that has jobs, the worker is lost.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import (
    Bye,
    Command,
    Enter,
    Faulty,
    FromRank,
    Hello,
    Leave,
    Listen,
    Meet,
    PartReady,
    SetGpus,
    SetPlan,
    Spread,
    Stop,
)
from tlora.engine.ranks.gpu_change import GpuChange, visible_gpus, worker_device
from tlora.engine.ranks.job_spans import choose_span, moves
from tlora.engine.ranks.lent_ranks import LostLenderError
from tlora.engine.ranks.rank_group import RANK_OF_WORKER, Lost, RankGroup
from tlora.engine.ranks.stage_gang import StageGang
from tlora.errors import ConfigError, RankError
from tlora.job import JobSpec
from tlora.link.flight import forget_flight
from tlora.link.log import note
from tlora.wording.numbers import place_names
from tlora.worker_protocol import (
    Alive,
    Delayed,
    GpusChanged,
    JobEnd,
    Join,
    Joined,
    Left,
    Listening,
    Load,
    Loaded,
    Measured,
    Memory,
    Refused,
    Report,
    Stepped,
)

_LOOK_SECONDS = 1.0


@dataclass
class _Job:
    """`number` counts the placements of jobs; `opened` are the ranks that are ready for it, `numel` the elements of its adapter as its lead
    rank has them. With `then` it has been asked to leave its ranks, and goes on there; where it has no room there, it goes `back`. One that
    is `pinned` stays where it is.
    """

    join: Join
    span: ReplicaPlacement
    number: int
    opened: set[int] = field(default_factory=set[int])
    numel: int = 0
    then: ReplicaPlacement | None = None
    back: ReplicaPlacement | None = None
    pinned: bool = False
    leaving: bool = False


class WorkerGroup:
    """Leads the ranks of one worker."""

    def __init__(
        self,
        load: Load,
        gpus: tuple[int, ...],
        inbox: queue.SimpleQueue[Command],
        send: Callable[[Report], None],
        heartbeat: Heartbeat,
        expected: Callable[[], tuple[JobSpec, ...]],
    ) -> None:
        """`heartbeat` gets what the rank is at that has been at it for the longest time. `expected` is asked for what `Trainer` expects."""
        self._load, self._send, self._heartbeat, self._expected = load, send, heartbeat, expected
        self._first_gpus, (self._one, self._several) = gpus, place_names(load.device)
        self._visible = visible_gpus(load.device, gpus)
        self._rank_group = RankGroup(len(gpus), program=RANK_OF_WORKER)
        self._change, self._order, self._gang = GpuChange(gpus), 0, StageGang(load.stages, len(gpus))
        self._lent: frozenset[int] = frozenset()  # GPUs of other hosts, of those that it shall have
        self._told: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._plan: SetPlan | None = None
        self._whole = True  # the base, on each GPU
        self._slow_dtypes: frozenset[str] | None = None  # of the ranks that began first
        self._beats: dict[int, tuple[Alive, float]] = {}  # the newest of each rank, and when it came
        self._meetings = self._placements = 0
        self._stopping = False
        threading.Thread(target=self._pass_on, args=(inbox,), name="commands", daemon=True).start()

    def go_on(self) -> None:
        """Run until stopped; then all jobs have been checkpointed and all ranks have ended. Raises RankError when a rank is lost."""
        rank_group = self._rank_group
        try:
            rank_group.start()
            while rank_group.lives_here:
                for rank, report in rank_group.listen(_LOOK_SECONDS):
                    self._hear(rank, report)
                for rank in self._change.late(time.monotonic()):
                    self._refuse_change(None, f"the rank on {self._one} {self._change.gpu_of[rank]} has not loaded the base in time")
                # What is said to a rank that is not there is lost; a gang that waits holds what is for ranks.
                while not self._told.empty() and (self._gang.waits or all(rank in rank_group.hellos for rank in self._change.taking)):
                    self._obey(self._told.get())
        except BaseException:
            rank_group.kill()
            raise
        finally:
            rank_group.close()

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the ranks that are there."""
        return [hello.pid for rank, hello in self._rank_group.hellos.items() if rank in self._rank_group.living]

    def _pass_on(self, inbox: queue.SimpleQueue[Command]) -> None:
        while True:
            self._told.put(inbox.get())
            self._rank_group.wake()

    # -- commands ------------------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        match command:
            case _ if self._gang.holds(command):
                pass
            case Join(job):
                assert job.name not in self._jobs, f"{job.name} is here already"
                spans = [each.then or each.span for each in self._jobs.values()]
                taking = self._gang.leading(self._change.taking)
                self._place(command, choose_span(command, taking, spans, self._load.deterministic, self._lent_ranks(taking)))
            case Leave(name):
                if (job := self._jobs.get(name)) is not None and not job.leaving:
                    job.leaving = True
                    if job.then is None:  # else the command was sent already
                        self._rank_group.send(job.span.lead_rank, command)
            case SetPlan():
                self._plan = command
                self._send_plan()
            case Listen(address):
                self._let_lend(address)
            case SetGpus(gpus, order, lent):
                self._order, self._lent = order, frozenset(lent)
                self._change.want(gpus)
                self._complete_gang()
                self._go_on_changing()
            case Stop():
                self._stopping = True
                for rank in self._change.stop():
                    self._rank_group.drop(rank)
                if self._gang.is_whole:  # the other stages have parts of what it saves
                    self._rank_group.end(self._gang.last)
                else:
                    self._rank_group.stop()

    def _let_lend(self, address: str) -> None:
        try:
            self._send(self._rank_group.let_lend(address))
        except OSError as error:
            problem = f"it cannot listen at {address} for workers of other hosts: {error.strerror or error}"
            self._send(Listening("", "", "", f"{problem}. Start it with --address and one of its host that they reach"))

    def _lent_ranks(self, ranks: Iterable[int]) -> set[int]:
        return {rank for rank in ranks if self._rank_group.is_lent(rank)}

    def _send_plan(self) -> None:
        if self._plan is not None:
            budget = max(1, self._plan.token_budget // len(self._change.target))
            for rank in self._gang.leading(self._change.taking):
                self._rank_group.send(rank, replace(self._plan, token_budget=budget))

    def _place(self, join: Join, span: ReplicaPlacement, back: ReplicaPlacement | None = None, *, pinned: bool = False) -> None:
        self._placements += 1
        self._jobs[join.job.name] = _Job(join, span, self._placements, back=back, pinned=pinned)
        self._rank_group.send(span.lead_rank, Spread(join, span, self._placements) if span.peers else join)

    def _move(self, job: _Job, span: ReplicaPlacement) -> None:
        """The job leaves its ranks at its last step, and goes on from there."""
        job.then = span
        self._rank_group.send(job.span.lead_rank, Leave(job.join.job.name))

    # -- GPUs that come and go -----------------------------------------------------------------------------------------

    def _complete_gang(self) -> None:
        """Have ranks started on the GPUs of other hosts that have stages of the base. Raises LostLenderError where those change."""
        missing = self._change.missing if self._gang.waits else []
        for gpu in missing:
            self._change.begin_together(self._rank_group.add_lent(gpu), gpu)
        if missing and self._rank_group.count > len(self._gang.ranks):
            raise LostLenderError("the GPUs that hold the stages of its base have changed before all were there")

    def _go_on_changing(self) -> None:
        """One step towards the GPUs that are wanted, as far as it can be done now."""
        change = self._change
        if change.wanted is None or self._stopping or not change.all_loaded:
            return
        if not self._whole and change.wanted != change.gpus:
            change.give_up()
            held = f"the base is held in parts, by {len(change.gpus)} GPUs or the host's memory"
            self._send(GpusChanged(change.gpus, held, fixed=True, order=self._order))
            return
        try:
            for gpu in change.missing:
                if gpu not in self._lent:
                    worker_device(self._load.device, self._first_gpus, gpu)
                rank = self._rank_group.add_lent(gpu) if gpu in self._lent else self._rank_group.add()
                change.begin(rank, gpu, time.monotonic())
        except (ConfigError, OSError) as error:
            self._refuse_change(None, str(error))
            return
        for rank in change.not_wanted_after_all():
            self._rank_group.drop(rank)
        if change.awaits_ranks:
            return
        if not change.placed:
            change.placed = True
            self._send_plan()
            self._move_jobs()
        busy = {rank for job in self._jobs.values() for span in (job.span, job.then) if span is not None for rank in span.ranks}
        for rank in change.end_vacated(busy):
            self._rank_group.end(rank)
        if change.is_done:
            change.give_up()
            self._rank_group.release_lenders(change.gpus)
            self._send(GpusChanged(change.gpus, order=self._order))
            self._send_memory()

    def _move_jobs(self) -> None:
        jobs = {name: job for name, job in self._jobs.items() if not job.leaving} if not self._gang.is_cut else {}
        spans = {name: job.then or job.span for name, job in jobs.items()}
        pinned = [name for name, job in jobs.items() if job.pinned]
        joins = {name: job.join for name, job in jobs.items()}
        taking = self._change.taking
        for name, span in moves(joins, spans, taking, self._load.deterministic, pinned, self._lent_ranks(taking)).items():
            if jobs[name].then is None:
                self._move(jobs[name], span)
            else:
                jobs[name].then = span

    def _refuse_change(self, rank: int | None, reason: str) -> None:
        """The GPUs stay as they are, since `rank` could not join. No job notices."""
        for joining in self._change.give_up():
            if joining != rank:
                self._rank_group.drop(joining)
        self._rank_group.release_lenders(self._change.gpus)
        note(f"the {self._several} stay {', '.join(map(str, self._change.gpus))}: {reason}")
        self._send_plan()
        self._send(GpusChanged(self._change.gpus, reason, order=self._order))

    def _send_memory(self) -> None:
        by_gpu = sorted((gpu, self._rank_group.memory[rank].limit_bytes[0]) for rank, gpu in self._change.gpu_of.items())
        self._send(Memory(tuple(limit for _, limit in by_gpu)))

    # -- what ranks say ------------------------------------------------------------------------------------------------

    def _hear(self, rank: int, report: FromRank | Lost) -> None:
        change = self._change
        match report:
            case Lost(reason) if rank in change.joining:
                self._refuse_change(rank, f"the rank on {self._one} {change.gpu_of[rank]} has ended while it joined: {reason}")
            case Lost(lent=True) if self._stopping and not self._gang.is_cut:
                pass  # it has nothing to save
            case Bye() if self._stopping and self._gang.is_cut:
                self._rank_group.stop()  # the last stage has saved all jobs
            case Lost(reason, broken, lent) if rank not in change.ending:
                self._lose(rank, reason, lent=lent and (broken is None or report.by_another))
            case Hello():
                begin, expected = self._gang.complete(rank, self._rank_group.hellos), self._expected()
                if self._gang.is_cut:  # while hosts are waited for, nothing is loaded
                    self._heartbeat.begin("loading" if begin else "waiting")
                if begin and self._slow_dtypes is None:  # also for ranks that other hosts lend later: all compute in one dtype
                    self._slow_dtypes = frozenset(name for each in begin for name in self._rank_group.hellos[each].slow_dtypes)
                for each in begin:
                    self._enter(each, expected)
                for command in self._gang.release():
                    self._obey(command)
            case Loaded():
                self._whole &= report.whole
                first = not change.all_loaded
                change.loaded(rank)
                if first and change.all_loaded:
                    self._send_memory()
                    self._send(report)
                self._go_on_changing()
            case Alive() if rank not in change.joining:
                self._beats[rank] = report, time.monotonic()
                self._show()
            case Lost() | Bye() if not self._stopping:
                change.ended(rank)
                self._beats.pop(rank, None)
                self._go_on_changing()
            case Joined(name):
                if name in self._jobs:
                    self._jobs[name].back = None
                self._send(report)
            case Stepped() | Measured() | Delayed():
                self._send(report)
                if self._whole and not (self._stopping or self._gang.is_cut) and change.may_grow(self._visible):
                    self._rank_group.prepare()
            case _ if isinstance(report, JobEnd):
                self._end(report)
            case _:
                self._hear_of_parts(rank, report)

    def _enter(self, rank: int, expected: tuple[JobSpec, ...]) -> None:
        self._rank_group.going.add(rank)  # from now on it is stopped by a command, not killed
        gang, gpu = self._gang, self._change.gpu_of[rank]
        load, together = self._load, 1 if gang.is_cut else len(self._first_gpus)
        if rank in self._change.joining:  # with a base of its own
            expected, together = tuple(job.join.job for job in self._jobs.values()), 1
            load = replace(load, layout="whole", calibrate=False)
        load = replace(load, calibrate=load.calibrate and rank == 0 and not gang.is_cut)  # all GPUs of a group are alike
        device = "" if self._rank_group.is_lent(rank) else worker_device(load.device, self._first_gpus, gpu)  # its lender knows
        stages, slow = (gang.ranks, gang.is_apart), tuple(sorted(self._slow_dtypes or ()))
        self._rank_group.send(rank, Enter(load, device, self._rank_group.store, together, os.getpid(), expected, *stages, slow))

    def _hear_of_parts(self, rank: int, report: FromRank | Lost) -> None:
        """Of jobs that several ranks compute."""
        match report:
            case PartReady(name) if (job := self._jobs.get(name)) is not None and report.number == job.number and not self._stopping:
                self._open(rank, job, report)
            case Faulty(name, reason) if (job := self._jobs.get(name)) is not None and rank in job.span.peers:
                if not (job.then or self._stopping):
                    note(f"{name}: rank {rank} cannot compute its part ({reason}); the job goes on in one place")
                    job.pinned, alone = True, ReplicaPlacement(job.span.replicas, (job.span.lead_rank,))
                    if not job.leaving:
                        self._move(job, alone)
            case _:
                pass

    def _open(self, rank: int, job: _Job, opened: PartReady) -> None:
        """A rank is ready for the job. When its lead rank is, the others follow; when all are, they meet."""
        job.opened.add(rank)
        if rank == job.span.lead_rank:
            job.numel = opened.numel
            join = replace(job.join, train_set=opened.train_set, eval_set=opened.eval_set)
            for peer in job.span.peers:
                self._rank_group.send(peer, Spread(join, job.span, job.number))
        if job.opened == set(job.span.ranks) and not (job.leaving or job.then):
            self._rank_group.spans[job.join.job.name] = job.span
            self._meetings += 1
            apart = bool(self._lent_ranks(job.span.ranks))
            for each in job.span.ranks:
                self._rank_group.send(each, Meet(job.join.job.name, job.span, job.numel, self._meetings, apart))

    def _end(self, report: JobEnd) -> None:
        """The job has ended at its lead rank, or has left it; one that moves goes on elsewhere, and nobody above is told."""
        name = report.job_id
        job = self._jobs.pop(name)
        self._rank_group.spans.pop(name, None)
        for peer in job.span.peers:
            self._rank_group.send(peer, Leave(name))
        goes_on = isinstance(report, Left | Refused) and not (job.leaving or self._stopping)
        if goes_on and job.then is not None:
            self._place(job.join, job.then, job.span, pinned=job.pinned)
        elif goes_on and job.back is not None and set(job.back.ranks) <= set(self._change.taking):
            self._place(job.join, job.back, pinned=True)  # there was room before
        else:
            self._send(report)
        self._go_on_changing()

    def _show(self) -> None:
        """What the rank is at that has been at it for the longest time, but for those that wait for commands or for others."""
        busy = {rank: since for rank, (beat, since) in self._beats.items() if beat.phase != "waiting"}
        rank = min(busy, key=busy.__getitem__) if busy else min(self._beats)
        beat, heartbeat = self._beats[rank][0], self._heartbeat
        heartbeat.phase, heartbeat.count = beat.phase, beat.count * self._rank_group.count + rank
        heartbeat.in_flight = tuple(dict.fromkeys(name for each, _ in self._beats.values() for name in each.in_flight))

    def _lose(self, rank: int, reason: str, *, lent: bool) -> None:
        """A rank that has jobs. The others end too, and are not what ended it. Raises RankError; where a host is lost that has `lent` its
        GPU, LostLenderError.
        """
        self._rank_group.kill()
        for other in self._change.gpu_of:
            if other != rank:
                forget_flight(Path(self._load.output_dir), os.getpid(), other)
        raise (LostLenderError if lent else RankError)(f"rank {rank} ({self._one} {self._change.gpu_of[rank]}) is lost: {reason}")
