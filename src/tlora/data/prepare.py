"""The entry point of `data`: from `DataConfig`s to tokenized sets, tokenized in a separate process.

A job whose data is invalid, or crashes or hangs the process, gets a DataError; the other jobs continue in a new process.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tlora.data import known_sets, scratch
from tlora.data.dataset import Dataset, count_shared
from tlora.data.order import Epoch, PackedRows, epoch_size, join_rows, mix, pack_rows, split
from tlora.data.report import DataReport
from tlora.data.request import (
    PREPARE_MESSAGES,
    MadeSet,
    PrepareBatch,
    PrepareFailed,
    PrepareProgress,
    PrepareRequest,
    SetsMade,
    describe_signal,
)
from tlora.data.sources import shown_files
from tlora.errors import DataError, ModelError
from tlora.job import DataConfig, DataSource, Sources
from tlora.link.lines import Line
from tlora.link.supervisor import SupervisedProcess, describe_exit, start_talking
from tlora.wording.numbers import quantity

STALL_SECONDS = 180.0  # without a sign of life; a batch of half a million characters takes about one
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "PYTHONUNBUFFERED": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Prepared:
    """A job's sets. `report` is about all of `data.path` (before the split), `eval_report` about `data.eval_path`. `data` is the request's
    with the commits of its hub data sets.
    """

    train: Dataset
    eval: Dataset | None
    report: DataReport
    data: DataConfig
    eval_report: DataReport | None = None
    remade: tuple[str, ...] = ()  # damage of earlier sets in the cache, reported for one of the jobs that share a set
    notes: tuple[str, ...] = ()  # on which files of a source were chosen
    shared: int = 0  # evaluation samples that are training samples too

    @property
    def reports(self) -> list[DataReport]:
        return [report for report in (self.report, self.eval_report) if report is not None]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that is trained or evaluated on."""
        return max(int(one.lengths.max()) for one in (self.train, self.eval) if one is not None)

    @property
    def longest_sequence(self) -> int:
        """The same of the sequences that samples have."""
        return max(int(one.longest_sequences.max()) for one in (self.train, self.eval) if one is not None)

    def warnings(self) -> list[str]:
        """Warnings about this data, one per line, without the `template_changes` of its reports."""
        lines = [f"tokenized data in the cache was damaged and has been made again ({damage})" for damage in self.remade]
        lines += dict.fromkeys(self.notes)
        if self.eval is not None and self.shared:
            split = self.eval_report is None
            remedy = "remove repeated rows from the data" if split else "give rows of their own as eval_path, or use eval_size in its place"
            lines.append(
                f"{self.shared:,} of {len(self.eval):,} evaluation rows are training rows too, so the eval loss is not of unseen data; "
                f"{remedy} ({(self.eval_report or self.report).files[0]})"
            )
        return lines + [warning for report in self.reports for warning in report.warnings()]


OnProgress = Callable[[PrepareProgress], None]


@dataclass(frozen=True)
class DataWorker:
    """The process that prepares data, and the line to it."""

    process: SupervisedProcess
    line: Line


@contextlib.contextmanager
def start_worker() -> Iterator[DataWorker]:
    """A process that loads its libraries and waits for requests. It is killed at the end of the block, even at work."""
    with tempfile.TemporaryFile() as log:
        process, line = start_talking("tlora.data.worker", log, (), _ENVIRONMENT, own_session=False)
        try:
            yield DataWorker(process, line)
        finally:
            process.kill()
            line.close()


@dataclass(frozen=True)
class Preparation:
    """A progress callback, and a worker process that has already been started."""

    on_progress: OnProgress
    started: DataWorker | None = None


def prepare(
    requests: Sequence[PrepareRequest], on_progress: OnProgress | None = None, started: DataWorker | None = None
) -> dict[str, Prepared | DataError]:
    """Tokenize what is not in the cache yet and open it, for each request under its key. `started` is a process of `start_worker` that
    has had no requests yet.

    Raises ModelError when the tokenizer cannot be loaded, which all jobs share. A KeyboardInterrupt meanwhile says how many rows are kept.
    """
    assert len({request.key for request in requests}) == len(requests), [request.key for request in requests]
    tell = on_progress or (lambda _: None)
    results = {request.key: known for request in requests if (known := _known(request, tell)) is not None}
    waiting = [request for request in requests if request.key not in results]
    restarted = False
    while waiting:
        with start_worker() if started is None else contextlib.nullcontext(started) as worker:
            answered = run_worker(worker, waiting, tell, restarted)
        results |= answered
        restarted = not answered
        started = None  # if the worker dies, a new one takes the remaining requests
        waiting = [request for request in waiting if request.key not in results]
    return {request.key: results[request.key] for request in requests}


