"""The fused AdamW against `adamw_step` in fp64 and fp32: one adapter's chunks, its verdicts, and nobody else's bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, MARKS, interpreted, thinned
from tests.tolerances import assert_close
from tlora.adapters.adamw import adamw_step
from tlora.adapters.layout import AdapterLayout, AdapterShape
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig

pytest.importorskip("triton")
with interpreted():
    from tlora.kernels import bank_chunks, fused_adamw, triton_adamw
    from tlora.kernels.bank_chunks import BankRun
    from tlora.kernels.fused_adamw import FlatState, StepBuffers, StepRule

pytestmark = MARKS
COUNTS = (16 * 20, 16 * 33, 7 * 5, 3 * 4096 + 1, 4096)
"""Elements of five runs: less than a chunk, of odd length, several chunks and one over, and exactly one."""

RULE = StepRule(1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, 0)
PROVEN, OPEN, REFUSED = (verdict.value for verdict in (triton_adamw.PROVEN, triton_adamw.OPEN, triton_adamw.REFUSED))


@dataclass
class Rows:
    """Weights and sums of some runs, each inside a larger tensor whose other elements are another adapter's."""

    weights: list[Tensor]
    sums: list[Tensor]

    @classmethod
    def make(cls, counts: Sequence[int], weight_dtype: torch.dtype, dtype: torch.dtype) -> Rows:
        full = [torch.full((n + 64,), 7.0, dtype=d, device=DEVICE) for d in (weight_dtype, dtype) for n in counts]
        return cls(full[: len(counts)], full[len(counts) :])

    def inner(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t[32:-32] for t in tensors]

    def outside_is_untouched(self) -> bool:
        return all(bool((t[:32] == 7).all()) and bool((t[-32:] == 7).all()) for t in self.weights + self.sums)


