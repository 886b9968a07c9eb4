"""Cluster traces as tables: our own CSV, ACMETrace's and Helios's, and the shipped ones by name; every row checked.

Which of the jobs are replayed, and how densely, is `scenario.py`'s; what LoRA job a row stands for, `mapping.py`'s. This program's
own event log is read here too, so that an incident can be replayed.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

from tlora.errors import DataError
from tlora.json_file import DECODER, KeyTwiceError
from tlora.protocol import Action, Event, from_json
from tlora.sim.records import FinalState

# The words of Slurm (ACMETrace, Helios), Philly, Kubernetes (Alibaba 2023: the phases of pods, and what kubectl shows for them), Alibaba
# 2018 and 2020 ("only Terminated tasks are successful"), Borg and LSF. An empty cell and UNKNOWN (the shipped Philly traces, a pod whose
# node does not answer) record no state: such a job is replayed as done. Any other word is unknown: the job runs, and is left out of the
# completion times.
_WORDS: tuple[tuple[FinalState, str], ...] = (
    ("done", "UNKNOWN COMPLETED COMPLETE DONE PASS SUCCEEDED SUCCESS TERMINATED FINISH FINISHED"),
    ("cancelled", "CANCELLED CANCELED KILLED KILL PREEMPTED REVOKED EVICTED EVICT INTERRUPTED"),
    ("failed", "FAILED FAIL TIMEOUT NODE_FAIL BOOT_FAIL DEADLINE OUT_OF_MEMORY ERROR OOMKILLED EXIT"),
)
_ENDS: dict[str, FinalState] = {"": "done", **{word: end for end, words in _WORDS for word in words.split()}}
_UNFINISHED = {"RUNNING", "PENDING", "WAITING", "QUEUED", "READY", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING"}
_UNFINISHED_PODS = {"CONTAINERCREATING", "TERMINATING"}


def end_of(state: str) -> FinalState:
    """How a job ends whose row has this state; "unknown" for a word that is not listed."""
    return _ENDS.get(_word(state), "unknown")


def is_unfinished(state: str) -> bool:
    """Whether the job had not ended when the trace was taken: its length is not known."""
    return _word(state) in _UNFINISHED | _UNFINISHED_PODS


def _word(state: str) -> str:
    """`sacct` adds to CANCELLED which user did it: "CANCELLED by 1004"; a cell that was cut to its column's width ends in "+"."""
    word = state.strip().upper()
    return "CANCELLED" if word.startswith("CANCELLED BY ") or word == "CANCELLED+" else word


TRACES = Path(__file__).with_name("traces")
SHIPPED = {
    "ee9e8c": "philly_vc_ee9e8c.csv.gz",
    "6c71a0+b436b2": "philly_vc_6c71a0_b436b2.csv.gz",
    "window_15k": "philly_window_15k.csv.gz",
    "synth_sft": "acme_marginal_synthetic_sft_6k.csv.gz",
}
NO_GPU = "no GPU asked for"
NEVER_RAN = "never started, or not ended when the log was taken"
NO_SECOND = "ran for less than a second"

