"""Tiles loaded by pointer, as on cards without bulk copies: the bytes are those by descriptor, and the promises hold with its tiles."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels import promises
from tests.kernels.interpreter import INTERPRETED_ALONE, interpreted
from tests.kernels.linear_cases import Bank, Base, Job, fused_linear, make_batch, run_kernels
from tlora.kernels.cards import HOPPER

with interpreted():
    from tlora.kernels.lora_tables import WIDEST_PIECE
    from tlora.kernels.tiles import TileTable, keys_of, tile_by_rule

pytestmark = INTERPRETED_ALONE
FP32 = torch.float32
QKV = (48, 32, 32)
BY_POINTER = promises.BY_POINTER
SLOW = pytest.mark.slow


def everything(base: Base, jobs: list[Job], tail: int) -> list[Tensor]:
    """y, dx and all sums."""
    slots = Bank(base, jobs).slots
    y, dx = run_kernels(base, make_batch(base, jobs, slots, tail))
    return [y, dx, *(rows for slot in slots for name in ("da", "db") for rows in slot.rows(name))]


@pytest.mark.parametrize(
    ("in_features", "widths", "jobs"),
    [
        pytest.param(64, (48,), [Job((30, 20), (8,), seed=1), Job((70,), (20,), seed=2, gap=9)], id="blocks end with K", marks=SLOW),
        pytest.param(80, (48,), [Job((130,), (8,), seed=1)], id="K ends in a block", marks=SLOW),
        pytest.param(48, QKV, [Job((33, 70), (8, 17, 0), seed=1), Job((11,), (64, 64, 64), seed=2)], id="three linears", marks=SLOW),
        pytest.param(32, QKV, [Job((17, 40), (100, 0, 65), 0.3, seed=1), Job((12,), (5, 5, 5), seed=2, gap=1)], id="dropout"),
        pytest.param(32, QKV, [Job((17, 40), (256, 1, 256), seed=1), Job((9,), (16, 33, 2), seed=2)], id="ranks to 256", marks=SLOW),
        pytest.param(32, (32,), [Job((1,), (4 + i % 9,), i % 2 / 5, i, i % 4 // 3) for i in range(20)], id="many runs", marks=SLOW),
        pytest.param(160, (160, 144), [Job((129,), (8, 8), seed=1)], id="several tiles of columns", marks=SLOW),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "bias"])
def test_the_bytes_are_those_by_descriptor(
    in_features: int, widths: tuple[int, ...], jobs: list[Job], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same ranks at a time: the interpreter adds up a block's products before it adds them to the rest, unlike a GPU."""
    monkeypatch.setattr(fused_linear, "_POINTER_PIECE", WIDEST_PIECE)
    base = Base(in_features, widths, bias=bias)
    tiles = {key: tile_by_rule(key, BY_POINTER) for key in keys_of(in_features, widths, FP32, FP32)}
    found: list[list[Tensor]] = []
    for card in (HOPPER, BY_POINTER):
        base.group = replace(base.group, tiles=TileTable(tiles, card=card))
        assert base.group.loads == card.loads
        found.append(everything(base, jobs, tail=3))
    for expected, given in pairwise(found):
        assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(expected, given, strict=True))
        assert all(bool(t.isfinite().all()) for t in given)


def test_what_lies_around_the_operands_is_never_used() -> None:
    """x, weights and dy lie in the midst of NaN: rows and columns beyond an edge come from within it, or meet a mask."""
    base = Base(80, (48, 32))
    tiles = {key: tile_by_rule(key, BY_POINTER) for key in keys_of(80, (48, 32), FP32, FP32)}
    base.group = replace(base.group, tiles=TileTable(tiles, card=BY_POINTER))
    job = Job((70, 5), (8, 20), 0.1, seed=1)
    expected = everything(base, [job], tail=0)

    def framed(t: Tensor) -> Tensor:
        frame = torch.full((t.shape[0] + 200, t.shape[1] + 128), math.nan)
        inner = frame[100 : 100 + t.shape[0], 64 : 64 + t.shape[1]]
        return inner.copy_(t)

    base.weights = [framed(weight) for weight in base.weights]
    (slot,) = Bank(base, [job]).slots
    batch = make_batch(base, [job], [slot])
    x, dys = framed(batch.x), [framed(part) for part in batch.dy.split(base.widths, 1)]
    ys, shrunk = fused_linear.forward(x, base.weights, [], base.group, batch.tables)
    dx = fused_linear.backward(dys, x, framed(shrunk), base.weights, base.group, batch.tables)
    for a, b in zip(expected, [torch.cat(ys, 1), dx, *slot.rows("da"), *slot.rows("db")], strict=True):
        assert torch.equal(a, b)
