"""The tables of one micro-batch that GPU kernels read: which tokens belong to which job, and the address of each adapter's rows. One copy.

Rows are given by address, so that a kernel needs no tensor per adapter and no resident adapter constrains another's place.
Kernels read the tables through the functions of `triton_tables.py`, which is the other side of this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlora.kernels.device import to_device

TILE = 64  # tokens; the kernels' row tiles are multiples of it
WIDEST_PIECE = 64  # ranks that a kernel takes at a time
A, B, DA, DB, RANK = range(5)  # of a row of `rows_LS5`: addresses of the first rows of A, B, dA and dB, and the rank
ADDRESS_FIELDS = 5
RUNS_STEP = 4  # runs are filled up to a multiple of it with empty ones: fewer shapes, and rows of tables at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `t0:t1` of one job: its samples' lengths in order, and its dropout."""

    t0: int
    t1: int
    lengths: tuple[int, ...]
    dropout: float = 0.0


@dataclass(frozen=True)
class LoraTables:
    """One micro-batch on the device. S runs, P samples, X tiles of 64 tokens, L linears.

    `weights` are the linears' banks, A [R, K] and B [R, N] (None where no job has an adapter); `starts_LS` int32 a run's first row there,
    and `rows_LS5` int64 its addresses and rank. `runs_S4` int32: t0, t1, first and last sample; `samples_P2` int32: t0, t1; `tiles_X2`
    int32: a tile's first and last run; `items_I2` int32: a tile's first token and one of its runs, or -1. `scales_LS` fp32, over the share
    that dropout keeps; `module_keys_L` int32, of dropout.
    """

    runs_S4: Tensor
    order_S: Tensor  # int32: runs by their work, the most first: a long one that starts last is waited for
    samples_P2: Tensor
    tiles_X2: Tensor
    items_I2: Tensor
    rows_LS5: Tensor
    starts_LS: Tensor
    scales_LS: Tensor
    thresholds_S: Tensor  # int32: int(dropout * 2^31), as `dropout.keep_mask` draws the line
    module_keys_L: Tensor
    keys_T: Tensor | None
    buffer: Tensor  # uint8: all of the above but `keys_T` are views of it
    weights: Sequence[tuple[Tensor, Tensor] | None]
    runs_in_a_tile: int  # at most, in 128 tokens from a multiple of 128
    width: int  # of S for one linear: the largest rank or, up to 64, more; 16, 32, 64 or a multiple of 64
    has_dropout: bool
    all_dropout: bool  # every run that has tokens

    @property
    def many(self) -> bool:
        """Whether the GEMM must be ready for several runs in a tile, or ranks above `WIDEST_PIECE`."""
        return self.runs_in_a_tile > 1 or self.width > WIDEST_PIECE

    @property
    def num_runs(self) -> int:
        return self.runs_S4.shape[0]

    @property
    def shape(self) -> tuple[int | bool, ...]:
        """All that launches depend on, except the number of tokens and where the banks lie."""
        return self.shape_with(len(self.samples_P2))

    def shape_with(self, num_samples: int) -> tuple[int | bool, ...]:
        """The same of a micro-batch that has so many samples, and is this one otherwise."""
        return self.num_runs, num_samples, self.width, self.many, self.has_dropout, self.all_dropout, self.keys_T is None


