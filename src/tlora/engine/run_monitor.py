"""Watches a run: rates and shares over the last seconds for the display, and a row of `run.jsonl` about every second."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlora.batching.pack import MicroBatch
from tlora.data.prepare import PrepareProgress
from tlora.engine.driver import Driver
from tlora.engine.watcher import Watcher
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Report
from tlora.progress.view import JobProgress, JobStatus, ProgressView, RunProgress
from tlora.store.job_result import JobResult
from tlora.store.metrics import RowWriter, finite_mean
from tlora.wording.numbers import quantity


@dataclass(frozen=True)
class Packing:
    """Sums over some micro-batches: real tokens, computed ones (padding included), and the budgets they were packed into."""

    tokens: int = 0
    computed: int = 0
    offered: int = 0
    micro_batches: int = 0

    def __add__(self, other: Packing) -> Packing:
        return Packing(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __sub__(self, other: Packing) -> Packing:
        return Packing(*(a - b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.tokens, self.computed, self.offered, self.micro_batches

    @property
    def padding(self) -> float | None:
        """Padded over computed tokens; None where nothing was computed."""
        return 1 - self.tokens / self.computed if self.computed else None

    @property
    def fill(self) -> float | None:
        """Tokens over the budgets; None where there was none."""
        return self.tokens / self.offered if self.offered else None

    def __str__(self) -> str:
        if self.padding is None or self.fill is None:
            return "no micro-batch"
        return f"padding {self.padding:.1%}, fill {self.fill:.1%} over {quantity(self.micro_batches, 'micro-batch', 'micro-batches')}"


@dataclass
class TokenCounts:
    """Tokens by job and the packing of all micro-batches since the start.

    A micro-batch is of the `tail` when all jobs together had less than one budget of tokens on offer, so that no packing could have
    filled it: at the end of a run, and all through one whose jobs are too small for its budget. All others are `full`.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    full: Packing = Packing()
    tail: Packing = Packing()

    def count(self, packed: MicroBatch, computed: int, left_tokens: int) -> None:
        """Enter a micro-batch that took `computed` tokens with padding; `left_tokens` more were on offer."""
        made = Packing(packed.tokens, computed, packed.budget, 1)
        if packed.tokens + left_tokens < packed.budget:
            self.tail += made
        else:
            self.full += made
        for row in packed.rows:
            self.tokens[row.job_id] = self.tokens.get(row.job_id, 0) + row.tokens

    @property
    def computed(self) -> int:
        """Tokens computed in all, padding included."""
        return self.full.computed + self.tail.computed

    def copy(self) -> TokenCounts:
        return TokenCounts(dict(self.tokens), self.full, self.tail)


_SHOW_SECONDS, _ROW_SECONDS, _WINDOW_SECONDS = 0.25, 1.0, 10.0


