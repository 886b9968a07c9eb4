"""What connects the stages of a base: hidden states one way, their gradients the other, and to and from the last one what it has to know of
adapters: how their gradients were measured and checked, and where jobs come and go or are saved their state.

Rank r has stage r. The last rank has norm, head and losses besides its layers: the jobs are led there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tlora.batching.pipeline_model import ring_places
from tlora.errors import RankError
from tlora.shape.stages import LayerRange
from tlora.sharing.channel import Channel, DeviceOrder, Ends, InterruptedWaitError, PeerWait, Ring, open_words
from tlora.sharing.peer_memory import PeerMemory, open_host_memory, open_peer_memory
from tlora.sharing.peers import Peers
from tlora.sharing.relayed_memory import RelayedPeers

_EPOCH, _FAILED, _FAILED_AT, _OBEYED, _THROUGH = range(5)
_HIDDEN_SENT, _HIDDEN_TAKEN, _GRADIENT_SENT, _GRADIENT_TAKEN = range(5, 9)
_MEASURES_SENT, _CHECKS_SENT, _STATES_SENT, _STATES_TAKEN, _SIZES = range(9, 14)
_REASON, _REASON_WORDS = 16, 256
_PER_RANK = _REASON + _REASON_WORDS  # words of the last stage's for each other rank: measures, checks, states taken, states sent
_WORDS_PER_RANK = 4
_PIECE_BYTES = 32 << 20  # of a state on its way
_MEASURES_BYTES, _CHECKS_BYTES = 8 << 20, 1 << 16  # of all jobs that may be on their way, beside a part of the largest adapter


@dataclass(frozen=True)
class StageSizes:
    """What goes through the links, the same on all ranks. `tokens` of all passes of the largest micro-batch, those for references included;
    `adapter`: numbers of the largest adapter; `layers` of each stage, where the ranks have cut the base by themselves.
    """

    tokens: int
    width: int
    adapter: int
    hidden_dtype: torch.dtype
    sum_dtype: torch.dtype
    layers: tuple[LayerRange, ...] = ()


@dataclass(frozen=True)
class FailedStage:
    """`at`: the number of the micro-batch in its epoch."""

    rank: int
    at: int
    reason: str
    out_of_memory: bool


class StageLinks:
    """One rank's ends of all links. `device`: where its stage computes; `through_host`: hidden states go through the host's memory, as GPUs
    that cannot read each other's need it, and `RelayedPeers` always. Raises RankError where the ranks have other sizes.
    """

    def __init__(self, peers: Peers | RelayedPeers, sizes: StageSizes, device: torch.device, through_host: bool) -> None:
        self.rank, self.count, self.sizes, self.device = peers.rank, peers.world_size, sizes, device
        self.last = self.count - 1
        ring = ring_places(self.count) * _aligned(sizes.tokens * sizes.width * sizes.hidden_dtype.itemsize)
        adapter = _aligned(sizes.adapter * sizes.sum_dtype.itemsize)
        states, measures = 2 * min(adapter, _PIECE_BYTES), _MEASURES_BYTES + _aligned(adapter // 8)
        small = states * (self.count - 1)  # where measures and checks begin
        flat_bytes = small + measures + _CHECKS_BYTES
        if isinstance(peers, RelayedPeers):
            next_to, all_before = {self.rank - 1, self.rank + 1}.intersection(range(self.count)), range(self.last)
            hidden = peers.open(2 * ring, device, heard=next_to)
            flat = peers.open(flat_bytes, device, heard=all_before if self.rank == self.last else [self.last])
        else:
            numbers, layers = [sizes.tokens, sizes.width, sizes.adapter], [[cut.first, cut.stop] for cut in sizes.layers]
            peers.agree("stages", [*numbers, str(sizes.hidden_dtype), through_host, layers], "stages of sizes")
            by_host = partial(open_host_memory, peers=peers, device=device)
            hidden = by_host(2 * ring, name="hidden states") if through_host else open_peer_memory(2 * ring, peers, device)
            flat = by_host(flat_bytes, name="adapters")
        self._words = open_words(_PER_RANK + _WORDS_PER_RANK * self.count, peers)
        self.patience, self._still = PeerWait(peers, self._interrupted, self._is_idle), PeerWait(peers)
        if isinstance(peers, RelayedPeers):
            self._agree_on_sizes()
        order = DeviceOrder(device)
        # On the last stage measures are read beside its products, and states by the host.
        beside, by_host = (DeviceOrder(device), DeviceOrder(torch.device("cpu"))) if self.rank == self.last else (order, order)
        self._epoch = 0

        def channel(memory: PeerMemory, start: int, size: int, ends: Ends, patience: PeerWait, order: DeviceOrder = order) -> Channel:
            return Channel(memory, Ring(start, size), self._words, ends, patience, order)

        own, before, behind, last = self.rank, self.rank - 1, self.rank + 1, self.last
        self.hidden_in = self.gradient_out = self.hidden_out = self.gradient_in = None
        if own > 0:
            self.hidden_in = channel(hidden, 0, ring, Ends(before, own, _HIDDEN_SENT, _HIDDEN_TAKEN), self.patience)
            self.gradient_out = channel(hidden, ring, ring, Ends(own, before, _GRADIENT_SENT, _GRADIENT_TAKEN), self.patience)
        if own < last:
            self.hidden_out = channel(hidden, 0, ring, Ends(own, behind, _HIDDEN_SENT, _HIDDEN_TAKEN), self.patience)
            self.gradient_in = channel(hidden, ring, ring, Ends(behind, own, _GRADIENT_SENT, _GRADIENT_TAKEN), self.patience)
        taking = self._still if own == last else self.patience
        self.measures, self.checks = dict[int, Channel](), dict[int, Channel]()
        self._states_in, self._states_out = dict[int, Channel](), dict[int, Channel]()
        for rank in self._with(own):
            first = _PER_RANK + _WORDS_PER_RANK * rank
            self.measures[rank] = channel(flat, small, measures, Ends(rank, last, _MEASURES_SENT, first), taking, beside)
            self.checks[rank] = channel(flat, small + measures, _CHECKS_BYTES, Ends(rank, last, _CHECKS_SENT, first + 1), taking, beside)
            to_last = channel(flat, 0, states, Ends(rank, last, _STATES_SENT, first + 2), self._still, by_host)
            from_last = channel(flat, rank * states, states, Ends(last, rank, first + 3, _STATES_TAKEN), self._still)
            self._states_in[rank], self._states_out[rank] = (to_last, from_last) if own == last else (from_last, to_last)

    def _agree_on_sizes(self) -> None:
        """Each host finds its own: CPUs of two kinds choose two dtypes."""
        own = zlib.crc32(str(self.sizes).encode()) + 1
        self._words.set(_SIZES, own)
        for rank in range(self.count):
            self._still.until(lambda rank=rank: self._words.get(rank, _SIZES) != 0, rank)
            if self._words.get(rank, _SIZES) != own:
                raise RankError(
                    f"rank {rank} has other tensors between stages than rank {self.rank} with its {self.sizes}: with dtype auto "
                    "each host's CPU chooses what it is fast in. Set dtype to one of both, or, where layers differ, order GPUs of one kind"
                )

    def _with(self, rank: int) -> Sequence[int]:
        """The ranks before the last stage with which this one exchanges adapters: all for the last, itself for the others."""
        return range(self.last) if rank == self.last else [rank]

    def send_flat(self, rank: int, flat_P: Tensor) -> None:
        """A flat vector of an adapter, between the last stage and `rank`, in pieces. Waits until there is room for the last one."""
        for piece in flat_P.split(self._piece):
            self._states_out[rank].send(piece)

    def receive_flat(self, rank: int, flat_P: Tensor) -> None:
        """The next one, into a vector of its size."""
        for piece in flat_P.split(self._piece):
            self._states_in[rank].receive_into(piece)

    @property
    def _piece(self) -> int:
        return _PIECE_BYTES // self.sizes.sum_dtype.itemsize

    @property
    def waited_seconds(self) -> float:
        """For other stages, with nothing else to do on the device."""
        return self.patience.seconds

    def _is_idle(self) -> bool:
        return self.device.type != "cuda" or torch.cuda.current_stream(self.device).query()

    # -- `Upstream`, of a stage behind the first -----------------------------------------------------------------------

    def receive(self, tokens: int) -> Tensor:
        assert self.hidden_in is not None, "the first stage has none before it"
        return self.hidden_in.receive((tokens, self.sizes.width), self.sizes.hidden_dtype, self.device)

    def send_back(self, gradient_TH: Tensor) -> None:
        assert self.gradient_out is not None, "the first stage has none before it"
        self.gradient_out.send(gradient_TH.contiguous())

    # -- trouble, and how far the others are ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    def _interrupted(self) -> bool:
        """Whether what a rank waits for may never come: the last stage begins anew, or, for that, another one has failed."""
        return self.failed is not None or (self.rank != self.last and self._words.get(self.last, _EPOCH) != self._epoch)

    @property
    def failed(self) -> FailedStage | None:
        """A stage before the last that has failed in this epoch."""
        for rank in range(self.last):
            if (word := self._words.get(rank, _FAILED)) // 2 == self._epoch + 1:
                reason, at = self._words.get_text(rank, _REASON, _REASON_WORDS), self._words.get(rank, _FAILED_AT)
                return FailedStage(rank, at, reason, bool(word % 2))
        return None

    def fail(self, at: int, reason: str, out_of_memory: bool) -> None:
        """This stage has failed in the micro-batch `at`, as they are counted in this epoch."""
        self._words.set_text(_REASON, reason, _REASON_WORDS)
        self._words.set(_FAILED_AT, at)
        self._words.set(_FAILED, 2 * (self._epoch + 1) + out_of_memory)

    def note_obeyed(self, count: int) -> None:
        self._words.set(_OBEYED, count)

    def note_through(self, count: int) -> None:
        self._words.set(_THROUGH, count)

    def wait_obeyed(self, count: int) -> None:
        """Until all stages have made so many changes. Raises InterruptedWaitError where one has failed."""
        self._wait_all(_OBEYED, count)
        if self.failed is not None:
            raise InterruptedWaitError

    def wait_through(self, count: int) -> None:
        """Until all stages have computed so many micro-batches of this epoch."""
        self._wait_all(_THROUGH, count)

    def _wait_all(self, word: int, count: int) -> None:
        for rank in range(self.last):
            self.patience.until(lambda rank=rank: self._words.get(rank, word) >= count, rank)

    def call_anew(self) -> int:
        """On the last stage: interrupt all waits of the others. Gives the new epoch's number."""
        self._words.set(_EPOCH, self._epoch + 1)
        return self._epoch + 1

    def begin_anew(self, epoch: int) -> None:
        """Nothing is on its way any more. The last stage returns when all others have done so."""
        self._epoch = epoch
        for channel in (
            self.hidden_in,
            self.hidden_out,
            self.gradient_in,
            self.gradient_out,
            *self.measures.values(),
            *self.checks.values(),
            *self._states_in.values(),
            *self._states_out.values(),
        ):
            if channel is not None:
                channel.begin_anew(epoch)
        self._words.set(_THROUGH, 0)
        self._words.set(_EPOCH, epoch)
        if self.rank == self.last:
            for rank in range(self.last):
                self._still.until(lambda rank=rank: self._words.get(rank, _EPOCH) >= epoch, rank)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256
