"""Jobs that span several ranks: gradients and weights lie in memory that the ranks read of each other, and short notes say when.

Each rank has a mailbox (`sharing/peer_memory.py`) with a region for each such job, or one for each job: at the job's home its newest
weights lie there, elsewhere the gradients of the replicas there. Nobody writes what somebody may still read: gradients follow only on the
weights of their step, and the next weights only on all gradients. A rank that has no samples of a global batch sends nothing, and may
fetch its weights half written: it computes nothing with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora.batching.replicas import Span
from tlora.engine.ranks.messages import Faulty, Note, Published, Sent
from tlora.engine.ranks.teller import Teller
from tlora.group.exchange import RunningSums, Whole
from tlora.group.job_run import Passed
from tlora.kernels.device import ToHost
from tlora.sharing.peer_memory import PeerMemory, open_peer_memory
from tlora.sharing.peers import Peers

_ALIGNMENT = 256  # bytes at which regions begin


@dataclass(frozen=True)
class Region:
    """`slots` flat tensors [P] of a job, from byte `start` of every mailbox on."""

    start: int
    slot_bytes: int
    slots: int

    def slot(self, number: int) -> int:
        """Where it begins."""
        assert 0 <= number < self.slots, (number, self)
        return self.start + number * self.slot_bytes


def lay_out_regions(spans: Mapping[str, Span], sizes: Mapping[str, int], element_bytes: int) -> tuple[dict[str, Region], int]:
    """A region for each job of `spans`, of so many elements, and the bytes of a mailbox. The same on all ranks."""
    regions: dict[str, Region] = {}
    start = 0
    for job, span in sorted(spans.items()):
        slots = max([1, *(len(span.at(rank)) for rank in span.peers)])
        regions[job] = Region(start, sizes[job] * element_bytes, slots)
        start += -(-slots * sizes[job] * element_bytes // _ALIGNMENT) * _ALIGNMENT
    return regions, start


class Mailbox:
    """The regions of all jobs that span, in the memory of each rank; values are flat tensors [P] of `dtype`. A device writes and reads in
    the order of its current stream.
    """

    def __init__(self, memory: PeerMemory, regions: Mapping[str, Region], dtype: torch.dtype) -> None:
        self._memory, self._regions, self._dtype = memory, regions, dtype

    def write(self, job_id: str, slot: int, values_P: Tensor) -> None:
        """Into this rank's own."""
        region = self._regions[job_id]
        start = region.slot(slot)
        self._memory.own[start : start + region.slot_bytes].view(self._dtype).copy_(values_P)

    def read(self, job_id: str, rank: int, slot: int) -> Tensor:
        """From that of `rank`, a copy."""
        region = self._regions[job_id]
        read = torch.empty(region.slot_bytes, dtype=torch.uint8, device=self._memory.own.device)
        self._memory.read(rank, region.slot(slot), read)
        return read.view(self._dtype)


def open_mailbox(spans: Mapping[str, Span], sizes: Mapping[str, int], dtype: torch.dtype, peers: Peers, device: torch.device) -> Mailbox:
    """All ranks call it together. `sizes`: elements of each job's adapter. Raises RankError where ranks cannot read each other's memory."""
    regions, num_bytes = lay_out_regions(spans, sizes, dtype.itemsize)
    return Mailbox(open_peer_memory(num_bytes, peers, device), regions, dtype)


