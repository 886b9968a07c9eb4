"""The fused linear against `reference.py` in fp64, and the bits of one job, which nobody else may change."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, MARKS
from tests.kernels.linear_cases import Bank, Base, Bits, Job, bits_of, check_case, fused_linear, make_batch, run_kernels
from tlora.kernels.dropout import keep_mask

pytestmark = MARKS
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]  # the interpreter knows fp32 alone
QKV = (48, 32, 32)
# Of these `tests/gpu/test_linear_kernels.py` has their like at real sizes; here each would have a GPU's compiler make kernels of its own.
MORE_SHAPES = [((48,), (8,), 0.0), ((48,), (100,), 0.0), (QKV, (8, 8, 8), 0.3), (QKV, (40, 40, 40), 0.0), (QKV, (100, 0, 7), 0.3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("in_features", "widths", "bias"),
    in_every_run([(64, (48,), True), (64, (64,), False), (16, (32, 32), False), (80, (32, 48), True), (48, QKV, False)], 3, 4),
    ids=str,
)
def test_equals_the_reference_in_fp64(in_features: int, widths: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    """Three jobs, one of a single token and one over several tiles, between tokens of no run."""
    m = len(widths)
    jobs = [Job((30, 20), (8,) * m, seed=1, gap=3), Job((1,), (3,) * m, seed=2, scale=0.25), Job((70, 7, 5), (20,) * m, seed=3, gap=9)]
    check_case(Base(in_features, widths, dtype, bias), jobs, tail=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ranks", "dropout"),
    in_every_run([((16, 17, 15), 0.0), ((0, 32, 0), 0.3), ((33, 64, 2), 0.0), ((100, 0, 65), 0.3), ((256, 0, 256), 0.0)], 0, 3),
    ids=str,
)
def test_ranks_from_0_to_256(ranks: tuple[int, ...], dtype: torch.dtype, dropout: float) -> None:
    """Each rank beside a small one, whose padding to the largest one's width must not count."""
    jobs = [Job((17, 40), ranks, dropout, seed=1), Job((12,), (5, 5, 5), seed=2), Job((6,), ranks[::-1], dropout / 2, seed=3, gap=1)]
    check_case(Base(32, QKV, dtype), jobs, tail=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", in_every_run([1, 63, 64, 65, 128, 129], 2, 5))
def test_token_counts_around_the_tiles(num_tokens: int, dtype: torch.dtype) -> None:
    check_case(Base(32, (32, 16), dtype), [Job((num_tokens,), (8, 8), seed=1)])


def test_many_runs_of_one_token() -> None:
    check_case(Base(32, (32,)), [Job((1,), (4 + i % 9,), seed=i, gap=int(i % 4 == 0), dropout=0.2 * (i % 2)) for i in range(20)])


@pytest.mark.parametrize("bias", in_every_run([False, True], 1), ids=["", "bias"])
def test_no_run_at_all_is_the_base(bias: bool) -> None:
    check_case(Base(32, (32, 16), bias=bias), [], tail=130)


def test_a_group_before_which_nothing_learns_gives_the_same_sums_and_no_dx() -> None:
    base, job = Base(32, (32, 16)), Job((70, 5), (8, 20), 0.1, seed=1)
    passing, first = Bank(base, [job]), Bank(base, [job])
    y, dx = run_kernels(base, make_batch(base, [job], passing.slots))
    base.group = replace(base.group, passes_back=False)
    y_first, dx_first = run_kernels(base, make_batch(base, [job], first.slots))
    assert torch.equal(y, y_first) and bool(dx.any()) and not bool(dx_first.any()) and dx_first.shape == dx.shape
    for name in ("da", "db"):
        sums, sums_first = passing.slots[0].rows(name), first.slots[0].rows(name)
        assert all(bool(s.any()) and torch.equal(s, t) for s, t in zip(sums, sums_first, strict=True))


@pytest.mark.parametrize("dropout", in_every_run([0.01, 0.5, 0.9], 1))
def test_dropout_has_the_reference_mask_forward_and_backward(dropout: float) -> None:
    """Through A = B = 1 and W = 0, y is the kept x, and dx the kept dy: the mask itself, of each linear its own."""
    base = Base(16, (16, 16))
    base.weight.zero_()
    job = Job((40, 30), (16, 16), dropout, seed=3, scale=1.0)
    (slot,) = Bank(base, [job]).slots
    for rows in slot.rows("a") + slot.rows("b"):
        rows.copy_(torch.eye(16))
    batch = make_batch(base, [job], [slot])
    masks = [keep_mask(batch.keys, int(key), 16, dropout) for key in base.module_keys]
    y, dx = run_kernels(base, batch)
    assert torch.equal(y != 0, torch.cat(masks, 1)) and not torch.equal(*masks)
    alone = batch.dy.clone()
    alone[:, 16:] = 0
    (slot,) = Bank(base, [job]).slots
    for rows in slot.rows("a") + slot.rows("b"):
        rows.copy_(torch.eye(16))
    batch = make_batch(base, [job], [slot])
    batch.dy.copy_(alone)
    _, dx = run_kernels(base, batch)
    assert torch.equal(dx != 0, masks[0])


def _unmix(h: int) -> int:
    """The inverse of `dropout._mix_numpy`."""
    h ^= h >> 16
    h = h * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
    h ^= (h >> 15) ^ (h >> 30)
    h = h * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
    return h ^ (h >> 16)


@pytest.mark.parametrize("dropout", in_every_run([0.1, 0.3, 0.9], 1))
def test_dropout_draws_the_line_where_the_reference_does(dropout: float) -> None:
    """Keys made so that the first feature's hash lies on the threshold, and near it: a probability in fp32 moves it by up to 64."""
    base = Base(16, (16,))
    line = int(dropout * 2**31)
    bits = [line + offset for offset in (-1000, -60, -20, -3, -2, -1, 0, 1, 2, 20, 60, 1000)]
    key = int(base.module_keys[0])
    keys = np.array([_unmix(_unmix(b)) ^ key for b in bits], np.uint32).view(np.int32)  # the first feature's own hash is 0
    base.weight.zero_()
    job = Job((len(bits),), (16,), dropout, scale=1.0)
    (slot,) = Bank(base, [job]).slots
    for rows in slot.rows("a") + slot.rows("b"):
        rows.copy_(torch.eye(16))
    batch = make_batch(base, [job], [slot])
    batch.keys.copy_(torch.from_numpy(keys))
    mask = keep_mask(batch.keys, key, 16, dropout)
    assert mask[:, 0].tolist() == [b >= line for b in bits]
    y, _ = run_kernels(base, batch)
    assert torch.equal(y != 0, mask)


# -- one job's bits ----------------------------------------------------------------------------------------------------

NEIGHBOURS = {
    "another place in the tile": ([], 37, []),
    "another tile": ([], 129, []),
    "one neighbour of larger rank": ([], 0, [Job((9,), (33, 0, 64), seed=8)]),
    "many of larger rank": ([Job((5, 3), (256, 0, 65), seed=7), Job((1,), (2, 2, 2), seed=9)], 2, [Job((7,), (33, 65, 2), seed=8)]),
    "a neighbour with dropout": ([Job((30,), (8, 8, 8), 0.5, seed=7)], 0, []),
    "one of NaN": ([Job((41,), (8, 8, 8), seed=7, spoilt=math.nan)], 0, []),
    "NaN and infinity on each side": (
        [Job((3,), (8, 8, 8), 0.3, seed=7, spoilt=math.inf)],
        0,
        [Job((5,), (64, 64, 64), seed=8, spoilt=math.nan), Job((5,), (4, 4, 4), seed=9, spoilt=3e38)],
    ),
}


def among(name: str, job: Job, members: int) -> tuple[list[Job], int]:
    before, gap, behind = NEIGHBOURS[name]
    cut = [Job(**{**vars(n), "ranks": n.ranks[:members]}) for n in (*before, *behind)]
    mine = Job(**{**vars(job), "gap": gap})
    return [*cut[: len(before)], mine, *cut[len(before) :]], len(before)


@functools.cache
def _bits_alone(in_features: int, widths: tuple[int, ...], dtype: torch.dtype, job: Job) -> Bits:
    return bits_of(Base(in_features, widths, dtype), [job], 0)


def assert_same_bits(found: Bits, expected: Bits, where: str) -> None:
    assert not found.differences(expected), f"{where}: {found.differences(expected)} elements differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", in_every_run(NEIGHBOURS, 0, 3, 6))
