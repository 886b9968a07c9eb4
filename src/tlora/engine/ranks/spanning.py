"""Jobs that span several ranks: gradients lie in memory that the ranks read of each other, and short notes say when.

Each rank has a mailbox (`sharing/peer_memory.py`) with a region for each such job, or one for each job, and puts its replicas' gradients
there. All ranks of a job read all of them, add them in one order and step. So no rank waits for another's step. No rank
overwrites what another may still read: even and odd steps have separate regions for gradients, and those of a step are written only when
all ranks have reported the end of the step before, and so have read what was there before that. Before the first step the job's lead rank
has its state in its region, and keeps its gradients back until all others have read the state.
Ranks that are apart, on several hosts, send what they have written before the note that tells of it (`sharing/relayed_memory.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from tlora.adapters.state import AdapterState
from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.messages import Faulty, Fetched, Note, Published, Sent
from tlora.engine.ranks.measured_weights import MeasuredWeights
from tlora.group.exchange import RunningSums, SummedGradient
from tlora.group.job_run import BatchLosses
from tlora.kernels.device import ToHost, mark_on
from tlora.sharing.peer_memory import PeerMemory, open_peer_memory
from tlora.sharing.peers import Peers
from tlora.sharing.regions import Region, lay_out_regions
from tlora.sharing.relayed_memory import Relay, RelayedMemory


class EventSender:
    """Where the device is behind, a thread waits for it and tells. The caller is launching its next micro-batch then, and other ranks
    would have to wait until it is through with that.
    """

    def __init__(self, tell: Callable[[Note], None]) -> None:
        """`tell` is called here by one thread at a time, the caller's or another."""
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "event-sender")
        self._untold: deque[Future[None]] = deque()

    def tell_when(self, done: ToHost, make: Callable[[list[float]], Note]) -> None:
        """The note that `make` makes of the values of `done`; at once where they are there. Raises what an earlier note failed with."""
        self.flush()
        if done.done and not self._untold:
            self._tell_now(done, make)
        else:
            self._untold.append(self._thread.submit(self._tell_now, done, make))

    def flush(self, *, wait: bool = False) -> None:
        """Send the notes that are due, all of them with `wait`. Raises the error of a send that failed."""
        while self._untold and (wait or self._untold[0].done()):
            self._untold.popleft().result()

    def _tell_now(self, done: ToHost, make: Callable[[list[float]], Note]) -> None:
        self._tell(make(done.read()))