def rank_width(rank: int) -> int:
    """16, 32, 64, then multiples of 64: the ranks that kernels are compiled for."""
    return next((w for w in (16, 32, 64) if rank <= w), -(-rank // 64) * 64)


@dataclass(frozen=True)
class Slots:
    """Where each of S runs' adapters lies at each of L linears: addresses and rank, first row, scale; and the linears' dropout keys."""

    rows_LS5: np.ndarray
    starts_LS: np.ndarray
    scales_LS: np.ndarray
    module_keys_L: np.ndarray
    weights: Sequence[tuple[Tensor, Tensor] | None]


def build_tables(runs: Sequence[Run], slots: Slots, num_tokens: int, keys_T: Tensor | None, device: torch.device) -> LoraTables:
    """Runs are ordered and disjoint; tokens of no run, and runs of rank 0 at a linear, have no adapter there. Never synchronises."""
    samples: list[tuple[int, int]] = []
    table = np.zeros((len(runs), 4), np.int32)
    for i, run in enumerate(runs):
        first, start = len(samples), run.t0
        for length in run.lengths:
            samples.append((start, start + length))
            start += length
        assert start == run.t1, f"run {run.t0}:{run.t1} has samples of {sum(run.lengths)} tokens"
        table[i] = run.t0, run.t1, first, len(samples)
    edges = np.arange(-(-num_tokens // TILE)) * TILE
    tiles = np.stack([np.searchsorted(table[:, 1], edges, "right"), np.searchsorted(table[:, 0], edges + TILE, "left")], 1)
    dropouts = np.array([run.dropout if keys_T is not None else 0.0 for run in runs])
    wide = np.stack([tiles[::2, 0], np.append(tiles[1::2, 1], tiles[-1:, 1])[: len(tiles[::2])]])
    ranks = slots.rows_LS5[:, :, RANK].max(0, initial=0).clip(16)
    parts = [
        slots.rows_LS5.astype(np.int64, copy=False),
        slots.starts_LS.astype(np.int32, copy=False),
        table,
        np.argsort(-(table[:, 1] - table[:, 0]) * ranks, kind="stable").astype(np.int32),
        np.array(samples, np.int32).reshape(-1, 2),
        tiles.astype(np.int32),
        _items(tiles, len(runs)),
        (slots.scales_LS / (1 - dropouts)).astype(np.float32),
        np.array([int(dropout * 2**31) for dropout in dropouts], np.int32),
        slots.module_keys_L.astype(np.int32, copy=False),
    ]
    buffer, moved = copy_together(parts, device)
    rows_t, starts_t, table_t, order_t, samples_t, tiles_t, items_t, scales_t, thresholds_t, module_keys_t = moved
    return LoraTables(
        runs_S4=table_t,
        order_S=order_t,
        samples_P2=samples_t,
        tiles_X2=tiles_t,
        items_I2=items_t,
        rows_LS5=rows_t,
        starts_LS=starts_t,
        scales_LS=scales_t,
        thresholds_S=thresholds_t,
        module_keys_L=module_keys_t,
        keys_T=keys_T if dropouts.any() else None,  # a kernel with a pointer is another one than with none
        buffer=buffer,
        weights=slots.weights,
        runs_in_a_tile=int((wide[1] - wide[0]).max(initial=0)),
        width=rank_width(int(slots.rows_LS5[:, :, RANK].max(initial=16))),
        has_dropout=bool(dropouts.any()),
        all_dropout=bool(dropouts.any() and dropouts[table[:, 0] < table[:, 1]].all()),
    )


def _items(tiles_X2: np.ndarray, num_runs: int) -> np.ndarray:
    """int32 [X + S, 2]: each tile's first token with each of its runs. A run lies in one tile more than it begins in, at most."""
    counts = (tiles_X2[:, 1] - tiles_X2[:, 0]).clip(0)
    items = np.full((len(tiles_X2) + num_runs, 2), (0, -1), np.int32)
    place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    items[: len(place)] = np.stack([np.repeat(np.arange(len(tiles_X2)) * TILE, counts), np.repeat(tiles_X2[:, 0], counts) + place], 1)
    return items


def copy_together(parts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """All arrays in one buffer and one asynchronous copy: the buffer, and the arrays in it, each at a multiple of 16 bytes."""
    offsets = np.cumsum([0] + [-(-part.nbytes // 16) * 16 for part in parts])
    host = np.zeros(int(offsets[-1]), np.uint8)
    for part, start in zip(parts, offsets, strict=False):
        host[start : start + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    buffer = to_device(host, device)
    kinds = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
    return buffer, [
        buffer[start : start + part.nbytes].view(kinds[part.dtype]).view(part.shape) for part, start in zip(parts, offsets, strict=False)
    ]
