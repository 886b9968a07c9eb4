"""`multi_lora_linear`: forward and every gradient against a dense oracle in fp64, computed live, one token at a time in meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tolerances import KERNEL, assert_close
from tlora.kernels.dropout import keep_mask
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.multi_lora import LoraWeights, multi_lora_linear
from tlora.kernels.reference import Segment, Segments, check_segments

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """Operands of one call, in its dtype; `dy` is the gradient that comes back from above."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    dy: Tensor
    segments: Segments
    keys: Tensor | None = None
    module_key: int = 77


@dataclass(frozen=True)
class Found:
    y: Tensor
    dx: Tensor
    da: Tensor
    db: Tensor


def make_case(
    lengths: list[int],
    ranks: list[int],
    dtype: torch.dtype,
    k: int = 24,
    n: int = 40,
    dropout: float = 0.0,
    gaps: int = 0,
    bias: bool = True,
) -> Case:
    """Segments one after another, each after `gaps` tokens of no segment; rank rows at multiples of 16."""
    segments: list[Segment] = []
    t, r = 0, 0
    for i, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        segments.append(Segment(t + gaps, t + gaps + length, r, r + rank, 0.5 + i, dropout if i % 2 == 0 else 0.0))
        t, r = t + gaps + length, r + -(-rank // 16) * 16
    t += gaps
    g = torch.Generator().manual_seed(t + 7 * r)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    keys = torch.randint(-(2**31), 2**31, (t,), generator=g).int() if dropout else None
    a, b = draw(r, k) / math.sqrt(k), draw(r, n) / 4
    return Case(draw(t, k), draw(n, k) / math.sqrt(k), draw(n) if bias else None, a, b, draw(t, n), tuple(segments), keys)


def run(case: Case, x_needs_grad: bool = True) -> Found:
    """What the operation gives. Gradient sums start at one, since they are added to, never written over."""
    sums = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    lora = LoraWeights(case.a, case.b, torch.ones_like(case.a, dtype=sums), torch.ones_like(case.b, dtype=sums), case.module_key)
    x = case.x.clone().requires_grad_(x_needs_grad)
    anchor = None if x_needs_grad else torch.zeros((), requires_grad=True)
    y = multi_lora_linear(x, lambda: FrozenLinear(PlainWeight(case.weight), case.bias), lora, case.segments, case.keys, anchor)
    y.backward(case.dy)
    dx = torch.empty(0) if x.grad is None else x.grad
    return Found(y.detach(), dx, lora.da_RK - 1, lora.db_RN - 1)


def oracle(case: Case) -> Found:
    """Dense fp64 with torch's own autograd: each token's own weight matrix is W + scale * B_s A_s."""
    x, a, b = (t.double().requires_grad_() for t in (case.x, case.a, case.b))
    y = x @ case.weight.double().t() + (case.bias.double() if case.bias is not None else 0)
    parts: list[Tensor] = []
    t = 0
    for s in case.segments:
        parts.append(y[t : s.t0])
        rows = x[s.t0 : s.t1]
        if s.dropout and case.keys is not None:
            rows = rows * keep_mask(case.keys[s.t0 : s.t1], case.module_key, rows.shape[1], s.dropout) / (1 - s.dropout)
        parts.append(y[s.t0 : s.t1] + rows @ (s.scale * b[s.r0 : s.r1].t() @ a[s.r0 : s.r1]).t())
        t = s.t1
    out = torch.cat([*parts, y[t:]])
    out.backward(case.dy.double())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (x, a, b)]
    return Found(out.detach(), *grads)


def check_case(case: Case) -> None:
    check_segments(case.segments, len(case.x), len(case.a))
    found, true, bound = run(case), oracle(case), KERNEL[case.x.dtype]
    for name in ("y", "dx", "da", "db"):
        assert_close(getattr(found, name), getattr(true, name), bound, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        ([5], [3]),
        ([1], [1]),
        ([1, 1, 1], [1, 2, 3]),
        ([7, 0, 4], [4, 8, 2]),
        ([3, 65], [256, 1]),
        ([17, 1, 31], [16, 17, 15]),
        ([9, 9], [0, 5]),
    ],
    ids=str,
)
def test_equals_the_dense_oracle(lengths: list[int], ranks: list[int], dtype: torch.dtype) -> None:
    check_case(make_case(lengths, ranks, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (13, 7), (64, 3), (5, 131), (256, 256)])
