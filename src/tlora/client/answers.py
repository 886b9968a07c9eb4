"""What a server answers with, as far as the commands read it. Keys that are not known here are left alone: the server may be newer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

ENDED = ("succeeded", "failed", "cancelled")


class RemoteJob(BaseModel, frozen=True, extra="allow"):
    """A job as it stood when it was asked for. Times are Unix seconds."""

    id: str
    name: str
    status: str
    base_model: str
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    steps: int = 0
    total_steps: int | None = None
    waiting_for: str | None = None
    reason: str | None = None
    warnings: list[str] = []
    sweep: str | None = None
    cloned_from: str | None = None
    order: dict[str, Any] = {}
    result: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class JobPage(BaseModel, frozen=True, extra="allow"):
    data: list[RemoteJob]
    next_cursor: str | None = None


class RemoteFile(BaseModel, frozen=True, extra="allow"):
    id: str
    sha256: str
    filename: str


class FilePage(BaseModel, frozen=True, extra="allow"):
    data: list[RemoteFile]


class RemoteEvent(BaseModel, frozen=True, extra="allow"):
    id: int
    created_at: float
    kind: str
    message: str


class EventPage(BaseModel, frozen=True, extra="allow"):
    data: list[RemoteEvent]
    next_cursor: str | None = None


class Metrics(BaseModel, frozen=True, extra="allow"):
    """Rows of a job's `metrics.jsonl`; the next ones begin at `next_offset`."""

    data: list[dict[str, Any]]
    next_offset: int


class LogText(BaseModel, frozen=True, extra="allow"):
    lines: list[str]


class RemoteBase(BaseModel, frozen=True, extra="allow"):
    name: str
    status: str
    problem: str | None = None
    bytes: int | None = None


class BaseList(BaseModel, frozen=True, extra="allow"):
    data: list[RemoteBase]


class RemoteKey(BaseModel, frozen=True, extra="allow"):
    id: str
    tenant: str
    name: str
    scopes: list[str]
    created_at: float
    revoked_at: float | None = None
    key: str = ""


class Deleted(BaseModel, frozen=True, extra="allow"):
    id: str


class KeyList(BaseModel, frozen=True, extra="allow"):
    data: list[RemoteKey]


class RemoteGroup(BaseModel, frozen=True, extra="allow"):
    id: str
    base_model: str
    gpus: list[int]
    token_budget: int = 0
    jobs: list[str]
    other_jobs: int = 0


class Waiting(BaseModel, frozen=True, extra="allow"):
    job: str
    name: str
    reason: str


class RemoteCluster(BaseModel, frozen=True, extra="allow"):
    device: str
    gpus: list[int]
    groups: list[RemoteGroup]
    waiting: list[Waiting]
    others_waiting: int = 0
    draining: bool = False


class Drained(BaseModel, frozen=True, extra="allow"):
    draining: bool
    open_jobs: int


class Link(BaseModel, frozen=True, extra="allow"):
    """A link that logs in once."""

    path: str
    expires_in: int


class Sweep(BaseModel, frozen=True, extra="allow"):
    id: str
    data: list[RemoteJob]
