"""Kernels of experts with many adapters: the formula's values and gradients; each job's bits, sums included, are those it has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.expert_cases import Case, Job, Layer, drawn, kernels
from tests.kernels.interpreter import DEVICE, MARKS
from tests.planted import Change, planted
from tests.tolerances import KERNEL, assert_close
from tlora.kernels import experts as plain

pytestmark = MARKS
FP32 = torch.float32
JOBS = (Job((1, 63), 3, seed=1), Job((65, 7), 20, seed=2, scale=0.5), Job((9,), 0, seed=3), Job((64, 2, 11), 16, seed=4))


def check_formula(case: Case, gathers: bool = True, tile_rows: int = 64) -> None:
    y, dx, sums = case.by_formula()
    found_y, found_dx = case.by_kernels(gathers, tile_rows)
    assert_close(found_y, y, KERNEL[case.layer.dtype], "y")
    assert_close(found_dx, dx, KERNEL[case.layer.dtype], "dx")
    for i, expected in enumerate(sums):
        for name, ours, theirs in zip(("dA", "dB"), case.sums(i), expected, strict=True):
            if len(ours):
                assert_close(ours, theirs, KERNEL[case.layer.dtype], f"{name} of job {i}")


@pytest.mark.parametrize(
    ("layer", "gathers", "tile_rows"),
    [
        pytest.param(Layer(), True, 64, id="in rows"),
        pytest.param(Layer(transposed=True, bias=True, inner=80, columns=144), False, 128, id="in columns, biased"),
        pytest.param(Layer(experts=3, slots=1, only=(1,)), True, 64, id="all to one expert"),
        pytest.param(Layer(dtype=torch.float16, experts=9, slots=4), True, 64, id="16 bits"),
    ],
)
def test_values_and_gradients_are_the_formulas(layer: Layer, gathers: bool, tile_rows: int) -> None:
    check_formula(Case(layer, JOBS, padding=5), gathers, tile_rows)


def everything(case: Case) -> list[list[Tensor]]:
    """Of each job y, dx and its sums."""
    y, dx = case.by_kernels()
    tokens = [sum(job.lengths) for job in case.jobs]
    parts = zip(y.split([*tokens, len(y) - sum(tokens)]), dx.split([*tokens, len(y) - sum(tokens)]), strict=True)
    return [[*own, *case.sums(i)] for i, own in enumerate(parts) if i < len(tokens)]


SMALL = Layer(experts=3, inner=32, columns=32)


def check_alone() -> None:
    layer = SMALL
    together = everything(Case(layer, JOBS, padding=3))
    others = everything(Case(layer, JOBS[::-1]))[::-1]
    for i, job in enumerate(JOBS):
        (alone,) = everything(Case(layer, (job,)))
        for given in (together[i], others[i]):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(given, alone, strict=True)), job


def test_together_is_alone_bitwise() -> None:
    check_alone()


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_what_neighbours_hold_changes_no_bit(bad: float) -> None:
    clean, spoilt = (Case(SMALL, JOBS[:2], padding=3) for _ in range(2))
    first = sum(JOBS[0].lengths)
    for values in (spoilt.x_TK, spoilt.dy_TKN):
        values[first:] = bad
    ours, theirs = everything(clean)[0], everything(spoilt)[0]
    assert all(torch.equal(a, b) and bool(b.isfinite().all()) for a, b in zip(ours, theirs, strict=True))


def test_an_expert_that_a_job_does_not_visit_keeps_its_sums() -> None:
    case = Case(Layer(experts=4, inner=32, columns=32, only=(0, 2)), JOBS[:2])
    before = [case.sums(i) for i in range(2)]
    case.by_kernels()
    for i, job in enumerate(JOBS[:2]):
        for old, new in zip(before[i], case.sums(i), strict=True):
            for expert in (1, 3):
                own = slice(expert * job.rank, (expert + 1) * job.rank)
                assert torch.equal(old[own], new[own])
            assert not job.rank or not torch.equal(old[: job.rank], new[: job.rank])


def test_sums_are_the_same_in_any_cut() -> None:
    """A job's samples in two micro-batches, one after the other, over the same sums."""
    layer, job = Layer(experts=3), Job((65, 1, 30), 5, seed=1)
    whole = Case(layer, (job,))
    whole.by_kernels()
    first, second = Case(layer, (replace(job, lengths=(65,)),)), Case(layer, (replace(job, lengths=(1, 30)),))
    for name in ("x_TK", "dy_TKN", "chosen_TK"):
        setattr(first, name, getattr(whole, name)[:65])
        setattr(second, name, getattr(whole, name)[65:])
    second.banks = first.banks
    for part in (first, second):
        part.by_kernels()
    assert all(torch.equal(a, b) for a, b in zip(whole.sums(0), second.sums(0), strict=True))


