"""What a server answered, as tables: its jobs, one job, the cluster, keys, base models; and jobs while they are watched."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tlora.api import MISSED, BaseView, EventView, FileView, JobView, KeyView, StorageView, TenantJobView
from tlora.cli.terminal import bytes_text, open_table, print_table, printable, shows_live
from tlora.client.jobs import Sight
from tlora.cluster_api import ClusterView, HostView, WaitingView
from tlora.job import SCHEDULED, DataConfig, JobSpec, LoraShape, TrainConfig
from tlora.wording.numbers import DASH, count_text, duration_text, field_text, loss_text, place_names, quantity, ranges_text, shorten

STYLES = {"running": "cyan", "succeeded": "green", "failed": "bold red", "cancelled": "yellow", "paused": "yellow"}  # others are dim
_SHOWN_EVENTS = 12
_WIDE = 120  # columns: an id has 28, and those that are not folded 60


def time_text(seconds: float) -> str:
    """A Unix time, in the user's zone."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def steps_text(job: JobView) -> str:
    if job.total_steps is None:
        return str(job.steps) if job.steps else ""
    return f"{job.steps:,}/{job.total_steps:,}"


def why(job: JobView) -> str:
    """Why the job does not train just now, and whether it is late."""
    return _with_deadline(job.reason or ("" if job.has_ended else job.waiting_for or ""), job.deadline_missed)


def _with_deadline(text: str, missed: bool) -> str:
    return "; ".join(filter(None, (text, MISSED if missed else "")))


def _loss(loss: float | None) -> str:
    return "" if loss is None else loss_text(loss)


def print_jobs(console: Console, jobs: Iterable[JobView], empty: str = "no jobs") -> None:
    """One line each, with their tenants where they are of all; a narrow console has neither losses nor ages, and folds what is long."""
    table, wide, listed = open_table(), console.width >= _WIDE, list(jobs)
    table.add_column("job", overflow="fold", min_width=8)
    if any(isinstance(job, TenantJobView) for job in listed):
        table.add_column("tenant", overflow="fold")
    table.add_column("id", overflow="fold", no_wrap=wide)
    table.add_column("status", no_wrap=True)
    for name in ("steps", "train loss", "eval loss", "age") if wide else ("steps",):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for job in listed:
        whose = [Text(printable(job.tenant))] if isinstance(job, TenantJobView) else []
        age = duration_text(max(0.0, time.time() - job.created_at))
        table.add_row(
            Text(printable(job.name)),
            *whose,
            job.id,
            Text(job.status, style=STYLES.get(job.status, "dim")),
            steps_text(job),
            *((_loss(job.train_loss), _loss(job.eval_loss), age) if wide else ()),
            Text(printable(why(job)), style="dim"),
        )
    if table.row_count:
        print_table(console, table)
    else:
        console.print(Text(empty, style="dim"))


def print_job(console: Console, job: JobView, events: Sequence[EventView]) -> None:
    """Everything about one job."""
    head = Text.assemble((printable(job.name), "bold"), "  ", (job.status, STYLES.get(job.status, "dim")))
    console.print(head)
    order = dict(job.order_fields)
    data: Mapping[str, Any] = order.pop("data", {})
    facts: dict[str, str] = {
        "id": job.id,
        "base model": job.base_model,
        "submitted": time_text(job.created_at),
        "started": time_text(job.started_at) if job.started_at else "",
        "ended": time_text(job.ended_at) if job.ended_at else "",
        "deadline": _deadline(job, order.get("deadline_seconds")),
        "step": steps_text(job),
        "train loss": _loss(job.train_loss),
        "eval loss": _loss(job.eval_loss),
        "tokens": count_text(float((job.result or {}).get("num_tokens") or 0)) if job.result else "",
        "waits for": "" if job.has_ended else job.waiting_for or "",
        "reason": job.reason or "",
        "sweep": job.sweep or "",
        "cloned from": job.cloned_from or "",
        "settings": _settings(order, {"name": job.name, "base_model": job.base_model} | _defaults()),
        "data": _settings(data, {"eval_file": None} | DataConfig(path="-").model_dump(mode="json")),
    }
    table = open_table(show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, Text(printable(value)))
    for warning in job.warnings:
        table.add_row("warning", Text(printable(warning), style="yellow"))
    print_table(console, table)
    if events:
        console.print()
        more = len(events) - _SHOWN_EVENTS
        if more > 0:
            console.print(Text(f"… {quantity(more, 'earlier event')}", style="dim"))
        for event in events[-_SHOWN_EVENTS:]:
            console.print(Text(printable(f"{time_text(event.created_at)}  {event.message}"), style="dim"), soft_wrap=True)