def _known(request: PrepareRequest, tell: OnProgress) -> Prepared | DataError | None:
    sets = known_sets.recall(request, lambda: tell(PrepareProgress(request.key, 0, 0.0)))
    return open_sets(request, *sets) if sets else None


def run_worker(
    worker: DataWorker, requests: Sequence[PrepareRequest], on_progress: OnProgress, restarted: bool
) -> dict[str, Prepared | DataError]:
    """Results until all are done or the worker dies, which fails the job that it was on. No results if it dies before the first job, which
    may be chance (a machine short of memory); if a worker that was `restarted` for that dies too: ModelError.
    """
    process = worker.process
    try:
        worker.line.send(PREPARE_MESSAGES.encode(PrepareBatch(tuple(requests))))
        return _follow(worker, requests, on_progress, restarted)
    except KeyboardInterrupt:
        _end(process, requests)
        raise KeyboardInterrupt(*_describe_kept(process.pid, requests)) from None
    finally:
        _end(process, requests)


def _end(process: SupervisedProcess, requests: Sequence[PrepareRequest]) -> None:
    process.kill()
    for cache_dir in {request.cache_dir for request in requests}:
        scratch.remove_left_by(cache_dir, process.pid)


def _describe_kept(process_id: int, requests: Sequence[PrepareRequest]) -> list[str]:
    """One line on the unfinished rows that the worker has kept; none if it has kept nothing."""
    kept = [progress for place in {request.cache_dir for request in requests} for progress in scratch.progress_of(place, process_id)]
    rows = sum(int(progress["counts"]["report"]["report"]["rows"]) for progress in kept)
    saved = quantity(rows, "tokenized row is", "tokenized rows are")
    return [f"Interrupted: {saved} kept; the next launch with the same data goes on behind them"] if rows else []


def _follow(
    worker: DataWorker, requests: Sequence[PrepareRequest], on_progress: OnProgress, restarted: bool
) -> dict[str, Prepared | DataError]:
    by_key = {request.key: request for request in requests}
    results: dict[str, Prepared | DataError] = {}
    current = ""
    while len(results) < len(requests):
        try:
            line = worker.line.read_line(STALL_SECONDS)
        except TimeoutError:
            line, ended = None, f"gave no sign of life for {STALL_SECONDS:g} seconds"
        else:
            ended = "" if line is not None else _how_it_ended(worker.process)
        if line is None:
            last = worker.process.last_line()
            message = f"the data worker {ended}" + (f" ({last})" if last else "")
            if current:
                display_name = by_key[current].data.display_name
                results[current] = DataError(
                    f"{display_name}: {message}; look for a row, or a chat template, that takes too much time or memory"
                )
            elif not results and (restarted or not worker.process.has_ended):
                raise ModelError(f"{requests[0].tokenizer_path}: {message}, before the first job; is the installation whole?")
            break
        match PREPARE_MESSAGES.decode(line):
            case PrepareProgress(current) as progress:
                on_progress(progress)
            case PrepareFailed(key, reason, disk_full, of_tokenizer):
                if of_tokenizer:
                    raise ModelError(reason)
                results[key], current = DataError(reason, disk_full=disk_full), ""
            case SetsMade(key, train, evaluation):
                results[key], current = _open_made(by_key[key], train, evaluation), ""
            case PrepareBatch():
                raise AssertionError("a data worker gives no orders")
    return results


def _open_made(request: PrepareRequest, made: MadeSet, of_eval: MadeSet) -> Prepared | DataError:
    data = request.data
    pinned = {"path": _pinned(data.path, data.sources, made.commits)}
    if data.eval_path:
        pinned["eval_path"] = _pinned(data.eval_path, data.eval_sources, of_eval.commits)
    assert made.directory is not None, f"{data.display_name} was not tokenized"
    train_set, eval_set = Path(made.directory), Path(of_eval.directory) if of_eval.directory else None
    known_sets.remember(request, train_set, eval_set)
    opened = open_sets(replace(request, data=data.model_copy(update=pinned)), train_set, eval_set)
    remade = tuple(found.damage for found in (made, of_eval) if found.damage)
    return replace(opened, remade=remade, notes=made.notes + of_eval.notes) if isinstance(opened, Prepared) else opened


