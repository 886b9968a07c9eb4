"""Bugs of the Triton kernels and the optimizer on the device: kernels, parts of kernels and functions that stand in the place of ours."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

# pyright: reportArgumentType=false
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.interpreter import interpreted

with interpreted():
    import triton
    import triton.language as tl

    from tlora.kernels import fused_adamw, triton_adamw, triton_attention, triton_cross_entropy, triton_gemm, varlen_attention
    from tlora.kernels.bank_chunks import gather, scatter
    from tlora.kernels.device import ToHost as HealthyToHost
    from tlora.kernels.fp8 import _largest as healthy_largest
    from tlora.kernels.fused_adamw import launch_update as healthy_launch_update
    from tlora.kernels.fused_adamw import scalars_of as healthy_scalars_of
    from tlora.kernels.triton_attention import _visible as healthy_visible
    from tlora.kernels.triton_chunks import chunk_at as healthy_chunk_at
    from tlora.kernels.triton_cross_entropy import _capped as healthy_capped
    from tlora.kernels.triton_gemm import _expand_many as healthy_expand_many
    from tlora.kernels.triton_loads import load_tile as healthy_load_tile
    from tlora.kernels.triton_lora import _sum_run as healthy_sum_run
    from tlora.kernels.triton_lora import keep_tile as healthy_keep_tile
    from tlora.kernels.triton_tables import in_run as healthy_in_run
    from tlora.kernels.triton_tables import rows_of as healthy_rows_of
    from tlora.kernels.triton_tables import sample_tokens as healthy_sample_tokens
    from tlora.supermodel.device_optimizer import DeviceOptimizer

healthy_table = DeviceOptimizer._table
healthy_measure = DeviceOptimizer.measure
healthy_list_tiles = varlen_attention.list_tiles


@dataclass(frozen=True)
class Launched:
    """A kernel whose launches get other arguments (`change`), or are followed by something (`after`)."""

    kernel: Any
    change: Callable[..., tuple[Any, ...]] = lambda *args: args
    after: Callable[..., object] = lambda *args: None

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **how: Any) -> None:
            self.kernel[grid](*self.change(*args), **how)
            self.after(*args)

        return launch


def of_the_first(values: Tensor) -> Tensor:
    """What belongs to the first row, for all rows."""
    return values[:1].expand_as(values).contiguous()


# -- linears -------------------------------------------------------------------------------------------------------------


@triton.jit
def dot_in_one_pass(a, b, acc=None, MAX_IMPRECISE: tl.constexpr = None, ACROSS: tl.constexpr = False):
    return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit
def own_rows_and_others(s, m0, column, T, own, R: tl.constexpr, LOADS: tl.constexpr):
    return healthy_load_tile(s, m0, column, T, None, own.shape[0], R, LOADS)


@triton.jit
def in_run_without_its_last_row(runs_ptr, run, t):
    return healthy_in_run(runs_ptr, run, t) & healthy_in_run(runs_ptr, run, t + 1)


@triton.jit
def first_run_of_all(tiles_ptr, start):
    return tl.load(tiles_ptr)


@triton.jit
def expand_that_rounds_once_more(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N,
                                 M: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    acc = (acc + 1.0) - 1.0
    return healthy_expand_many(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N, M,
                               SKIP, W, R, LOADS)  # fmt: skip


@triton.jit
def expand_of_runs_with_dropout_too(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N,
                                    M: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                                    LOADS: tl.constexpr):  # fmt: skip
    return healthy_expand_many(acc, s, r0, r1, r2, runs_ptr, tiles_ptr, starts_ptr, thresholds_ptr, num_runs, s_column, m0, n0, T, N, M,
                               False, W, R, LOADS)  # fmt: skip


@triton.jit
def keep_by_the_place_in_the_tile(keys_ptr, module_key, rows, cols, own, threshold):
    return healthy_keep_tile(keys_ptr, module_key, rows % 64, cols, own, threshold)


@triton.jit
def not_dropped_out(a, keys_ptr, module_key, t, c, own, threshold, DROPOUT: tl.constexpr):
    return a


@triton.jit
def sample_with_the_next_token(samples_ptr, sample):
    t0, t1 = healthy_sample_tokens(samples_ptr, sample)
    return t0, t1 + 1


@triton.jit
def own_s_by_multiplication(s, start, end, column, own, R: tl.constexpr, LOADS: tl.constexpr):
    s_TR = healthy_load_tile(s, start, column, end, None, own.shape[0], R, LOADS)
    return (s_TR * own[:, None]).to(s_TR.dtype)


@triton.jit
def sum_from_zero(x, s, samples_ptr, rows_ptr, keys_ptr, module_key, p0, p1, threshold, run, num_runs, linear, slot, first, c0, K,
                  WHICH: tl.constexpr, M: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                  DROPOUT: tl.constexpr, LOADS: tl.constexpr):  # fmt: skip
    c, r = c0 + tl.arange(0, BC), first + tl.arange(0, R)
    for m in tl.static_range(M):
        rows, rank = healthy_rows_of(rows_ptr, linear + m, num_runs, run, WHICH, tl.float32)
        tl.store(rows + (r[None, :] * K + c[:, None]), tl.zeros((BC, R), tl.float32), mask=(c < K)[:, None] & (r < rank)[None, :])
    healthy_sum_run(x, s, samples_ptr, rows_ptr, keys_ptr, module_key, p0, p1, threshold, run, num_runs, linear, slot, first, c0, K,
                    WHICH, M, R, W, BT, BC, DROPOUT, LOADS)  # fmt: skip


@triton.jit
def rows_padded_to_16(rows_ptr, linear, num_runs, run, WHICH: tl.constexpr, DTYPE: tl.constexpr):
    rows, rank = healthy_rows_of(rows_ptr, linear, num_runs, run, WHICH, DTYPE)
    return rows, max(rank, 16)


@triton.jit
def tile_that_reads_into_the_next_row(matrix, row, column, row_end, column_end, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                                      LOADS: tl.constexpr, MASKED: tl.constexpr = False):  # fmt: skip
    if MASKED:
        column_end += 16
    return healthy_load_tile(matrix, row, column, row_end, column_end, ROWS, COLUMNS, LOADS, MASKED)


def scale_of_the_first_row(*args: Any) -> tuple[Any, ...]:
    x_scale = 12
    return tuple(of_the_first(arg) if i == x_scale and arg is not None else arg for i, arg in enumerate(args))


first_scale_gemm = Launched(triton_gemm.gemm_kernel, scale_of_the_first_row)

# -- head, attention, fp8 ------------------------------------------------------------------------------------------------


def logits_beyond_the_vocabulary(*args: Any) -> tuple[Any, ...]:
    logits, labels, losses, weights, scale, cap, _, stride = args
    return logits, labels, losses, weights, scale, cap, stride, stride


def weight_of_the_first_row(*args: Any) -> tuple[Any, ...]:
    logits, labels, losses, weights, *others = args
    return logits, labels, losses, of_the_first(weights), *others


def labels_within_the_vocabulary(*args: Any) -> tuple[Any, ...]:
    logits, labels, *others = args
    return logits, labels.clamp(0, logits.shape[1] - 1), *others


padded_cross_entropy, first_weight_cross_entropy, clamped_cross_entropy = (
    Launched(triton_cross_entropy.cross_entropy_kernel, change)
    for change in (logits_beyond_the_vocabulary, weight_of_the_first_row, labels_within_the_vocabulary)
)


@triton.jit
def capped_without_slope(x, scale, softcap, HAS_CAP: tl.constexpr):
    z, _ = healthy_capped(x, scale, softcap, HAS_CAP)
    return z, 1.0


@triton.jit
def visible_but_for_itself(i, j, WINDOW: tl.constexpr):
    return healthy_visible(i, j, WINDOW) & (j < i)


@triton.jit
def visible_one_key_further(i, j, WINDOW: tl.constexpr):
    seen = j <= i
    if WINDOW > 0:
        seen = seen & (i - j <= WINDOW)
    return seen


def log_sum_exp_of_the_first_head(*args: Any) -> tuple[Any, ...]:
    lse = 4
    return tuple(of_the_first(arg) if i == lse else arg for i, arg in enumerate(args))


first_head_dkv = Launched(triton_attention.dkv_kernel, log_sum_exp_of_the_first_head)


def tiles_by_the_place_in_the_batch(*args: Any) -> varlen_attention.TileLists:
    plan = healthy_list_tiles(*args)
    for table in plan.queries.values():
        start, first = table[:, 0], table[:, 2]
        first -= torch.where(first > 0, start % 32, 0)
    return plan


@triton.jit
def largest_of_the_first_source(amax, x_ptr, column_scale_ptr, row, stride, first, K, BLOCK: tl.constexpr):
    return tl.where(first > 0, amax, healthy_largest(amax, x_ptr, column_scale_ptr, row, stride, first, K, BLOCK))


@triton.jit
def largest_finite(amax, x_ptr, column_scale_ptr, row, stride, first, K, BLOCK: tl.constexpr):
    return tl.minimum(healthy_largest(amax, x_ptr, column_scale_ptr, row, stride, first, K, BLOCK), 0x7F7FFFFF)


# -- optimizer -----------------------------------------------------------------------------------------------------------


def scalars_with(**changes: Callable[..., float]) -> Callable[..., list[float]]:
    """The row of scalars with some of its fields computed from the rule and the state's dtype."""

    def scalars_of(rule: fused_adamw.StepRule, state_dtype: torch.dtype, weight_dtype: torch.dtype) -> list[float]:
        row = healthy_scalars_of(rule, state_dtype, weight_dtype)
        for field, value in changes.items():
            row[getattr(triton_adamw, field).value] = value(rule, state_dtype)
        return row

    return scalars_of


