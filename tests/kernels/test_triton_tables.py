"""What kernels read of a micro-batch's tables, against what the tables were built from."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.kernels.test_lora_tables import Drawn, make, owners
from tlora.kernels.lora_tables import ADDRESS_FIELDS, DA, DB, RANK, TILE, A, B, LoraTables, build_tables

pytest.importorskip("triton")
import triton
import triton.language as tl

with interpreted():
    from tlora.kernels import triton_tables
    from tlora.kernels.triton_tables import (
        first_run,
        in_run,
        item_at,
        rank_of,
        rows_of,
        run_samples,
        run_tokens,
        runs_of_tiles,
        sample_tokens,
        store_rank,
        store_sums,
        store_weights,
    )

    @triton.jit
    def runs_kernel(runs_ptr, out_ptr, own_ptr, T, BT: tl.constexpr):
        run, t = tl.program_id(0), tl.arange(0, BT)
        t0, t1 = run_tokens(runs_ptr, run)
        p0, p1 = run_samples(runs_ptr, run)
        tl.store(out_ptr + run * 4, t0)
        tl.store(out_ptr + run * 4 + 1, t1)
        tl.store(out_ptr + run * 4 + 2, p0)
        tl.store(out_ptr + run * 4 + 3, p1)
        tl.store(own_ptr + run * T + t, in_run(runs_ptr, run, t), mask=t < T)

    @triton.jit
    def samples_kernel(samples_ptr, out_ptr):
        sample = tl.program_id(0)
        t0, t1 = sample_tokens(samples_ptr, sample)
        tl.store(out_ptr + sample * 2, t0)
        tl.store(out_ptr + sample * 2 + 1, t1)

    @triton.jit
    def items_kernel(items_ptr, out_ptr):
        item = tl.program_id(0)
        start, run = item_at(items_ptr, item)
        tl.store(out_ptr + item * 2, start)
        tl.store(out_ptr + item * 2 + 1, run)

    @triton.jit
    def tiles_kernel(tiles_ptr, out_ptr, T, TOKENS: tl.constexpr):
        tile = tl.program_id(0)
        lo, hi = runs_of_tiles(tiles_ptr, tile * TOKENS, T, TOKENS)
        tl.store(out_ptr + tile * 3, lo)
        tl.store(out_ptr + tile * 3 + 1, hi)
        tl.store(out_ptr + tile * 3 + 2, first_run(tiles_ptr, tile * TOKENS))

    @triton.jit
    def rows_kernel(rows_ptr, out_ptr, num_runs, WHICH: tl.constexpr):
        run, linear = tl.program_id(0), tl.program_id(1)
        base, rank = rows_of(rows_ptr, linear, num_runs, run, WHICH, tl.bfloat16)
        out_ptr += (linear * num_runs + run) * 3
        tl.store(out_ptr, base.to(tl.int64))
        tl.store(out_ptr + 1, rank)
        tl.store(out_ptr + 2, rank_of(rows_ptr, linear, num_runs, run, VOLATILE=True))

    @triton.jit
    def store_kernel(rows_ptr, num_runs, S: tl.constexpr, GRADIENTS: tl.constexpr):
        run = tl.arange(0, S)
        rank = run.to(tl.int64) + 100
        store_weights(rows_ptr, run, rank + 100, rank + 200, run < num_runs)
        if GRADIENTS:
            store_sums(rows_ptr, run, rank + 300, rank + 400, run < num_runs)
        store_rank(rows_ptr, run, rank, run < num_runs)


pytestmark = MARKS


def drawn_and_built() -> tuple[Drawn, LoraTables]:
    """Runs that share a tile, that span several, with gaps and a tail of no run."""
    drawn = make([[30, 20], [5], [100, 41], [7]], [0, 3, 0, 130], [[8, 0, 20, 1], [3, 64, 16, 0]], [0.0] * 4, tail=70)
    drawn.slots.rows_LS5[:, :, :RANK] &= -16  # multiples of 16 bytes, as kernels take for granted
    return drawn, build_tables(drawn.runs, drawn.slots, drawn.num_tokens, None, DEVICE)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, -99, dtype=dtype, device=DEVICE)


def test_runs_and_their_samples() -> None:
    drawn, tables = drawn_and_built()
    runs, samples, own = empty(tables.num_runs, 4), empty(len(tables.samples_P2), 2), empty(tables.num_runs, drawn.num_tokens)
    runs_kernel[(len(runs),)](tables.runs_S4, runs, own, drawn.num_tokens, BT=512)
    owner = owners(drawn)
    assert own.tolist() == [[int(run == s) for run in owner] for s in range(len(runs))]
    samples_kernel[(len(samples),)](tables.samples_P2, samples)
    for run, (t0, t1, p0, p1) in zip(drawn.runs, runs.tolist(), strict=True):
        assert (t0, t1) == (run.t0, run.t1)
        cuts = samples.tolist()[p0:p1]
        assert tuple(end - start for start, end in cuts) == run.lengths and (cuts[0][0], cuts[-1][1]) == (t0, t1)


@pytest.mark.parametrize("tokens", [TILE, 2 * TILE])
def test_tiles(tokens: int) -> None:
    drawn, tables = drawn_and_built()
    owner = owners(drawn)
    found = empty(-(-drawn.num_tokens // tokens), 3)
    tiles_kernel[(len(found),)](tables.tiles_X2, found, drawn.num_tokens, TOKENS=tokens)
    assert len(found) > 3
    for tile, (first, end, same) in enumerate(found.tolist()):
        assert set(range(first, end)) == {run for run in owner[tile * tokens : (tile + 1) * tokens] if run is not None}
        assert same == first


def test_items() -> None:
    drawn, tables = drawn_and_built()
    owner, found = owners(drawn), empty(len(tables.items_I2), 2)
    items_kernel[(len(found),)](tables.items_I2, found)
    expected = {(t // TILE * TILE, run) for t, run in enumerate(owner) if run is not None}
    real = [(start, run) for start, run in found.tolist() if run >= 0]
    assert len(real) == len(expected) < len(found) and set(real) == expected


@pytest.mark.parametrize("which", [A, B, DA, DB])
def test_rows(which: int) -> None:
    drawn, tables = drawn_and_built()
    rows = drawn.slots.rows_LS5
    found = empty(*rows.shape[:2], 3, dtype=torch.int64)
    rows_kernel[(rows.shape[1], rows.shape[0])](tables.rows_LS5, found, tables.num_runs, WHICH=which)
    assert np.array_equal(found.cpu().numpy(), rows[:, :, [which, RANK, RANK]])


@pytest.mark.parametrize("gradients", [False, True])
def test_a_row_that_is_stored(gradients: bool) -> None:
    rows, rank = empty(4, ADDRESS_FIELDS, dtype=torch.int64), torch.arange(3, device=DEVICE) + 100
    store_kernel[(1,)](rows, 3, S=4, GRADIENTS=gradients)
    for field, more in ((RANK, 0), (A, 100), (B, 200), (DA, 300), (DB, 400)):
        assert rows[:3, field].equal(rank + more if gradients or field not in (DA, DB) else torch.full_like(rank, -99)), field
    assert (rows[3] == -99).all(), "a run that is masked"


def test_nothing_reads_a_global() -> None:
    """Triton would hash it into some kernels' cache keys and not into others': those that compile ahead would miss."""
    functions = [value for value in vars(triton_tables).values() if hasattr(value, "fn")]
    assert functions
    for function in functions:
        names = inspect.getclosurevars(function.fn).globals
        assert all(value is tl or hasattr(value, "fn") for value in names.values()), f"{function.fn.__name__} reads {names}"
