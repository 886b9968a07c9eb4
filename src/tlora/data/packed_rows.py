"""Which samples share a row of `packing: true`: best-fit decreasing, TRL's `bfd`.

A row is no sequence: its samples attend to themselves alone, as everywhere. It only says how much one of `batch_size` holds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tlora.data.order import PackedRows


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
