"""One job's data as it is asked for, with limits that a server sets and the data worker enforces, and what `prepare.py` and that worker say
to each other: one order, then an event for each thing that becomes of its jobs.
"""

from __future__ import annotations

import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tlora.cache_directory import cache_dir
from tlora.errors import DataError
from tlora.job import DataConfig, Rows, RunSpec
from tlora.message_codec import Codec, message


@dataclass(frozen=True, slots=True)
class DataLimits:
    """`memory_bytes` of private memory; `seconds` of wall time; at most `row_characters` per row and `rows` rows."""

    memory_bytes: int
    cpu_seconds: int
    seconds: float
    row_characters: int
    rows: int

    def enforce(self) -> None:
        """Limit this process from now on. Too much memory raises MemoryError; too much time ends the process by a signal."""
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (spent + self.cpu_seconds, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def check_row(self, place: str, number: int, value: object) -> None:
        """Raises DataError with file and row."""
        if number > self.rows:
            raise DataError(f"{place}: the data has more than {self.rows:,} rows; split it")
        if _characters(value) > self.row_characters:
            raise DataError(f"{place}: longer than {self.row_characters:,} characters; a row is one sample: split it")


@dataclass(frozen=True)
class PrepareRequest:
    """One job's data. Relative paths in `data` are under `base_dir`; `rows` is what the job learns from. `keep_unfinished`: an unfinished
    set stays in `cache_dir` for the next launch. Use it for private caches: deleting a data file does not remove the set.
    """

    key: str
    data: DataConfig
    tokenizer_path: str
    vocab_size: int
    cache_dir: Path
    base_dir: Path
    rows: Rows = "samples"
    limits: DataLimits | None = None  # on a server, where the data is a tenant's
    keep_unfinished: bool = True


def prepare_requests(run: RunSpec, vocab_size: int) -> list[PrepareRequest]:
    """The data of all jobs of a run, keyed by their names."""
    return [PrepareRequest(job.name, job.data, run.base_model, vocab_size, cache_dir(), Path.cwd(), job.learns_from) for job in run.jobs]


def describe_signal(number: int) -> str | None:
    """Why `enforce` ended a process with this signal; None for other signals."""
    return {signal.SIGXCPU: "used up its CPU seconds", signal.SIGALRM: "used up its time"}.get(signal.Signals(number))


def _characters(value: object) -> int:
    """The characters of all texts in a value; a number counts as one. The value is a tree, as it was read from a file."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            count += len(item)
        elif isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        else:
            count += 1
    return count


@dataclass(frozen=True)
class MadeSet:
    """A set: its directory (None: there is no such set), the commit of each source that is the hub's, what was wrong with an earlier one
    there, and `notes` on which files were chosen.
    """

    directory: str | None = None
    commits: tuple[str | None, ...] = ()
    damage: str | None = None
    notes: tuple[str, ...] = ()


@message
class PrepareBatch:
    """All that the worker shall do."""

    requests: tuple[PrepareRequest, ...]


@message
class PrepareProgress:
    """The worker is on the job `key`: rows read, and the fraction of its bytes. The first one says that it begins."""

    key: str
    rows: int
    share: float


@message
class SetsMade:
    """The job `key` is done. `eval`: of `data.eval_path`."""

    key: str
    train: MadeSet
    eval: MadeSet


@message
class PrepareFailed:
    """The job `key` is not: a DataError or, where the tokenizer cannot be loaded, which all jobs share, a ModelError."""

    key: str
    reason: str
    disk_full: bool = False
    of_tokenizer: bool = False


PrepareEvent = PrepareProgress | SetsMade | PrepareFailed
PREPARE_MESSAGES: Codec[PrepareBatch | PrepareEvent] = Codec(PrepareBatch | PrepareEvent)