@pytest.mark.parametrize(
    ("widths", "ranks", "dropout"),
    [
        pytest.param((48,), (8,), 0.3, marks=pytest.mark.slow),
        (QKV, (8, 0, 20), 0.0),
        *(pytest.param(*shape, marks=pytest.mark.soak) for shape in MORE_SHAPES if not ON_GPU),
    ],
    ids=str,
)
def test_bits_are_the_same_whoever_is_beside(
    widths: tuple[int, ...], ranks: tuple[int, ...], dropout: float, name: str, dtype: torch.dtype
) -> None:
    """Bitwise y, dx, dA and dB: alone, elsewhere, among others, and among NaN."""
    base, job = Base(80, widths, dtype), Job((33, 1, 20), ranks, dropout, seed=1)
    jobs, mine = among(name, job, len(widths))
    assert_same_bits(bits_of(base, jobs, mine, tail=70), _bits_alone(80, widths, dtype, job), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("cut", "dropout"), [(3, 0.3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 0.0), (1, 0.3), (3, 0.0)))]
)
def test_sums_over_two_micro_batches_are_the_sums_over_one(cut: int, dropout: float, dtype: torch.dtype) -> None:
    """Wherever a global batch is cut between samples, bitwise, with other neighbours in each part."""
    base, lengths, ranks = Base(48, QKV, dtype), (33, 70, 1, 40), (8, 17, 0)
    whole = bits_of(base, [Job(lengths, ranks, dropout, seed=1)], 0)
    other = Job((11,), (64, 64, 64), seed=9)
    beside, mine = Bank(base, [other, Job(lengths, ranks, seed=1)]).slots
    ys: list[Tensor] = []
    for part, first, gap in ((lengths[:cut], 0, 5), (lengths[cut:], cut, 0)):
        batch = make_batch(base, [other, Job(part, ranks, dropout, seed=1, gap=gap)], [beside, mine], first=[0, first])
        ys.append(run_kernels(base, batch)[0][slice(*batch.spans[1])])
    assert_same_bits(Bits(torch.cat(ys), whole.dx, tuple(mine.rows("da") + mine.rows("db"))), whole, f"cut after {cut}")