MOST_NUMBER = 1e11  # 3,000 years in seconds; later than that a clock of doubles would not tell the ends of short jobs apart
_AMEND = "Correct the row or take it out"


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One row: `duration_seconds` is the recorded run time on `gpus` GPUs. What a file does not tell (user, vc, type, state) is empty."""

    job_id: str
    submit_seconds: float
    gpus: int
    duration_seconds: float
    user: str
    vc: str
    type: str
    state: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission, the first at 0 seconds; jobs that were cancelled or failed are kept with their recorded duration.

    `skipped` counts rows of the file that are no GPU jobs, by reason. `filters` and `compression` tell a report what was done to it.
    """

    name: str
    jobs: tuple[TraceJob, ...]
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    filters: tuple[str, ...] = ()
    compression: float = 1.0


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns that tell a format. `needs_offset`: its times must carry their distance from UTC."""

    name: str
    columns: tuple[str, ...]
    needs_offset: bool = False


_OWN = _Layout("tlora", ("job_id", "submit_s", "gpus", "duration_s", "user", "vc", "type", "state"))
_LOGGED = ("job_id", "user", "gpu_num", "state", "submit_time", "start_time", "end_time")
_LAYOUTS = (_OWN, _Layout("ACMETrace", (*_LOGGED, "type"), needs_offset=True), _Layout("Helios", (*_LOGGED, "vc")))


@dataclass(frozen=True, slots=True)
class _Row:
    """A row with its place in the file."""

    place: str
    cells: Mapping[str, str]

    def broken(self, column: str, rule: str, remedy: str = _AMEND) -> DataError:
        return DataError(f"{self.place}: {column} is {self.cells[column]!r}, and {rule}. {remedy}")

    def number(self, column: str) -> float:
        try:
            value = float(self.cells[column])
        except ValueError:
            raise self.broken(column, "must be a number") from None
        if not math.isfinite(value):
            raise self.broken(column, "must be a finite number")
        if abs(value) > MOST_NUMBER:
            raise self.broken(column, f"must be no larger than {MOST_NUMBER:,.0f}")
        return value

    def whole(self, column: str) -> int:
        """A count of GPUs; pandas writes 8 as 8.0 where a column has gaps."""
        value = self.number(column)
        if value < 0 or value != int(value):
            raise self.broken(column, "must be a whole number, 0 or more")
        return int(value)

    def time(self, column: str) -> datetime:
        try:
            return datetime.fromisoformat(self.cells[column])
        except ValueError:
            raise self.broken(column, "must be a time such as 2023-03-01 00:18:22+08:00") from None


def rebased(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """The same jobs with the first submitted at 0."""
    start = jobs[0].submit_seconds
    return tuple(replace(job, submit_seconds=job.submit_seconds - start) for job in jobs) if start else tuple(jobs)


def read_trace(source: str | Path) -> Trace:
    """The trace in a CSV file (also .gz), recognised by its columns; or a shipped one by its name (`SHIPPED`).

    Run time is end minus start in ACMETrace and Helios, as both define it: the column `duration` of ACMETrace's Kalos counts the wait
    too. Rows without GPUs, and those that never ran or had not ended, are skipped and counted. A broken row raises DataError with its line.
    """
    name, path = find_trace(source)
    text = text_of(path)
    if is_json_lines(text):
        raise DataError(f"{path} is an event log, no table: nothing of its jobs is to be drawn. Read it with read_event_log")
    jobs, skipped = _read_rows(text, path)
    if not jobs:
        raise DataError(f"{path} has no job in it (rows skipped: {dict(skipped) or 'none'}). Give a trace with at least one GPU job")
    return Trace(name, rebased(jobs), skipped)


def find_trace(source: str | Path) -> tuple[str, Path]:
    """The name of a trace, and its file. A file that is called as a shipped trace is found as ./name. Raises DataError for neither."""
    if str(source) in SHIPPED:
        return str(source), TRACES / SHIPPED[str(source)]
    path = _file_of(source)
    if path is None:
        shipped = ", ".join(SHIPPED)
        raise DataError(f"there is no trace {str(source)!r}: it is no file, and none of the shipped ones. Give a file, or one of {shipped}")
    return path.name.removesuffix(".gz").rsplit(".", 1)[0], path


def _file_of(source: str | Path) -> Path | None:
    """None too where there can be no file: a name that is too long, the home of an unknown user."""
    try:
        path = Path(source).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def is_directory(source: str | Path) -> bool:
    try:
        return Path(source).expanduser().is_dir()
    except (OSError, RuntimeError):
        return False


def text_of(path: Path) -> str:
    """What the file holds, unpacked. Raises DataError."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). It must be text in UTF-8, packed with gzip if its name ends in .gz") from None


def is_json_lines(text: str) -> bool:
    """Whether the first line that is no comment opens an object."""
    return next((line for line in io.StringIO(text) if line.strip() and not line.startswith("#")), "").startswith("{")


def _read_rows(text: str, path: Path) -> tuple[list[TraceJob], Counter[str]]:
    lines = _lines(text, path)
    place, header = next(lines, (f"{path}, line 1", list[str]()))
    header = [cell.strip() for cell in header]
    layout = _layout_of(header, place)
    rows = (_row(place, header, cells) for place, cells in lines)
    jobs: list[TraceJob] = []
    skipped: Counter[str] = Counter()
    first = next(rows, None)
    if first is None:
        return jobs, skipped
    zone = None if layout is _OWN else _zone(first, layout)
    place_of: dict[str, str] = {}
    for row in itertools.chain((first,), rows):
        job = _own_job(row) if layout is _OWN else _logged_job(row, zone)
        if isinstance(job, str):
            skipped[job] += 1
            continue
        if not job.job_id:
            raise row.broken("job_id", "every job needs one")
        if job.job_id in place_of:
            raise row.broken("job_id", f"{place_of[job.job_id]} has the same; every job is there once")
        if jobs and job.submit_seconds < jobs[-1].submit_seconds:
            column = "submit_s" if layout is _OWN else "submit_time"
            raise row.broken(column, "lies before that of the job above; rows stand in order of submission", f"Sort them by {column}")
        place_of[job.job_id] = row.place
        jobs.append(job)
    return jobs, skipped