def test_odd_shapes(k: int, n: int, dtype: torch.dtype) -> None:
    check_case(make_case([11, 4], [3, 9], dtype, k=k, n=n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_acts_on_the_adapters_input_alone(dtype: torch.dtype) -> None:
    check_case(make_case([20, 13, 9], [4, 8, 16], dtype, dropout=0.3, gaps=2))


@pytest.mark.parametrize("bias", [True, False])
def test_tokens_of_no_segment_see_the_base_alone(bias: bool) -> None:
    case = make_case([6, 5], [4, 3], torch.float32, gaps=3, bias=bias)
    check_case(case)
    bare = torch.nn.functional.linear(case.x, case.weight, case.bias)
    found = run(case).y
    free = torch.ones(len(case.x), dtype=torch.bool)
    for s in case.segments:
        free[s.t0 : s.t1] = False
    assert free.sum() == 9 and torch.equal(found[free], bare[free])
    assert not torch.equal(found[~free], bare[~free])


def test_no_segment_at_all_is_the_base() -> None:
    case = replace(make_case([6], [4], torch.float32), segments=())
    found = run(case)
    assert torch.equal(found.y, torch.nn.functional.linear(case.x, case.weight, case.bias)) and not found.da.any() and not found.db.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_anchor_reaches_the_adapters_of_a_first_layer(dtype: torch.dtype) -> None:
    case = make_case([6, 5], [4, 3], dtype, dropout=0.2)
    with_dx, without = run(case), run(case, x_needs_grad=False)
    assert without.dx.numel() == 0
    assert torch.equal(with_dx.da, without.da) and torch.equal(with_dx.db, without.db)


def test_without_an_anchor_nothing_is_learnt_from_an_x_without_gradient() -> None:
    case = make_case([3], [2], torch.float32)
    lora = LoraWeights(case.a, case.b, torch.zeros_like(case.a), torch.zeros_like(case.b))
    assert not multi_lora_linear(case.x, lambda: FrozenLinear(PlainWeight(case.weight), case.bias), lora, case.segments).requires_grad


def test_the_base_gets_no_gradient() -> None:
    case = make_case([3], [2], torch.float32)
    weight = case.weight.clone().requires_grad_()
    lora = LoraWeights(case.a, case.b, torch.zeros_like(case.a), torch.zeros_like(case.b))
    x = case.x.clone().requires_grad_()
    multi_lora_linear(x, lambda: FrozenLinear(PlainWeight(weight)), lora, case.segments).sum().backward()
    assert weight.grad is None and x.grad is not None


def test_bf16_sums_its_gradients_in_fp32() -> None:
    """A thousand small gradients must all arrive: in bf16, adding 1/256 to one would change nothing."""
    case = make_case([4], [2], torch.bfloat16)
    lora = LoraWeights(case.a, case.b, torch.ones_like(case.a, dtype=torch.float32), torch.ones_like(case.b, dtype=torch.float32))
    for _ in range(100):
        x = case.x.clone().requires_grad_()
        multi_lora_linear(x, lambda: FrozenLinear(PlainWeight(case.weight)), lora, case.segments).backward(case.dy * 2**-10)
    assert_close(lora.db_RN - 1, oracle(replace(case, bias=None)).db * 100 * 2**-10, KERNEL[torch.bfloat16], "db")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("where", ["x", "dy", "a", "b"])
def test_a_bad_neighbour_leaks_nowhere(bad: float, where: str) -> None:
    """Bitwise: rows of the other segments in y and dx, and the others' rows of da and db, in each dtype."""
    for dtype in DTYPES[1:]:
        good = make_case([9, 6, 12], [5, 16, 3], dtype, dropout=0.2, gaps=1)
        poisoned = getattr(good, where).clone()
        s = good.segments[1]
        start, stop = (s.t0, s.t1) if where in ("x", "dy") else (s.r0, s.r1)
        poisoned[start:stop] = bad
        expected, found = run(good), run(replace(good, **{where: poisoned}))
        for name, start, stop in (("y", s.t0, s.t1), ("dx", s.t0, s.t1), ("da", s.r0, s.r1), ("db", s.r0, s.r1)):
            others = torch.ones(len(getattr(good, "x" if name in ("y", "dx") else "a")), dtype=torch.bool)
            others[start:stop] = False
            assert torch.equal(getattr(found, name)[others], getattr(expected, name)[others]), f"{bad} in {where} reached {name}"


def test_rows_that_nobody_owns_are_neither_read_nor_written() -> None:
    """A slot's padding rows and free slots may hold anything, NaN too, and their sums stay as they were."""
    case = make_case([8, 5], [3, 5], torch.float32)
    owned = torch.zeros(len(case.a), dtype=torch.bool)
    for s in case.segments:
        owned[s.r0 : s.r1] = True
    a, b = case.a.clone(), case.b.clone()
    a[~owned], b[~owned] = math.nan, math.nan
    found, expected = run(replace(case, a=a, b=b)), run(case)
    for name in ("y", "dx", "da", "db"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert not found.da[~owned].any() and not found.db[~owned].any()


def mix(kind: str, count: int, rng: np.random.Generator) -> list[int]:
    """Segment lengths as they come in practice."""
    if kind == "identical":
        return [8] * count
    if kind == "distinct":
        return list(range(1, count + 1))
    if kind == "uniform":
        return [int(n) for n in rng.integers(1, 33, count)]
    if kind == "zipf":
        return [int(min(n, 64)) for n in rng.zipf(1.5, count)]
    return [64] + [1] * (count - 1)  # skewed


@pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "zipf", "skewed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixes_of_segment_lengths(kind: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    check_case(make_case(mix(kind, 9, rng), [int(r) for r in rng.integers(1, 40, 9)], dtype, dropout=0.1))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6), st.integers(0, 2), st.sampled_from([0.0, 0.25]))
def test_any_segments(drawn: list[tuple[int, int]], gaps: int, dropout: float) -> None:
    check_case(make_case([n for n, _ in drawn], [r for _, r in drawn], torch.float64, k=6, n=9, dropout=dropout, gaps=gaps))


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ((Segment(0, 4, 0, 1, 1.0), Segment(3, 5, 0, 1, 1.0)), "3:5 overlap"),
        ((Segment(0, 9, 0, 1, 1.0),), "0:9 overlap, or leave"),
        ((Segment(4, 2, 0, 1, 1.0),), "4:2"),
        ((Segment(0, 2, 3, 9, 1.0),), "rows 3:9 leave"),
    ],
)
def test_check_segments_names_the_wrong_one(segments: Segments, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_segments(segments, num_tokens=5, num_rows=8)
    x, weight, a, b = torch.ones(5, 3), torch.ones(4, 3), torch.ones(8, 3), torch.ones(8, 4)
    with pytest.raises(AssertionError, match=words):
        multi_lora_linear(x, lambda: FrozenLinear(PlainWeight(weight)), LoraWeights(a, b, torch.zeros(8, 3), torch.zeros(8, 4)), segments)