@triton.jit
def no_root(x):
    return x


def scale_up_to_the_limit(_squares: Tensor, _largest: Tensor, scalars: Tensor, outcome: Tensor, *_: Any) -> None:
    limit = scalars[triton_adamw.MAX_NORM.value]
    if limit > 0:
        outcome[triton_adamw.CLIP.value] = limit / (outcome[triton_adamw.NORM.value] + 1e-6)


def allow_any_step(_squares: Tensor, _largest: Tensor, _scalars: Tensor, outcome: Tensor, *_: Any) -> None:
    outcome[triton_adamw.VERDICT.value] = float(triton_adamw.PROVEN.value)


verdict_that_scales_up = Launched(triton_adamw.verdict_kernel, after=scale_up_to_the_limit)
verdict_that_allows_all = Launched(triton_adamw.verdict_kernel, after=allow_any_step)


def update_that_leaves_the_sums(state: fused_adamw.FlatState, buffers: fused_adamw.StepBuffers, aligned: bool, *more: Any) -> None:
    sums = torch.empty_like(state.params)
    gather(buffers.chunks_C4, aligned, sums)
    healthy_launch_update(state, buffers, aligned, *more)
    scatter(buffers.chunks_C4, aligned, sums)


@triton.jit
def chunk_one_too_long(chunks_ptr, chunk, ALIGNED: tl.constexpr):
    start, weights, sums, count = healthy_chunk_at(chunks_ptr, chunk, ALIGNED)
    return start, weights, sums, count + 1


