"""Bugs planted in the Triton kernels and in the optimizer on the device: each must break the promise that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from tests.kernels import promises as p
from tests.kernels.interpreter import INTERPRETED_ALONE, interpreted
from tests.planted import planted

with interpreted():
    from tlora.kernels import (
        fused_adamw,
        triton_adamw,
        triton_attention,
        triton_chunks,
        triton_cross_entropy,
        triton_dot,
        triton_fp8,
        triton_gemm,
        triton_loads,
        triton_lora,
    )
    from tlora.supermodel import device_optimizer

pytestmark = [*INTERPRETED_ALONE, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`, and `caught_by` must fail; `gets_past` holds with it, which is why that promise alone would not do."""

    name: str
    module: ModuleType
    old: str
    new: str
    caught_by: Callable[[], None]
    gets_past: Callable[[], None] | None = None
    soak: bool = False  # like another one here


LINEAR = (
    Mutant(
        "fp32 is multiplied in one pass of TF32",
        triton_dot,
        "PRECISION: tl.constexpr = FP32 if a.dtype",
        'PRECISION: tl.constexpr = "tf32" if a.dtype',
        p.linear_is_the_formula,
    ),
    Mutant(
        "a neighbour's rows of S in my tile",
        triton_gemm,
        "return tl.where(own[:, None], s_BR, 0.0).to(s_BR.dtype)",
        "return s_BR",
        p.linear_alone_is_together,
    ),
    Mutant(
        "a run's last row goes without its adapter where runs share a tile",
        triton_gemm,
        "own = in_run(runs_ptr, run, t)",
        "own = in_run(runs_ptr, run, t) & in_run(runs_ptr, run, t + 1)",
        p.linear_alone_is_together,
        soak=True,
    ),
    Mutant(
        "the bank's rows of the first run where each tile has one",
        triton_gemm,
        "at = starts_ptr + min(first_run(tiles_ptr, m0), num_runs - 1)",
        "at = starts_ptr",
        p.linear_alone_is_together_in_tiles_apart,
        p.linear_alone_is_together,
    ),
    Mutant(
        "the product is rounded once more where runs share a tile",
        triton_gemm,
        "x0, w0, m0, n0, T, N, K0, NK, BK, IMPRECISE, LOADS, MASKED)\n",
        "x0, w0, m0, n0, T, N, K0, NK, BK, IMPRECISE, LOADS, MASKED)\n        if MANY:\n            acc = (acc + 1.0) - 1.0\n",
        p.linear_alone_is_together,
        p.linear_is_the_formula,
    ),
    Mutant(
        "the input gradient of a run with dropout has its adapter twice",
        triton_gemm,
        "own &= tl.load(thresholds_ptr + run) == 0",
        "own &= run >= 0",
        p.linear_is_the_formula,
    ),
    Mutant(
        "the scale of the batch's first run for all",
        triton_lora,
        "scale_at = scales_ptr + linear * num_runs + run\n",
        "scale_at = scales_ptr + linear * num_runs\n",
        p.linear_alone_is_together,
        soak=True,
    ),
    Mutant(
        "the first run shrinks to nothing",
        triton_lora,
        "    if run >= 0:\n",
        "    if run > 0:\n",
        p.linear_is_the_formula,
        soak=True,
    ),
    Mutant(
        "dropout by the row's place in the tile",
        triton_lora,
        "keys = tl.load(keys_ptr + rows, mask",
        "keys = tl.load(keys_ptr + rows % 64, mask",
        p.linear_alone_is_together,
    ),
    Mutant(
        "dA of the undropped input",
        triton_lora,
        "a = tl.trans(_dropped_out(a, keys_ptr, module_key, t, c, own, threshold, DROPOUT))",
        "a = tl.trans(a)",
        p.linear_is_the_formula,
        p.linear_alone_is_together,
    ),
    Mutant(
        "dx without the dropout's mask",
        triton_lora,
        "total += tl.where(keep, delta, 0.0)",
        "total += delta",
        p.linear_is_the_formula,
        p.linear_alone_is_together,
        soak=True,
    ),
    Mutant(
        "the tokens behind a sample's last are summed with it",
        triton_lora,
        "full = t0 + (t1 - t0) // BT * BT",
        "full = t0 + (t1 - t0 + BT - 1) // BT * BT",
        p.linear_alone_is_together,
        soak=True,
    ),
    Mutant(
        "S behind a sample's last token is masked by multiplication",
        triton_lora,
        "return tl.where(own[:, None], s_TR, 0.0).to(s_TR.dtype)",
        "return (s_TR * own[:, None]).to(s_TR.dtype)",
        p.linear_keeps_nan_next_door,
    ),
    Mutant(
        "x behind a sample's last token is masked by multiplication",
        triton_lora,
        "a = tl.where(own[:, None], load_tile(x, full, c0, t1, K, BT, BC, LOADS), 0.0)",
        "a = load_tile(x, full, c0, t1, K, BT, BC, LOADS) * own[:, None]",
        p.linear_keeps_nan_next_door,
        soak=True,
    ),
    Mutant(
        "the next run's first sample is summed too",
        triton_lora,
        "p0, p1 = run_samples(runs_ptr, run)\n",
        "p0, p1 = run_samples(runs_ptr, run)\n    p1 += run + 1 < num_runs\n",
        p.linear_alone_is_together,
        soak=True,
    ),
    Mutant(
        "sums start at zero in each micro-batch",
        triton_lora,
        "total0 = tl.load(base0 + offsets, mask=inside & (r < rank0)[None, :], other=0.0)",
        "total0 = tl.zeros((BC, R), tl.float32)",
        p.linear_sums_in_any_cut,
    ),
    Mutant(
        "sums of the padding to 16 ranks are written, into the next slot's rows",
        triton_lora,
        "tl.store(base0 + offsets, total0, mask=inside & (r < rank0)[None, :])",
        "tl.store(base0 + offsets, total0, mask=inside & (r < 16)[None, :])",
        p.linear_is_the_formula,
    ),
)

