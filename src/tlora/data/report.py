"""Statistics of a tokenized set: its size, and which parts of its rows training does not see.

Counted while the set is made (`build.py`), stored in its meta.json, printed by `check` and `train`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from tlora.data.template_changes import Change

_MOST_KINDS = 100  # of columns, or of changes: a file of random keys must not fill the report
_MOST_NAMED = 12
_NEWER = ("sources", "has_chats")  # beside the others in meta.json: earlier versions, which may share the cache, do not read them


@dataclass
class ChangeCount:
    """One kind of change by the chat template (`template_changes.py`) over all rows."""

    what: str
    rows: int = 0
    characters: int = 0
    example: str = ""  # the first one's text


@dataclass
class DataReport:
    """Statistics of a set. `rendered` is its first sample as runs of text with one loss weight; `longest` is before cutting."""

    format: str = ""
    files: list[str] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    skipped: int = 0  # rows without a trained token, or with none left after cutting
    truncated: int = 0  # rows, also of those that are skipped
    tokens: int = 0
    trained_tokens: int = 0  # targets whose loss weight is not 0
    trained_tokens_lost: int = 0  # by cutting
    longest: int = 0
    rendered: list[tuple[str, float]] = field(default_factory=list)
    trained_characters: int = 0  # of text, before cutting
    unused_columns: dict[str, int] = field(default_factory=dict)  # by name: rows in which they hold something
    changes: list[ChangeCount] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # samples of each source, in their order; none for a set of an earlier version
    has_chats: bool | None = False  # whether a row goes through the chat template; None for a set of an earlier version

    @staticmethod
    def from_meta(meta: dict[str, object], files: list[str]) -> DataReport:
        """The report of a finished set, with the current file names: files of equal content may have been renamed."""
        fields = cast("dict[str, Any]", dict(cast("dict[str, object]", meta["report"])))
        fields["files"] = files
        fields["rendered"] = [(str(text), float(weight)) for text, weight in fields["rendered"]]
        fields["changes"] = [ChangeCount(**change) for change in fields["changes"]]
        fields |= {"sources": [], "has_chats": None} | {key: meta[key] for key in _NEWER if key in meta}
        return DataReport(**fields)

    def as_meta(self) -> dict[str, object]:
        fields = dataclasses.asdict(self)
        newer = {key: fields.pop(key) for key in _NEWER}
        return {"report": fields, **newer}

    def count_columns(self, columns: Iterable[str]) -> None:
        """One more row in which `columns` hold something that is not used."""
        for column in columns:
            if column in self.unused_columns or len(self.unused_columns) < _MOST_KINDS:
                self.unused_columns[column] = self.unused_columns.get(column, 0) + 1

    def count_changes(self, changes: Iterable[Change]) -> None:
        """One more row with these changes."""
        by_kind = {count.what: count for count in self.changes}
        seen: set[str] = set()
        for change in changes:
            count = by_kind.get(change.what)
            if count is None:
                if len(by_kind) == _MOST_KINDS:
                    continue
                count = by_kind[change.what] = ChangeCount(change.what, example=change.example)
                self.changes.append(count)
            count.rows += change.what not in seen
            count.characters += change.characters
            seen.add(change.what)

    def warnings(self) -> list[str]:
        """What training does not see of the rows, one line each."""
        place, found = self.files[0], list[str]()
        if self.truncated:
            lost = f"{self.trained_tokens_lost:,} trained tokens lost; the longest has {self.longest:,} tokens"
            found.append(f"{self.truncated:,} of {self.rows:,} rows are cut to max_length, {lost} ({place})")
        if self.skipped:
            found.append(f"{self.skipped:,} of {self.rows:,} rows have no trained token and are left out ({place})")
        if self.unused_columns:
            named = list(map(repr, self.unused_columns))[:_MOST_NAMED]
            more = f" and {len(self.unused_columns) - len(named)} more" if len(self.unused_columns) > len(named) else ""
            found.append(f"columns that format {self.format} does not use: {', '.join(named)}{more} ({place})")
        return found

    def template_changes(self) -> list[str]:
        """A heading and one line for each kind of change by the chat template; empty if it changes nothing."""
        if not self.changes:
            return []
        head = f"changed by the chat template, where {self.trained_characters:,} characters are trained ({self.files[0]}):"
        return [head] + [
            f"  {count.what}: {count.characters:,} characters in {count.rows:,} of {self.rows:,} rows, such as {count.example!r}"
            for count in self.changes[:_MOST_NAMED]
        ]