def _pinned(path: str | Sources, sources: Sequence[DataSource], commits: Sequence[str | None]) -> str | Sources:
    """The sources with the commits that were read; `path` itself if none of them is the hub's."""
    if not any(commits):
        return path
    return tuple(source.model_copy(update={"revision": commit} if commit else {}) for source, commit in zip(sources, commits, strict=True))


def open_sets(request: PrepareRequest, train_set: Path, eval_set: Path | None) -> Prepared | DataError:
    """The result of `prepare` from the sets that it made for this request before. `eval_set`: of `data.eval_path`, if there is one."""
    data = request.data
    train, evaluation, eval_report = None, None, None
    try:
        whole = Dataset(train_set)
        report = _report(request, data.sources, whole)
        if data.eval_path:
            assert eval_set is not None, f"{data.eval_path} was not tokenized"
            evaluation = Dataset(eval_set)
            eval_report = _report(request, data.eval_sources, evaluation)
        elif data.eval_size:
            train, held_out = split(len(whole), data.eval_size, data.eval_seed)
            evaluation = Dataset(train_set, held_out)
        epoch = _epoch(data, report.sources, train_set, train)
        shared = _count_shared(train_set, eval_set if data.eval_path else None, data.eval_size, data.eval_seed)
        return Prepared(Dataset(train_set, train, epoch), evaluation, report, data, eval_report, shared=shared)
    except DataError as error:
        return DataError(f"{data.display_name}: {error}")


@lru_cache(maxsize=64)  # a second for a million rows, and the jobs of a sweep ask for the same
def _count_shared(train_set: Path, eval_set: Path | None, eval_size: float, seed: int) -> int:
    whole = Dataset(train_set)
    if eval_set is not None:
        return count_shared(whole, Dataset(eval_set))
    if not eval_size:
        return 0
    train, held_out = split(len(whole), eval_size, seed)
    return count_shared(Dataset(train_set, train), Dataset(train_set, held_out))


def _epoch(data: DataConfig, counts: Sequence[int], train_set: Path, train: npt.NDArray[np.int64] | None) -> Epoch | None:
    """What an epoch takes of the sources, of whose samples those in `train` are trained on (None: all)."""
    weights = [source.weight for source in data.sources if source.weight is not None]
    if len(weights) < 2:
        return _pack(train_set, data.eval_size, data.eval_seed, data.max_length)[0] if data.packing else None
    sizes = list(counts) if train is None else np.diff(np.searchsorted(train, np.cumsum([0, *counts]))).tolist()
    for source, size in zip(data.sources, sizes, strict=True):
        if not size:
            raise DataError(f"eval_size takes all samples of {source.display_name} and leaves none to train on; lower it or add rows")
    if not data.packing:
        return mix(sizes, weights)
    parts = _pack(train_set, data.eval_size, data.eval_seed, data.max_length, tuple(sizes))
    return replace(join_rows(parts), rows=mix([epoch_size(part) for part in parts], weights))


@lru_cache(maxsize=64)  # two seconds for a million samples, and the jobs of a sweep ask for the same
def _pack(train_set: Path, eval_size: float, eval_seed: int, max_length: int, sizes: tuple[int, ...] = ()) -> list[PackedRows]:
    """The training samples of a set in rows, each source packed by itself."""
    whole = Dataset(train_set)
    train = split(len(whole), eval_size, eval_seed)[0] if eval_size else slice(None)
    lengths = whole.lengths[train]
    return [pack_rows(part, max_length) for part in np.split(lengths, np.cumsum(sizes[:-1]))]


def _report(request: PrepareRequest, sources: Sequence[DataSource], dataset: Dataset) -> DataReport:
    try:
        files = shown_files(sources, request.base_dir)
    except DataError:  # they are on another host, or have gone since: their names are those that the set was made with
        files = None
    return DataReport.from_meta(dataset.meta, files)


def _how_it_ended(process: SupervisedProcess) -> str:
    process.wait()
    status = process.exit_status
    assert status is not None, "a child that has ended has an exit status"
    return (describe_signal(-status) if status < 0 else None) or describe_exit(status)