def _deadline(job: JobView, seconds: float | None) -> str:
    return "" if seconds is None else time_text(job.created_at + seconds) + (", missed" if job.deadline_missed else "")


def _defaults() -> dict[str, Any]:
    scheduled = {key: JobSpec.model_fields[key].default for key in SCHEDULED}
    of_order = {"gpus": 1, "start_from": None, "metadata": {}}
    return of_order | scheduled | LoraShape().model_dump(mode="json") | TrainConfig().model_dump(mode="json")


def _settings(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The settings that differ from the defaults."""
    return ", ".join(f"{key} {field_text(value)}" for key, value in values.items() if key not in defaults or defaults[key] != value)


def print_cluster(console: Console, cluster: ClusterView, running: Mapping[str, JobView], all_tenants: bool = False) -> None:
    """Groups on their GPUs, then the queue. `running`: those of the caller's jobs by id, or of those of all tenants; others in a group wait
    to be let in.
    """
    waiting = {one.job: _name_of(one) for one in cluster.waiting}
    place, places = place_names(cluster.device)
    used = {gpu for group in cluster.groups for gpu in group.gpus}
    table = open_table()
    table.add_column(place, no_wrap=True)
    if unlike := cluster.unlike:
        table.add_column("kind", overflow="fold")
    table.add_column("base model", overflow="fold")
    table.add_column("jobs that share it", overflow="fold")
    for group in sorted(cluster.groups, key=lambda group: group.gpus):
        listed = [
            f"{_name_of(view)} ({steps_text(view) or DASH}{f', {MISSED}' if view.deadline_missed else ''})"
            if (view := running.get(job))
            else waiting.get(job, job)
            for job in group.jobs
        ]
        listed += [f"{group.other_jobs} of others"] if group.other_jobs else []
        kind = [Text(printable(cluster.kinds_of(group.gpus)))] if unlike else []
        table.add_row(", ".join(map(str, group.gpus)), *kind, Text(printable(group.base_model)), Text(printable(", ".join(listed) or DASH)))
    states = cluster.states
    for gpu in cluster.gpus:
        if gpu not in used:
            kind = [Text(printable(unlike.get(gpu, "")))] if unlike else []
            table.add_row(str(gpu), *kind, Text(states.get(gpu, "free"), style="dim"), "")
    print_table(console, table)
    for group in cluster.groups:
        if group.placement:
            named = f"{place if len(group.gpus) == 1 else places} {', '.join(map(str, group.gpus))}"
            console.print(Text(printable(f"{named}: {group.placement}"), style="dim"), soft_wrap=True)
    if len(cluster.hosts) > 1 or states:
        console.print()
        print_table(console, _hosts_table(cluster.hosts, places))
    console.print()
    if cluster.waiting:
        queue = open_table()
        queue.add_column("waiting", overflow="fold")
        queue.add_column("for", overflow="fold")
        for one in cluster.waiting:
            queue.add_row(Text(printable(_name_of(one))), Text(printable(_with_deadline(one.reason, one.deadline_missed))))
        print_table(console, queue)
    else:
        console.print(Text("no job waits" if all_tenants else "no job of yours waits", style="dim"))
    if cluster.others_waiting:
        console.print(Text(f"{quantity(cluster.others_waiting, 'job of others waits', 'jobs of others wait')}", style="dim"))
    if cluster.draining:
        console.print(Text("the server is drained: it accepts no new jobs", style="yellow"))


def _name_of(job: JobView | WaitingView) -> str:
    """With its tenant, where the jobs of all are shown."""
    tenant = job.tenant if isinstance(job, WaitingView | TenantJobView) else None
    return f"{tenant}/{job.name}" if tenant else job.name


def _hosts_table(hosts: Sequence[HostView], places: str) -> Table:
    table = open_table()
    for name in ("host", "fails with", places, "in use", ""):
        table.add_column(name, overflow="fold")
    for host in hosts:
        table.add_row(
            Text(printable(host.name)),
            Text(printable(host.failure_domain or DASH)),
            ranges_text(host.gpus),
            f"{host.in_use} of {len(host.gpus)}",
            Text(host.state, style="yellow"),
        )
    return table


def print_keys(console: Console, keys: Iterable[KeyView]) -> None:
    table = open_table()
    for name in ("id", "tenant", "name", "scopes", "created", "revoked"):
        table.add_column(name, overflow="fold")
    for key in keys:
        revoked = time_text(key.revoked_at) if key.revoked_at else ""
        table.add_row(
            key.id, Text(printable(key.tenant)), Text(printable(key.name)), ", ".join(key.scopes), time_text(key.created_at), revoked
        )
    print_table(console, table)


def print_files(console: Console, files: Iterable[FileView], storage: StorageView) -> None:
    table = open_table()
    for name in ("file", "id", "size", "purpose", "uploaded"):
        table.add_column(name, overflow="fold", justify="right" if name == "size" else "left")
    for file in files:
        table.add_row(Text(printable(file.filename)), file.id, bytes_text(file.bytes), file.purpose, time_text(file.created_at))
    if table.row_count:
        print_table(console, table)
    else:
        console.print(Text("no files; `tlora submit` uploads those of its jobs", style="dim"))
    kept, tokens, most = (bytes_text(count) for count in (storage.files_bytes, storage.tokenized_bytes, storage.limit_bytes))
    console.print(Text(f"storage: files {kept}, tokenized data {tokens}, of {most}", style="dim"), soft_wrap=True)


def print_bases(console: Console, bases: Iterable[BaseView]) -> None:
    table = open_table()
    for name in ("base model", "status", "size", "problem"):
        table.add_column(name, overflow="fold")
    for base in bases:
        size = bytes_text(base.bytes) if base.bytes is not None else ""
        table.add_row(Text(printable(base.name)), base.status, size, Text(printable(base.problem or ""), style="red"))
    print_table(console, table)


LINE_SECONDS = 10.0  # between two plain lines about the steps of one job
_AROUND_ROWS = 4
_WITH_LOSSES = 64  # columns: else nothing would be left for reasons
_URGENCY = {"running": 0, "failed": 1, "preparing": 2, "queued": 3, "paused": 4, "cancelled": 5, "succeeded": 6}


def follow(console: Console, sights: Iterable[Sight]) -> None:
    """Show the sights as they come."""
    plain = PlainFollower(console)
    if not shows_live(console):
        for sight in sights:
            plain.show(sight)
        return
    with Live(Text("asking the server", style="dim"), console=console, auto_refresh=False, transient=True) as live:
        for sight in sights:
            plain.show(sight, steps=False)
            live.update(follow_table(sight, *console.size), refresh=True)


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
            self._show_job(job, steps)

    def _show_job(self, job: JobView, steps: bool) -> None:
        now = time.monotonic()
        changed = self._status.get(job.id) != job.status
        due = steps and job.status == "running" and now - self._told.get(job.id, 0.0) >= LINE_SECONDS
        if not changed and not due:
            return
        self._status[job.id], self._told[job.id] = job.status, now
        parts = [f"{job.name}: {job.status}"]
        parts += [f"step {steps_text(job)}"] if job.steps else []
        parts += [f"train loss {loss_text(job.train_loss)}"] if job.train_loss is not None else []
        parts += [f"waits for {job.waiting_for}"] if job.status in ("queued", "running") and job.waiting_for else []
        parts += [job.reason] if job.reason else []
        parts += [MISSED] if job.deadline_missed else []
        self._say(", ".join(parts), STYLES.get(job.status, "") if job.has_ended else "")

    def _say(self, line: str, style: str) -> None:
        self._console.print(Text(printable(line), style=style), soft_wrap=True)


def follow_table(sight: Sight, width: int, height: int) -> Group:
    """The table, limited to the terminal's height: running jobs and failures first. A narrow one has no losses."""
    shown = _with_room(sight.jobs, height - _AROUND_ROWS)
    table = open_table(expand=True)
    table.add_column("job", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    if wide := width >= _WITH_LOSSES:
        table.add_column("train loss", justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis", ratio=1)  # what the others leave free
    name_width = max(12, min(40, width - 64))
    for job in shown:
        table.add_row(
            Text(printable(shorten(job.name, name_width))),
            Text(job.status, style=STYLES.get(job.status, "dim")),
            steps_text(job),
            *([_loss(job.train_loss)] if wide else []),
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
