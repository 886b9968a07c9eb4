"""The links of stages that are on several hosts, whose bytes travel within one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.errors import RankError
from tlora.shape.stages import LayerRange
from tlora.sharing.relayed_memory import Relay, RelayedPeers

CPU, SIZES = torch.device("cpu"), StageSizes(4, 8, 100, torch.float32, torch.float32)
RANKS = (2, 3, 0, 1)  # in the order of their stages


class Hosts:
    """A rank on each."""

    def __init__(self) -> None:
        self.relays = {rank: Relay(rank, lambda *sent, rank=rank: self._deliver(rank, *sent)) for rank in RANKS}

    def _deliver(self, sender: int, number: int, to: int, start: int, content: bytes) -> None:
        self.relays[to].take(number, sender, start, content)

    def open(self, sizes: Sequence[StageSizes]) -> Iterator[StageLinks]:
        """By stage. Raises what a rank raises."""

        def open_links(stage: int) -> StageLinks:
            peers = RelayedPeers(self.relays[RANKS[stage]], RANKS[stage], RANKS)
            return StageLinks(peers, sizes[stage], CPU, through_host=True)

        with ThreadPoolExecutor(len(RANKS)) as threads:
            yield from threads.map(open_links, range(len(RANKS)))

    def held(self, memory: int) -> list[set[int]]:
        """Whose bytes each stage has room for, in one of the memories that all have opened."""
        return [set(self.relays[rank]._memories[memory]._parts) for rank in RANKS]


def test_each_stage_has_room_for_those_alone_that_it_reads() -> None:
    hosts = Hosts()
    links = list(hosts.open([SIZES] * 4))
    hidden, flat, words = (hosts.held(memory) for memory in range(3))
    assert hidden == [{2, 3}, {2, 3, 0}, {3, 0, 1}, {0, 1}]
    assert flat == [{2, 1}, {3, 1}, {0, 1}, {2, 3, 0, 1}] and words == [set(RANKS)] * 4
    values_TH, flat_P, last = torch.randn(4, 8), torch.randn(100), links[3]
    for before, behind in pairwise(links):
        assert before.hidden_out is not None and before.gradient_in is not None
        before.hidden_out.send(values_TH)
        assert torch.equal(behind.receive(4), values_TH)
        behind.send_back(-values_TH)
        assert torch.equal(before.gradient_in.receive((4, 8), torch.float32, CPU), -values_TH)
    for stage, early in enumerate(links[:-1]):
        for sender, receiver in ((early, last), (last, early)):
            read_P = torch.empty(100)
            sender.send_flat(stage, flat_P + stage)
            receiver.receive_flat(stage, read_P)
            assert torch.equal(read_P, flat_P + stage)
        for name in ("measures", "checks"):
            getattr(early, name)[stage].send(flat_P - stage)
            assert torch.equal(getattr(last, name)[stage].receive((100,), torch.float32, CPU), flat_P - stage)


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("other", [replace(SIZES, hidden_dtype=torch.bfloat16), replace(SIZES, layers=(LayerRange(0, 3, 4),))])
def test_a_host_that_has_chosen_another_dtype_or_cut_is_refused(odd: int, other: StageSizes) -> None:
    """Its CPU has no instructions for that of the others; or its GPU is none that our kernels know, which counts other bytes."""
    sizes = [other if stage == odd else SIZES for stage in range(4)]
    with pytest.raises(RankError, match=r"has other tensors between stages than rank \d with its StageSizes\(tokens=4, .* Set dtype"):
        list(Hosts().open(sizes))
