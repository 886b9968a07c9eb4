"""How kernels read and write the tables of a micro-batch. The layout is `LoraTables`'s: it stands as numbers here and nowhere else.

    runs_S4     first token, end of tokens, first sample, end of samples
    samples_P2  first token, end of tokens
    tiles_X2    first run, end of runs; a tile is 64 tokens
    items_I2    first token of a tile, and one of its runs or -1
    rows_LS5    addresses of the first rows of A, B, dA and dB, and the rank

The numbers are literals because no shared Triton function may read a global (docs/adr/023-the-gpu-path.md).
`tests/kernels/test_triton_tables.py` compares them with the tables as built.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_tokens(runs_ptr, run):
    """A run's first token, and the one behind its last."""
    return tl.load(runs_ptr + run * 4), tl.load(runs_ptr + run * 4 + 1)


@triton.jit
def in_run(runs_ptr, run, t):
    """Which of tokens `t` are the run's."""
    return (t >= tl.load(runs_ptr + run * 4)) & (t < tl.load(runs_ptr + run * 4 + 1))


@triton.jit
def run_samples(runs_ptr, run):
    """A run's first sample, and the one behind its last."""
    return tl.load(runs_ptr + run * 4 + 2), tl.load(runs_ptr + run * 4 + 3)


@triton.jit
def sample_tokens(samples_ptr, sample):
    """A sample's first token, and the one behind its last."""
    return tl.load(samples_ptr + sample * 2), tl.load(samples_ptr + sample * 2 + 1)


@triton.jit
def first_run(tiles_ptr, start):
    """The first run of the tile that token `start` begins; without any, the next run."""
    return tl.load(tiles_ptr + start // 64 * 2)


@triton.jit
def runs_of_tiles(tiles_ptr, start, T, TOKENS: tl.constexpr):
    """The first run of the tiles of TOKENS tokens from `start` on, of T in all, and the one behind the last."""
    return first_run(tiles_ptr, start), tl.load(tiles_ptr + ((min(start + TOKENS, T) - 1) // 64) * 2 + 1)


@triton.jit
def item_at(items_ptr, item):
    """The first token of an item's tile, and its run or -1."""
    return tl.load(items_ptr + item * 2), tl.load(items_ptr + item * 2 + 1)


@triton.jit
def rank_of(rows_ptr, linear, num_runs, run, VOLATILE: tl.constexpr = False):
    """A run's rank at a linear. VOLATILE: it is loaded again, though an earlier load gave the same."""
    return tl.load(rows_ptr + (linear * num_runs + run) * 5 + 4, volatile=VOLATILE).to(tl.int32)


@triton.jit
def rows_of(rows_ptr, linear, num_runs, run, WHICH: tl.constexpr, DTYPE: tl.constexpr):
    """The first of a run's rows at a linear as a pointer to DTYPE, and the rank there. WHICH is A, B, DA or DB of `lora_tables`."""
    address = tl.load(rows_ptr + (linear * num_runs + run) * 5 + WHICH)
    base = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)  # type: ignore[arg-type]
    return base, rank_of(rows_ptr, linear, num_runs, run)


@triton.jit
def store_weights(rows_ptr, run, a, b, mask):
    """Write the addresses of A and B of runs at a lone linear."""
    tl.store(rows_ptr + run * 5, a, mask=mask)
    tl.store(rows_ptr + run * 5 + 1, b, mask=mask)


@triton.jit
def store_sums(rows_ptr, run, da, db, mask):
    """Write the addresses of dA and dB."""
    tl.store(rows_ptr + run * 5 + 2, da, mask=mask)
    tl.store(rows_ptr + run * 5 + 3, db, mask=mask)


@triton.jit
def store_rank(rows_ptr, run, rank, mask):
    tl.store(rows_ptr + run * 5 + 4, rank, mask=mask)