BY_POINTER = (
    Mutant(
        "by pointer, the block in which K ends reads into the next row",
        triton_loads,
        "column + j < column_end\n            mask = inside",
        "column + j < column_end + 16\n            mask = inside",
        p.linear_by_pointer_is_the_formula,
        p.linear_is_the_formula,
    ),
    Mutant(
        "by pointer, a tile's second row is its first",
        triton_loads,
        "i = tl.minimum(i, row_end - 1 - row)",
        "i = tl.minimum(i, row_end - 1 - row) // 2 * 2",
        p.linear_by_pointer_is_the_formula,
        soak=True,
    ),
)

HEAD_AND_ATTENTION = (
    Mutant(
        "the logits' padding has a share of the sum",
        triton_cross_entropy,
        'z = tl.where(v < V, z, float("-inf"))',
        "z = z * 1.0",
        p.loss_is_the_formula,
        p.loss_of_a_row_is_its_own,
    ),
    Mutant(
        "the sum is not rescaled when the maximum moves",
        triton_cross_entropy,
        "total = total * tl.exp(peak - new_peak) + ",
        "total = total + ",
        p.loss_is_the_formula,
    ),
    Mutant(
        "the soft cap has no slope",
        triton_cross_entropy,
        "tl.where(v == label, p - 1.0, p) * slope * factor",
        "tl.where(v == label, p - 1.0, p) * factor",
        p.loss_is_the_formula,
    ),
    Mutant(
        "the weight of the chunk's first row for all",
        triton_cross_entropy,
        "factor = tl.load(grad_weights_ptr + row)",
        "factor = tl.load(grad_weights_ptr)",
        p.loss_of_a_row_is_its_own,
    ),
    Mutant(
        "a label outside the vocabulary has a finite gradient",
        triton_cross_entropy,
        'lse = tl.where(is_valid, lse, float("nan"))',
        "lse = lse + 0.0",
        p.loss_of_a_wrong_label_is_nan,
    ),
    Mutant("a query does not see itself", triton_attention, "seen = j <= i", "seen = j < i", p.attention_is_the_formula),
    Mutant(
        "the window is one key too wide",
        triton_attention,
        "seen = seen & (i - j < WINDOW)",
        "seen = seen & (i - j <= WINDOW)",
        p.attention_is_the_formula,
        soak=True,
    ),
    Mutant(
        "the sum of earlier blocks is not rescaled",
        triton_attention,
        "acc = acc * decay[:, None]",
        "acc = acc * 1.0",
        p.attention_is_the_formula,
        soak=True,
    ),
    Mutant(
        "dk and dv take the first head's log-sum-exp",
        triton_attention,
        "        at = head * num_tokens + start\n        dk, dv",
        "        at = start\n        dk, dv",
        p.attention_is_the_formula,
        soak=True,
    ),
    Mutant(
        "blocks are counted from the batch's first token",
        triton_attention,
        '    top = tl.full((BM,), float("-inf"), tl.float32)\n    begin, full, full_end, end = _key_bounds(first, length, BM, BN, WINDOW)',
        '    top = tl.full((BM,), float("-inf"), tl.float32)\n    begin, full, full_end, end = _key_bounds(first, length, BM, BN, WINDOW)\n'
        "    full_end = tl.maximum(full_end - start % BN, 0).to(tl.int32)",
        p.attention_of_a_sample_is_its_own,
        p.attention_is_the_formula,
    ),
    Mutant(
        "fp8: the scale is of the first source alone",
        triton_fp8,
        "amax, width = _largest(amax, x1_ptr, column_scale_ptr, row, stride1, K0, K1, BLOCK), K0 + K1\n",
        "width = K0 + K1\n",
        p.fp8_rows_are_torchs,
    ),
    Mutant(
        "fp8: a row with Inf is clamped",
        triton_fp8,
        'tl.where(finite, tl.div_rn(largest, tl.full((), LARGEST, tl.float32)), float("nan"))',
        "tl.div_rn(tl.where(finite, largest, 1.0), tl.full((), LARGEST, tl.float32))",
        p.fp8_spoils_one_row,
        p.fp8_rows_are_torchs,
    ),
    Mutant(
        "fp8: the first row's scale for the tile",
        triton_gemm,
        "acc *= tl.load(x_scale_ptr + m0 + tl.arange(0, BM), mask",
        "acc *= tl.load(x_scale_ptr + m0 + tl.zeros((BM,), tl.int32), mask",
        p.fp8_linear_is_the_formula,
    ),
)

