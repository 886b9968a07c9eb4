"""Slots of layers in one process: which layer comes into which, in the usual order and in any other."""

from __future__ import annotations

import doctest

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.shared_models import random_rows
from tlora.kernels.frozen import PlainWeight
from tlora.sharing import layer_stream
from tlora.sharing.layer_stream import LayerStream, upcoming
from tlora.sharing.layout import BaseLayout, lay_out
from tlora.sharing.shards import fill


class Memory:
    """What all ranks hold, in one process; says which layers were fetched."""

    def __init__(self, layout: BaseLayout) -> None:
        rows = random_rows(0, layout, torch.float32, torch.device("cpu"))
        self.parts = [torch.zeros(layout.rank_bytes, dtype=torch.uint8) for _ in range(layout.world_size)]
        for rank, part in enumerate(self.parts):
            fill(part, layout, rank, rows)
        self.own = self.parts[0]
        self.fetched: list[int] = []
        self._number = {layer.range_start: number for number, layer in enumerate(layout.layers)}

    def read(self, peer: int, start: int, target: Tensor) -> None:
        if peer == 0:
            self.fetched.append(self._number[start])
        target.copy_(self.parts[peer][start : start + target.numel()])


def weight_of(num_rows: int, row_length: int) -> PlainWeight:
    return PlainWeight(torch.empty(num_rows, row_length, device="meta"))


def weight(stream: LayerStream, name: str) -> Tensor:
    piece = stream.layout.places[name][1]
    return stream.tensors(name)["weight"].view(piece.num_rows, piece.row_length)


def stream_of(num_layers: int, num_slots: int) -> tuple[LayerStream, Memory]:
    layout = lay_out([{f"{i}.x": weight_of(16, 16 * (1 + i % 3)), f"{i}.y": weight_of(32, 16)} for i in range(num_layers)], 2)
    memory = Memory(layout)
    return LayerStream(layout, memory, 0, num_slots), memory


@given(st.integers(1, 5), st.integers(2, 4), st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xy")), max_size=30))
def test_any_order_gives_the_right_weights(num_layers: int, num_slots: int, order: list[tuple[int, str]]) -> None:
    stream, _ = stream_of(num_layers, num_slots)
    rows = random_rows(0, stream.layout, torch.float32, torch.device("cpu"))
    for number, which in order:
        name = f"{number % num_layers}.{which}"
        assert torch.equal(weight(stream, name), rows(name, 0, stream.layout.places[name][1].num_rows))


def test_forwards_and_back_each_layer_is_fetched_once_in_each_direction_and_ahead() -> None:
    stream, memory = stream_of(5, 2)
    ahead: list[bool] = []
    for _ in range(2):  # two micro-batches
        for number in (*range(5), *reversed(range(5))):
            before = set(memory.fetched[-2:])
            weight(stream, f"{number}.x")
            ahead.append(number in before)
            weight(stream, f"{number}.y")
    assert memory.fetched == [0, 1, 2, 3, 4, 2, 1, 0, *[2, 3, 4, 2, 1, 0]]
    assert not ahead[0] and all(ahead[1:5])
    assert stream.stats().layers == len(memory.fetched)


def test_three_slots_fetch_two_layers_ahead() -> None:
    stream, memory = stream_of(6, 3)
    weight(stream, "0.x")
    assert memory.fetched == [0, 1, 2]
    weight(stream, "1.x")
    assert memory.fetched == [0, 1, 2, 3]


def test_a_second_pass_in_between_is_served_and_followed() -> None:
    stream, memory = stream_of(6, 2)
    for number in (0, 1, 2, 0, 1, 2):
        weight(stream, f"{number}.x")
    assert memory.fetched == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_fetch_that_raised_leaves_no_layer_behind() -> None:
    stream, memory = stream_of(4, 2)
    true = weight(stream, "0.x").clone()
    parts, memory.parts = memory.parts, []
    for name in ("2.x", "3.x", "2.y"):
        try:
            weight(stream, name)
        except IndexError:
            continue
        raise AssertionError(f"{name} came from nowhere")
    memory.parts = parts
    assert torch.equal(weight(stream, "0.x"), true)
    assert torch.equal(weight(stream, "2.x"), random_rows(0, stream.layout, torch.float32, torch.device("cpu"))("2.x", 0, 16))


def test_the_example_in_the_documentation() -> None:
    assert doctest.testmod(layer_stream).failed == 0
    assert upcoming(0, None, 1, 3) == []
