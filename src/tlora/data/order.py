"""The order of samples in an epoch (also of a mixture), the global batches cut from it, and the train/eval split.

Counter-based: every answer depends on its arguments only, so a resumed job needs no random state. Rows of `packing: true` hold the samples
that best-fit decreasing puts together, as TRL's `bfd`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from tlora.errors import DataError

_SPLIT_STREAM = 2**64 - 1  # the epoch number that no epoch reaches: the split must not equal an epoch's order


@dataclass(frozen=True)
class Mixture:
    """Samples of several sources, which lie one source after another: source i has `sizes[i]`, and an epoch takes `takes[i]` of them."""

    sizes: tuple[int, ...]
    takes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Samples grouped in rows, each in one: row i is `samples[starts[i]:starts[i + 1]]`. An epoch takes `rows` of them."""

    rows: int | Mixture
    samples: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


Epoch = int | Mixture | PackedRows
"""What an epoch takes: all of so many samples, samples of several sources, or rows of samples."""


def mix(sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
    """A mixture of sources in proportion to `weights`: as many samples as possible without repeats, so at least one source is used up.

    takes[i] = round(weights[i] * min_j(sizes[j] / weights[j])), at least 1. Every source must have a sample.
    """
    assert all(sizes) and len(sizes) == len(weights), (sizes, weights)
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    takes = (min(size, max(1, round(weight * scale))) for size, weight in zip(sizes, weights, strict=True))
    return Mixture(tuple(sizes), tuple(takes))


def epoch_size(epoch: Epoch) -> int:
    """Samples of one epoch, or rows where they are packed: what `batch_size` counts."""
    if isinstance(epoch, PackedRows):
        return epoch_size(epoch.rows)
    return epoch if isinstance(epoch, int) else sum(epoch.takes)


def takes_all(epoch: Epoch) -> bool:
    """Whether each epoch takes each sample once."""
    return isinstance(epoch.rows if isinstance(epoch, PackedRows) else epoch, int)


def row_tokens(lengths: npt.NDArray[np.int64], epoch: Epoch) -> npt.NDArray[np.int64]:
    """Tokens of each unit that `batch_size` counts: of the samples, or of the rows that they are packed in."""
    return np.add.reduceat(lengths[epoch.samples], epoch.starts[:-1]) if isinstance(epoch, PackedRows) else lengths


def epoch_order(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(num_samples)` that depends on (seed, epoch) only.

    Sorts Philox's raw 64-bit stream, which numpy promises to keep, unlike `Generator.permutation`.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def mixed_order(seed: int, epoch: int, mixture: Mixture) -> npt.NDArray[np.int64]:
    """The samples of one epoch of a mixture, in their order. It depends on the arguments only.

    Each source goes through all its samples, in a new order each time, and each epoch takes the next `takes[i]` of them: no sample is
    taken twice before every other of its source has been taken once.
    """
    starts = [0, *accumulate(mixture.sizes)]
    parts = [
        starts[i] + _stretch(seed + ((i + 1) << 32), epoch * take, take, size)  # seeds are below 2^32: each source has keys of its own
        for i, (size, take) in enumerate(zip(mixture.sizes, mixture.takes, strict=True))
    ]
    taken = np.concatenate(parts)
    return taken[epoch_order(seed, epoch, len(taken))]


def _stretch(seed: int, begin: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """`count` <= `size` places from `begin` on, of the permutations 0, 1, ... of `size` samples one after another."""
    turn, start = divmod(begin, size)
    order = epoch_order(seed, turn, size)[start : start + count]
    return order if len(order) == count else np.concatenate([order, epoch_order(seed, turn + 1, size)[: count - len(order)]])


def global_batch(step: int, epoch: Epoch, batch_size: int, seed: int) -> list[int]:
    """Sample indices of optimizer step `step` (from 0): `batch_size` samples, or the samples of `batch_size` rows. Epochs follow one
    another; an epoch's last batch may be smaller.
    """
    if isinstance(epoch, PackedRows):
        rows = global_batch(step, epoch.rows, batch_size, seed)
        return [sample for row in rows for sample in epoch.samples[epoch.starts[row] : epoch.starts[row + 1]].tolist()]
    size = epoch_size(epoch)
    assert step >= 0 and size > 0 and batch_size > 0, (step, epoch, batch_size)
    number, batch = divmod(step, -(-size // batch_size))
    return _order_of_epoch(seed, number, epoch)[batch * batch_size : (batch + 1) * batch_size].tolist()


@lru_cache(maxsize=64)  # 8 bytes a sample; one epoch of each of 64 jobs
def _order_of_epoch(seed: int, epoch: int, samples: int | Mixture) -> npt.NDArray[np.int64]:
    order = epoch_order(seed, epoch, samples) if isinstance(samples, int) else mixed_order(seed, epoch, samples)
    order.setflags(write=False)
    return order


def split(num_samples: int, eval_size: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Disjoint ascending indices (train, eval): `eval_size` below 1 is a share of the samples (at least one), else a count."""
    count = max(1, round(num_samples * eval_size)) if 0 < eval_size < 1 else int(eval_size)
    if count >= num_samples:
        raise DataError(f"eval_size {eval_size:g} takes {count} of {num_samples} samples and leaves none to train on; lower it or add rows")
    order = epoch_order(seed, _SPLIT_STREAM, num_samples)
    return np.sort(order[count:]), np.sort(order[:count])


def pack_rows(lengths: npt.NDArray[np.int64], capacity: int) -> PackedRows:
    """Pack samples, none longer than `capacity` tokens, in rows of at most `capacity`: from the longest to the shortest each goes into the
    row where it leaves the least room, or into a new one if it fits nowhere. Within a row samples keep their order.
    """
    shortest = int(lengths.min())
    row_of = np.empty(len(lengths), np.int64)
    rooms: list[int] = []  # that rows have left, each once, ascending
    rows_with: dict[int, list[int]] = {}
    count = 0
    for sample in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[sample])
        place = bisect_left(rooms, tokens)
        if place < len(rooms):
            room = rooms[place]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[place], rows_with[room]
        else:
            room, row, count = capacity, count, count + 1
        row_of[sample] = row
        room -= tokens
        if room >= shortest:  # else no sample fits any more
            if room not in rows_with:
                insort(rooms, room)
                rows_with[room] = []
            rows_with[room].append(row)
    samples = np.argsort(row_of, kind="stable")
    return PackedRows(count, samples, np.searchsorted(row_of[samples], np.arange(count + 1)))


def join_rows(packed: Sequence[PackedRows]) -> PackedRows:
    """The rows of sets of samples that lie one after another. An epoch takes all of them."""
    sizes, rows = (
        [0, *np.cumsum(each).tolist()] for each in ([len(one.samples) for one in packed], [len(one.starts) - 1 for one in packed])
    )
    samples = np.concatenate([one.samples + size for one, size in zip(packed, sizes[:-1], strict=True)])
    starts = [one.starts[:-1] + size for one, size in zip(packed, sizes[:-1], strict=True)]
    return PackedRows(rows[-1], samples, np.concatenate([*starts, np.array(sizes[-1:])]))
