"""The progress of a run: a live table in a terminal, plain lines elsewhere. Draws `RunProgress`, measures nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from tlora.cli.terminal import open_table, printable, shows_live, tables_within
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.progress.view import ENDED, JobProgress, RunProgress
from tlora.wording.numbers import MANY_JOBS, count_text, duration_text, loss_text, names_text, place_names, quantity, shorten

LINE_SECONDS = 10.0  # between two plain lines of one job
STYLES = {
    "training": "cyan",
    "evaluating": "magenta",
    "saving": "cyan",
    "done": "green",
    "failed": "bold red",
    "stopped": "yellow",
}  # others are dim
_AROUND_ROWS = 7  # lines of the live table without a job: heading, rules, total, the line below, the cursor
_URGENCY = {"training": 0, "evaluating": 0, "saving": 0, "failed": 1, "stopped": 2, "preparing": 3, "queued": 4, "paused": 4, "done": 5}


@contextmanager
def watching(console: Console | None) -> Iterator[Watcher]:
    """A watcher that shows a run on `console`: a live table in a terminal, plain lines elsewhere, nothing without a console."""
    if console is None:
        yield Watcher()
    elif shows_live(console):
        with LiveView(console) as live:
            yield Watcher(live.progress, live.note)
    else:
        plain = PlainView(console)
        try:
            yield Watcher(plain.progress, plain.note)
        finally:
            with suppress(OSError, ConfigError):  # stdout may be closed; the results say so
                plain.close()


class LiveView:
    """Redraws one table in place; notes scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(Text("starting", style="dim"), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be closed
            self._live.stop()

    def progress(self, state: RunProgress) -> None:
        width, height = self._console.size
        self._live.update(progress_view(state, width, height), refresh=True)

    def note(self, line: str) -> None:
        self._console.print(Text(printable(line)))


class PlainView:
    """At most one line per job in `LINE_SECONDS`; the end of a job and notes are printed at once.

    Of more than `MANY_JOBS` jobs, one line counts them all, and a text that is noted of several of them is printed with its first job and
    once more with the others.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last: dict[str, tuple[float, int]] = {}  # job: when it was last printed, and at which step
        self._ended: set[str] = set()
        self._stage, self._stage_at = "", float("-inf")
        self._many: frozenset[str] = frozenset()  # the names of the jobs, if they are summarised
        self._noted: dict[str, list[str]] = {}  # texts noted of a job: the names of further jobs, not printed yet
        self._all_at = float("-inf")

    def progress(self, state: RunProgress) -> None:
        now = self._clock()
        if state.stage not in ("", self._stage) and now - self._stage_at >= LINE_SECONDS:
            self._stage, self._stage_at = state.stage, now
            self.note(state.stage)
        if len(state.jobs) > MANY_JOBS:
            self._summarise(state, now)
            return
        for job in state.jobs:
            if job.has_ended:
                if job.name not in self._ended:
                    self._ended.add(job.name)
                    self.note(plain_line(state.seconds, job, state.device))
                continue
            printed, step = self._last.get(job.name, (float("-inf"), 0))
            if job.step > step and now - printed >= LINE_SECONDS:
                self._last[job.name] = now, job.step
                self.note(plain_line(state.seconds, job, state.device))

    def note(self, line: str) -> None:
        name, _, text = line.partition(": ")
        if name in self._many:
            if text in self._noted:
                self._noted[text].append(name)
                return
            self._noted[text] = []
        self._print(line)

    def close(self) -> None:
        """Print the lines that were held back."""
        for text, names in self._noted.items():
            if names:
                self._print(f"{names_text(names)}: {text}")
                names.clear()

    def _summarise(self, state: RunProgress, now: float) -> None:
        self._many = self._many or frozenset(job.name for job in state.jobs)
        ended = all(job.has_ended for job in state.jobs)
        begun = any(job.step for job in state.jobs)
        if (begun and now - self._all_at >= LINE_SECONDS) or (ended and not self._ended):
            self._all_at = now
            self._ended = {job.name for job in state.jobs} if ended else set()
            self.close()
            self._print(summary_line(state))

    def _print(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)


def summary_line(state: RunProgress) -> str:
    """All jobs in one line: time, how many are in which state, steps, speed."""
    counts = Counter(job.status for job in state.jobs)
    parts = [", ".join(f"{counts[status]} {status}" for status in sorted(counts, key=_URGENCY.__getitem__))]
    parts += [f"step {sum(job.step for job in state.jobs):,}/{sum(job.total_steps for job in state.jobs):,} of all"]
    parts += [f"{count_text(state.tokens_per_second)} tokens/s"] if state.tokens_per_second else []
    return f"[{duration_text(state.seconds)}] {quantity(len(state.jobs), 'job')}: {', '.join(parts)}"


def plain_line(seconds: float, job: JobProgress, device: str = "cuda") -> str:
    """One job in one line: time, name, where it is of the places of `device`, step, losses, speed."""
    where = f" on {place_names(device)[bool(job.parts_on)]} {job.gpus_text}" if job.gpus_text else ""
    parts = [f"{job.name}: {job.status}{where}"]
    if job.total_steps:  # else nothing is known of its length: it failed before
        parts += [f"step {job.step}/{job.total_steps}"]
    parts += [f"train loss {loss_text(job.loss)}"] if job.loss is not None else []
    parts += [f"eval loss {loss_text(job.eval_loss)}"] if job.eval_loss is not None else []
    if job.has_ended:
        parts += (
            [f"{count_text(job.num_tokens)} tokens"] if job.total_steps else []
        )  # the reason of a failure is printed as a note and with the results
    else:
        parts += [f"{count_text(job.tokens_per_second)} tokens/s", f"share {job.share:.0%}"]
        parts += [f"ETA {duration_text(job.eta_seconds)}"] if job.eta_seconds is not None else []
    return f"[{duration_text(seconds)}] {', '.join(parts)}"


def progress_view(state: RunProgress, width: int, height: int) -> Group:
    """The table, not higher than the terminal: if not all jobs fit, running ones are shown first. Of a command without jobs, its stage."""
    stage = f"{printable(state.stage)}  " if state.stage else ""
    if not state.jobs:
        return Group(Text(f"{stage}{duration_text(state.seconds)}", style="dim", no_wrap=True, overflow="ellipsis"))
    shown = _with_room(state.jobs, height - _AROUND_ROWS)
    wide = width >= 110
    placed = any(job.gpu is not None for job in state.jobs)
    name_width = max(12, min(40, width - (100 if wide else 67) - 6 * placed))  # what the other columns leave free
    table = open_table(show_footer=True, footer_style="bold")
    table.add_column("job", quantity(len(state.jobs), "job"), no_wrap=True)
    table.add_column("status", "", no_wrap=True)
    if placed:
        table.add_column("CPU" if "cpu" in state.device else "GPU", "", justify="right", no_wrap=True)
    if wide:
        table.add_column("", "", width=20)
    table.add_column("step", _steps(state.jobs), justify="right", no_wrap=True)
    table.add_column("train loss" if wide else "train", "", justify="right", no_wrap=True)
    table.add_column("eval loss" if wide else "eval", "", justify="right", no_wrap=True)
    table.add_column("tokens/s" if wide else "tok/s", count_text(state.tokens_per_second), justify="right", no_wrap=True)
    table.add_column("share", "", justify="right", no_wrap=True)
    table.add_column("ETA", _eta(state.jobs), justify="right", no_wrap=True)
    for job in shown:
        bar = [ProgressBar(total=job.total_steps, completed=job.step, width=20) if job.total_steps else ""] if wide else []
        table.add_row(
            Text(printable(shorten(job.name, name_width))),
            Text(job.status, style=STYLES.get(job.status, "dim")),
            *([job.gpus_text] if placed else []),
            *bar,
            f"{job.step}/{job.total_steps}" if job.total_steps else "",
            loss_text(job.loss),
            loss_text(job.eval_loss),
            *_speed(job),
        )
    hidden = Counter(job.status for job in state.jobs) - Counter(job.status for job in shown)
    rest = ", ".join(f"{count} {status}" for status, count in hidden.items())
    lines = [Text(f"… and {rest}", style="dim", no_wrap=True, overflow="ellipsis")] if hidden else []
    line = f"{stage}{duration_text(state.seconds)}  padding {state.padding:.1%}"
    return Group(tables_within(table, width)[0], *lines, Text(line, style="dim", no_wrap=True, overflow="ellipsis"))


def clock_text(seconds: float) -> str:
    """0:07, 2:19, 1:02:19, 3 d 4 h."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _with_room(jobs: Sequence[JobProgress], room: int) -> list[JobProgress]:
    if len(jobs) <= max(room, 1):
        return list(jobs)
    urgent = sorted(range(len(jobs)), key=lambda index: (_URGENCY[jobs[index].status], index))[: max(room - 1, 1)]
    return [jobs[index] for index in sorted(urgent)]


def _speed(job: JobProgress) -> tuple[str, str, str]:
    if job.status not in ("training", "evaluating"):
        return "", "", ""
    eta = clock_text(job.eta_seconds) if job.eta_seconds is not None else ""
    return count_text(job.tokens_per_second), f"{job.share:.0%}", eta


def _steps(jobs: Sequence[JobProgress]) -> str:
    total = sum(job.total_steps for job in jobs)
    return f"{sum(job.step for job in jobs) / total:.0%}" if total else ""


def _eta(jobs: Sequence[JobProgress]) -> str:
    """The run ends with its last job; empty while the end of one job is unknown."""
    etas = [job.eta_seconds for job in jobs if job.status not in (*ENDED, "saving")]
    known = [eta for eta in etas if eta is not None]
    return clock_text(max(known)) if known and len(known) == len(etas) else ""
