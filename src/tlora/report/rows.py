"""Reads the JSON files of a run that may still be running, and thins long series without losing their shape.

Missing files are empty and a torn line is skipped: a page about half a run is better than none. `run_view.py` knows what the rows mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlora.json_file import read_object

JsonObject = dict[str, Any]


def read_json(path: Path) -> JsonObject:
    """The object in `path`; an empty one if the file is missing, torn, or not an object."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_rows(path: Path) -> list[JsonObject]:
    """The objects of a JSON-lines file, in order; lines that are not an object (the last one, if half written) are skipped."""
    rows: list[JsonObject] = []
    try:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict):
                    rows.append(value)
    except OSError:
        return rows
    return rows


def number(value: object) -> float:
    """`value` as a float; NaN for anything that is not a number, so that charts show a gap."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond float's range
        return math.inf if value > 0 else -math.inf


def column(rows: Sequence[JsonObject], key: str) -> list[float]:
    """One field of all rows; NaN where a row does not have it."""
    return [number(row.get(key)) for row in rows]


def smoothing_window(longest: int) -> int:
    """Rows that an average reaches back over, for series of which the longest has so many rows."""
    return round(min(100.0, max(3.0, longest / 40)))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing average over about `window` rows; NaN where `values` is not finite.

    m_i = sum_{j<=i} d^(i-j) v_j / sum_{j<=i} d^(i-j) over the finite v_j, with d = 1 - 1/window. So m_0 = v_0, no point knows what
    comes after it, and equal values give equal averages however long the series go on.
    """
    decay = 1 - 1 / window
    total, weight = 0.0, 0.0
    result: list[float] = []
    for value in values:
        finite = math.isfinite(value)
        total, weight = decay * total + (value if finite else 0.0), decay * weight + finite
        result.append(total / weight if finite else math.nan)
    return result


def thin(series: Sequence[Sequence[float]], limit: int) -> list[int]:
    """Indices, at most `limit`, that keep the shape of all `series` (equally long): first, last and each bucket's extremes.

    A spike one row wide survives, and so does the first value of each bucket that is not finite: a NaN must stay visible.
    """
    length = len(series[0])
    if length <= limit:
        return list(range(length))
    buckets = max(1, (limit - 2) // (2 * len(series) + 1))
    kept = {0, length - 1}
    for bucket in range(buckets):
        here = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        for values in series:
            finite = [index for index in here if math.isfinite(values[index])]
            if finite:
                kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
        kept.update([index for index in here if not math.isfinite(series[0][index])][:1])
    return sorted(kept)


def buckets(length: int, limit: int) -> list[range]:
    """`range(length)` in at most `limit` runs of nearly equal length."""
    count = min(length, limit)
    return [range(index * length // count, (index + 1) * length // count) for index in range(count)]
