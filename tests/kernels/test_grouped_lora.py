"""`grouped_lora_linear` against the dense fp64 oracle of `multi_lora_linear` and against the loop; nothing of a neighbour gets through."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.test_multi_lora import DTYPES, Case, Found, make_case, oracle
from tests.kernels.test_multi_lora import run as run_by_segment
from tests.tolerances import KERNEL, assert_close
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.grouped_lora import ChunkedJobs, chunk_jobs, grouped_lora_linear, make_slots
from tlora.kernels.multi_lora import LoraWeights

SIZE = 16
MIXES = {
    "one job": ((1,), (3,)),
    "equal ranks": ((2, 1, 3), (16, 16, 16)),
    "ranks 1 to 256": ((2, 1, 3, 1), (1, 256, 17, 64)),
    "a job without an adapter": ((2, 1, 3), (4, 0, 9)),
    "only the last has one": ((1, 1, 2), (0, 0, 8)),
    "a chunk each": ((1, 1, 1), (8, 2, 5)),
}


def case_of(counts: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Case:
    return make_case([count * SIZE for count in counts], list(ranks), dtype, **options)


def run(case: Case, counts: tuple[int, ...], x_needs_grad: bool = True) -> Found:
    """What the operation gives. Gradient sums start at one, since they are added to, never written over."""
    sums = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    lora = LoraWeights(case.a, case.b, torch.ones_like(case.a, dtype=sums), torch.ones_like(case.b, dtype=sums), case.module_key)
    x = case.x.clone().requires_grad_(x_needs_grad)
    anchor = None if x_needs_grad else torch.zeros((), requires_grad=True)
    slots = make_slots(ChunkedJobs(SIZE, counts), case.segments, sums, x.device)
    y = grouped_lora_linear(x, lambda: FrozenLinear(PlainWeight(case.weight), case.bias), lora, slots, case.keys, anchor)
    y.backward(case.dy)
    return Found(y.detach(), torch.empty(0) if x.grad is None else x.grad, lora.da_RK - 1, lora.db_RN - 1)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("counts", "ranks"), MIXES.values(), ids=MIXES)
def test_forward_and_gradients(counts: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, dropout: float) -> None:
    case = case_of(counts, ranks, dtype, dropout=dropout)
    found, true = run(case, counts), oracle(case)
    for name in ("y", "dx", "da", "db"):
        assert_close(getattr(found, name), getattr(true, name), KERNEL[dtype], name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equal_to_the_loop_in_fp64(dropout: float) -> None:
    """With scales that are no powers of two."""
    case = case_of((2, 1, 3), (4, 64, 17), torch.float64, dropout=dropout)
    case = replace(case, segments=tuple(replace(s, scale=s.scale / 3) for s in case.segments))
    found, expected = run(case, (2, 1, 3)), run_by_segment(case)
    for name in ("y", "dx", "da", "db"):
        assert_close(getattr(found, name), getattr(expected, name), 1e-12, name)


def test_every_job_drops_out() -> None:
    case = case_of((2, 1), (4, 9), torch.float64, dropout=0.25)
    case = replace(case, segments=tuple(replace(s, dropout=0.25 + i / 4) for i, s in enumerate(case.segments)))
    found, true = run(case, (2, 1)), oracle(case)
    for name in ("y", "dx", "da", "db"):
        assert_close(getattr(found, name), getattr(true, name), KERNEL[torch.float64], name)


def test_a_first_layer_needs_no_gradient_of_x() -> None:
    case = case_of((2, 1), (4, 9), torch.float64)
    found, true = run(case, (2, 1), x_needs_grad=False), oracle(case)
    assert_close(found.da, true.da, KERNEL[torch.float64], "da")
    assert_close(found.db, true.db, KERNEL[torch.float64], "db")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_a_neighbour_holds_changes_no_bit(bad: float, dropout: float) -> None:
    """Neither its x and gradients nor its adapter; ranks differ, so that rows are filled up next to its own."""
    counts, case = (2, 1, 3), case_of((2, 1, 3), (4, 64, 17), torch.float32, dropout=dropout)
    middle, poisoned = case.segments[1], replace(case, x=case.x.clone(), dy=case.dy.clone(), a=case.a.clone(), b=case.b.clone())
    for tokens in (poisoned.x, poisoned.dy):
        tokens[middle.t0 : middle.t1] = bad
    for rows in (poisoned.a, poisoned.b):
        rows[middle.r0 : middle.r1] = bad
    healthy, beside = run(case, counts), run(poisoned, counts)
    for first, second in ((0, 0), (2, 2)):
        tokens, rows = slice(case.segments[first].t0, case.segments[second].t1), slice(case.segments[first].r0, case.segments[second].r1)
        assert torch.equal(healthy.y[tokens], beside.y[tokens]) and torch.equal(healthy.dx[tokens], beside.dx[tokens])
        assert torch.equal(healthy.da[rows], beside.da[rows]) and torch.equal(healthy.db[rows], beside.db[rows])
    assert not bool(beside.y[middle.t0 : middle.t1].isfinite().all())


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_calls_do_not_depend_on_jobs() -> None:
    found: list[Counter[str]] = []
    for jobs in (2, 9):
        case = case_of((2,) * jobs, (8, 16) + (16,) * (jobs - 2), torch.float32, dropout=0.3)
        with Calls() as calls:
            run(case, (2,) * jobs)
        found.append(calls.found)
    assert found[0] == found[1] and not any("_local_scalar_dense" in name for name in found[0])


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_chunks_hold_all_tokens_and_little_more(tokens: list[int]) -> None:
    chunks = chunk_jobs(tokens)
    assert all(0 <= count * chunks.size - own < chunks.size for own, count in zip(tokens, chunks.counts, strict=True))
    assert chunks.num_tokens <= max(1.0625 * sum(tokens), sum(tokens) + 15 * len(tokens))
    assert len(tokens) > 1 or chunks.counts == (1,)


def test_chunks_are_as_large_as_little_padding_allows() -> None:
    assert chunk_jobs([1024] * 8).size == 1024 and chunk_jobs([1000, 1050, 980, 1010] * 2).size == 128
    assert chunk_jobs([3] * 8) == ChunkedJobs(16, (1,) * 8)