class Mailbox:
    """The regions of all jobs that span, in the memory of each of `ranks`; values are flat tensors [P] of `dtype`. A device writes and
    reads in the order of its current stream. With a `RelayedMemory` the others get what was written by `hand_over`.
    """

    def __init__(self, memory: PeerMemory, regions: Mapping[str, Region], dtype: torch.dtype, ranks: Sequence[int]) -> None:
        self._memory, self._regions, self._dtype = memory, regions, dtype
        self._peer = {rank: peer for peer, rank in enumerate(ranks)}
        self._relayed = memory if isinstance(memory, RelayedMemory) else None
        self._unsent: list[tuple[int, int]] = []  # first byte and bytes of what was written since

    def write(self, job_id: str, slot: int, values_P: Tensor) -> None:
        """Into this rank's own."""
        region = self._regions[job_id]
        start = region.slot(slot)
        self._memory.own[start : start + region.slot_bytes].view(self._dtype).copy_(values_P, non_blocking=True)
        if self._relayed is not None:
            self._unsent.append((start, region.slot_bytes))

    def hand_over(self) -> Callable[[], None]:
        """To be called once the device has done all that was written so far: ranks of other hosts get it then."""
        unsent, self._unsent, relayed = self._unsent, [], self._relayed

        def send() -> None:
            for start, size in unsent:
                assert relayed is not None, "memory that all read is not sent"
                relayed.pass_on(start, size)

        return send

    def read(self, job_id: str, rank: int, slot: int, into_P: Tensor) -> None:
        """From that of `rank`, which may be this one."""
        self._memory.read(self._peer[rank], self._regions[job_id].slot(slot), into_P.view(torch.uint8))

    @property
    def device(self) -> torch.device:
        return self._memory.own.device if self._relayed is None else self._relayed.device

    def empty(self, job_id: str) -> Tensor:
        """Room for one of its flat tensors."""
        return torch.empty(self._regions[job_id].slot_bytes // self._dtype.itemsize, dtype=self._dtype, device=self.device)


def open_mailbox(
    spans: Mapping[str, ReplicaPlacement],
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    peers: Peers,
    device: torch.device,
    ranks: Sequence[int],
) -> Mailbox:
    """All `ranks` call it together, which are the `peers` in their order. `sizes`: elements of each job's adapter. Raises RankError where
    they cannot read each other's memory.
    """
    peers.agree("regions", sorted([job, sizes[job], span.replicas, *span.ranks] for job, span in spans.items()), "jobs that span GPUs")
    regions, num_bytes = lay_out_regions(spans, sizes, dtype.itemsize)
    return Mailbox(open_peer_memory(num_bytes, peers, device), regions, dtype, ranks)


def open_relayed_mailbox(
    job: str, span: ReplicaPlacement, numel: int, dtype: torch.dtype, relay: Relay, number: int, device: torch.device
) -> Mailbox:
    """The same for the ranks of one job that are apart. They wait for nothing here: what comes early is kept."""
    regions, num_bytes = lay_out_regions({job: span}, {job: numel}, dtype.itemsize)
    return Mailbox(relay.open(number, num_bytes, span.ranks, device), regions, dtype, span.ranks)


class SpanExchange:
    """The exchange of rank `rank`. What it has to say goes to `tell`, from two threads; what others say comes in by `hear`, in the group's
    own.
    """

    def __init__(
        self,
        rank: int,
        spans: Mapping[str, ReplicaPlacement],
        tell: Callable[[Note | Faulty], None],
        mailbox: Mailbox | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`mailbox` is needed where `spans` has a job. `clock`: by which weights of replicas are corrected; they stay without one, as in a
        deterministic run, whose bits they would change.
        """
        self._rank, self._spans, self._tell, self._clock = rank, dict(spans), tell, clock
        self._event_sender = EventSender(tell)
        self._boxes: dict[str, Mailbox] = {}
        if spans:
            assert mailbox is not None, "jobs span, and there is no mailbox"
            self._boxes = dict.fromkeys(spans, mailbox)
        self._sums = RunningSums()
        self._measured = {job: MeasuredWeights(span, rank, clock) for job, span in spans.items()}
        self._sent: dict[str, dict[tuple[int, int], Sent]] = {}  # by job, of each other rank and step
        self._added: dict[str, int] = {}  # how many replicas are in a job's sum
        self._published: dict[str, Published] = {}
        self._unread: dict[str, set[int]] = {}  # on the lead rank, by whom its state has yet to be read
        self._held: dict[str, list[Callable[[], None]]] = {}  # what has to wait for that
        self._news: dict[str, None] = {}

    # -- from and to other ranks ---------------------------------------------------------------------------------------

    def hear(self, note: Note) -> None:
        """Of a job that no longer spans it is too late."""
        job = note.job
        if job not in self._spans:
            return
        match note:
            case Sent():
                self._sent.setdefault(job, {})[note.sender, note.step] = note
            case Published():
                self._published[job] = note
            case Fetched():
                self._unread.get(job, set[int]()).discard(note.sender)
                if not self._unread.get(job):
                    for do in self._held.pop(job, []):
                        do()
        self._news[job] = None

    def flush(self) -> None:
        """Return when all notes have been sent and the device has done the work that they report."""
        self._event_sender.flush(wait=True)

    def spread(self, job_id: str, span: ReplicaPlacement, mailbox: Mailbox) -> None:
        """One more job spans, through a mailbox of its own."""
        self._spans[job_id], self._boxes[job_id] = span, mailbox
        self._measured[job_id] = MeasuredWeights(span, self._rank, self._clock)

    def dissolve(self, job_id: str) -> None:
        """The job spans no longer: all of its replicas are computed in one place from now on."""
        self._spans.pop(job_id, None)
        self._boxes.pop(job_id, None)
        self._measured.pop(job_id, None)
        self.forget(job_id)
        for heard in (self._sent, self._published, self._unread, self._news):
            heard.pop(job_id, None)

    # -- the group's side: `Exchange` ----------------------------------------------------------------------------------

    def replicas_here(self, job_id: str, replicas: int) -> Sequence[int]:
        span = self._spans.get(job_id)
        return range(replicas) if span is None else span.at(self._rank)

    def offered(self, job_id: str) -> None:
        if job_id in self._spans:
            self._measured[job_id].offered()

    def give(self, job_id: str, step: int, replica: int, gradient_P: Tensor) -> None:
        span = self._spans.get(job_id)
        if span is None:
            self._sums.give(job_id, step, replica, gradient_P)
        else:
            self._when_read(job_id, partial(self._boxes[job_id].write, job_id, _slot(span, step, replica), gradient_P))

    def send(self, job_id: str, step: int, passed: BatchLosses) -> None:
        width, tokens, measured = 2 + len(passed.metrics), passed.tokens, self._measured[job_id]
        stop, weights = measured.timer(step, tokens), measured.decide(step) if self._spans[job_id].lead_rank == self._rank else ()

        def make(values: list[float], hand_over: Callable[[], None]) -> Sent:
            seconds = stop()
            hand_over()
            parts = tuple(tuple(values[i : i + width]) for i in range(0, len(values), width))
            return Sent(job_id, self._rank, step, parts, tokens, seconds, weights)

        def tell() -> None:
            box = self._boxes[job_id]
            done = ToHost(torch.stack(passed.values)) if passed.parts else mark_on(box.device)
            self._event_sender.tell_when(done, partial(make, hand_over=box.hand_over()))

        self._when_read(job_id, tell)

    def _when_read(self, job_id: str, do: Callable[[], None]) -> None:
        """Now or, where others have yet to read the state that lies in this rank's region, then."""
        if self._unread.get(job_id):
            self._held.setdefault(job_id, []).append(do)
        else:
            do()

    def take(self, job_id: str, step: int, replicas: Sequence[int]) -> SummedGradient | None:
        span = self._spans.get(job_id)
        if span is None:
            return self._sums.take(job_id, step, replicas)
        if job_id in self._held:
            return None
        sent, box = self._sent.get(job_id, {}), self._boxes[job_id]
        for replica in replicas[self._added.get(job_id, 0) :]:
            rank = span.rank_of(replica)
            if rank != self._rank and (rank, step) not in sent:
                return None
            read_P = box.empty(job_id)
            box.read(job_id, rank, _slot(span, step, replica), read_P)
            self._sums.give(job_id, step, replica, read_P)
            self._added[job_id] = self._added.get(job_id, 0) + 1
        others = [rank for rank in span.ranks if rank != self._rank]
        if any((rank, step) not in sent for rank in others):  # one without samples may still read the step before
            return None
        heard = {rank: sent.pop((rank, step)) for rank in others}
        del self._added[job_id]
        summed = self._sums.take(job_id, step, replicas)
        assert summed is not None, "sums of one process are there at once"
        parts = [part for each in heard.values() for part in each.parts]
        return SummedGradient(
            summed.gradient_P, parts, sum(each.tokens for each in heard.values()), self._next_weights(job_id, step, heard)
        )

    def _next_weights(self, job_id: str, step: int, heard: Mapping[int, Sent]) -> tuple[float, ...]:
        """As the lead rank has decided, which is this one or has sent them."""
        lead_rank, measured = self._spans[job_id].lead_rank, self._measured[job_id]
        if lead_rank != self._rank:
            return heard[lead_rank].weights
        measured.see(step, {rank: each.tokens for rank, each in heard.items()}, {rank: each.seconds for rank, each in heard.items()})
        return measured.decide(step)

    def publish(self, job_id: str, state: AdapterState) -> None:
        span = self._spans.get(job_id)
        if span is None:
            return
        for slot, flat_P in enumerate(_flats(state)):
            self._boxes[job_id].write(job_id, slot, flat_P)
        self._unread[job_id] = set(span.peers)
        published, hand_over = Published(job_id, self._rank, state.step, state.updates, state.skipped), self._boxes[job_id].hand_over()

        def make(_: list[float]) -> Published:
            hand_over()
            return published

        self._event_sender.tell_when(mark_on(self._boxes[job_id].device), make)

    def fetch(self, job_id: str, state: AdapterState) -> bool:
        published, span = self._published.get(job_id), self._spans.get(job_id)
        if published is None or span is None:
            return False
        for slot, flat_P in enumerate(_flats(state)):
            self._boxes[job_id].read(job_id, span.lead_rank, slot, flat_P)
        del self._published[job_id]
        state.step, state.updates, state.skipped = published.step, published.updates, published.skipped
        self._event_sender.tell_when(mark_on(self._boxes[job_id].device), lambda _: Fetched(job_id, self._rank))
        return True

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def news(self) -> list[str]:
        news, self._news = list(self._news), {}
        return news

    def forget(self, job_id: str) -> None:
        self._sums.forget(job_id)
        self._added.pop(job_id, None)
        self._held.pop(job_id, None)

    def leave(self, job_id: str, failed: str = "") -> None:
        self.forget(job_id)
        span = self._spans.get(job_id)
        if failed and span is not None and span.lead_rank != self._rank:
            self._tell(Faulty(job_id, failed))


def _flats(state: AdapterState) -> tuple[Tensor, Tensor, Tensor]:
    """What its lead rank's region has in the first slots."""
    return state.params, state.exp_avg, state.exp_avg_sq


def _slot(span: ReplicaPlacement, step: int, replica: int) -> int:
    """Of its gradient, in the region of its rank."""
    return 2 * span.at(span.rank_of(replica)).index(replica) + step % 2
