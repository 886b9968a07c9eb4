"""Jobs of a server while they are watched: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tlora.api import JobView
from tlora.cli.service_view import STYLES, steps_text, why
from tlora.cli.terminal import open_table, printable, shows_live
from tlora.client.jobs import Sight
from tlora.wording.numbers import loss_text, shorten

LINE_SECONDS = 10.0  # between two plain lines about the steps of one job
_AROUND_ROWS = 4
_URGENCY = {"running": 0, "failed": 1, "preparing": 2, "queued": 3, "paused": 4, "cancelled": 5, "succeeded": 6}


def follow(console: Console, sights: Iterable[Sight]) -> tuple[JobView, ...]:
    """Show the sights as they come; returns the jobs of the last one."""
    jobs: tuple[JobView, ...] = ()
    plain = PlainFollower(console)
    if not shows_live(console):
        for sight in sights:
            plain.show(sight)
            jobs = sight.jobs
        return jobs
    with Live(Text("asking the server", style="dim"), console=console, auto_refresh=False, transient=True) as live:
        for sight in sights:
            plain.show(sight, steps=False)
            live.update(follow_table(sight, *console.size), refresh=True)
            jobs = sight.jobs
    return jobs


class PlainFollower:
    """A line for each change of a job's status, and now and then one about its steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: dict[str, str] = {}
        self._told: dict[str, float] = {}
        self._warned: set[tuple[str, str]] = set()
        self._away = False

    def show(self, sight: Sight, steps: bool = True) -> None:
        if sight.away and not self._away:
            self._say(f"the server does not answer, and is asked again: {sight.away}", "yellow")
        elif self._away and not sight.away:
            self._say("the server is back", "")
        self._away = bool(sight.away)
        for job in sight.jobs:
            for warning in job.warnings:
                if (job.id, warning) not in self._warned:
                    self._warned.add((job.id, warning))
                    self._say(f"{job.name}: {warning}", "yellow")
            self._show_job(job, sight.losses.get(job.id), steps)

    def _show_job(self, job: JobView, loss: float | None, steps: bool) -> None:
        now = time.monotonic()
        changed = self._status.get(job.id) != job.status
        due = steps and job.status == "running" and now - self._told.get(job.id, 0.0) >= LINE_SECONDS
        if not changed and not due:
            return
        self._status[job.id], self._told[job.id] = job.status, now
        parts = [f"{job.name}: {job.status}"]
        parts += [f"step {steps_text(job)}"] if job.steps else []
        parts += [f"train loss {loss_text(loss)}"] if loss is not None else []
        parts += [f"waits for {job.waiting_for}"] if job.status == "queued" and job.waiting_for else []
        parts += [job.reason] if job.reason else []
        self._say(", ".join(parts), STYLES.get(job.status, "") if job.has_ended else "")

    def _say(self, line: str, style: str) -> None:
        self._console.print(Text(printable(line), style=style), soft_wrap=True)


def follow_table(sight: Sight, width: int, height: int) -> Group:
    """The table, limited to the terminal's height: running jobs and failures first."""
    shown = _with_room(sight.jobs, height - _AROUND_ROWS)
    table = open_table()
    table.add_column("job", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("train loss", justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis")
    name_width = max(12, min(40, width - 64))
    for job in shown:
        table.add_row(
            Text(printable(shorten(job.name, name_width))),
            Text(job.status, style=STYLES.get(job.status, "dim")),
            steps_text(job),
            loss_text(sight.losses[job.id]) if job.id in sight.losses else "",
            Text(printable(why(job)), style="dim"),
        )
    ended = sum(job.has_ended for job in sight.jobs)
    line = f"{ended} of {len(sight.jobs)} ended; Ctrl-C ends the watching, not the jobs"
    hidden = len(sight.jobs) - len(shown)
    return Group(table, Text(f"… and {hidden} more. {line}" if hidden else line, style="dim", no_wrap=True, overflow="ellipsis"))


def _with_room(jobs: Sequence[JobView], room: int) -> list[JobView]:
    if len(jobs) <= max(room, 1):
        return list(jobs)
    urgent = sorted(range(len(jobs)), key=lambda index: (_URGENCY.get(jobs[index].status, 9), index))[: max(room, 1)]
    return [jobs[index] for index in sorted(urgent)]
