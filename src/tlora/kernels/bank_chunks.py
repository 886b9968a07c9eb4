"""Host side of chunks: the table of one adapter, and the launches that copy its gradient and weights between the bank and a flat vector.

Nothing here waits for the device or takes memory on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tlora.kernels import triton_chunks as kernels

CHUNK = 4096  # elements of a program: 16 a thread
WARPS = 8


@dataclass(frozen=True, slots=True)
class BankRun:
    """Elements that are contiguous in the flat vectors and in the bank: addresses of their weights and gradient sums, in bytes."""

    weights: int
    sums: int
    count: int


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


def gather(chunks_C4: Tensor, aligned: bool, flat_P: Tensor) -> None:
    """Queue one launch that copies the sums in the bank to `flat_P`: contiguous, of the sums' dtype, as long as all chunks together."""
    kernels.gather_kernel[(len(chunks_C4),)](chunks_C4, flat_P, **_how(aligned))


def scatter(chunks_C4: Tensor, aligned: bool, flat_P: Tensor) -> None:
    """Queue one launch that writes `flat_P`, as `gather` fills it, over the sums in the bank."""
    kernels.scatter_kernel[(len(chunks_C4),)](chunks_C4, flat_P, **_how(aligned))


def write(chunks_C4: Tensor, aligned: bool, flat_P: Tensor, weights_like: Tensor) -> None:
    """Queue one launch that writes `flat_P` over the weights in the bank, rounded to their dtype, which is that of `weights_like`."""
    kernels.write_kernel[(len(chunks_C4),)](chunks_C4, flat_P, weights_like, **_how(aligned))


def _how(aligned: bool) -> dict[str, Any]:
    return {"CHUNK": CHUNK, "ALIGNED": aligned, "num_warps": WARPS}