def test_rows_of_a_wider_x_are_read_in_place() -> None:
    """x may be a part of a wider tensor, whose other columns are nobody's business."""
    base, job = Base(48, (32,)), Job((70,), (8,), seed=1)
    found: list[tuple[Tensor, ...]] = []
    for wide in (False, True):
        (slot,) = Bank(base, [job]).slots
        batch = make_batch(base, [job], [slot])
        if wide:
            x = torch.full((70, 80), math.nan, device=DEVICE)
            x[:, 16:64] = batch.x
            batch = type(batch)(x[:, 16:64], batch.dy, batch.spans, batch.keys, batch.tables)
        found.append((*run_kernels(base, batch), *slot.rows("da"), *slot.rows("db")))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_widths_off_16_are_refused() -> None:
    with pytest.raises(AssertionError, match="multiples of 16"):
        fused_linear.make_group(0, (24,), 16, DEVICE)


@pytest.mark.soak
@pytest.mark.skipif(ON_GPU, reason="kernels of their own for each batch that is drawn: minutes of a GPU's compiler")
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 90), min_size=1, max_size=4),
            st.tuples(*[st.integers(0, 130)] * 3),
            st.sampled_from([0.0, 0.0, 0.4]),
            st.integers(0, 70),
        ),
        max_size=5,
    ),
    st.integers(1, 3),
    st.integers(0, 70),
)
def test_any_batch(drawn: list[tuple[list[int], tuple[int, int, int], float, int]], members: int, tail: int) -> None:
    jobs = [Job(tuple(lengths), ranks[:members], p, seed=i, gap=gap) for i, (lengths, ranks, p, gap) in enumerate(drawn)]
    check_case(Base(48, QKV[:members]), jobs, tail + (not jobs))
