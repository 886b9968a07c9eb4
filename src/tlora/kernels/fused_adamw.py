"""Host side of the fused AdamW: the row of scalars, and the launches of one adapter's step, two for each half.

Nothing here waits for the device or allocates on it. The super-model decides which adapters step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlora.kernels import triton_adamw as kernels
from tlora.kernels.bank_chunks import CHUNK, WARPS

_BLOCK = 4096  # partial results that the verdict's one program takes at a time
_VERDICT_WARPS = 16

NUM_SCALARS, NUM_OUTCOMES = kernels.NUM_SCALARS, kernels.NUM_OUTCOMES


@dataclass(frozen=True, slots=True)
class StepRule:
    """What one step of one adapter is made of. `updates`: AdamW updates so far; `max_norm` 0: no clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_norm: float
    updates: int


@dataclass(frozen=True)
class StepBuffers:
    """One adapter's table of chunks on the device and what its kernels hand each other. C chunks.

    `chunks_C4` int64, see `bank_chunks.chunk_table`; `squares_C` fp64; `largest_3C` in the state's dtype: of |weight|, |exp_avg| and
    exp_avg_sq.
    """

    chunks_C4: Tensor
    squares_C: Tensor
    largest_3C: Tensor

    @classmethod
    def empty(cls, num_chunks: int, dtype: torch.dtype, device: torch.device) -> StepBuffers:
        return cls(
            torch.empty(num_chunks, 4, dtype=torch.int64, device=device),
            torch.empty(num_chunks, dtype=torch.float64, device=device),
            torch.zeros(3, num_chunks, dtype=dtype, device=device),
        )


@dataclass(frozen=True)
class FlatState:
    """One adapter's weights and moments, flat, contiguous and in the dtype of the gradient sums (fp32, or fp64 for an fp64 bank)."""

    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def scalars_of(rule: StepRule, state_dtype: torch.dtype, weight_dtype: torch.dtype) -> list[float]:
    """The row of scalars that the kernels read, combined in double precision as torch does."""
    state, weight = torch.finfo(state_dtype), torch.finfo(weight_dtype)
    t = rule.updates + 1
    step_size, decay = rule.learning_rate / (1 - rule.beta1**t), rule.learning_rate * rule.weight_decay
    row = [0.0] * NUM_SCALARS
    row[kernels.ALLOWED.value] = float(max(step_size, decay) <= state.max)  # torch raises for such a factor
    row[kernels.MAX_NORM.value] = rule.max_norm
    row[kernels.BETA1.value], row[kernels.BETA2.value], row[kernels.EPSILON.value] = rule.beta1, rule.beta2, rule.epsilon
    row[kernels.DECAY.value], row[kernels.STEP_SIZE.value] = 1 - decay, step_size
    row[kernels.ROOT_CORRECTION.value] = (1 - rule.beta2**t) ** 0.5
    row[kernels.LARGEST_WEIGHT.value] = min(weight.max, state.max)
    row[kernels.LARGEST_STATE.value], row[kernels.SMALLEST_STATE.value] = state.max, state.tiny
    return row


def note_largest(state: FlatState, largest_3C: Tensor) -> None:
    """Enter the largest magnitudes of a state that the kernels have not written themselves."""
    largest_3C.zero_()
    for row, values in zip(largest_3C, (state.params, state.exp_avg, state.exp_avg_sq), strict=True):
        row[0] = torch.linalg.vector_norm(values, float("inf"))
    largest_3C.nan_to_num_(nan=float("inf"), posinf=float("inf"))  # a maximum drops NaN


def launch_measure(state: FlatState, buffers: StepBuffers, aligned: bool, scalars_S: Tensor, outcome_4: Tensor) -> None:
    """Queue the first half of one adapter's step, which writes `outcome_4` (norm, clip factor, verdict) and nothing else that lasts.

    `scalars_S` and `outcome_4` are the adapter's rows, fp64.
    """
    launch_norm(state, buffers, aligned)
    launch_verdict(buffers.squares_C, buffers.largest_3C, scalars_S, outcome_4)


def launch_norm(state: FlatState, buffers: StepBuffers, aligned: bool) -> None:
    """Queue the sums of squares of all chunks' gradients, into `buffers.squares_C`."""
    kernels.norm_kernel[(len(buffers.chunks_C4),)](buffers.chunks_C4, state.params, buffers.squares_C, **_how(aligned))


def launch_verdict(squares_C: Tensor, largest_3C: Tensor, scalars_S: Tensor, outcome_4: Tensor) -> None:
    """Queue the verdict on an adapter by the results of all of its chunks, in the order of its flat vector."""
    how: dict[str, Any] = {"BLOCK": _BLOCK, "num_warps": _VERDICT_WARPS}
    kernels.verdict_kernel[(1,)](squares_C, largest_3C, scalars_S, outcome_4, len(squares_C), **how)


def launch_update(
    state: FlatState, buffers: StepBuffers, aligned: bool, weights_like: Tensor, scalars_S: Tensor, outcome_4: Tensor
) -> None:
    """Queue the second half. `weights_like`: any tensor of the bank's weights' dtype; the rows are those of `launch_measure`.

    Afterwards the sums are zero; state and weights are new where `applied(outcome)`, else as before.
    """
    launch_check(state, buffers, aligned, weights_like, scalars_S, outcome_4)
    chunks, flat, how = len(buffers.chunks_C4), (state.params, state.exp_avg, state.exp_avg_sq), _how(aligned)
    kernels.update_kernel[(chunks,)](buffers.chunks_C4, *flat, weights_like, buffers.largest_3C, scalars_S, outcome_4, chunks, **how)


def launch_check(state: FlatState, buffers: StepBuffers, aligned: bool, weights_like: Tensor, scalars_S: Tensor, outcome_4: Tensor) -> None:
    """Queue the look at the update itself, where the verdict is open: `outcome_4` says whether it failed. Arguments as for the update."""
    flat = (state.params, state.exp_avg, state.exp_avg_sq)
    kernels.check_kernel[(len(buffers.chunks_C4),)](buffers.chunks_C4, *flat, weights_like, scalars_S, outcome_4, **_how(aligned))


def _how(aligned: bool) -> dict[str, Any]:
    # Without contraction the check computes to the bit what the update computes.
    return {"CHUNK": CHUNK, "ALIGNED": aligned, "num_warps": WARPS, "enable_fp_fusion": False}


def norm_of(outcome: Sequence[float]) -> float:
    """Gradient norm before clipping, from a row of outcomes on the host."""
    return outcome[kernels.NORM.value]


def applied(outcome: Sequence[float]) -> bool:
    """Whether the step of this row of outcomes was taken."""
    return outcome[kernels.VERDICT.value] != kernels.REFUSED.value and not outcome[kernels.CHECK_FAILED.value]