class World:
    """One adapter stepped by the kernels, beside the same adapter stepped by `adamw_step`."""

    def __init__(self, counts: Sequence[int] = COUNTS, dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype | None = None) -> None:
        self.dtype, self.weight_dtype = dtype, weight_dtype or dtype
        self.numel = sum(counts)
        draw = torch.Generator().manual_seed(1)
        params, exp_avg = (torch.randn(self.numel, generator=draw, dtype=torch.float64) * 0.1 for _ in range(2))
        exp_avg_sq = torch.rand(self.numel, generator=draw, dtype=torch.float64) * 0.01
        layout = AdapterLayout((AdapterShape("m", 1, self.numel, 0, 1.0),))
        self.state = AdapterState(layout, *(t.to(DEVICE, dtype) for t in (params, exp_avg, exp_avg_sq)))
        self.rows = Rows.make(counts, self.weight_dtype, dtype)
        at = zip(self.rows.inner(self.rows.weights), self.rows.inner(self.rows.sums), counts, strict=True)
        runs = [BankRun(w.data_ptr(), s.data_ptr(), n) for w, s, n in at]
        table, self.aligned = bank_chunks.chunk_table(runs, self.weight_dtype.itemsize, dtype.itemsize)
        assert len(table) == bank_chunks.num_chunks(counts)
        self.buffers = StepBuffers.empty(len(table), dtype, DEVICE)
        self.buffers.chunks_C4.copy_(torch.from_numpy(table))
        self.note()
        self.outcome: list[float] = []

    @property
    def flat(self) -> FlatState:
        return FlatState(self.state.params, self.state.exp_avg, self.state.exp_avg_sq)

    def note(self) -> None:
        fused_adamw.note_largest(self.flat, self.buffers.largest_3C)

    def step(self, grad: Tensor, rule: StepRule = RULE) -> bool:
        for into, part in zip(self.rows.inner(self.rows.sums), grad.split([t.numel() - 64 for t in self.rows.sums]), strict=True):
            into.copy_(part)
        scalars = torch.tensor(fused_adamw.scalars_of(rule, self.dtype, self.weight_dtype), dtype=torch.float64, device=DEVICE)
        outcome = torch.full((fused_adamw.NUM_OUTCOMES,), math.nan, dtype=torch.float64, device=DEVICE)
        like = torch.empty(0, dtype=self.weight_dtype, device=DEVICE)
        fused_adamw.launch_measure(self.flat, self.buffers, self.aligned, scalars, outcome)
        fused_adamw.launch_update(self.flat, self.buffers, self.aligned, like, scalars, outcome)
        self.outcome = outcome.tolist()
        assert self.rows.outside_is_untouched(), "another adapter's rows have changed"
        assert not any(bool(t.any()) for t in self.rows.inner(self.rows.sums)), "the sums are not zero"
        return fused_adamw.applied(self.outcome)

    @property
    def weights(self) -> Tensor:
        return torch.cat(self.rows.inner(self.rows.weights))

    @property
    def verdict(self) -> float:
        return self.outcome[triton_adamw.VERDICT.value]

    def gradient(self, seed: int, size: float = 1.0) -> Tensor:
        made = torch.randn(self.numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size
        return made.to(DEVICE, self.dtype)


def config_of(rule: StepRule) -> TrainConfig:
    return TrainConfig.model_construct(  # an order may not have 1e300
        learning_rate=rule.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=rule.weight_decay,
        adam_beta1=rule.beta1,
        adam_beta2=rule.beta2,
        adam_epsilon=rule.epsilon,
        max_grad_norm=rule.max_norm,
    )


def double(state: AdapterState) -> AdapterState:
    copy = state.clone()
    return replace(copy, params=copy.params.double(), exp_avg=copy.exp_avg.double(), exp_avg_sq=copy.exp_avg_sq.double())


@pytest.mark.parametrize("dtype", in_every_run([torch.float32, torch.float64], 0), ids=str)
@pytest.mark.parametrize(
    "change",
    in_every_run(
        [
            {},
            {"max_norm": 0.0},
            {"max_norm": 1e-3, "weight_decay": 0.0},
            {"beta1": 0.0, "beta2": 0.0, "epsilon": 1e-3},
            {"beta1": 0.5, "beta2": 0.95, "updates": 400},
            {"beta1": 0.3, "learning_rate": 0.0},
        ],
        *(0, 3, 4),
    ),
    ids=str,
)
def test_three_steps_equal_the_reference_in_fp64(change: dict[str, float], dtype: torch.dtype) -> None:
    world, rule = World(dtype=dtype), replace(RULE, **change)
    true = double(world.state)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    for step, size in enumerate((1.0, 1e-3, 50.0)):
        rule = replace(rule, updates=int(change.get("updates", 0)) + step)
        true.updates = rule.updates
        grad = world.gradient(step, size)
        assert world.step(grad, rule) and world.verdict == PROVEN
        stats = adamw_step(true, grad.double(), config_of(rule), 9)
        assert math.isclose(fused_adamw.norm_of(world.outcome), stats.grad_norm, rel_tol=1e-12)
        for name in ("params", "exp_avg", "exp_avg_sq"):
            assert_close(getattr(world.state, name), getattr(true, name), bound, f"{name} after step {step}")
        assert torch.equal(world.weights, world.state.params)
        largest = [t.abs().max() for t in (world.state.params, world.state.exp_avg, world.state.exp_avg_sq)]
        assert torch.equal(world.buffers.largest_3C.amax(1), torch.stack(largest))


def test_a_gradient_at_the_limit_of_clipping_is_clipped_as_torch_does() -> None:
    world = World(dtype=torch.float64)
    rule = replace(RULE, beta1=0.0, beta2=0.0, epsilon=1.0, weight_decay=0.0)
    true, grad = double(world.state), world.gradient(0)
    grad *= (1 - 5e-7) / grad.norm()
    before = true.params.clone()
    assert world.step(grad, rule)
    adamw_step(true, grad, config_of(rule), 9)
    assert_close(world.state.params - before, true.params - before, 1e-11)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bank_gets_the_weights_in_its_own_dtype(weight_dtype: torch.dtype) -> None:
    world = World(weight_dtype=weight_dtype)
    assert world.step(world.gradient(0))
    rounded = world.state.params.to(weight_dtype)
    if DEVICE.type == "cpu" and weight_dtype == torch.bfloat16:  # the interpreter cuts bf16 instead of rounding it
        assert_close(world.weights, rounded, 2**-7)
    else:
        assert torch.equal(world.weights, rounded)


@pytest.mark.parametrize(
    ("at", "bad", "max_norm"),
    thinned(
        product([0, 4, -1], [math.nan, math.inf, -math.inf], [0.0, 1.0]), lambda at, bad, max_norm: (at == 4) == bool(max_norm), 0, 4, 8
    ),
)
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, at: int, max_norm: float) -> None:
    world, rule = World(), replace(RULE, max_norm=max_norm)
    assert world.step(world.gradient(0), rule)
    before, weights, largest = world.state.clone(), world.weights, world.buffers.largest_3C.clone()
    grad = world.gradient(1)
    grad[at] = bad
    assert not world.step(grad, replace(rule, updates=1)) and world.verdict == REFUSED
    assert not math.isfinite(fused_adamw.norm_of(world.outcome))
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(world.state, name), getattr(before, name))
    assert torch.equal(world.weights, weights) and torch.equal(world.buffers.largest_3C, largest)
    assert world.step(world.gradient(2), replace(rule, updates=1))


