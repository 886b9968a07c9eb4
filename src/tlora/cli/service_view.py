"""What a server answered, as tables: its jobs, one job, the cluster, keys, base models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from tlora.api import BaseView, ClusterView, EventView, JobView, KeyView
from tlora.cli.terminal import bytes_text, open_table, printable
from tlora.job import SCHEDULED, DataConfig, JobSpec, LoraShape, TrainConfig
from tlora.wording.numbers import DASH, count_text, duration_text, loss_text

STYLES = {"running": "cyan", "succeeded": "green", "failed": "bold red", "cancelled": "yellow", "paused": "yellow"}  # others are dim
_SHOWN_EVENTS = 12


def time_text(seconds: float) -> str:
    """A Unix time, in the user's zone."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def steps_text(job: JobView) -> str:
    if job.total_steps is None:
        return str(job.steps) if job.steps else ""
    return f"{job.steps:,}/{job.total_steps:,}"


def why(job: JobView) -> str:
    """Why the job is not running."""
    return job.reason or ("" if job.status == "running" else job.waiting_for or "")


def _loss(job: JobView, key: str) -> str:
    loss = (job.result or {}).get(key)
    return loss_text(float(loss)) if isinstance(loss, int | float) else ""


def print_jobs(console: Console, jobs: Iterable[JobView], empty: str = "no jobs") -> None:
    """One line each."""
    table = open_table()
    for name, options in (("job", {"overflow": "fold"}), ("id", {"no_wrap": True}), ("status", {"no_wrap": True})):
        table.add_column(name, **options)  # type: ignore[arg-type]
    for name in ("steps", "train loss", "eval loss", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for job in jobs:
        table.add_row(
            Text(printable(job.name)),
            job.id,
            Text(job.status, style=STYLES.get(job.status, "dim")),
            steps_text(job),
            _loss(job, "train_loss"),
            _loss(job, "eval_loss"),
            duration_text(max(0.0, time.time() - job.created_at)),
            Text(printable(why(job)), style="dim"),
        )
    console.print(table if table.row_count else Text(empty, style="dim"))


def print_job(console: Console, job: JobView, loss: float | None, events: Sequence[EventView]) -> None:
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
        "step": steps_text(job),
        "train loss": loss_text(loss) if loss is not None else _loss(job, "train_loss"),
        "eval loss": _loss(job, "eval_loss"),
        "tokens": count_text(float((job.result or {}).get("num_tokens") or 0)) if job.result else "",
        "waits for": "" if job.has_ended else job.waiting_for or "",
        "reason": job.reason or "",
        "sweep": job.sweep or "",
        "cloned from": job.cloned_from or "",
        "settings": _settings(order, {"name": job.name, "base_model": job.base_model, "gpus": 1, "start_from": None} | _defaults()),
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
    console.print(table)
    if events:
        console.print()
        more = len(events) - _SHOWN_EVENTS
        if more > 0:
            console.print(Text(f"… {more} earlier events", style="dim"))
        for event in events[-_SHOWN_EVENTS:]:
            console.print(Text(printable(f"{time_text(event.created_at)}  {event.message}"), style="dim"), soft_wrap=True)


def _defaults() -> dict[str, Any]:
    scheduled = {key: JobSpec.model_fields[key].default for key in SCHEDULED}
    return scheduled | LoraShape().model_dump(mode="json") | TrainConfig().model_dump(mode="json")


def _settings(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The settings that differ from the defaults."""
    shown = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
        if key not in defaults or defaults[key] != value
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def print_cluster(console: Console, cluster: ClusterView, running: Mapping[str, JobView]) -> None:
    """Groups on their GPUs, then the queue. `running`: those of the caller's jobs by id; others in a group wait to be let in."""
    waiting = {one.job: one.name for one in cluster.waiting}
    place = "GPU" if cluster.device == "cuda" else "process"
    used = {gpu for group in cluster.groups for gpu in group.gpus}
    table = open_table()
    table.add_column(place, no_wrap=True)
    table.add_column("base model", overflow="fold")
    table.add_column("jobs that share it", overflow="fold")
    for group in sorted(cluster.groups, key=lambda group: group.gpus):
        listed = [
            f"{view.name} ({steps_text(view) or DASH})" if (view := running.get(job)) else waiting.get(job, job) for job in group.jobs
        ]
        listed += [f"{group.other_jobs} of others"] if group.other_jobs else []
        table.add_row(", ".join(map(str, group.gpus)), Text(printable(group.base_model)), Text(printable(", ".join(listed) or DASH)))
    for gpu in cluster.gpus:
        if gpu not in used:
            table.add_row(str(gpu), Text("free", style="dim"), "")
    console.print(table)
    console.print()
    if cluster.waiting:
        queue = open_table()
        queue.add_column("waiting", overflow="fold")
        queue.add_column("for", overflow="fold")
        for one in cluster.waiting:
            queue.add_row(Text(printable(one.name)), Text(printable(one.reason)))
        console.print(queue)
    else:
        console.print(Text("no job of yours waits", style="dim"))
    if cluster.others_waiting:
        console.print(Text(f"{cluster.others_waiting} jobs of others wait", style="dim"))
    if cluster.draining:
        console.print(Text("the server is drained: it accepts no new jobs", style="yellow"))


def print_keys(console: Console, keys: Iterable[KeyView]) -> None:
    table = open_table()
    for name in ("id", "tenant", "name", "scopes", "created", "revoked"):
        table.add_column(name, overflow="fold")
    for key in keys:
        revoked = time_text(key.revoked_at) if key.revoked_at else ""
        table.add_row(
            key.id, Text(printable(key.tenant)), Text(printable(key.name)), ", ".join(key.scopes), time_text(key.created_at), revoked
        )
    console.print(table)


def print_bases(console: Console, bases: Iterable[BaseView]) -> None:
    table = open_table()
    for name in ("base model", "status", "size", "problem"):
        table.add_column(name, overflow="fold")
    for base in bases:
        size = bytes_text(base.bytes) if base.bytes is not None else ""
        table.add_row(Text(printable(base.name)), base.status, size, Text(printable(base.problem or ""), style="red"))
    console.print(table)