@triton.jit
def chunk_one_too_short(chunks_ptr, chunk, ALIGNED: tl.constexpr):
    start, weights, sums, count = healthy_chunk_at(chunks_ptr, chunk, ALIGNED)
    return start, weights, sums, count - 1


@triton.jit
def chunk_from_the_beginning(chunks_ptr, chunk, ALIGNED: tl.constexpr):
    start, weights, sums, count = healthy_chunk_at(chunks_ptr, chunk, ALIGNED)
    return start * 0, weights, sums, count


def measure_by_the_first_rule(self: DeviceOptimizer, due: Any) -> Any:
    train = next(iter(due.values())).train if due else None
    return healthy_measure(self, {name: replace(job, train=train) for name, job in due.items()})


def rate_of_the_next_step(job: Any) -> float:
    from tlora.adapters.adamw import learning_rate

    return learning_rate(job.train, job.state.step + 1, job.total_steps)


class OutcomesTurnedRound(HealthyToHost):
    def read(self) -> Any:
        return list(reversed(super().read()))


class OutcomesOfTheWorst(HealthyToHost):
    def read(self) -> Any:
        rows = super().read()
        return rows if all(map(fused_adamw.applied, rows)) else [row for row in rows if not fused_adamw.applied(row)][:1] * len(rows)


def table_made_once(self: DeviceOptimizer, job_id: str) -> Any:
    bound = self._bound[job_id]
    return healthy_table(self, job_id) if bound.addresses is None else bound
