"""A base's shape comes back from its JSON as it was written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tlora.shape.base_parts import BaseParts
from tlora.shape.base_shape import BaseShape, parse_shape
from tlora.shape.length_limits import LengthLimit
from tlora.shape.memory import BaseMemory, MemoryModel, Phase, StreamedBytes

SHAPE = BaseShape(
    {"layers.0.q_proj": (64, 32)}, ("layers.0", "layers.0.q_proj"), (), 1 << 20, 300,
    (LengthLimit(4096, "this base's rotary embedding changes past 4096"),), 2048,
    BaseMemory((1 << 20, 6 << 17), 1e3, 2.5, 0.5, 7e4, num_layers=2), ("a note",),
    BaseParts(
        MemoryModel(1 << 20, (Phase(1e3, 2.5, 0.5, 0.25), Phase(0.0, 3.5, 0.5, 0.25)), 2, 2, 4), ("layers.0", "layers.1"),
        (1 << 18, 1 << 18), (2048, 2048), (96, 96), 1 << 18, 1 << 18, 19200, 364, 64, False, (1 << 20, 6 << 17),
        StreamedBytes(1 << 19, 1 << 18, 2, 1 << 19), {"nf4": 1 << 19},
    ),
    ("embed_tokens", 300, 64),
)  # fmt: skip


def test_it_is_written_and_read() -> None:
    assert parse_shape(json.loads(json.dumps(SHAPE.to_json()))) == SHAPE


def test_one_that_was_written_without_its_number_of_layers_is_read() -> None:
    found = json.loads(json.dumps(SHAPE.to_json()))
    del found["memory"][4:]
    assert parse_shape(found) == replace(SHAPE, memory=replace(SHAPE.memory, num_layers=0))


@pytest.mark.parametrize("key", ["linears", "memory", "bytes", "limits", "notes", "parts"])
def test_what_is_damaged_is_no_shape(key: str) -> None:
    found = json.loads(json.dumps(SHAPE.to_json()))
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_shape({name: value for name, value in found.items() if name != key})
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_shape(found | {key: 3 if key != "bytes" else "many"})