ADAMW = (
    Mutant(
        "no bias correction of the first moment",
        fused_adamw,
        "rule.learning_rate / (1 - rule.beta1**t), rule",
        "rule.learning_rate, rule",
        p.adamw_is_torchs,
    ),
    Mutant(
        "no bias correction of the second moment",
        fused_adamw,
        "(1 - rule.beta2**t) ** 0.5",
        "1.0",
        p.adamw_is_torchs,
    ),
    Mutant(
        "weight decay without the learning rate",
        fused_adamw,
        "rule.learning_rate * rule.weight_decay",
        "rule.weight_decay",
        p.adamw_is_torchs,
    ),
    Mutant(
        "epsilon within the root",
        triton_adamw,
        "_divide(_root(exp_avg_sq), correction) + epsilon",
        "_divide(_root(exp_avg_sq + epsilon), correction)",
        p.adamw_is_torchs,
    ),
    Mutant(
        "gradients below the limit are scaled up to it",
        triton_adamw,
        "clip = tl.where(clipped, limit / (norm + 1e-6), 1.0)",
        "clip = tl.where(limit > 0, limit / (norm + 1e-6), 1.0)",
        p.adamw_is_torchs,
    ),
    Mutant(
        "the sums are not zeroed",
        triton_adamw,
        "tl.store(sums_at, tl.zeros((CHUNK,), params_ptr.dtype.element_ty), mask=mask)",
        "pass",
        p.adamw_is_torchs,
    ),
    Mutant(
        "a chunk writes beyond its last element",
        triton_adamw,
        "tl.store(weights_at, params.to(weights_like_ptr.dtype.element_ty), mask=mask)",
        "tl.store(weights_at, params.to(weights_like_ptr.dtype.element_ty), mask=i < count + 1)",
        p.adamw_is_torchs,
    ),
    Mutant(
        "a gradient of NaN is taken",
        triton_adamw,
        'finite = (norm < float("inf")) & (tl.load',
        'finite = (norm < float("inf")) | (tl.load',
        p.adamw_takes_no_nan,
        p.adamw_is_torchs,
    ),
    Mutant(
        "the bound forgets that the bank's dtype is smaller",
        fused_adamw,
        "min(weight.max, state.max)",
        "state.max",
        p.adamw_stays_finite,
        p.adamw_is_torchs,
    ),
    Mutant(
        "each chunk to the beginning of the flat gradient",
        triton_chunks,
        "tl.store(flat_ptr + start + i",
        "tl.store(flat_ptr + i",
        p.gradient_is_gathered,
        p.gradient_is_put_back,
    ),
    Mutant(
        "a gradient that is put back runs on into the next rows",
        triton_chunks,
        "tl.load(flat_ptr + start + i, mask=i < count), mask=i < count)",
        "tl.load(flat_ptr + start + i, mask=i < count), mask=i < count + 1)",
        p.gradient_is_put_back,
        p.gradient_is_gathered,
    ),
    Mutant(
        "weights that are written end a chunk early",
        triton_chunks,
        "tl.store(rows_at(weights, weights_like_ptr, ALIGNED) + i, values, mask=i < count)",
        "tl.store(rows_at(weights, weights_like_ptr, ALIGNED) + i, values, mask=i < count - 1)",
        p.weights_are_written,
        p.gradient_is_put_back,
    ),
    Mutant(
        "the rule of the first due job for all",
        device_optimizer,
        "fused_adamw.scalars_of(_rule(job), self",
        "fused_adamw.scalars_of(_rule(next(iter(due.values()))), self",
        p.due_jobs_step_by_their_own_rules,
    ),
    Mutant(
        "the scalars of the first due job for all",
        device_optimizer,
        "scalars_S, outcome_4 = rows.scalars_JS[i], rows",
        "scalars_S, outcome_4 = rows.scalars_JS[0], rows",
        p.due_jobs_step_by_their_own_rules,
    ),
    Mutant(
        "the learning rate of the next step",
        device_optimizer,
        "return learning_rate(job.train, job.state.step, job.total_steps)",
        "return learning_rate(job.train, job.state.step + 1, job.total_steps)",
        p.due_jobs_step_by_their_own_rules,
    ),
    Mutant(
        "the outcome of another job",
        device_optimizer,
        "zip(due.items(), outcomes.read(), strict=True)",
        "zip(due.items(), reversed(outcomes.read()), strict=True)",
        p.a_neighbours_nan_is_its_own,
    ),
    Mutant(
        "all skip the step where one must",
        device_optimizer,
        "fused_adamw.norm_of(outcome), fused_adamw.applied(outcome))",
        "fused_adamw.norm_of(outcome), all(map(fused_adamw.applied, outcomes.read())))",
        p.a_neighbours_nan_is_its_own,
        p.due_jobs_step_by_their_own_rules,
    ),
    Mutant(
        "addresses of before the bank grew",
        device_optimizer,
        "if bound.addresses is not addresses:",
        "if bound.addresses is None:",
        p.rows_that_move_are_found,
        p.due_jobs_step_by_their_own_rules,
    ),
)
MUTANTS = LINEAR + BY_POINTER + HEAD_AND_ATTENTION + ADAMW
PROMISES = list(dict.fromkeys(promise for m in MUTANTS for promise in (m.caught_by, m.gets_past) if promise))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_without_a_mutant_the_promise_is_kept(promise: Callable[[], None]) -> None:
    promise()


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name, marks=[pytest.mark.soak] if m.soak else []) for m in MUTANTS])
@pytest.mark.slow
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with planted(mutant.module, [(mutant.old, mutant.new)], tmp_path):
        with pytest.raises(AssertionError) as caught:
            mutant.caught_by()
        if mutant.gets_past is not None:
            mutant.gets_past()
    print(f"{mutant.name}: {caught.value}")
