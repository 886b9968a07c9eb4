"""AdamW, clipping and schedules against torch's and transformers' own; and gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from tests.tolerances import assert_close
from tlora.adapters.adamw import adamw_step, learning_rate, measure
from tlora.adapters.layout import make_layout
from tlora.adapters.state import AdapterState, init_state
from tlora.job import LoraConfig, SchedulerType, TrainConfig

LAYOUT = make_layout(LoraConfig(r=3), {"q_proj": (7, 5), "v_proj": (7, 9)})
SCHEDULES: list[SchedulerType] = ["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial"]


def fresh(dtype: torch.dtype = torch.float64, seed: int = 1) -> AdapterState:
    state = init_state(LAYOUT, seed, dtype)
    state.params += 0.1  # B too
    return state


def gradient(step: int, size: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (size * torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)).to(dtype)


def theirs(config: TrainConfig, total: int, sizes: list[float], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Parameters after each step, learning rates and norms by torch and transformers."""
    param = torch.nn.Parameter(fresh(dtype).params)
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW([param], config.learning_rate, betas, config.adam_epsilon, config.weight_decay)
    special = {"min_lr_rate": config.min_lr_rate} if config.lr_scheduler_type == "cosine_with_min_lr" else None
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_count(total), total, special)
    params: list[torch.Tensor] = []
    rates: list[float] = []
    norms: list[float] = []
    for step, size in enumerate(sizes):
        param.grad = gradient(step, size, dtype)
        norms.append(float(torch.nn.utils.clip_grad_norm_([param], config.max_grad_norm or math.inf)))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < total:  # past the end, transformers' polynomial divides by zero when all was warm-up
            schedule.step()
        params.append(param.detach().clone())
    return params, rates, norms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    rate=st.floats(1e-6, 1.0),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.5, 0.95)]),
    epsilon=st.sampled_from([1e-8, 1e-3]),
    clip=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    warmup=st.sampled_from([0, 1, 3, 0.5]),
    sizes=st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 1e6]), min_size=1, max_size=8),
)
def test_equals_torch_and_transformers(
    schedule: SchedulerType,
    dtype: torch.dtype,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
    clip: float,
    warmup: float,
    sizes: list[float],
) -> None:
    config = TrainConfig(
        learning_rate=rate,
        lr_scheduler_type=schedule,
        weight_decay=decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=epsilon,
        max_grad_norm=clip,
        warmup_steps=warmup,
    )
    state, total = fresh(dtype), len(sizes)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for step, (params, their_rate, norm) in enumerate(zip(*theirs(config, total, sizes, dtype), strict=True)):
        stats = adamw_step(state, gradient(step, sizes[step], dtype), config, total)
        assert stats.applied and stats.step == step and state.step == state.updates == step + 1
        assert math.isclose(stats.learning_rate, their_rate, rel_tol=1e-12, abs_tol=1e-18)
        assert math.isclose(stats.grad_norm, norm, rel_tol=1e-6)
        assert_close(state.params, params, bound, f"step {step}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (10, 0), (10, 3), (10, 0.1), (10, 10), (7, 20)])
def test_whole_schedules_equal_transformers(schedule: SchedulerType, total: int, warmup: float) -> None:
    config = TrainConfig(learning_rate=0.3, lr_scheduler_type=schedule, warmup_steps=warmup, min_lr_rate=0.25)
    _, rates, _ = theirs(config, total, [0.0] * total, torch.float64)
    assert [learning_rate(config, step, total) for step in range(total)] == pytest.approx(rates, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("peak", [0.0, 1e-9, 1e-7, 1e-3])
def test_a_polynomial_schedule_never_ends_above_its_peak(peak: float) -> None:
    config = TrainConfig(learning_rate=peak, lr_scheduler_type="polynomial", warmup_steps=2)
    rates = [learning_rate(config, step, 10) for step in range(12)]
    assert max(rates) == rates[2] == peak and rates[-1] == min(1e-7, peak)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_norm_at_the_limit_is_clipped_as_torch_clips_it() -> None:
    config = TrainConfig(max_grad_norm=1.0, adam_beta1=0, adam_beta2=0, lr_scheduler_type="constant", adam_epsilon=1.0)
    grad = gradient(0)
    grad *= (1 - 5e-7) / grad.norm()
    param = torch.nn.Parameter(fresh().params)
    param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    torch.optim.AdamW([param], config.learning_rate, (0.0, 0.0), 1.0, 0.0).step()
    state = fresh()
    adamw_step(state, grad, config, 1)
    assert_close(state.params - fresh().params, param.detach() - fresh().params, 1e-12)


@pytest.mark.parametrize(("size", "clip"), [(1.0, 1.0), (1.0, 100.0), (1e-3, 0.0), (math.nan, 1.0), (math.inf, 0.0)])
def test_a_step_in_two_halves_is_the_whole_step(size: float, clip: float) -> None:
    config, whole, halves = TrainConfig(max_grad_norm=clip), fresh(), fresh()
    grad = gradient(0, size)
    expected, before = adamw_step(whole, grad.clone(), config, 9), grad.clone()
    verdict = measure(grad, clip, LAYOUT)
    assert torch.equal(grad.nan_to_num(7), before.nan_to_num(7)), "measuring has changed the gradient"
    assert (verdict[1] < 1) == (clip == 1.0 and math.isfinite(size))
    assert repr(adamw_step(halves, grad, config, 9, None, verdict)) == repr(expected)  # NaN too
    assert torch.equal(halves.params, whole.params) and torch.equal(halves.exp_avg_sq, whole.exp_avg_sq)


def test_the_second_half_clips_as_the_verdict_says() -> None:
    config, given, scaled = TrainConfig(max_grad_norm=1.0), fresh(), fresh()
    adamw_step(given, gradient(0), config, 9, verdict_2=torch.tensor([8.0, 0.25], dtype=torch.float64))
    adamw_step(scaled, gradient(0) * 0.25, config.model_copy(update={"max_grad_norm": 0.0}), 9)
    assert torch.equal(given.params, scaled.params) and torch.equal(given.exp_avg, scaled.exp_avg)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_only_the_counters(bad: float, clip: float) -> None:
    config, state = TrainConfig(max_grad_norm=clip), fresh()
    adamw_step(state, gradient(0), config, 9)
    before, grad = state.clone(), gradient(1)
    grad[4] = bad
    stats = adamw_step(state, grad, config, 9)
    assert not stats.applied and not math.isfinite(stats.grad_norm)
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(state, name), getattr(before, name))
    assert (state.step, state.updates, state.skipped) == (2, 1, 1)
    assert adamw_step(state, gradient(2), config, 9).applied
    assert (state.step, state.updates, state.skipped) == (3, 2, 0)


def test_a_skipped_step_leaves_bias_correction_as_if_it_had_not_been() -> None:
    config = TrainConfig(lr_scheduler_type="constant")
    skipping, plain = fresh(), fresh()
    for grad in (gradient(0), torch.full((LAYOUT.numel,), math.nan, dtype=torch.float64), gradient(1)):
        adamw_step(skipping, grad, config, 9)
    for step in range(2):
        adamw_step(plain, gradient(step), config, 9)
    assert torch.equal(skipping.params, plain.params)


@pytest.mark.parametrize(("weight", "applied"), [(60000.0, True), (65519.0, True), (65521.0, False), (-1e6, False)])
def test_a_weight_must_be_finite_in_the_banks_dtype_too(weight: float, applied: bool) -> None:
    """65,520 and above round to infinity in fp16. Many weights below it have a norm above it, which must not count."""
    state, config = fresh(torch.float32), TrainConfig(learning_rate=0.0, lr_scheduler_type="constant")
    state.params[:] = 50000.0
    state.params[3] = weight
    kept = state.params.clone()
    assert adamw_step(state.clone(), gradient(0, dtype=torch.float32), config, 9, torch.float32).applied
    assert adamw_step(state, gradient(0, dtype=torch.float32), config, 9, torch.float16).applied is applied
    assert torch.equal(state.params, kept) and state.updates == applied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1.0, 1e19, 3e38])
@given(rate=st.sampled_from([1e9, 1e30, 1e300]), decay=st.sampled_from([0.0, 0.1, 1e9]), clip=st.sampled_from([0.0, 1.0]))
def test_weights_stay_finite_whatever_the_learning_rate(dtype: torch.dtype, size: float, rate: float, decay: float, clip: float) -> None:
    fields = {"learning_rate": rate, "weight_decay": decay, "max_grad_norm": clip, "lr_scheduler_type": "constant"}
    config = TrainConfig.model_construct(**fields)  # an order may not have 1e300
    state, refused = fresh(dtype), 0
    for step in range(40):
        refused += not adamw_step(state, gradient(step, size, dtype), config, 40).applied
        assert all(bool(t.isfinite().all()) for t in (state.params, state.exp_avg, state.exp_avg_sq)), step
    assert state.step == 40 and state.updates == 40 - refused
