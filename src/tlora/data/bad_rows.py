"""Rows that cannot be used: the first of them in the order of the files, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora.errors import DataError

MOST_LISTED = 20
_NUMBER = re.compile(r", (?:line|row) (\d+)")


@dataclass
class BadRows:
    """`first` are the messages of the first rows in the order of `files`, not of discovery."""

    files: Sequence[Path]
    count: int = 0
    reasons: set[str] = field(default_factory=set[str])  # without their places; two are enough to know that they differ
    first: list[str] = field(default_factory=list[str])
    _last: str = ""

    def add(self, error: DataError) -> None:
        """One more; several errors of one row count once if they come one after another."""
        message = str(error)
        place = self._place(message)
        if str(place) == self._last:
            return
        self._last = str(place)
        self.count += 1
        if len(self.reasons) < 2:
            self.reasons.add(message.partition(": ")[2])
        if len(self.first) < MOST_LISTED or place < self._place(self.first[-1]):
            self.first = sorted([*self.first, message], key=self._place)[:MOST_LISTED]

    def as_json(self) -> list[object]:
        return [self.count, sorted(self.reasons), self.first, self._last]

    def restore(self, saved: list[Any]) -> None:
        """`saved`: the value of `as_json`, written and read back."""
        self.count, reasons, self.first, self._last = saved
        self.reasons = set(reasons)

    def error(self, called: str, rows: int) -> DataError:
        """An error about all bad rows among `rows`; the first one's own message if there is no other."""
        if self.count == 1 or (self.count == rows and len(self.reasons) == 1):
            return DataError(self.first[0])
        more = [f"and {self.count - len(self.first):,} more"] if self.count > len(self.first) else []
        listed = "\n".join(f"  {line}" for line in [*self.first, *more])
        return DataError(
            f"{called}: {self.count:,} of {rows:,} rows are bad:\n{listed}\nMend them, or leave them out with on_bad_rows: drop"
        )

    def _place(self, message: str) -> tuple[int, int]:
        file = next((index for index, file in enumerate(self.files) if message.startswith(f"{file}, ")), len(self.files))
        number = _NUMBER.search(message)
        return file, int(number[1]) if number else 0
