"""Bugs planted in the Triton kernels and in the optimizer on the device: each must break the promise that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("triton")

from tests.kernels import promises as p
from tests.kernels.interpreter import INTERPRETED_ALONE, interpreted
from tests.planted import Change, planted

with interpreted():
    import torch

    from tests.kernels import kernel_mutants as m
    from tlora.kernels import (
        fp8,
        fused_adamw,
        triton_adamw,
        triton_attention,
        triton_chunks,
        triton_cross_entropy,
        triton_dot,
        triton_gemm,
        triton_loads,
        triton_lora,
        triton_tables,
        varlen_attention,
    )
    from tlora.supermodel import device_optimizer
    from tlora.supermodel.device_optimizer import DeviceOptimizer

pytestmark = [*INTERPRETED_ALONE, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]


@dataclass(frozen=True)
class Mutant:
    """What is planted must make `caught_by` fail; `gets_past` holds with it, which is why that promise alone would not do."""

    name: str
    change: Change
    caught_by: Callable[[], None]
    gets_past: Callable[[], None] | None = None


LINEAR = (
    Mutant("fp32 is multiplied in one pass of TF32", (triton_dot, "dot", m.dot_in_one_pass), p.linear_is_the_formula),
    Mutant("a neighbour's rows of S in my tile", (triton_gemm, "_own_rows", m.own_rows_and_others), p.linear_alone_is_together),
    Mutant(
        "a run's last row goes without its adapter where runs share a tile",
        (triton_tables, "in_run", m.in_run_without_its_last_row),
        p.linear_is_the_formula,
    ),
    Mutant(
        "the bank's rows of the first run where each tile has one",
        (triton_tables, "first_run", m.first_run_of_all),
        p.linear_alone_is_together_in_tiles_apart,
        p.linear_alone_is_together,
    ),
    Mutant(
        "the product is rounded once more where runs share a tile",
        (triton_gemm, "_expand_many", m.expand_that_rounds_once_more),
        p.linear_alone_is_together,
        p.linear_is_the_formula,
    ),
    Mutant(
        "the input gradient of a run with dropout has its adapter twice",
        (triton_gemm, "_expand_many", m.expand_of_runs_with_dropout_too),
        p.linear_is_the_formula,
    ),
    Mutant(
        "dropout by the row's place in the tile", (triton_lora, "keep_tile", m.keep_by_the_place_in_the_tile), p.linear_alone_is_together
    ),
    Mutant(
        "the adapter sees what its dropout leaves out",
        (triton_lora, "_dropped_out", m.not_dropped_out),
        p.linear_is_the_formula,
        p.linear_alone_is_together,
    ),
    Mutant(
        "the token behind a sample's last is summed with it",
        (triton_tables, "sample_tokens", m.sample_with_the_next_token),
        p.linear_alone_is_together,
    ),
    Mutant(
        "S behind a sample's last token is masked by multiplication",
        (triton_lora, "_own_s", m.own_s_by_multiplication),
        p.linear_keeps_nan_next_door,
    ),
    Mutant("sums start at zero in each micro-batch", (triton_lora, "_sum_run", m.sum_from_zero), p.linear_sums_in_any_cut),
    Mutant("a run has 16 ranks in the bank at least", (triton_tables, "rows_of", m.rows_padded_to_16), p.linear_is_the_formula),
    Mutant(
        "by pointer, the block in which K ends reads into the next row",
        (triton_loads, "load_tile", m.tile_that_reads_into_the_next_row),
        p.linear_by_pointer_is_the_formula,
        p.linear_is_the_formula,
    ),
)

HEAD_AND_ATTENTION = (
    Mutant(
        "the logits' padding has a share of the sum",
        (triton_cross_entropy, "cross_entropy_kernel", m.padded_cross_entropy),
        p.loss_is_the_formula,
    ),
    Mutant("the soft cap has no slope", (triton_cross_entropy, "_capped", m.capped_without_slope), p.loss_is_the_formula),
    Mutant(
        "the weight of the chunk's first row for all",
        (triton_cross_entropy, "cross_entropy_kernel", m.first_weight_cross_entropy),
        p.loss_of_a_row_is_its_own,
    ),
    Mutant(
        "a label outside the vocabulary has a finite gradient",
        (triton_cross_entropy, "cross_entropy_kernel", m.clamped_cross_entropy),
        p.loss_of_a_wrong_label_is_nan,
    ),
    Mutant("a query does not see itself", (triton_attention, "_visible", m.visible_but_for_itself), p.attention_is_the_formula),
    Mutant("the window is one key too wide", (triton_attention, "_visible", m.visible_one_key_further), p.attention_is_the_formula),
    Mutant("dk and dv take the first head's log-sum-exp", (triton_attention, "dkv_kernel", m.first_head_dkv), p.attention_is_the_formula),
    Mutant(
        "tiles are counted from the batch's first token",
        (varlen_attention, "list_tiles", m.tiles_by_the_place_in_the_batch),
        p.attention_of_a_sample_is_its_own,
        p.attention_is_the_formula,
    ),
    Mutant("fp8: the scale is of the first source alone", (fp8, "_largest", m.largest_of_the_first_source), p.fp8_rows_are_torchs),
    Mutant("fp8: a row with Inf is clamped", (fp8, "_largest", m.largest_finite), p.fp8_spoils_one_row, p.fp8_rows_are_torchs),
    Mutant("fp8: the first row's scale for all", (triton_gemm, "gemm_kernel", m.first_scale_gemm), p.fp8_linear_is_the_formula),
)

ADAMW = (
    Mutant(
        "no bias correction of the first moment",
        (fused_adamw, "scalars_of", m.scalars_with(STEP_SIZE=lambda rule, _: rule.learning_rate)),
        p.adamw_is_torchs,
    ),
    Mutant(
        "no bias correction of the second moment",
        (fused_adamw, "scalars_of", m.scalars_with(ROOT_CORRECTION=lambda *_: 1.0)),
        p.adamw_is_torchs,
    ),
    Mutant(
        "weight decay without the learning rate",
        (fused_adamw, "scalars_of", m.scalars_with(DECAY=lambda rule, _: 1 - rule.weight_decay)),
        p.adamw_is_torchs,
    ),
    Mutant(
        "the bound forgets that the bank's dtype is smaller",
        (fused_adamw, "scalars_of", m.scalars_with(LARGEST_WEIGHT=lambda _, dtype: torch.finfo(dtype).max)),
        p.adamw_stays_finite,
        p.adamw_is_torchs,
    ),
    Mutant("no root of the second moment", (triton_adamw, "_root", m.no_root), p.adamw_is_torchs),
    Mutant("gradients below the limit are scaled up to it", (triton_adamw, "verdict_kernel", m.verdict_that_scales_up), p.adamw_is_torchs),
    Mutant(
        "a gradient of NaN is taken",
        (triton_adamw, "verdict_kernel", m.verdict_that_allows_all),
        p.adamw_takes_no_nan,
        p.adamw_is_torchs,
    ),
    Mutant("the sums are not zeroed", (fused_adamw, "launch_update", m.update_that_leaves_the_sums), p.adamw_is_torchs),
    Mutant("a chunk writes beyond its last element", (triton_chunks, "chunk_at", m.chunk_one_too_long), p.gradient_is_put_back),
    Mutant("weights that are written end a chunk early", (triton_chunks, "chunk_at", m.chunk_one_too_short), p.weights_are_written),
    Mutant(
        "each chunk to the beginning of the flat gradient",
        (triton_chunks, "chunk_at", m.chunk_from_the_beginning),
        p.gradient_is_gathered,
    ),
    Mutant(
        "the rule of the first due job for all",
        (DeviceOptimizer, "measure", m.measure_by_the_first_rule),
        p.due_jobs_step_by_their_own_rules,
    ),
    Mutant("the learning rate of the next step", (device_optimizer, "_rate", m.rate_of_the_next_step), p.due_jobs_step_by_their_own_rules),
    Mutant("the outcome of another job", (device_optimizer, "ToHost", m.OutcomesTurnedRound), p.a_neighbours_nan_is_its_own),
    Mutant(
        "all skip the step where one must",
        (device_optimizer, "ToHost", m.OutcomesOfTheWorst),
        p.a_neighbours_nan_is_its_own,
        p.due_jobs_step_by_their_own_rules,
    ),
    Mutant(
        "addresses of before the bank grew",
        (DeviceOptimizer, "_table", m.table_made_once),
        p.rows_that_move_are_found,
        p.due_jobs_step_by_their_own_rules,
    ),
)
MUTANTS = LINEAR + HEAD_AND_ATTENTION + ADAMW
PROMISES = list(dict.fromkeys(promise for mutant in MUTANTS for promise in (mutant.caught_by, mutant.gets_past) if promise))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.slow
def test_without_a_mutant_the_promise_is_kept(promise: Callable[[], None]) -> None:
    promise()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.slow
def test_mutant_is_caught(mutant: Mutant) -> None:
    with planted(mutant.change):
        with pytest.raises(AssertionError) as caught:
            mutant.caught_by()
        if mutant.gets_past is not None:
            mutant.gets_past()
    print(f"{mutant.name}: {caught.value}")
