"""The jobs of one rank that other ranks of its worker compute too: those that this rank leads, and those that have a part here.

A job begins when all of its ranks have opened it and met: each then has memory that the others read. Who trains what is decided
elsewhere; what a rank does with a job of its own alone is the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import FileStore, PrefixStore, Store

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine import driver
from tlora.engine.messages import Faulty, Meet, Note, PartReady, Spread
from tlora.engine.ranks.spanning import SpanExchange, open_mailbox, open_relayed_mailbox
from tlora.planning.planned_job import PlannedJob
from tlora.sharing.peers import BASE_LOADED, Peers, Sharing
from tlora.sharing.relayed_memory import Relay

_MEETING_SECONDS = 7200.0  # beyond all limits of the controller (`Limits`): a late rank may be compiling, for an hour at most


@dataclass(frozen=True)
class RankContext:
    """Rank `number` of a worker, which loads the base together with the first `together` of its ranks. `store`: a file by which ranks find
    each other. `relay`: what is sent to and comes from ranks of other hosts. `stages`: the ranks that have the base in stages, in the order
    of these, the one that has jobs last; some are `apart`, on other hosts. None where it is not cut so. `slow_dtypes`: in which the ranks
    of its group do not compute on CPUs; None: it goes by its own.
    """

    number: int = 0
    together: int = 1
    store: str = ""
    flight: str = ""  # the name of its flight record, by default its process'
    relay: Relay | None = None
    stages: tuple[int, ...] = ()
    apart: bool = False
    slow_dtypes: tuple[str, ...] | None = None

    @property
    def stage(self) -> int:
        """Which of the stages this rank has."""
        return self.stages.index(self.number)


@dataclass(frozen=True)
class Planned:
    """The data of a job that has a part here is open, or cannot be had."""

    follow: Spread
    planned: PlannedJob


class SpanningJobs:
    """`exchange` is that of the rank's group."""

    def __init__(
        self, rank_context: RankContext, tell: Callable[[Note | Faulty | PartReady], None], clock: Callable[[], float] | None = None
    ) -> None:
        """`clock` as of `SpanExchange`."""
        self._rank_context, self._tell = rank_context, tell
        self.exchange = SpanExchange(rank_context.number, {}, tell, clock=clock)
        self._spans: dict[str, ReplicaPlacement] = {}  # of the jobs that this rank leads
        self._numbers: dict[str, int] = {}  # of their placements
        self._waiting: dict[str, driver.ReadyJob] = {}  # those of them whose other ranks have not come
        self._peer_jobs: dict[str, Spread] = {}
        self._planned: dict[str, PlannedJob] = {}  # of the jobs that follow, those that wait for the others
        self._store: Store | None = None
        self._relayed: dict[str, int] = {}  # job -> meeting, of those whose ranks are apart

    @property
    def shared_load(self) -> Sharing | None:
        """With the ranks that load the base together; None where it is loaded alone."""
        return self._sharing("base", range(together), BASE_LOADED) if (together := self._rank_context.together) > 1 else None

    def _sharing(self, about: str, ranks: Sequence[int], occasion: str) -> Sharing:
        """With those ranks, of which this is one; once for each thing that it is about."""
        self._store = self._store or FileStore(self._rank_context.store)
        place = ranks.index(self._rank_context.number)
        return Sharing(PrefixStore(about, self._store), place, len(ranks), timeout_seconds=_MEETING_SECONDS, occasion=occasion)

    # -- jobs that this rank leads -----------------------------------------------------------------------------------------

    def spread(self, spread: Spread) -> None:
        """The job is on its way in, and shall span ranks."""
        name = spread.join.job.name
        self._spans[name], self._numbers[name] = spread.span, spread.number

    def span_of(self, job_id: str) -> ReplicaPlacement | None:
        return self._spans.get(job_id)

    def waits(self, opened: driver.ReadyJob) -> bool:
        """Whether a job that could begin here has to wait for other ranks, which get a message. A job that had ended before has not."""
        run = opened.run
        name = run.spec.name
        if name not in self._spans or run.progress.finished:
            return False
        self._waiting[name] = opened
        eval_set = str(run.evaluation.directory) if run.evaluation is not None else None
        self._tell(PartReady(name, opened.state.layout.numel, str(run.train.directory), eval_set, self._numbers[name]))
        return True

    def give_up(self, job_id: str) -> driver.ReadyJob | None:
        """A job that waits for other ranks shall not begin."""
        return self._waiting.pop(job_id, None)

    def is_here(self, job_id: str) -> bool:
        return job_id in self._waiting or job_id in self._peer_jobs

    @property
    def expects_jobs(self) -> bool:
        """Whether a job is on its way in, or has a part here."""
        return bool(self._waiting or self._peer_jobs)

    def end(self, job_id: str) -> None:
        """The job has ended here or left: no more messages about it are sent."""
        if self._spans.pop(job_id, None) is not None:
            del self._numbers[job_id]
            self._dissolve(job_id)

    def _dissolve(self, job_id: str) -> None:
        """Nothing that is said of it may come in a later life of it."""
        self.exchange.flush()
        self.exchange.dissolve(job_id)
        if (meeting := self._relayed.pop(job_id, None)) is not None and self._rank_context.relay is not None:
            self._rank_context.relay.close(meeting)

    # -- jobs that have a part here ------------------------------------------------------------------------------------

    def is_home(self, span: ReplicaPlacement) -> bool:
        return span.lead_rank == self._rank_context.number

    def follow(self, follow: Spread) -> None:
        """The job is on its way in."""
        self._peer_jobs[follow.join.job.name] = follow

    def planned(self, follow: Spread, planned: PlannedJob) -> None:
        """Its data is open."""
        name = follow.join.job.name
        if self._peer_jobs.get(name) is not follow:  # it has left meanwhile
            return
        if planned.problems or planned.layout is None or planned.data is None:
            self._tell(Faulty(name, "; ".join(planned.problems)))
            return
        planned.span = follow.span
        self._planned[name] = planned
        self._tell(PartReady(name, planned.layout.numel, str(planned.data.train.directory), number=follow.number))

    def unfollow(self, job_id: str, group: driver.Driver) -> bool:
        """Let go of a part that is here. False where there is none."""
        if self._peer_jobs.pop(job_id, None) is None:
            return False
        self._planned.pop(job_id, None)
        if job_id in group.group.runs:
            group.group.leave(job_id)
        self._dissolve(job_id)
        return True

    # -- together ------------------------------------------------------------------------------------------------------

    def meet(self, meet: Meet, group: driver.Driver) -> driver.ReadyJob | None:
        """With the job's ranks: those of one host wait for each other, as long as the longest micro-batch takes. A job that follows begins.
        Returns one that has its lead rank here, and can begin. Raises RankError.
        """
        name, model, ranks = meet.job_id, group.group.model, meet.span.ranks
        place, dtype, relay = torch.device(model.device), model.bank.sum_dtype, self._rank_context.relay
        if meet.apart:
            assert relay is not None, f"{name} spans hosts, and this rank has no line to them"
            mailbox = open_relayed_mailbox(name, meet.span, meet.numel, dtype, relay, meet.number, place)
            self._relayed[name] = meet.number
        else:
            peers = Peers(self._sharing(f"meeting {meet.number}", ranks, f"the ranks that job {name} spans were connected"))
            mailbox = open_mailbox({name: meet.span}, {name: meet.numel}, dtype, peers, place, ranks)
        opened, planned = self._waiting.pop(name, None), self._planned.pop(name, None)
        if opened is not None or planned is not None:
            self.exchange.spread(name, meet.span, mailbox)
        if planned is not None:
            group.follow(planned)
        return opened
