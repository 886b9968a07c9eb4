"""Packing by an exact solver: the fewest micro-batches of a global batch, and the most tokens of the next few micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, milp
from scipy.sparse import lil_matrix


@dataclass(frozen=True)
class Solved:
    """`value` is the best that was found, `bound` what nothing can beat; they are equal where the solver was through in time."""

    value: float
    bound: float


def fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """Bins that no packing of `lengths` can do without: Martello and Toth's L2. A sample longer than `budget` has one by itself."""
    short = sorted((tokens for tokens in lengths if tokens <= budget), reverse=True)
    best = 0
    for least in {0, *(tokens for tokens in short if 2 * tokens <= budget)}:
        alone = sum(1 for tokens in short if tokens > budget - least)
        wide = [tokens for tokens in short if budget // 2 < tokens <= budget - least]
        rest = [tokens for tokens in short if least <= tokens <= budget // 2]
        spare = len(wide) * budget - sum(wide)
        best = max(best, alone + len(wide) + max(0, math.ceil((sum(rest) - spare) / budget)))
    return best + len(lengths) - len(short)


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of positions; the heuristic that stands in where the solver has not found anything better."""
    bins: list[list[int]] = []
    left: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        place = next((bin for bin, space in enumerate(left) if space >= lengths[position]), None)
        if place is None:
            bins.append([])
            left.append(max(budget, lengths[position]))
            place = len(bins) - 1
        bins[place].append(position)
        left[place] -= lengths[position]
    return bins


def pack_exactly(lengths: Sequence[int], budget: int, seconds: float) -> tuple[list[list[int]], int]:
    """Bins of positions, as few as the solver finds in `seconds`, and how many no packing can do without."""
    found, least = first_fit_decreasing(lengths, budget), fewest_bins(lengths, budget)
    while len(found) > least:
        fewer = _into_bins(lengths, budget, len(found) - 1, seconds)
        if fewer is None:
            break
        if not fewer:
            least = len(found)
            break
        found = fewer
    return found, least


def _into_bins(lengths: Sequence[int], budget: int, bins: int, seconds: float) -> list[list[int]] | None:
    """Bins of positions; [] where it cannot be, None where the time was up."""
    long = [[position] for position, tokens in enumerate(lengths) if tokens > budget]
    items = [position for position, tokens in enumerate(lengths) if tokens <= budget]
    bins -= len(long)
    size = len(items) * bins
    matrix = lil_matrix((len(items) + bins, size))
    for row in range(len(items)):
        matrix[row, row * bins : (row + 1) * bins] = 1
    for bin in range(bins):
        for row, position in enumerate(items):
            matrix[len(items) + bin, row * bins + bin] = lengths[position]
    sizes = [len(items), bins]
    found = milp(
        np.zeros(size),
        constraints=(matrix.tocsr(), np.repeat([1.0, 0.0], sizes), np.repeat([1.0, float(budget)], sizes)),
        bounds=Bounds(0, 1),
        integrality=np.ones(size),
        options={"time_limit": seconds},
    )
    if found.x is None:
        return [] if found.status == 2 else None
    chosen = found.x.reshape(len(items), bins) > 0.5
    return long + [[items[row] for row in np.flatnonzero(chosen[:, bin])] for bin in range(bins)]


def most_tokens(batches: Sequence[Sequence[Sequence[int]]], budget: int, bins: int, seconds: float) -> Solved:
    """Tokens that `bins` micro-batches in a row can hold: `batches[j][g]` are lengths of job j's batch g, which enters when all of batch
    g - 1 lies in micro-batches before. Samples longer than `budget` are left out, so that the bound holds for streams with them too.

    x[i, b]: sample i is in micro-batch b. y[j, g, b]: batch g of job j is through before b; y <= sum of x[i, b'] over b' < b for each of
    its samples i.
    """
    items = [(job, batch, n) for job, own in enumerate(batches) for batch, ns in enumerate(own) for n in ns if n <= budget]
    throughs = [(job, batch) for job, own in enumerate(batches) for batch in range(len(own) - 1)]
    size = (len(items) + len(throughs)) * bins
    rows: list[tuple[dict[int, float], float]] = []  # coefficients, and what they are at most together
    for item in range(len(items)):
        rows.append(({item * bins + bin: 1.0 for bin in range(bins)}, 1.0))
    for bin in range(bins):
        rows.append(({item * bins + bin: float(n) for item, (_, _, n) in enumerate(items)}, float(budget)))
    for number, through in enumerate(throughs):
        first = (len(items) + number) * bins
        for item, (job, batch, _) in enumerate(items):
            for bin in range(bins):
                if (job, batch) == through:
                    rows.append(({first + bin: 1.0} | {item * bins + before: -1.0 for before in range(bin)}, 0.0))
                elif (job, batch - 1) == through:
                    rows.append(({item * bins + bin: 1.0, first + bin: -1.0}, 0.0))
    matrix = lil_matrix((len(rows), size))
    for row, (coefficients, _) in enumerate(rows):
        for column, value in coefficients.items():
            matrix[row, column] = value
    gain, whole = np.zeros(size), np.zeros(size)
    for item, (_, _, n) in enumerate(items):
        gain[item * bins : (item + 1) * bins], whole[item * bins : (item + 1) * bins] = -n, 1
    found = milp(
        gain,
        constraints=(matrix.tocsr(), -np.inf, np.array([most for _, most in rows])),
        bounds=Bounds(0, 1),
        integrality=whole,
        options={"time_limit": seconds},
    )
    bound = -found.mip_dual_bound if found.mip_dual_bound is not None else math.inf
    return Solved(-found.fun if found.x is not None else 0.0, min(bound, float(bins * budget)))