def _lines(text: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Places and cells. A comment becomes an empty line, so that a quotation mark in it opens no quoted cell."""
    reader = csv.reader("\n" if line.startswith("#") else line for line in io.StringIO(text))
    try:
        for cells in reader:
            if cells:
                yield f"{path}, line {reader.line_num}", cells
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: this is no row of a CSV file ({error}). {_AMEND}") from None


def _row(place: str, header: list[str], cells: list[str]) -> _Row:
    if len(cells) != len(header):
        raise DataError(f"{place}: there are {len(cells)} cells, and the header names {len(header)} columns. {_AMEND}")
    return _Row(place, dict(zip(header, cells, strict=True)))


def _layout_of(header: list[str], place: str) -> _Layout:
    """The format that has these columns; others may be among them (Kalos has four more than Seren)."""
    for column, count in Counter(header).items():
        if column and count > 1:
            raise DataError(f"{place}: the header names column {column!r} {count} times; which one counts is unclear. Take the others out")
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if header[0].count(mark) > 1), None)):
        raise DataError(f"{place}: the cells are separated by {other!r}, and a trace's by commas. Write it with commas")
    missing = {layout.name: [column for column in layout.columns if column not in header] for layout in _LAYOUTS}
    for layout in _LAYOUTS:
        if not missing[layout.name]:
            return layout
    nearest = min(_LAYOUTS, key=lambda layout: len(missing[layout.name]) / len(layout.columns))
    raise DataError(
        f"{place}: the header is {','.join(header)!r}, and column {missing[nearest.name][0]!r} is missing for the nearest format "
        f"({nearest.name}: {','.join(nearest.columns)}). Add it, with empty cells for a user, vc, type or state that is not known"
    )


def _own_job(row: _Row) -> TraceJob | str:
    """A job, or why the row is none: the seconds that a job has run so far are not its length."""
    if is_unfinished(row.cells["state"]):
        return NEVER_RAN
    submit_seconds, gpus, duration_seconds = row.number("submit_s"), row.whole("gpus"), row.number("duration_s")
    if gpus == 0:
        raise row.broken("gpus", "a job needs at least one GPU")
    if duration_seconds <= 0:
        raise row.broken("duration_s", "must be more than 0 seconds")
    cells = row.cells
    return TraceJob(cells["job_id"], submit_seconds, gpus, duration_seconds, cells["user"], cells["vc"], cells["type"], cells["state"])


def _zone(row: _Row, layout: _Layout) -> timedelta | None:
    """How far the file's times are from UTC, by their own words. None: without a zone, all of one clock (Helios: China, no summer time)."""
    offset = row.time("submit_time").utcoffset()
    if offset is None and layout.needs_offset:
        remedy = "Write +08:00 behind the times of Seren, +00:00 behind those of Kalos"
        raise row.broken("submit_time", "carries no time zone; ACMETrace's times do", remedy)
    return offset


def _logged_job(row: _Row, zone: timedelta | None) -> TraceJob | str:
    """A job of ACMETrace or Helios, or why the row is none. Its times must all be of `zone`."""
    cells = row.cells
    gpus = row.whole("gpu_num")
    if gpus == 0:
        return NO_GPU
    if is_unfinished(cells["state"]) or not cells["start_time"] or not cells["end_time"]:
        return NEVER_RAN
    times: list[datetime] = []
    for column in ("submit_time", "start_time", "end_time"):
        time = row.time(column)
        if time.utcoffset() != zone:
            wanted = "no time zone" if zone is None else f"the time zone {timezone(zone)}"
            raise row.broken(column, f"the first row has {wanted}; all times of a file are of one zone", "Convert them to one")
        times.append(time if zone is not None else time.replace(tzinfo=UTC))
    submitted, started, ended = times
    if ended < started:
        raise row.broken("end_time", f"it started at {cells['start_time']}; a job ends after its start")
    if ended == started:
        return NO_SECOND
    run_seconds = (ended - started).total_seconds()
    return TraceJob(
        cells["job_id"], submitted.timestamp(), gpus, run_seconds, cells["user"], cells.get("vc", ""), cells.get("type", ""), cells["state"]
    )


_REMEDY = "Take the line out"


def is_event_log(source: str | Path) -> bool:
    """Whether the file holds JSON lines and no table. Raises DataError where there is none."""
    return is_json_lines(text_of(find_trace(source)[1]))


def read_event_log(path: str | Path) -> list[tuple[float, Event | Action]]:
    """The entries of a log with their seconds: lines of `protocol.to_json` plus "seconds", in order of time.

    A last line that a crash has torn is left out. Any other that is no event or action raises DataError with its number.
    """
    path = find_trace(path)[1]
    lines = text_of(path).split("\n")
    entries: list[tuple[float, Event | Action]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = DECODER.decode(line)
        except KeyTwiceError as error:
            raise DataError(f"{place}: {error}") from None
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline follows: the write was cut short
                break
            remedy = _REMEDY if entries else "An event log has one JSON object a line, and any other trace is CSV. Give one of these"
            raise DataError(f"{place}: {line[:80]!r} is not JSON ({error}). {remedy}") from None
        entries.append(_entry(entry, entries[-1][0] if entries else -math.inf, place))
    return entries


def _entry(entry: Any, after: float, place: str) -> tuple[float, Event | Action]:
    if not isinstance(entry, dict):
        raise DataError(f"{place}: {str(entry)[:80]!r} is no JSON object; every line of an event log is one. {_REMEDY}")
    values = cast("dict[str, Any]", entry)
    seconds = values.pop("seconds", None)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) <= MOST_NUMBER:
        raise DataError(f'{place}: "seconds" is {repr(seconds)[:80]}, and must be a number of at most {MOST_NUMBER:,.0f}. {_REMEDY}')
    if seconds < after:
        raise DataError(
            f'{place}: "seconds" is {seconds}, and the line before has {after}; time goes on. '
            'If another run begins here, give it a file of its own; else sort the lines by "seconds"'
        )
    try:
        return float(seconds), from_json(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{place}: {error}. {_REMEDY}") from None
