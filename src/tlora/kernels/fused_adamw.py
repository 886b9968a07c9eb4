"""Host side of the fused AdamW: the table of chunks, the row of scalars, and the four launches of one adapter's step.

Nothing here waits for the device or takes memory on it; who is due, and what follows, is the super-model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlora.kernels import triton_adamw as kernels

CHUNK = 4096  # elements of a program: 16 a thread
_BLOCK = 4096  # partial results that the verdict's one program takes at a time
_WARPS, _VERDICT_WARPS = 8, 16

NUM_SCALARS, NUM_OUTCOMES = kernels.NUM_SCALARS, kernels.NUM_OUTCOMES


@dataclass(frozen=True, slots=True)
class BankRun:
    """Elements that are contiguous in the flat vectors and in the bank: addresses of their weights and gradient sums, in bytes."""

    weights: int
    sums: int
    count: int


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

    `chunks_C4` int64, see `chunk_table`; `squares_C` fp64; `largest_3C` in the state's dtype: of |weight|, |exp_avg| and exp_avg_sq.
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


def num_chunks(counts: Sequence[int]) -> int:
    """Chunks of runs of `counts` elements: none spans two runs."""
    return sum(-(-count // CHUNK) for count in counts)


def chunk_table(runs: Sequence[BankRun], weight_bytes: int, sum_bytes: int) -> tuple[np.ndarray, bool]:
    """The chunks of `runs`, which follow each other in the flat vectors: int64 [C, 4] of offset there, addresses of weights and sums,
    and elements; and whether every one starts and ends at a multiple of 16 elements and 16 bytes.
    """
    counts = np.array([run.count for run in runs], np.int64)
    parts = -(-counts // CHUNK)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    inside = (np.arange(parts.sum()) - first) * CHUNK  # where a chunk starts in its run
    weights, sums = (np.repeat(np.array(a, np.int64), parts) for a in ([r.weights for r in runs], [r.sums for r in runs]))
    table = np.empty((len(inside), 4), np.int64)
    table[:, 0] = np.repeat(np.cumsum(counts) - counts, parts) + inside
    table[:, 1] = weights + inside * weight_bytes
    table[:, 2] = sums + inside * sum_bytes
    table[:, 3] = np.minimum(np.repeat(counts, parts) - inside, CHUNK)
    return table, not (table % 16).any()


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


def launch_step(state: FlatState, buffers: StepBuffers, aligned: bool, weights_like: Tensor, scalars_S: Tensor, outcome_4: Tensor) -> None:
    """Queue one adapter's step. `weights_like`: any tensor of the bank's weights' dtype; `scalars_S`, `outcome_4`: its rows, fp64.

    Afterwards the sums are zero; state and weights are new where `applied(outcome)`, else as before.
    """
    chunks, flat = len(buffers.chunks_C4), (state.params, state.exp_avg, state.exp_avg_sq)
    # Without contraction the check computes to the bit what the update computes.
    how: dict[str, Any] = {"CHUNK": CHUNK, "ALIGNED": aligned, "num_warps": _WARPS, "enable_fp_fusion": False}
    how_verdict: dict[str, Any] = {"BLOCK": _BLOCK, "num_warps": _VERDICT_WARPS}
    kernels.norm_kernel[(chunks,)](buffers.chunks_C4, state.params, buffers.squares_C, **how)
    kernels.verdict_kernel[(1,)](buffers.squares_C, buffers.largest_3C, scalars_S, outcome_4, chunks, **how_verdict)
    kernels.check_kernel[(chunks,)](buffers.chunks_C4, *flat, weights_like, scalars_S, outcome_4, **how)
    kernels.update_kernel[(chunks,)](buffers.chunks_C4, *flat, weights_like, buffers.largest_3C, scalars_S, outcome_4, chunks, **how)


def norm_of(outcome: Sequence[float]) -> float:
    """Gradient norm before clipping, from a row of outcomes on the host."""
    return outcome[kernels.NORM.value]


def applied(outcome: Sequence[float]) -> bool:
    """Whether the step of this row of outcomes was taken."""
    return outcome[kernels.VERDICT.value] != kernels.REFUSED.value and not outcome[kernels.CHECK_FAILED.value]