def overflow(world: World, case: str) -> tuple[Tensor, StepRule]:
    """A finite gradient and rule whose update is not finite somewhere in the last run."""
    grad, rule = world.gradient(0), replace(RULE, max_norm=0.0, weight_decay=0.0)
    if case == "exp_avg_sq":
        grad[-1] = 3e38
    elif case == "params":
        world.state.params[-1], world.state.exp_avg[-1], rule = 3.4e38, -1.0, replace(rule, learning_rate=3e37)
    elif case == "decay":
        world.state.params[-1], rule = 3e38, replace(rule, learning_rate=1.0, weight_decay=3.0)
    elif case == "state":
        world.state.exp_avg[-1] = math.inf
    elif case == "half":  # finite in the state's dtype, not in the bank's
        world.state.params[-1], rule = -65519.0, replace(rule, learning_rate=100.0)
        world.state.exp_avg[-1] = grad[-1] = 1.0
    world.note()
    return grad, rule


@pytest.mark.parametrize("case", ["exp_avg_sq", "params", "decay", "state", "half"])
def test_an_update_that_is_not_finite_changes_nothing(case: str) -> None:
    world = World(weight_dtype=torch.float16 if case == "half" else torch.float32)
    grad, rule = overflow(world, case)
    before, weights = world.state.clone(), world.weights
    assert not world.step(grad, rule) and world.verdict == OPEN
    assert math.isfinite(fused_adamw.norm_of(world.outcome))
    assert not adamw_step(before.clone(), grad, config_of(rule), 9, world.weight_dtype).applied
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(world.state, name), getattr(before, name)), name
    assert torch.equal(world.weights, weights)


@pytest.mark.parametrize("epsilon", [1e-42, 1e-60])
def test_an_epsilon_that_is_no_normal_number_proves_nothing(epsilon: float) -> None:
    """1e-60 is zero in fp32: where moments and gradient are zero, the update is 0/0."""
    world, rule = World(), replace(RULE, epsilon=epsilon)
    for moment in (world.state.exp_avg, world.state.exp_avg_sq):
        moment.zero_()
    world.note()
    before, grad = world.state.clone(), torch.zeros_like(world.state.params)
    applied = world.step(grad, rule)
    assert world.verdict == OPEN
    assert applied == adamw_step(before.clone(), grad, config_of(rule), 9).applied == (epsilon == 1e-42)
    assert bool(world.state.params.isfinite().all()) and (applied or torch.equal(world.state.params, before.params))


@pytest.mark.parametrize("rate", [1e32, 1e36])
def test_an_update_that_the_bound_does_not_show_to_be_finite_is_made_where_it_is(rate: float) -> None:
    world, rule = World(), replace(RULE, learning_rate=rate, weight_decay=0.0)
    true, grad = world.state.clone(), world.gradient(0)
    assert world.step(grad, rule) and world.verdict == OPEN
    assert adamw_step(true, grad, config_of(rule), 9).applied
    assert_close(world.state.params, true.params, 1e-6)
    assert torch.equal(world.weights, world.state.params)


SIZES = [0.0, 1e-38, 1.0, 1e19, 3e38]
RATES_AND_DECAYS = [(1e9, 0.0), (1e9, 0.1), (1e30, 0.0), (1e30, 1e9), (1e300, 0.1)]


@pytest.mark.parametrize(
    ("size", "rate_and_decay"),  # each with two of the other
    thinned(product(SIZES, RATES_AND_DECAYS), lambda size, both: (SIZES.index(size) - 2 * RATES_AND_DECAYS.index(both)) % 5 < 2, 2, 5, 9),
)
def test_weights_stay_finite_and_steps_are_refused_as_by_the_reference(size: float, rate_and_decay: tuple[float, float]) -> None:
    rate, decay = rate_and_decay
    world = World(counts=(48, 100))
    rule, updates = replace(RULE, learning_rate=rate, weight_decay=decay, max_norm=0.0), 0
    true = world.state.clone()
    for step in range(8):
        grad = world.gradient(step, size).clamp_(-3e38, 3e38)
        true.params, true.exp_avg, true.exp_avg_sq, true.updates = *(t.clone() for t in vars(world.flat).values()), updates
        applied = world.step(grad, replace(rule, updates=updates))
        refused = size == 1e19 and DEVICE.type == "cuda"  # there torch squares before it takes the thousandth, and that overflows
        assert refused or applied == adamw_step(true, grad, config_of(rule), 9).applied, f"step {step}, {world.outcome}"
        updates += applied
        tensors = (world.state.params, world.state.exp_avg, world.state.exp_avg_sq, world.weights)
        assert all(bool(t.isfinite().all()) for t in tensors), step


def test_the_same_bytes_wherever_the_rows_lie_and_aligned_or_not() -> None:
    """Counts of 16 and their multiples make aligned rows; the same elements cut otherwise must give the same update."""
    aligned, odd = World(counts=(4096, 64)), World(counts=(4096, 64))
    assert aligned.aligned
    odd.aligned = False
    for step in range(2):
        rule = replace(RULE, updates=step)
        assert aligned.step(aligned.gradient(step), rule) and odd.step(odd.gradient(step), rule)
    assert torch.equal(aligned.state.params, odd.state.params) and aligned.outcome == odd.outcome
    assert not World(counts=(4095, 65)).aligned
