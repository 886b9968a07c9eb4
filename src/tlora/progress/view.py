"""One view of how far jobs are, as plain values: what terminals and a server show is read from it.

Whoever hears of jobs (a run's loop, the ranks' coordinator, a cluster's controller) turns what it hears into the verbs of
`ProgressView`. What a verb does to a job's row, and what a rate and a share are, is decided here alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from tlora.wording.losses import recent_loss
from tlora.wording.numbers import place_names

JobStatus = Literal["preparing", "queued", "paused", "training", "evaluating", "saving", "done", "stopped", "failed"]
ENDED = ("done", "stopped", "failed")


@dataclass(frozen=True)
class JobProgress:
    """One job's row. Losses are means per trained token, `loss` over the last ten steps; `tokens_per_second` are those of the last
    seconds, or of its latest steps, and `share` is its part of all jobs' together. `eta_seconds`: its steps left x the time of a step.
    """

    name: str
    status: JobStatus
    rank: int = 0
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    num_tokens: int = 0
    tokens_per_second: float = 0.0
    share: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""  # why it failed or stopped
    gpu: int | None = None  # where it is, or where it ended, of a run on several GPUs
    parts_on: tuple[int, ...] = ()  # other GPUs that compute some of its replicas
    host: str = ""  # that has them, where there are several

    @property
    def gpus_text(self) -> str:
        """All of them, with commas, and their host before them; "" on a single one."""
        numbers = "" if self.gpu is None else ",".join(map(str, (self.gpu, *self.parts_on)))
        return f"{self.host}:{numbers}" if self.host and numbers else numbers

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True)
class RunProgress:
    """The view at one moment. `padding` is padded over computed tokens since the start, tails (`run_monitor.py`) left out; `stage`
    says what happens before training.
    """

    seconds: float
    jobs: tuple[JobProgress, ...]
    tokens_per_second: float = 0.0
    padding: float = 0.0
    stage: str = ""
    device: str = "cuda"  # whose places the jobs' `gpu` numbers


@dataclass(frozen=True)
class _Source:
    tokens_per_second: float
    padding: float
    stage: str
    rates: Mapping[str, float]


Change = tuple[JobProgress | None, JobProgress]
"""A job's row before and after."""


class ProgressView:
    """Rows by job, in the order in which they came. A job that has ended stays as it is until it is queued again.

    A *source* is a process that measures its own rates (one rank of several; a run of one process has a single one).
    """

    def __init__(self, rows: Iterable[JobProgress] = (), device: str = "cuda") -> None:
        """`device`: whose places are numbered ("cpu", "cuda:0")."""
        self._device = device
        self.rows = {row.name: row for row in rows}
        self._changed: dict[str, JobProgress | None] = {}
        self._sources: dict[int, _Source] = {}

    def take_changes(self) -> list[Change]:
        """Of the rows that were set since the last call."""
        changed, self._changed = self._changed, {}
        return [(before, self.rows[name]) for name, before in changed.items() if name in self.rows]

    # -- of a job --------------------------------------------------------------------------------------------------------

    def show(self, row: JobProgress) -> None:
        """All of its row, whatever that was before: by a source that trains it."""
        self._changed.setdefault(row.name, self.rows.get(row.name))
        self.rows[row.name] = row

    def advance(self, name: str, **values: Any) -> None:
        """Newer values of its row. One that is paused stays so: it may take steps until it has left its place."""
        if (row := self._open(name)) is not None:
            self.show(replace(row, **(values | ({"status": "paused"} if row.status == "paused" else {}))))

    def queue(self, name: str, **values: Any) -> None:
        """It waits for a place, unless it has one or is paused. `values`: fields of its row."""
        row = self._open(name) or replace(self.rows.get(name) or JobProgress(name, "queued"), gpu=None, parts_on=(), reason="")
        keeps = row.status == "paused" or row.gpu is not None
        self.show(replace(row, status=row.status if keeps else "queued", **values))

    def place(self, name: str, gpus: tuple[int, ...], host: str = "") -> None:
        """It is to be trained on `gpus` of `host`, the first of which leads. Where that is another one than before, it is loaded first."""
        if (row := self._open(name)) is not None:
            stays = row.status == "paused" or row.gpu == gpus[0] or (row.gpu is None and row.status == "training")
            self.show(replace(row, status=row.status if stays else "preparing", gpu=gpus[0], parts_on=gpus[1:], host=host))

    def leave(self, name: str) -> None:
        """It has lost its place, and waits for another unless it is paused."""
        self.advance(name, status="queued", gpu=None, parts_on=(), host="", tokens_per_second=0.0, eta_seconds=None)

    def hold(self, name: str) -> None:
        """Its owner pauses it; it keeps its place until it leaves it."""
        self.advance(name, status="paused", tokens_per_second=0.0, eta_seconds=None)

    def release(self, name: str) -> None:
        """A paused job goes on as soon as it can."""
        if (row := self._open(name)) is not None and row.status == "paused":
            self.show(replace(row, status="queued" if row.gpu is None else "preparing"))

    def end(self, name: str, status: JobStatus, **values: Any) -> None:
        """It is over; `values`: last ones of its row. It stays where it was last."""
        if name in self.rows:
            self.show(replace(self.rows[name], status=status, tokens_per_second=0.0, eta_seconds=None, **values))

    def forget(self, name: str) -> None:
        self.rows.pop(name, None)

    def _open(self, name: str) -> JobProgress | None:
        """The row of a job that is known and has not ended."""
        row = self.rows.get(name)
        return None if row is None or row.has_ended else row

    # -- of a source -----------------------------------------------------------------------------------------------------

    def measure(
        self, source: int, tokens_per_second: float, padding: float, stage: str = "", rates: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """What `source` says of all its jobs together; `rates`: its tokens per second of jobs that another source shows."""
        self._sources[source] = _Source(tokens_per_second, padding, stage, rates)

    def lose(self, source: int) -> None:
        """Jobs that it led wait until another one shows them."""
        self._sources.pop(source, None)
        for name, row in self.rows.items():
            if row.gpu == source:
                self.leave(name)

    # -- the whole -------------------------------------------------------------------------------------------------------

    def progress(self, seconds: float, stage: str = "") -> RunProgress:
        """Rates are sums over all sources, or over the rows where there is no source; padding is weighted by them, if there are any."""
        sources = self._sources.values()
        total = sum(each.tokens_per_second for each in sources or self.rows.values())
        weighted = sum(each.padding * each.tokens_per_second for each in sources)
        padding = weighted / total if total else max((each.padding for each in sources), default=0.0)
        place = place_names(self._device)[0]
        stage = stage or next((f"{place} {number}: {each.stage}" for number, each in sorted(self._sources.items()) if each.stage), "")
        return RunProgress(seconds, tuple(self._with_share(row, total) for row in self.rows.values()), total, padding, stage, self._device)

    def _with_share(self, row: JobProgress, total: float) -> JobProgress:
        """The row with the tokens of all sources that compute parts of the job, of `total` tokens per second."""
        if not row.tokens_per_second:
            return row
        rate = row.tokens_per_second + sum(each.rates.get(row.name, 0.0) for each in self._sources.values())
        return replace(row, tokens_per_second=rate, share=rate / total if total else 0.0)


def logged_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a job's row from rows of its `metrics.jsonl`: the losses, and the tokens that it was trained on. Without what is not in
    them.
    """
    values: dict[str, Any] = {}
    for row in rows:
        for key in ("num_tokens", "eval_loss"):
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                values[key] = value
    loss = recent_loss(rows)
    return values if loss is None else values | {"loss": loss}
