"""A frozen linear with any number of adapters by the library's products alone: the plain path of a GPU.

Tokens come in chunks of one size, each of one job's (`ChunkedJobs`), so that all adapters' products are one batched product over the
chunks: the number of calls depends neither on jobs nor on samples. Rows are selected, never masked: a chunk meets its own job's rows of
A and B, and no sum has another job's tokens.

J jobs, n chunks of C tokens, T = n * C. K in features, N out features, R rank rows of all slots, r rows of the largest adapter here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.device import to_device
from tlora.kernels.dropout import keep_mask, threshold_of
from tlora.kernels.frozen import FrozenLinear
from tlora.kernels.gemm import linear
from tlora.kernels.multi_lora import LoraWeights
from tlora.kernels.reference import Segments

_SIZES = (1024, 512, 256, 128, 64, 32, 16)  # of chunks of several jobs
_MOST_PADDING = 1 / 16  # of the tokens: more would cost the base more than larger chunks save the adapters


@dataclass(frozen=True)
class ChunkedJobs:
    """`counts` chunks of each job, one job after another, each of `size` tokens."""

    size: int
    counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.size * sum(self.counts)


def chunk_jobs(tokens: Sequence[int]) -> ChunkedJobs:
    """Chunks for jobs of so many tokens, the last of a job's filled up: as large as a few more tokens allow. A job alone is one chunk."""
    if len(tokens) == 1:
        return ChunkedJobs(tokens[0], (1,))
    for size in _SIZES:
        chunks = ChunkedJobs(size, tuple(-(-count // size) for count in tokens))
        if chunks.num_tokens <= (1 + _MOST_PADDING) * sum(tokens):
            return chunks
    return ChunkedJobs(_SIZES[-1], tuple(-(-count // _SIZES[-1]) for count in tokens))


@dataclass(frozen=True)
class ChunkSlots:
    """Which rows of the bank the chunks meet at a linear. `segments` have one entry per job, empty where the job has no adapter there."""

    num_chunks: int
    rank: int
    rows: Tensor  # int64 [n * r]: of A and B, for each chunk; where `beyond` says so, any
    beyond: Tensor | None  # bool [n * r, 1]: rows that the chunk's job does not have; None where there are none
    scale: float | Tensor  # of all jobs alike, or [n, 1, 1]; without dropout's factor
    bounds: Tensor  # int64 [J + 1]: the chunks of each job
    own: Tensor | None  # int64: those of J * r rows of sums that jobs have; None where that is all of them
    targets: Tensor  # int64: the bank's row of each of these
    drops: Tensor | None  # int64: chunks of the jobs with dropout
    thresholds: Tensor | None  # int32 [number of these * C, 1]


def make_slots(chunks: ChunkedJobs, segments: Segments, sums: torch.dtype, device: torch.device) -> ChunkSlots:
    """Copies a few small tables to `device`; does not wait for it."""
    counts, jobs = np.array(chunks.counts), range(len(segments))
    ranks, starts = np.array([s.r1 - s.r0 for s in segments]), np.array([s.r0 for s in segments])
    rank = int(ranks.max())
    columns = np.arange(rank)
    has_JR = columns[None, :] < ranks[:, None]
    rows_JR = np.where(has_JR, starts[:, None] + columns[None, :], 0)
    factors = np.array([s.scale / (1 - s.dropout) for s in segments])
    dropping = np.repeat(np.array([s.dropout > 0 for s in segments]), counts)
    thresholds = np.repeat(np.array([threshold_of(s.dropout) for s in segments], np.int32), counts)[dropping]
    adapted = {factors[j] for j in jobs if ranks[j]}
    dtype = np.float64 if sums == torch.float64 else np.float32

    def put(array: np.ndarray) -> Tensor:
        return to_device(np.ascontiguousarray(array), device)

    return ChunkSlots(
        num_chunks=int(counts.sum()),
        rank=rank,
        rows=put(np.repeat(rows_JR, counts, 0).reshape(-1)),
        beyond=None if has_JR.all() else put(~np.repeat(has_JR, counts, 0).reshape(-1, 1)),
        scale=adapted.pop() if len(adapted) == 1 else put(np.repeat(factors.astype(dtype), counts)[:, None, None]),
        bounds=put(np.array([0, *accumulate(chunks.counts)])),
        own=None if has_JR.all() else put(has_JR.reshape(-1).nonzero()[0]),
        targets=put(rows_JR[has_JR]),
        drops=put(dropping.nonzero()[0]) if dropping.any() else None,
        thresholds=put(np.repeat(thresholds, chunks.size)[:, None]) if dropping.any() else None,
    )


def grouped_lora_linear(
    x_TK: Tensor,
    base: Callable[[], FrozenLinear],
    lora: LoraWeights,
    slots: ChunkSlots,
    keys_T: Tensor | None = None,
    anchor: Tensor | None = None,
) -> Tensor:
    """`multi_lora.multi_lora_linear` for tokens in chunks. `scale` is applied to S = x @ A.T, which is rounded once more for it."""
    return _GroupedLoraLinear.apply(x_TK, base, lora, slots, keys_T, anchor)  # type: ignore[no-any-return]


class _GroupedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        base: Callable[[], FrozenLinear],
        lora: LoraWeights,
        slots: ChunkSlots,
        keys_T: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        frozen = base()
        y_TN = linear(x_TK, frozen.dense(x_TK.dtype), frozen.bias_N)
        x_nCK = _drop(_chunks(x_TK, slots), _kept(x_TK, lora, slots, keys_T), slots)
        s_nCr = _scaled(torch.bmm(x_nCK, _rows(lora.a_RK, slots).transpose(1, 2)), slots.scale)
        _chunks(y_TN, slots).baddbmm_(s_nCr, _rows(lora.b_RN, slots))
        ctx.save_for_backward(x_TK, s_nCr)
        ctx.base, ctx.lora, ctx.slots, ctx.keys_T = base, lora, slots, keys_T
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TK, s_nCr = ctx.saved_tensors
        lora: LoraWeights = ctx.lora
        slots: ChunkSlots = ctx.slots
        dy_nCN = _chunks(dy_TN, slots)
        ds_nCr = _scaled(torch.bmm(dy_nCN, _rows(lora.b_RN, slots).transpose(1, 2)), slots.scale)
        kept = _kept(x_TK, lora, slots, ctx.keys_T)
        _add_sums(lora.db_RN, s_nCr, dy_nCN, slots)
        _add_sums(lora.da_RK, ds_nCr, _drop(_chunks(x_TK, slots), kept, slots), slots)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        dx_TK = linear(dy_TN, ctx.base().dense(dy_TN.dtype).t())
        a_nrK, dx_nCK = _rows(lora.a_RK, slots), _chunks(dx_TK, slots)
        if kept is None:
            dx_nCK.baddbmm_(ds_nCr, a_nrK)
        else:
            dx_nCK.add_(_drop(torch.bmm(ds_nCr, a_nrK), kept, slots))
        return dx_TK, None, None, None, None, None


def _chunks(values_TK: Tensor, slots: ChunkSlots) -> Tensor:
    return values_TK.unflatten(0, (slots.num_chunks, -1))  # a view, however the rows lie


def _rows(bank_RK: Tensor, slots: ChunkSlots) -> Tensor:
    """[n, r, K]: each chunk's rows; rows that its job does not have are zero, with any bank content."""
    rows = bank_RK.index_select(0, slots.rows)
    if slots.beyond is not None:
        rows.masked_fill_(slots.beyond, 0)
    return rows.view(slots.num_chunks, slots.rank, -1)


def _scaled(s_nCr: Tensor, scale: float | Tensor) -> Tensor:
    return s_nCr.mul_(scale) if isinstance(scale, float) else (s_nCr * scale).to(s_nCr.dtype)


def _kept(x_TK: Tensor, lora: LoraWeights, slots: ChunkSlots, keys_T: Tensor | None) -> Tensor | None:
    """bool [number of chunks with dropout, C, K]: dropout's mask; None without dropout."""
    if slots.drops is None or slots.thresholds is None or keys_T is None:
        return None
    keys_t = keys_T.view(slots.num_chunks, -1).index_select(0, slots.drops).view(-1)
    return keep_mask(keys_t, lora.module_key, x_TK.shape[1], slots.thresholds).view(len(slots.drops), -1, x_TK.shape[1])


def _drop(values_nCK: Tensor, kept: Tensor | None, slots: ChunkSlots) -> Tensor:
    """The values with zeros where dropout drops them; its factor is part of the scale."""
    if kept is None or slots.drops is None:
        return values_nCK
    if len(slots.drops) == slots.num_chunks:
        return torch.where(kept, values_nCK, 0)
    return values_nCK.index_copy(0, slots.drops, torch.where(kept, values_nCK.index_select(0, slots.drops), 0))


def _add_sums(sums_RK: Tensor, left_nCr: Tensor, right_nCK: Tensor, slots: ChunkSlots) -> None:
    """sums += left.T @ right of each job's own chunks, which are added in their order: bits do not change from run to run."""
    parts_nrK = torch.bmm(left_nCr.transpose(1, 2), right_nCK).to(sums_RK.dtype)
    jobs = len(slots.bounds) - 1
    if jobs != slots.num_chunks:
        parts_nrK = torch.segment_reduce(parts_nrK, "sum", offsets=slots.bounds, unsafe=True)
    own = parts_nrK.view(jobs * slots.rank, -1)
    sums_RK.index_add_(0, slots.targets, own if slots.own is None else own.index_select(0, slots.own))
