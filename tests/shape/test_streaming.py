"""What a streamed micro-batch costs, and how often a stream really fetches."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
import torch

from tlora.kernels.frozen import PlainWeight
from tlora.shape import token_cost
from tlora.shape.token_cost import StreamCost, fetched_layers
from tlora.sharing.host_memory import HostMemory
from tlora.sharing.layer_stream import LayerStream
from tlora.sharing.layout import lay_out


@pytest.mark.parametrize(("link", "exposed", "seconds"), [(10.0, 0.0, 3.0), (5.0, 1.0, 4.0)])
def test_the_slower_of_link_and_products_is_what_it_takes(link: float, exposed: float, seconds: float) -> None:
    cost = StreamCost(20, link, 3.0)
    assert (cost.link_seconds, cost.exposed_seconds, cost.seconds) == (20 / link, exposed, seconds)


@pytest.mark.parametrize(("num_layers", "slots"), [(1, 2), (2, 2), (5, 2), (5, 3), (6, 4), (6, 6), (9, 8)])
def test_fetches_are_those_of_a_stream(num_layers: int, slots: int) -> None:
    """From the second micro-batch on; the first one also fetches what the slots hold from then on."""
    layout = lay_out([{f"{i}.x": PlainWeight(torch.empty(4, 4, device="meta"))} for i in range(num_layers)], 1)
    stream = LayerStream(layout, HostMemory(layout.rank_bytes, torch.device("cpu")), 0, slots)
    counts: list[int] = []
    for _ in range(4):
        for number in (*range(num_layers), *reversed(range(num_layers))):
            stream.tensors(f"{number}.x")
        counts.append(stream.stats().layers)
    assert {after - before for before, after in pairwise(counts)} == {fetched_layers(num_layers, slots)}


def test_examples() -> None:
    assert doctest.testmod(token_cost).attempted and not doctest.testmod(token_cost).failed
