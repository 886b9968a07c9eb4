"""Statistics of a tokenized set: its size, and the parts of its rows that are not trained on.

Counted while the set is made (`build.py`), stored in its meta.json, printed by `check` and `train`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tlora.data.examples import Chat, Example, Labelled, Pair
from tlora.data.template_changes import Change
from tlora.wording.numbers import are, quantity

_MOST_KINDS = 100  # of columns, or of changes: a file of random keys must not fill the report
_MOST_NAMED = 12
_EXAMPLE_CHARACTERS = 80
_SUMMED = (
    *("rows", "samples", "skipped", "truncated", "tokens", "trained_tokens", "trained_tokens_lost", "trained_characters", "unended"),
    *("pieces", "equal_pairs", "equal_when_cut", "wanted", "unwanted", "empty"),
)


@dataclass
class ChangeCount:
    """One kind of change by the chat template (`template_changes.py`), or of note (`examples.py`), over all rows."""

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
    sources: list[int] = field(default_factory=list)  # samples of each source, in their order
    unstopped: dict[str, int] = field(default_factory=dict)  # by what ends a trained turn without a stop token ("": nothing): rows
    stops: list[str] = field(default_factory=list)  # the base's stop tokens
    empty: int = 0  # samples with an answer of white space alone
    unended: int = 0  # rows of plain text without an end token, as the tokenizer has none
    has_chats: bool = False  # whether a row goes through the chat template
    pieces: int = 0  # samples and skipped ones: more than rows where rows were packed
    notes: list[ChangeCount] = field(default_factory=list)
    equal_pairs: int = 0
    equal_when_cut: int = 0  # of these, those that max_length has made equal
    wanted: int = 0  # of labelled answers
    unwanted: int = 0
    dropped: int = 0  # rows that are bad, by on_bad_rows: drop
    bad_rows: list[str] = field(default_factory=list[str])  # what is wrong with the first of these

    @staticmethod
    def from_meta(meta: dict[str, object], files: list[str] | None) -> DataReport:
        """The report of a finished set, with the current file names (files of equal content may have been renamed) where they are known."""
        fields = cast("dict[str, Any]", dict(cast("dict[str, object]", meta["report"])))
        fields |= {each.name: meta[each.name] for each in dataclasses.fields(DataReport) if each.name in meta}  # of unreleased versions
        fields |= {"files": files} if files is not None else {}
        fields["rendered"] = [(str(text), float(weight)) for text, weight in fields["rendered"]]
        fields |= {key: [ChangeCount(**each) for each in fields[key]] for key in ("changes", "notes")}
        return DataReport(**fields)

    def as_meta(self) -> dict[str, object]:
        return {"report": dataclasses.asdict(self)}

    def count_row(self, examples: Sequence[Example | Pair | Labelled]) -> None:
        """Count a row, which was read as `examples`, with their notes."""
        self.rows += 1
        self.pieces += len(examples)
        answers = [answer for example in examples for answer in _answers(example) if isinstance(answer, Chat)]
        seen: set[str] = set()
        for note in (note for answer in answers for note in answer.notes):
            count = next((count for count in self.notes if count.what == note.what), None)
            if count is None:
                count = ChangeCount(note.what, example=note.example[:_EXAMPLE_CHARACTERS])
                self.notes.append(count)
            count.rows += note.what not in seen
            seen.add(note.what)

    def count_label(self, wanted: bool) -> None:
        """Count a sample of a labelled answer."""
        self.wanted += wanted
        self.unwanted += not wanted

    def count_columns(self, columns: Iterable[str]) -> None:
        """Count a row in which `columns` hold values that are not used."""
        for column in columns:
            self.unused_columns[column] = self.unused_columns.get(column, 0) + 1

    def count_changes(self, changes: Iterable[Change]) -> None:
        """Count a row with these changes."""
        by_kind = {count.what: count for count in self.changes}
        seen: set[str] = set()
        for change in changes:
            count = by_kind.get(change.what)
            if count is None:
                count = by_kind[change.what] = ChangeCount(change.what, example=change.example)
                self.changes.append(count)
            count.rows += change.what not in seen
            count.characters += change.characters
            seen.add(change.what)

    def count_unstopped(self, ends: Iterable[str | None]) -> None:
        """Count a row whose trained turns end in these (see `unstopped`); None if they end in a stop token."""
        for end in dict.fromkeys(end for end in ends if end is not None):
            self.unstopped[end] = self.unstopped.get(end, 0) + 1

    def add(self, later: DataReport) -> None:
        """Add the counts of the rows in `later`, which follow. Of columns, changes and ends the first 100 kinds are kept."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.longest = max(self.longest, later.longest)
        self.format, self.rendered = later.format or self.format, self.rendered or later.rendered
        self.has_chats = self.has_chats or later.has_chats
        for ours, theirs in ((self.unused_columns, later.unused_columns), (self.unstopped, later.unstopped)):
            for kind, rows in theirs.items():
                if kind in ours or len(ours) < _MOST_KINDS:
                    ours[kind] = ours.get(kind, 0) + rows
        _add_counts(self.changes, later.changes, _MOST_KINDS)
        _add_counts(self.notes, later.notes)

    def warnings(self) -> list[str]:
        """Warnings about parts of the rows that are not trained on, one line each."""
        place, lines = self.files[0], list[str]()
        packed = self.pieces > self.rows
        total = quantity(self.pieces, "sample") if packed else quantity(self.rows, "row")
        if packed:
            cut = quantity(self.rows, "row is packed and is cut", "rows are packed and are cut")
            lines.append(f"{cut} into {self.pieces:,} samples ({place})")
        if self.dropped:
            listed = "".join(f"\n  {line}" for line in self.bad_rows)
            lines.append(f"{self.dropped:,} of {quantity(self.rows, 'row')} {are(self.dropped)} bad and left out ({place}):{listed}")
        if self.truncated:
            lost = f"{self.trained_tokens_lost:,} trained tokens lost; the longest has {self.longest:,} tokens"
            lines.append(f"{self.truncated:,} of {total} {are(self.truncated)} cut to max_length, {lost} ({place})")
        if self.skipped:
            lines.append(f"{self.skipped:,} of {total} {are(self.skipped)} left out, without a trained token ({place})")
        if self.empty:
            kind = "text" if self.format == "text" else "answer"
            lines.append(
                f"{self.empty:,} of {total} {'has' if self.empty == 1 else 'have'} an empty {kind}, from which the model learns to say "
                f"nothing: fill or remove {'it' if self.empty == 1 else 'them'} ({place})"
            )
        lines += [f"{note.what}: {note.rows:,} of {quantity(self.rows, 'row')}, such as {note.example!r} ({place})" for note in self.notes]
        lines += self._preference_warnings()
        lines += list(self._stop_warnings())
        if self.unused_columns:
            named = list(map(repr, self.unused_columns))[:_MOST_NAMED]
            more = f" and {len(self.unused_columns) - len(named)} more" if len(self.unused_columns) > len(named) else ""
            lines.append(f"columns that format {self.format} does not use: {', '.join(named)}{more} ({place})")
        return lines

    def _preference_warnings(self) -> list[str]:
        place, lines = self.files[0], list[str]()
        if self.equal_pairs:
            cut = f", {self.equal_when_cut:,} of them because max_length cuts what differs" if self.equal_when_cut else ""
            remedy = "they cannot teach which is better; " + ("raise max_length or remove them" if cut else "remove them")
            lines.append(f"{self.equal_pairs:,} of {self.samples:,} pairs have equal answers{cut}: {remedy} ({place})")
        if bool(self.wanted) != bool(self.unwanted):
            kind, other = ("wanted", "unwanted") if self.wanted else ("unwanted", "wanted")
            lines.append(
                f"all {self.samples:,} answers are labelled {kind}: kto learns from both kinds; add {other} answers"
                + (f", or use objective: sft ({place})" if self.wanted else f" ({place})")
            )
        return lines

    def _stop_warnings(self) -> Iterator[str]:
        if self.unended:
            yield (
                f"{self.unended:,} of {self.rows:,} rows of plain text get no end token, as the base's tokenizer has none, so the "
                f"model does not learn to stop. Set eos_token in the base's tokenizer_config.json ({self.files[0]})"
            )
        known = ", ".join(map(repr, self.stops)) or "none"
        for end, rows in self.unstopped.items():
            head = f"in {rows:,} of {self.rows:,} rows the chat template ends an assistant's turn with"
            if end:
                yield (
                    f"{head} {end!r}, which is trained but is no stop token of the base ({known}): answers would run on. Generate with "
                    f"{end!r} as a stop, or add it to eos_token_id in the base's generation_config.json ({self.files[0]})"
                )
            else:
                yield (
                    f"{head} no stop token (the base's: {known}), so the model does not learn to stop. Give the job a chat_template that "
                    f"writes eos_token after each answer ({self.files[0]})"
                )

    def template_changes(self) -> list[str]:
        """A heading and one line for each kind of change by the chat template; empty if it changes nothing."""
        if not self.changes:
            return []
        head = f"changed by the chat template, where {self.trained_characters:,} characters are trained ({self.files[0]}):"
        return [head] + [
            f"  {count.what}: {count.characters:,} characters in {count.rows:,} of {self.rows:,} rows, such as {count.example!r}"
            for count in self.changes[:_MOST_NAMED]
        ]


def _add_counts(ours: list[ChangeCount], theirs: Sequence[ChangeCount], most: int | None = None) -> None:
    known = {count.what: count for count in ours}
    for count in theirs:
        if (same := known.get(count.what)) is not None:
            same.rows += count.rows
            same.characters += count.characters
        elif most is None or len(ours) < most:
            ours.append(count)


def _answers(example: Example | Pair | Labelled) -> Sequence[Example]:
    if isinstance(example, Pair):
        return (example.chosen, example.rejected)
    return (example.example,) if isinstance(example, Labelled) else (example,)
