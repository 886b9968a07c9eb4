"""What the API answers with: one model for each thing, and rows of the store as these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from sqlalchemy import Row

from tlora.service.keys import SCOPES, NewKey, Scope
from tlora.service.orders import OrderSpec

Status = Literal["preparing", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
OPEN: tuple[Status, ...] = ("preparing", "queued", "running", "paused")
ENDED: tuple[Status, ...] = ("succeeded", "failed", "cancelled")
Purpose = Literal["fine-tune", "evals", "user_data"]


class FileView(BaseModel):
    """An uploaded file, as OpenAI's API has it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    sha256: str


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileView]
    has_more: bool
    next_cursor: str | None = None
    first_id: str | None = None
    last_id: str | None = None


class StorageView(BaseModel):
    """What a tenant's data takes: its files, and what was made of them for jobs."""

    object: Literal["storage"] = "storage"
    files_bytes: int
    tokenized_bytes: int
    limit_bytes: int


class Deleted(BaseModel):
    id: str
    object: str
    deleted: bool = True


class JobView(BaseModel):
    """A job as it stands now. Times are Unix seconds."""

    id: str
    object: Literal["job"] = "job"
    name: str
    status: Status
    base_model: str
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    steps: int = 0
    total_steps: int | None = None  # known once its data has been read
    waiting_for: str | None = None  # why it is not running, in words
    queue_place: int | None = None  # in the order in which the policy will start jobs, 1 being the next; of one that is queued
    estimated_start: float | None = None  # if no other job comes; None where it is too far away to be foreseen
    reason: str | None = None  # why it failed
    warnings: list[str] = []
    sweep: str | None = None
    cloned_from: str | None = None
    order: OrderSpec
    result: dict[str, Any] | None = None


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobView]
    has_more: bool = False
    next_cursor: str | None = None


class Sweep(BaseModel):
    id: str
    object: Literal["sweep"] = "sweep"
    data: list[JobView]


class EventView(BaseModel):
    id: int
    object: Literal["event"] = "event"
    job: str | None
    created_at: float
    kind: str
    message: str
    data: dict[str, Any] | None = None


class EventList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EventView]
    has_more: bool = False
    next_cursor: str | None = None


class MetricList(BaseModel):
    """Rows of a job's metrics from `offset` on; `next_offset` is where the next ones will begin."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    next_offset: int


class LogText(BaseModel):
    object: Literal["log"] = "log"
    lines: list[str]


class KeyView(BaseModel):
    id: str
    object: Literal["key"] = "key"
    tenant: str
    name: str
    scopes: list[Scope]
    created_at: float
    revoked_at: float | None = None


class NewKeyView(KeyView):
    """With the key itself, which is shown this once."""

    key: str


class KeyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[KeyView]


class BaseView(BaseModel):
    """A base model that orders may name."""

    name: str
    object: Literal["base"] = "base"
    status: Literal["unknown", "ready", "failed"]
    problem: str | None = None
    bytes: int | None = None


class BaseList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BaseView]


class GroupView(BaseModel):
    """Jobs that share a base on GPUs. Of other tenants' jobs only the number is told."""

    id: str
    base_model: str
    gpus: list[int]
    token_budget: int
    jobs: list[str]
    other_jobs: int


class WaitingView(BaseModel):
    """`place`: among all tenants' jobs that wait for a GPU, 1 being the next; `estimated_start`: as of a job."""

    job: str
    name: str
    reason: str
    place: int | None = None
    estimated_start: float | None = None


class ClusterView(BaseModel):
    object: Literal["cluster"] = "cluster"
    device: str
    gpus: list[int]
    groups: list[GroupView]
    waiting: list[WaitingView]
    others_waiting: int
    draining: bool


def file_view(row: Row[Any]) -> FileView:
    return FileView(id=row.id, bytes=row.bytes, created_at=int(row.created), filename=row.filename, purpose=row.purpose, sha256=row.sha256)


def job_view(
    row: Row[Any],
    steps: int | None = None,
    waiting_for: str | None = None,
    order: OrderSpec | None = None,
    queue_place: tuple[int | None, float | None] = (None, None),
) -> JobView:
    """`steps`: newer than the row's, if they are known; `order`: the row's, where it has been read; `queue_place`: as in `LiveState`."""
    intake: Mapping[str, Any] = row.intake or {}
    return JobView.model_construct(
        id=row.id,
        name=row.name,
        status=row.status,
        base_model=row.base_model,
        created_at=row.created,
        started_at=row.started,
        ended_at=row.ended,
        steps=max(row.steps, steps or 0),
        total_steps=intake.get("profile", {}).get("steps"),
        waiting_for=waiting_for,
        queue_place=queue_place[0],
        estimated_start=queue_place[1],
        reason=row.reason or None,
        warnings=intake.get("warnings", []),
        sweep=row.sweep,
        cloned_from=row.cloned_from,
        order=order or OrderSpec.model_validate(row.order),
        result=row.result,
    )


def event_view(row: Row[Any]) -> EventView:
    return EventView(id=row.serial, job=row.job, created_at=row.time, kind=row.kind, message=row.message, data=row.data)


def key_view(row: Row[Any]) -> KeyView:
    scopes: list[Scope] = [scope for scope in SCOPES if scope in row.scopes.split()]
    return KeyView(id=row.id, tenant=row.tenant_name, name=row.name, scopes=scopes, created_at=row.created, revoked_at=row.revoked)


def new_key_view(made: NewKey, tenant_name: str) -> NewKeyView:
    return NewKeyView(id=made.id, tenant=tenant_name, name=made.name, scopes=list(made.scopes), created_at=made.created, key=made.secret)
