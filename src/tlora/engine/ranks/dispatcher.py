"""Assigns a run's jobs on several GPUs: which rank has which job, and which command each rank gets after an event.

Pure: reports come in as calls, commands go out in `commands`. A job that waits goes to whichever rank has room; a rank that has nothing
left takes a job from the fullest one if that shortens the end; the jobs of a lost rank go to the others. A job that spans several ranks
stays where it is; with one of these lost it spans no longer, and goes on in one place. A job goes only to ranks that may have it; where no
such rank is left, to any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tlora.batching.placement import MOVE_SECONDS, Placement, best_move
from tlora.batching.replicas import ReplicaPlacement


@dataclass
class _Rank:
    waiting: list[str] = field(default_factory=list[str])
    running: dict[str, float] = field(default_factory=dict[str, float])  # seconds that each still needs
    leaving: set[str] = field(default_factory=set[str])  # asked to release, not answered yet
    following: dict[str, float] = field(default_factory=dict[str, float])  # the same of jobs that another rank leads
    has_room: bool = False
    is_full: bool = False  # its waiting jobs found no room when it last looked

    @property
    def jobs(self) -> list[str]:
        return [*self.waiting, *self.running]

    @property
    def keeps_one(self) -> bool:
        """It has something to do without the last of its jobs that wait."""
        return len(self.jobs) - len(self.leaving) + len(self.following) > 1

    @property
    def dry(self) -> bool:
        """Whether it has nothing to compute now; jobs may still wait."""
        return not self.running and not self.following


class Dispatcher:
    """`commands` are (rank, what, job): `Join` and `Leave`, to be sent in their order and removed by the caller."""

    def __init__(
        self,
        seconds: Mapping[str, float],
        placement: Placement,
        move_seconds: float = MOVE_SECONDS,
        ranks: Collection[int] | None = None,
        speeds: Sequence[float] = (),
        may_have: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        """`seconds`: predicted for each job alone on one GPU. `ranks`: those that take jobs, by default all. `speeds`: of GPUs that differ,
        against that which `seconds` are of. `may_have`: of a job that shall not go to all ranks, those that may have it.
        """
        self._seconds, self._move_seconds, self._may_have = dict(seconds), move_seconds, dict(may_have or {})
        self._speeds = defaultdict[int, float](lambda: 1.0, enumerate(speeds))
        taking = range(len(placement.jobs)) if ranks is None else ranks
        self._ranks = {rank: _Rank(list(placement.jobs[rank]), has_room=not placement.jobs[rank]) for rank in taking}
        for rank, held in self._ranks.items():
            held.following = {job: seconds[job] * placement.spans[job].part(rank) / self._speeds[rank] for job in placement.parts(rank)}
        self.spans: dict[str, ReplicaPlacement] = dict(placement.spans)
        self._goes_to: dict[str, int] = {}  # of jobs that leave: where they go on
        self.commands: list[tuple[int, Literal["join", "leave"], str]] = []
        self.ended: set[str] = set()
        self.moves: list[tuple[str, int, int]] = []  # job, from, to: of those that had begun

    @property
    def open(self) -> set[str]:
        """Jobs that have not ended."""
        return self._seconds.keys() - self.ended

    @property
    def ranks(self) -> list[int]:
        """Those that are not lost."""
        return list(self._ranks)

    def lead_rank(self, job: str) -> int | None:
        """The rank that has the job now."""
        return next((rank for rank, held in self._ranks.items() if job in held.waiting or job in held.running), None)

    def began(self, rank: int, job: str) -> None:
        held = self._ranks[rank]
        if job in held.waiting:
            held.waiting.remove(job)
            held.running[job] = self._here(rank, job)
            held.has_room, held.is_full = not held.waiting, False  # it tells whether the next one has room
            self.balance()

    def stands(self, rank: int, job: str, left_seconds: float) -> None:
        """So much of a running job is left."""
        if job not in self._ranks[rank].running:
            return
        self._ranks[rank].running[job] = left_seconds
        if (span := self.spans.get(job)) is not None:
            for peer in span.peers:
                relative = span.part(peer) / self._speeds[peer] * self._speeds[rank] / span.part(rank)
                self._ranks[peer].following[job] = left_seconds * relative

    def _here(self, rank: int, job: str) -> float:
        """Predicted seconds of what the rank, which is the job's lead rank, computes of it."""
        span = self.spans.get(job)
        return self._seconds[job] * (span.part(rank) if span is not None else 1.0) / self._speeds[rank]

    def _may(self, rank: int, job: str) -> bool:
        able = self._may_have.get(job)
        return able is None or rank in able or not any(other in able for other in self._ranks)

    def _load(self, rank: int) -> float:
        held = self._ranks[rank]
        return sum(held.running.values()) + sum(held.following.values()) + sum(self._here(rank, job) for job in held.waiting)

    def _can_move(self, rank: int, target: int) -> list[str]:
        """Jobs that wait on the rank and could as well wait on the other one: on a slower one, if they end sooner there than all is done
        here.
        """
        held, speed, room = self._ranks[rank], self._speeds[target], self._load(rank) - self._load(target)
        free = [job for job in held.waiting if job not in held.leaving and job not in self.spans and self._may(target, job)]
        return [job for job in free if speed >= self._speeds[rank] or self._seconds[job] / speed < room]

    def refused(self, rank: int) -> None:
        """The first of the rank's waiting jobs has no room there now."""
        held = self._ranks[rank]
        held.has_room, held.is_full = False, True
        self.balance()

    def balance(self) -> None:
        """Give ranks that have room what waits elsewhere, and ranks that have nothing what would end sooner there."""
        for rank, held in self._ranks.items():
            if not held.has_room or held.waiting or rank in self._goes_to.values():
                continue
            if (found := self._waiting_elsewhere(rank) or self._running_elsewhere(rank)) is not None:
                self._move(*found, rank)

    def _waiting_elsewhere(self, rank: int) -> tuple[int, str] | None:
        """The last job that waits on the rank with the most left to do: one that is full or, for a rank that has nothing at all, any that
        keeps another job.
        """
        dry = self._ranks[rank].dry
        could = [r for r, held in self._ranks.items() if r != rank and (held.is_full or (dry and held.keeps_one))]
        others = [r for r in could if self._can_move(r, rank)]
        if not others:
            return None
        full = max(others, key=self._load)
        return full, self._can_move(full, rank)[-1]

    def _running_elsewhere(self, rank: int) -> tuple[int, str] | None:
        if not self._ranks[rank].dry:
            return None
        order = list(self._ranks)
        moves = [{} if held.leaving else held.running for held in self._ranks.values()]  # one at a time
        free = [{job: seconds for job, seconds in each.items() if job not in self.spans and self._may(rank, job)} for each in moves]
        stays = [self._load(r) - sum(here.values()) for r, here in zip(order, free, strict=True)]
        found = best_move(free, order.index(rank), self._move_seconds, stays, [self._speeds[r] for r in order])
        return (order[found[0]], found[1]) if found is not None else None

    def _move(self, source: int, job: str, target: int) -> None:
        self._ranks[source].leaving.add(job)
        self._goes_to[job] = target
        self.commands.append((source, "leave", job))

    def left(self, rank: int, job: str) -> None:
        """The rank has let the job go."""
        held = self._ranks[rank]
        if job in held.running:
            self.moves.append((job, rank, self._goes_to.get(job, rank)))
            held.has_room = not held.waiting
        self._forget(rank, job)
        target = self._goes_to.pop(job, None)
        if target is not None and target in self._ranks:
            self._give(target, job)
        else:
            self._share_out([job])

    def end(self, rank: int, job: str) -> None:
        """The job has come to its end."""
        held = self._ranks[rank]
        self._forget(rank, job)
        held.has_room = not held.waiting
        self._goes_to.pop(job, None)
        self.ended.add(job)
        self._part(job)
        self.balance()

    def lose(self, rank: int) -> list[str]:
        """The rank is gone; its jobs go to the others, each to the one that is through first. Returns the names of those, and of the jobs
        that it computed a part of. With no rank left they stay `open`.
        """
        lost = self._ranks.pop(rank)
        jobs, parts = [job for job in lost.jobs if job not in self.ended], list(lost.following)
        self._goes_to = {job: target for job, target in self._goes_to.items() if job not in jobs}
        for job in [*jobs, *parts]:
            self.dissolve(job)
        self._share_out(jobs)
        return [*jobs, *parts]

    def dissolve(self, job: str) -> None:
        """A job that spans several ranks goes on from its last step, all of it in one place."""
        lead, spans = self.lead_rank(job), job in self.spans
        self._part(job)
        if spans and lead is not None and job not in self._ranks[lead].leaving:
            self._ranks[lead].leaving.add(job)
            self.commands.append((lead, "leave", job))

    def _part(self, job: str) -> None:
        """The job spans no longer."""
        span = self.spans.pop(job, None)
        for peer in span.peers if span is not None else ():
            if peer in self._ranks:
                self._ranks[peer].following.pop(job, None)
                self.commands.append((peer, "leave", job))

    def _share_out(self, jobs: list[str]) -> None:
        if not self._ranks:
            return
        loads = {r: self._load(r) for r in self._ranks}
        for job in sorted(jobs, key=self._seconds.__getitem__, reverse=True):
            ends = {rank: load + self._seconds[job] / self._speeds[rank] for rank, load in loads.items() if self._may(rank, job)}
            target = min(ends, key=ends.__getitem__)
            loads[target] = ends[target]
            self._give(target, job)

    def _give(self, rank: int, job: str) -> None:
        self._ranks[rank].waiting.append(job)
        self._ranks[rank].has_room = False
        self.commands.append((rank, "join", job))

    def _forget(self, rank: int, job: str) -> None:
        held = self._ranks[rank]
        held.running.pop(job, None)
        held.leaving.discard(job)
        if job in held.waiting:
            held.waiting.remove(job)
