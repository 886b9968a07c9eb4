"""Numbers, durations and lists of names as people read them, in the terminal and on pages. Plain text: nothing is escaped here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Row = TypeVar("Row")
DASH = "\u2013"  # where there is no value
MINUS = "\u2212"


def loss_text(loss: float | None) -> str:
    """Four decimals for everyday losses, so that a column lines up; a dash for none."""
    if loss is None:
        return DASH
    if math.isnan(loss):
        return "NaN"
    if math.isinf(loss):
        return "∞" if loss > 0 else f"{MINUS}∞"
    return f"{loss:.4f}" if 1e-3 <= abs(loss) < 1e4 or loss == 0 else f"{loss:.3e}"


def count_text(count: float) -> str:
    """1,234 in full, 12.3 k and 1.23 M shortened."""
    if not math.isfinite(count):
        return DASH
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= max(size, 1e4):
            return f"{float(f'{count / size:.3g}'):g} {unit}"
    return f"{count:,.0f}"


def quantity(count: int, noun: str, nouns: str = "") -> str:
    """1 job, 1,234 jobs. `nouns` is the plural where it is not `noun` and an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def are(count: int) -> str:
    """The verb behind so many."""
    return "is" if count == 1 else "are"


def gib(count: float) -> str:
    """Bytes, with as many digits as plans are compared by: 5.50 GiB, 12.0 MiB, 3.1 KiB, 24 bytes."""
    if count < 2**10:
        return f"{count:.0f} bytes"
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**28 else f"{count / 2**30:,.2f} GiB"


def place_names(device: str) -> tuple[str, str]:
    """What one place of a `device` is called ("cuda:1", "2 of cpu"), and several."""
    return ("CPU process", "CPU processes") if "cpu" in device else ("GPU", "GPUs")


def places_text(count: int, device: str) -> str:
    """1 GPU, 2 CPU processes."""
    return quantity(count, *place_names(device))


def duration_text(seconds: float | None) -> str:
    """The two largest units of a duration."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 100:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def field_text(value: object) -> str:
    """A field of an order as one would write it: text as it is, a whole number such as 50.0 as 50, the rest as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def setting_text(value: object) -> str:
    """A swept value as one would write it in a jobs file."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_text(settings: Mapping[str, object]) -> str:
    """Several swept values in a line."""
    return ", ".join(f"{field} {setting_text(value)}" for field, value in settings.items())


def shorten(name: str, length: int = 24) -> str:
    """Cut out the middle: the names of a sweep start alike and differ at the end."""
    return name if len(name) <= length else f"{name[: length // 2 - 1]}…{name[-(length - length // 2) :]}"


def names_text(names: Sequence[str]) -> str:
    """The first four in full, then how many more: a sweep has hundreds of jobs."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def ranges_text(numbers: Iterable[int]) -> str:
    """Whole numbers in rising order, neighbours as one: 0-7, 12."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


MANY_JOBS = 40  # more are summarised: their first and last rows, and a count
_AT_AN_END = 10  # rows at the start and at the end of what is summarised


def shortened(rows: Sequence[Row], must_show: Callable[[Row], bool] = lambda _: False) -> list[Row | int]:
    """All of up to `MANY_JOBS` rows; of more, the first, the last and those that `must_show`. A number counts rows left out there."""
    if len(rows) <= MANY_JOBS:
        return list(rows)
    shown: list[Row | int] = []
    for index, row in enumerate(rows):
        if index < _AT_AN_END or index >= len(rows) - _AT_AN_END or must_show(row):
            shown.append(row)
        elif shown and isinstance(shown[-1], int):
            shown[-1] += 1
        else:
            shown.append(1)
    return shown


def by_jobs(said: Iterable[tuple[str, str]]) -> list[str]:
    """Lines about jobs, from pairs of a job's name and a text: jobs with the same text share a line."""
    names: dict[str, list[str]] = {}
    for name, text in said:
        names.setdefault(text, []).append(name)
    return [f"{names_text(list(dict.fromkeys(jobs)))}: {text}" for text, jobs in names.items()]


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds per unit, its name) for an axis that reaches `seconds`."""
    if seconds > 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds > 300 else (1.0, "s")
