"""A base's shape comes back from its JSON as it was written."""

from __future__ import annotations

import json

import pytest

from tlora.json_file import fields_of, value_of
from tlora.shape.base_parts import BaseParts
from tlora.shape.base_shape import BaseShape
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
    assert value_of(BaseShape, json.loads(json.dumps(fields_of(SHAPE)))) == SHAPE


@pytest.mark.parametrize("key", ["linears", "memory", "bytes", "limits", "notes", "parts"])
def test_what_is_damaged_is_no_shape(key: str) -> None:
    found = json.loads(json.dumps(fields_of(SHAPE)))
    with pytest.raises(ValueError):
        value_of(BaseShape, {name: value for name, value in found.items() if name != key})
    with pytest.raises(ValueError):
        value_of(BaseShape, found | {key: 3 if key != "bytes" else "many"})