class RunMonitor:
    """Listens for token counts, and keeps a short history of them and of steps; all else is read from the driver when it looks, and
    shown in a `ProgressView`.
    """

    def __init__(
        self,
        directory: Path,
        ranks: dict[str, int],
        watcher: Watcher,
        resume: bool,
        started: float | None = None,
        write_row: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`ranks`: of the adapters, by job. `started`: the run's beginning on the monotonic clock (default: now, or where an earlier run
        of `directory` stopped). `write_row` takes the rows of `run.jsonl` (default: that file in `directory`).
        """
        self._watcher, self._ranks = watcher, ranks
        self._view = ProgressView(JobProgress(name, "preparing", rank) for name, rank in ranks.items())
        self.resume = resume
        self.ended: Mapping[str, JobResult] = {}
        """Jobs that an earlier run has ended: nothing is done with them."""
        self.started = begin_of_run(directory, resume) if started is None else started
        self._write = write_row or RowWriter(directory / "run.jsonl", watcher.note).write
        self._traffic = TokenCounts()
        self._runs: dict[str, JobRun] = {}
        self._first_step: dict[str, tuple[int, float]] = {}
        self._history: deque[tuple[float, dict[str, int]]] = deque([(self.seconds(), {})])
        self._row_before: tuple[float, TokenCounts] = (self.seconds(), TokenCounts())
        self._shown = -math.inf  # the first look is shown at once

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def note(self, line: str) -> None:
        self._watcher.note(line)

    def stage(self, stage: str) -> None:
        for result in self.ended.values():
            self._view.show(row_of(result))
        self._watcher.progress(self._view.progress(self.seconds(), stage))

    def preparing(self, progress: PrepareProgress) -> None:
        self.stage(f"tokenizing {progress.key}: {progress.rows:,} rows, {progress.share:.0%}")

    def track(self, run: JobRun) -> None:
        """A job joins."""
        self._runs[run.spec.name] = run
        self._first_step[run.spec.name] = (run.progress.step, self.seconds())

    def listen(self, report: Report) -> None:
        if isinstance(report, Computed):
            self._traffic.count(report.packed, report.computed_tokens, report.left_tokens)

    def update(self, driver: Driver, waiting: Sequence[str], *, now_due: bool) -> None:
        """A row and a look where one is due; a look in any case with `now_due`."""
        now = self.seconds()
        if now - self._row_before[0] >= _ROW_SECONDS:
            self._write_row(now)
        if now - self._shown >= _SHOW_SECONDS or now_due:
            self._shown = now
            self._history.append((now, dict(self._traffic.tokens)))
            while len(self._history) > 2 and now - self._history[1][0] > _WINDOW_SECONDS:
                self._history.popleft()
            self._watcher.progress(self._progress(driver, waiting, now))

    def close(self, driver: Driver) -> None:
        """The last row, the last look, and how well the budget was used."""
        self._write_row(self.seconds())
        self._watcher.progress(self._progress(driver, [], self.seconds()))
        if self._traffic.computed:
            self.note(f"packing: {self._traffic.full}; tail, with less than a token budget on offer: {self._traffic.tail}")

    def _write_row(self, now: float) -> None:
        (then, before), traffic = self._row_before, self._traffic
        jobs = {name: tokens - before.tokens.get(name, 0) for name, tokens in traffic.tokens.items()}
        jobs = {name: tokens for name, tokens in jobs.items() if tokens}
        if traffic.computed > before.computed:
            row = {"seconds": now, "tokens_per_second": sum(jobs.values()) / max(now - then, 1e-9)}
            row |= _packing_row(traffic.full - before.full) | _packing_row(traffic.tail - before.tail, "tail_")
            self._write(row | {"jobs": jobs})
        self._row_before = (now, traffic.copy())

    def _progress(self, driver: Driver, waiting: Sequence[str], now: float) -> RunProgress:
        then, before = self._history[0]
        rates = {n: (t - before.get(n, 0)) / max(now - then, 1e-9) for n, t in self._traffic.tokens.items()}
        for name in self._ranks:
            self._view.show(self._row(name, driver, waiting, now, rates.get(name, 0.0)))
        self._view.measure(0, sum(rates.values()), self._traffic.full.padding or 0.0)
        return self._view.progress(now)

    def _row(self, name: str, driver: Driver, waiting: Sequence[str], now: float, rate: float) -> JobProgress:
        result, run = driver.records.results.get(name), self._runs.get(name)
        if name in self.ended:
            return row_of(self.ended[name])
        if run is None:
            status: JobStatus = "queued" if name in waiting else result.status if result else "preparing"
            return JobProgress(name, status, self._ranks[name], reason=result.reason if result else "")
        p = run.progress
        step0, then = self._first_step[name]
        pace = (now - then) / (p.step - step0) if p.step > step0 else None
        running = name in driver.group.runs
        status = "saving" if name in driver.records.ending else "evaluating" if run.evaluating else "training"
        return JobProgress(
            name=name,
            status=result.status if result else status,
            rank=run.spec.r,
            step=p.step,
            total_steps=run.total_steps,
            loss=finite_mean(p.losses) if p.losses else None,
            eval_loss=p.eval_last,
            num_tokens=p.num_tokens,
            tokens_per_second=rate if running else 0.0,
            eta_seconds=pace * (run.total_steps - p.step) if running and pace else None,
            reason=result.reason if result else "",
        )


def row_of(result: JobResult) -> JobProgress:
    """Of a job that has ended."""
    return JobProgress(
        result.name,
        result.status,
        result.rank,
        step=result.steps,
        total_steps=result.total_steps,
        loss=result.train_loss,
        eval_loss=result.eval_loss,
        num_tokens=result.num_tokens,
        reason=result.reason,
    )


def _packing_row(packing: Packing, prefix: str = "") -> dict[str, Any]:
    tokens, computed, offered, micro_batches = packing.counts
    row = {"padding": packing.padding, "fill": packing.fill, "micro_batches": micro_batches}
    row |= {"tokens": tokens, "computed": computed, "offered": offered}
    return {prefix + key: value for key, value in row.items()}


def begin_of_run(directory: Path, resume: bool) -> float:
    """Now, on the monotonic clock; for a resumed run so much earlier that its time goes on from where it stopped."""
    return time.monotonic() - (_last_second(directory / "run.jsonl") if resume else 0.0)


def _last_second(path: Path) -> float:
    """Where the clock of an earlier run stopped: a resumed run's time goes on from there. A row that a kill tore is passed over."""
    last = 0.0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return last
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            last = max(last, float(json.loads(line)["seconds"]))
    return last