@pytest.mark.parametrize("dtype", [FP32, torch.float16], ids=str)
def test_slots_are_put_together_as_on_the_plain_path(dtype: torch.dtype) -> None:
    """Routers' weights in fp32, as some families have them; out, and the gradients of both."""
    layer, case = Layer(experts=5, slots=4), Case(Layer(experts=5, slots=4), JOBS[:1])
    routing = kernels.route(case.chosen_TK, kernels.make_batch([JOBS[0].lengths], 64, {}, DEVICE), layer.experts, 64)
    plain_routing = plain.route(case.chosen_TK, [64], layer.experts)
    y_SH, weights_TK, dout_TH = drawn(1, (256, 48), dtype), drawn(2, (64, 4), FP32), drawn(3, (64, 48), dtype)
    results: list[list[Tensor]] = []
    for combine, found in ((kernels.combine, routing), (plain.combine, plain_routing)):
        y, weights = y_SH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        out = combine(y, weights, found)  # type: ignore[operator]
        results.append([out, *torch.autograd.grad((out * dout_TH).sum(), [y, weights])])
    for name, ours, theirs in zip(("out", "dy", "dweights"), *results, strict=True):
        assert_close(ours, theirs, KERNEL[dtype], name)


# -- planted bugs --------------------------------------------------------------------------------------------------------


def unsorted(chosen_TK: Tensor, batch: kernels.ExpertBatch, num_experts: int, tile_rows: int) -> kernels.ExpertRouting:
    """Equal keys lie in an order that depends on how many rows there are."""
    routing = healthy_route(chosen_TK, batch, num_experts, tile_rows)
    order = routing.order_S.clone()
    if len(order) > 2 * sum(JOBS[1].lengths):
        for start, end in zip(routing.cells.tolist(), routing.cells[1:].tolist(), strict=False):
            order[start:end] = order[start:end].flip(0)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=DEVICE))
    return replace(routing, order_S=order, inverse_S=inverse)


def tiles_from_the_first_row(routing: kernels.ExpertRouting) -> None:
    """A tile has rows of two experts."""
    healthy_list_tiles(routing)
    starts = torch.arange(len(routing.tiles), dtype=torch.int32, device=DEVICE) * routing.tile_rows
    firsts = routing.cells[:: routing.num_samples].contiguous()
    routing.tiles[:, 0] = torch.where(starts < len(routing.order_S), torch.searchsorted(firsts, starts, right=True) - 1, -1)
    routing.tiles[:, 1], routing.tiles[:, 2] = starts, len(routing.order_S)


healthy_route, healthy_list_tiles = kernels.route, kernels.list_tiles
BUGS: dict[str, tuple[Change, Callable[[], None]]] = {
    "unstable sort": ((kernels, "route", unsorted), check_alone),
    "a tile with two experts": ((kernels, "list_tiles", tiles_from_the_first_row), lambda: check_formula(Case(Layer(), JOBS))),
}


@pytest.mark.parametrize(("bug", "caught_by"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(bug: Change, caught_by: Callable[[], None]) -> None:
    with planted(bug), pytest.raises(AssertionError):
        caught_by()
