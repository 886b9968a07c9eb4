"""The varlen attention against softmax attention of each sample by itself in fp64: out, log-sum-exp and all gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, interpreted, thinned
from tests.tolerances import KERNEL, assert_close

with interpreted():
    from tlora.kernels import varlen_attention
    from tlora.kernels.varlen_attention import Rule, Saved, Tile, launch_dkv, launch_dq, launch_forward, list_tiles

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # numpy on Triton's interpreter
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # NaN next door, rows beyond a sequence's end
]
NAMES = ("out", "lse", "dq", "dk", "dv")
LENGTHS = (1, 33, 7, 70, 32)
"""One token, one over the tile, short, several tiles, and exactly one."""


@dataclass(frozen=True)
class Case:
    """Samples and how they attend."""

    lengths: tuple[int, ...] = LENGTHS
    heads: int = 2
    kv_heads: int = 1
    size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    scale: float = 0.3
    sinks: tuple[float, ...] | None = None

    @property
    def options(self) -> tuple[float, int | None, float | None]:
        return self.scale, self.window, self.softcap

    def draw(self, seed: int = 0) -> list[Tensor]:
        """q, k, v as slices of one fused projection [T, (H + 2G) D], and dout."""
        gen = torch.Generator().manual_seed(seed)
        heads = self.heads + 2 * self.kv_heads
        fused = torch.randn(sum(self.lengths), heads, self.size, generator=gen, dtype=torch.float64).to(DEVICE, self.dtype)
        dout = torch.randn(sum(self.lengths), self.heads, self.size, generator=gen, dtype=torch.float64).to(DEVICE, self.dtype)
        return [*fused.split([self.heads, self.kv_heads, self.kv_heads], 1), dout]


def computed(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v, dout = tensors
    plan = list_tiles(case.lengths, DEVICE)
    out, lse = varlen_attention.varlen_attention_forward(q, k, v, plan, *case.options, sinks_of(case))
    return [out, lse, *varlen_attention.varlen_attention_backward(dout, q, k, v, out, lse, plan, *case.options)]


def sinks_of(case: Case) -> Tensor | None:
    return None if case.sinks is None else torch.tensor(case.sinks, dtype=case.dtype, device=DEVICE)


def true(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """The same by autograd in fp64, sample by sample, with repeated kv heads."""
    q, k, v = (t.double().detach().requires_grad_() for t in tensors[:3])
    outs, lses = [], []
    for qs, ks, vs in zip(*(t.split(case.lengths) for t in (q, k, v)), strict=True):
        ks, vs = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (ks, vs))
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        i = torch.arange(len(qs), device=DEVICE)
        distance = i[:, None] - i[None, :]
        scores = scores.masked_fill((distance < 0) | (distance >= (case.window or math.inf)), -math.inf)
        if case.sinks is not None:
            sinks = torch.tensor(case.sinks, dtype=torch.float64, device=DEVICE)
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(qs), 1)], -1)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(qs)], vs))
        lses.append(scores.logsumexp(-1))
    out = torch.cat(outs)
    return [out, torch.cat(lses, 1), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


def assert_true(case: Case, found: list[Tensor], tensors: list[Tensor]) -> None:
    """Within the table's bounds. A gradient that is zero (one visible key) comes of a difference of numbers as large as dout's."""
    for name, one, expected in zip(NAMES, found, true(case, tensors), strict=True):
        bound = KERNEL[torch.float32 if name == "lse" else case.dtype]
        assert_close(one, expected, bound if expected.any() else bound * float(tensors[3].norm()), name)


@pytest.mark.parametrize(
    "case",
    in_every_run(
        [
            Case(),
            Case(heads=2, kv_heads=2, lengths=(33, 40)),
            Case(heads=8, kv_heads=2, lengths=(3, 40)),
            Case(size=64),
            Case(size=80, lengths=(40, 3)),
            Case(size=160, lengths=(5, 33)),
            Case(window=1),
            Case(window=20),
            Case(window=33, heads=4, kv_heads=2, lengths=(66, 2)),
            Case(window=64, lengths=(130, 5)),
            Case(window=1000),
            Case(softcap=2.0),
            Case(softcap=500.0),
            Case(softcap=3.0, window=40, lengths=(90, 1)),
            Case(lengths=(0, 5, 0, 34, 0)),
            Case(sinks=(1.5, -1.0)),
            Case(sinks=(400.0, -400.0), lengths=(40, 3)),
            Case(sinks=(0.5, 3.0, -2.0, 1.0), heads=4, kv_heads=2, window=20, softcap=2.0, lengths=(66, 2)),
        ],
        *(0, 2, 4, 6, 13, 14, 16, 17),
    ),
    ids=str,
)
def test_forward_and_gradients_equal_fp64(case: Case) -> None:
    tensors = case.draw()
    assert_true(case, computed(case, tensors), tensors)


def test_scores_of_hundreds_do_not_overflow() -> None:
    """A score of 500 is known to 3e-5 in fp32, and so is its weight."""
    case = Case(scale=40.0, lengths=(45, 64))
    tensors = case.draw()
    for name, found, expected in zip(NAMES, computed(case, tensors), true(case, tensors), strict=True):
        assert_close(found, expected, 1e-4, name)


TILES = [(32, 16), (32, 64), (64, 32), (64, 64), (128, 32), (64, 128)]
WINDOWS = [0, 1, 50, 95, 127]


@pytest.mark.parametrize(
    ("tile", "window"),  # each tile with a window, each window with a tile
    thinned(product(TILES, WINDOWS), lambda tile, window: TILES.index(tile) % 5 == WINDOWS.index(window), 1, 3, 5),
)
def test_every_shape_of_tiles_sees_the_same_pairs(tile: tuple[int, int], window: int) -> None:
    """Lengths around multiples of both: which blocks are full, masked or left out is the part that is easily off by one."""
    case = Case(lengths=(127, 129, 65, 16), heads=1, window=window or None)
    q, k, v, dout = case.draw()
    plan, rule, shape = list_tiles(case.lengths, DEVICE), Rule(case.scale, window), Tile(*tile, 4, 1)
    out, lse = launch_forward(q, k, v, plan, rule, shape)
    saved = Saved(dout, q, k, v, out, lse)
    dq, delta = launch_dq(saved, plan, rule, shape)
    assert_true(case, [out, lse, dq, *launch_dkv(saved, delta, plan, rule, shape)], [q, k, v, dout])


def of_sample(case: Case, found: list[Tensor], index: int) -> list[Tensor]:
    start = sum(case.lengths[:index])
    return [t.narrow(1 if name == "lse" else 0, start, case.lengths[index]) for name, t in zip(NAMES, found, strict=True)]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"window": 20, "softcap": 2.0, "sinks": (1.0, -1.0)},
        pytest.param({"dtype": torch.float16}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_nan_next_door_changes_no_bit(change: dict[str, object]) -> None:
    case = replace(Case(lengths=(33, 1, 40)), **change)
    clean = case.draw()
    before = computed(case, clean)
    for poison, places in ((math.nan, range(len(case.lengths))), (math.inf, [1])):
        for own in places:
            start = sum(case.lengths[:own])
            dirty = [torch.full_like(t, poison) for t in clean]
            for into, t in zip(dirty, clean, strict=True):
                into[start : start + case.lengths[own]] = t[start : start + case.lengths[own]]
            after = of_sample(case, computed(case, dirty), own)
            for name, x, y in zip(NAMES, of_sample(case, before, own), after, strict=True):
                assert torch.equal(x, y) and y.isfinite().all(), f"{name} of sample {own}"


@pytest.mark.parametrize("change", in_every_run([{"size": 80}, {"window": 20, "softcap": 2.0, "sinks": (1.0, -1.0)}], 1), ids=str)
def test_a_sample_has_the_same_bits_wherever_it_lies(change: dict[str, object]) -> None:
    case = replace(Case(lengths=(13, 70, 1, 45)), **change)
    tensors = case.draw()
    before = computed(case, tensors)
    order = (3, 1, 0, 2)
    parts = [t.split(case.lengths) for t in tensors]
    moved = replace(case, lengths=tuple(case.lengths[i] for i in order))
    after = computed(moved, [torch.cat([part[i] for i in order]) for part in parts])
    for place, index in enumerate(order):
        alone = computed(replace(case, lengths=(case.lengths[index],)), [part[index] for part in parts])
        there = of_sample(moved, after, place)
        for name, x, y, z in zip(NAMES, of_sample(case, before, index), there, alone, strict=True):
            assert torch.equal(x, y) and torch.equal(x, z), f"{name} of sample {index}"


def test_strides_of_tokens_and_heads_are_free() -> None:
    case = Case(lengths=(33, 5), heads=4, kv_heads=2)
    tensors = case.draw()
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    tails = [t.movedim(2, 0).contiguous().movedim(0, 2) for t in tensors]
    for other in (heads_first, tails):
        for name, x, y in zip(NAMES, computed(case, tensors), computed(case, other), strict=True):
            assert torch.equal(x, y), name
    ones = [*tensors[:3], torch.ones((), device=DEVICE).expand(tensors[3].shape)]
    for name, x, y in zip(NAMES, computed(case, ones), computed(case, [*tensors[:3], torch.ones_like(tensors[3])]), strict=True):
        assert torch.equal(x, y), name


def test_half_precision_is_summed_in_fp32() -> None:
    """Against fp64 on the same fp16 inputs: what is lost is the rounding of p, ds and the results, 2^-11 each."""
    case = Case(dtype=torch.float16, heads=4, kv_heads=1, lengths=(100, 33))
    tensors = case.draw()
    for name, found, expected in zip(NAMES, computed(case, tensors), true(case, tensors), strict=True):
        assert found.dtype == (torch.float32 if name == "lse" else torch.float16)
        assert_close(found, expected, 2e-6 if name == "lse" else 1e-3, name)


def test_no_tokens_at_all() -> None:
    assert [tuple(t.shape) for t in computed(Case(lengths=()), Case(lengths=()).draw())] == [
        (0, 2, 16),
        (2, 0),
        (0, 2, 16),
        (0, 1, 16),
        (0, 1, 16),
    ]


def test_a_plan_lists_every_tile_once_and_the_longest_work_first() -> None:
    lengths = (100, 0, 1, 64, 300)
    plan = list_tiles(lengths, torch.device("cpu"))
    starts = np.cumsum([0, *lengths]).tolist()
    expected = {rows: {(starts[s], n, first, 0) for s, n in enumerate(lengths) for first in range(0, n, rows)} for rows in plan.queries}
    for rows, tiles in expected.items():
        for table in (plan.queries[rows], plan.keys[rows]):
            real, empty = table.split([len(tiles), len(table) - len(tiles)])
            assert {tuple(row) for row in real.tolist()} == tiles and not empty.any()
            assert len(table) == sum(lengths) // rows + len(lengths)
            assert table.storage_offset() % 4 == 0, "not at a multiple of 16 bytes"
        late_first = plan.queries[rows][: len(tiles), 2]
        assert torch.equal(late_first, late_first.sort(descending=True).values)
        left = plan.keys[rows][: len(tiles), 1] - plan.keys[rows][: len(tiles), 2]
        assert torch.equal(left, left.sort(descending=True).values)
    assert plan.num_tokens == 465


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"size": 257}, "heads of 257"),
        ({"heads": 3, "kv_heads": 2}, "3 heads"),
        ({"window": -1}, "makes no sense"),
        ({"scale": 0.0}, "makes no sense"),
        ({"sinks": (1.0,)}, "sinks"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(change: dict[str, object], message: str) -> None:
    case = replace(Case(lengths=(2,)), **change)
    q, k, v, _ = case.draw()
    with pytest.raises(AssertionError, match=message):
        varlen_attention.varlen_attention_forward(q, k, v, list_tiles(case.lengths, DEVICE), *case.options, sinks_of(case))


def test_tokens_outside_the_plan_are_refused() -> None:
    q, k, v, _ = Case().draw()
    with pytest.raises(AssertionError, match="planned 5"):
        varlen_attention.varlen_attention_forward(q, k, v, list_tiles((5,), DEVICE), 1.0)


RULES = ({}, {"window": 200}, {"softcap": 5.0}, {"softcap": 5.0, "window": 130})
SINKS = {"sinks": (0.0, 1.0, -1.0, 4.0, -4.0, 30.0, -30.0, 2.0)}
# Each is compiled anew: all head sizes, all rules where a head fills its tile, and in other dtypes the simplest rule and the fullest.
ON_THE_GPU = (
    *((size, torch.bfloat16, {}) for size in (80, 96, 192)),
    *((size, torch.bfloat16, rule) for size in (64, 128, 256) for rule in RULES),
    *((size, dtype, rule) for size in (64, 128) for dtype in (torch.float16, torch.float32) for rule in (RULES[0], RULES[-1])),
    (80, torch.float32, RULES[-1]),
    *((64, dtype, SINKS | rule) for dtype in (torch.bfloat16, torch.float32) for rule in (RULES[0], RULES[1])),  # gpt-oss: heads of 64
)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
class TestOnTheGpu:
    """bf16 and the shipped tiles at lengths of several of them; wgmma, pipelining and masks as they really run."""

    LONG = (1, 513, 255, 128, 1000, 64)

    @pytest.mark.parametrize(("size", "dtype", "change"), ON_THE_GPU, ids=str)
    def test_forward_and_gradients_equal_fp64(self, size: int, dtype: torch.dtype, change: dict[str, object]) -> None:
        case = replace(Case(self.LONG, 8, 2, size, dtype=dtype, scale=size**-0.5), **change)
        tensors = case.draw()
        assert_true(case, computed(case, tensors), tensors)

    @pytest.mark.parametrize("size", [64, 128, 256])
    @pytest.mark.parametrize("change", [{}, {"window": 200, "softcap": 5.0}], ids=str)
    def test_bits_depend_on_the_own_sample_alone(self, size: int, change: dict[str, object]) -> None:
        case = replace(Case(self.LONG, 8, 2, size, dtype=torch.bfloat16, scale=size**-0.5), **change)
        tensors = case.draw()
        before = computed(case, tensors)
        parts = [t.split(case.lengths) for t in tensors]
        for index, length in enumerate(case.lengths):
            packed = replace(case, lengths=(37, length, 700))
            dirty = [
                torch.cat(
                    [
                        part[0].new_full((37, *part[0].shape[1:]), math.nan),
                        part[index],
                        part[0].new_full((700, *part[0].shape[1:]), math.inf),
                    ]
                )
                for part in parts
            ]
            after = of_sample(packed, computed(packed, dirty), 1)
            for name, x, y in zip(NAMES, of_sample(case, before, index), after, strict=True):
                assert torch.equal(x, y) and y.isfinite().all(), f"{name} of sample {index}"

    def test_bits_repeat(self) -> None:
        case = Case((2048, 700, 1300), 32, 8, 128, dtype=torch.bfloat16, scale=128**-0.5)
        tensors = case.draw()
        before = computed(case, tensors)
        for _ in range(5):
            assert all(torch.equal(x, y) for x, y in zip(before, computed(case, tensors), strict=True))
