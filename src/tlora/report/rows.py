"""Reads the JSON files of a run that may still be running, and thins long series without losing their shape.

Missing files are empty and a torn line is skipped: a page about half a run is better than none. `run_view.py` knows what the rows mean.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlora.json_file import read_object

JsonObject = dict[str, Any]

_SPAN_SECONDS = 2.0  # each GPU writes a row about every second: two seconds hold one of each
_COUNTS = ("tokens", "computed", "offered", "micro_batches")


def read_json(path: Path) -> JsonObject:
    """The object in `path`; an empty one if the file is missing, torn, or not an object."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_rows(path: Path, most_bytes: int | None = None) -> list[JsonObject]:
    """The objects of a JSON-lines file, in order; lines that are not an object (the last one, if half written) are skipped. With
    `most_bytes`, those of its end.
    """
    rows: list[JsonObject] = []
    try:
        with path.open("rb") as lines:
            if most_bytes is not None and lines.seek(0, os.SEEK_END) > most_bytes:
                lines.seek(-most_bytes, os.SEEK_END)
                lines.readline()
            else:
                lines.seek(0)
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


def merge_gpus(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """Rows of a run on several GPUs, each of which writes its own, as rows of all GPUs together: one for each two seconds.

    Rates are means of a GPU's rows and sums over GPUs; counts are sums; padding and fill follow from the counts. Rows without "gpu" stay.
    """
    if not any("gpu" in row for row in rows):
        return list(rows)
    spans: dict[float, list[JsonObject]] = {}
    for row in rows:
        seconds = number(row.get("seconds"))
        if math.isfinite(seconds):
            spans.setdefault((seconds // _SPAN_SECONDS + 1) * _SPAN_SECONDS, []).append(row)
    return [{"seconds": end} | _together(span_rows) for end, span_rows in sorted(spans.items())]


def _together(rows: Sequence[JsonObject]) -> JsonObject:
    rates: dict[object, list[float]] = {}
    jobs: dict[str, float] = {}
    for row in rows:
        rates.setdefault(row.get("gpu"), []).append(number(row.get("tokens_per_second")))
        own = row.get("jobs")
        for name, tokens in own.items() if isinstance(own, dict) else ():
            jobs[name] = jobs.get(name, 0) + number(tokens)
    merged: JsonObject = {"tokens_per_second": sum(sum(own) / len(own) for own in rates.values()), "jobs": jobs}
    for prefix in ("", "tail_"):
        counts = {key: sum(n for n in column(rows, prefix + key) if math.isfinite(n)) for key in _COUNTS}
        merged |= {prefix + key: value for key, value in counts.items()}
        merged[prefix + "padding"] = 1 - counts["tokens"] / counts["computed"] if counts["computed"] else None
        merged[prefix + "fill"] = counts["tokens"] / counts["offered"] if counts["offered"] else None
    return merged


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
    """Window of the trailing average, in rows, where the longest series has `longest` rows."""
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