class SpanExchange:
    """The exchange of rank `rank`. What it has to say goes to `tell`, from any thread; what others say comes in by `hear`, in the group's
    own.
    """

    def __init__(
        self,
        rank: int,
        spans: Mapping[str, Span],
        tell: Callable[[Note], None],
        mailbox: Mailbox | None = None,
    ) -> None:
        """`mailbox` is needed where `spans` has a job."""
        self._rank, self._spans, self._tell = rank, dict(spans), tell
        self._teller = Teller(tell)
        self._boxes: dict[str, Mailbox] = {}
        if spans:
            assert mailbox is not None, "jobs span, and there is no mailbox"
            self._boxes = dict.fromkeys(spans, mailbox)
        self._sums = RunningSums()
        self._sent: dict[str, dict[int, Sent]] = {}  # by job, of each rank the newest
        self._added: dict[str, int] = {}  # at home, how many of the other ranks' replicas are in its sum
        self._published: dict[str, int] = {}
        self._news: dict[str, None] = {}

    # -- from and to other ranks ---------------------------------------------------------------------------------------

    def hear(self, sender: int, note: Published | Sent) -> None:
        """Of a job that no longer spans it is too late."""
        if note.job not in self._spans:
            return
        if isinstance(note, Sent):
            self._sent.setdefault(note.job, {})[sender] = note
        else:
            self._published[note.job] = note.step
        self._news[note.job] = None

    def flush(self) -> None:
        """Return when the device has done, and others are told, all that it has been given to do."""
        self._teller.flush(wait=True)

    def spread(self, job_id: str, span: Span, mailbox: Mailbox) -> None:
        """One more job spans, through a mailbox of its own."""
        self._spans[job_id], self._boxes[job_id] = span, mailbox

    def dissolve(self, job_id: str) -> None:
        """The job spans no longer: all of its replicas are computed in one place from now on."""
        self._spans.pop(job_id, None)
        self._boxes.pop(job_id, None)
        self.forget(job_id)
        for heard in (self._sent, self._published, self._news):
            heard.pop(job_id, None)

    # -- the group's side: `Exchange` ----------------------------------------------------------------------------------

    def replicas_here(self, job_id: str, replicas: int) -> Sequence[int]:
        span = self._spans.get(job_id)
        return range(replicas) if span is None else span.at(self._rank)

    def give(self, job_id: str, replica: int, gradient_P: Tensor) -> None:
        span = self._spans.get(job_id)
        if span is None or span.home == self._rank:
            self._sums.give(job_id, replica, gradient_P)
        else:
            self._boxes[job_id].write(job_id, span.at(self._rank).index(replica), gradient_P)

    def send(self, job_id: str, step: int, passed: Passed) -> None:
        width, tokens = 2 + len(passed.metrics), passed.tokens

        def make(values: list[float]) -> Sent:
            parts = tuple(tuple(values[i : i + width]) for i in range(0, len(values), width))
            return Sent(job_id, step, parts, tokens)

        self._teller.tell_when(ToHost(torch.stack(passed.values)), make)

    def take(self, job_id: str, step: int, replicas: Sequence[int]) -> Whole | None:
        span = self._spans.get(job_id)
        if span is None:
            return self._sums.take(job_id, step, replicas)
        sent, away = self._sent.get(job_id, {}), [replica for replica in replicas if span.rank_of(replica) != self._rank]
        for replica in away[self._added.get(job_id, 0) :]:
            rank = span.rank_of(replica)
            if rank not in sent or sent[rank].step != step:
                return None
            self._sums.give(job_id, replica, self._boxes[job_id].read(job_id, rank, span.at(rank).index(replica)))
            self._added[job_id] = self._added.get(job_id, 0) + 1
        self._added.pop(job_id, None)
        heard = [sent.pop(rank) for rank in dict.fromkeys(span.rank_of(replica) for replica in away)]
        gradient_P = self._sums.take(job_id, step, replicas).gradient_P
        return Whole(gradient_P, [part for sent in heard for part in sent.parts], sum(sent.tokens for sent in heard))

    def publish(self, job_id: str, step: int, params_P: Tensor) -> None:
        if job_id not in self._spans:
            return
        self._boxes[job_id].write(job_id, 0, params_P)
        self._teller.tell_when(ToHost(params_P.new_empty(0)), lambda _: Published(job_id, step))

    def fetch(self, job_id: str) -> tuple[int, Tensor] | None:
        step, span = self._published.pop(job_id, None), self._spans.get(job_id)
        return None if step is None or span is None else (step, self._boxes[job_id].read(job_id, span.home, 0))

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def news(self) -> list[str]:
        news, self._news = list(self._news), {}
        return news

    def forget(self, job_id: str) -> None:
        self._sums.forget(job_id)
        self._added.pop(job_id, None)

    def leave(self, job_id: str, failed: str = "") -> None:
        self.forget(job_id)
        span = self._spans.get(job_id)
        if failed and span is not None and span.home != self._rank:
            self._tell(Faulty(job_id, failed))
