"""What a server answers with, as far as the commands read it. Keys that are not known here are left alone: the server may be newer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

ENDED = ("succeeded", "failed", "cancelled")
_LOOSE = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class RemoteJob(BaseModel):
    """A job as it stood when it was asked for. Times are Unix seconds."""

    model_config = _LOOSE

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


class JobPage(BaseModel):
    model_config = _LOOSE

    data: list[RemoteJob]
    next_cursor: str | None = None


class RemoteFile(BaseModel):
    model_config = _LOOSE

    id: str
    sha256: str
    filename: str


class FilePage(BaseModel):
    model_config = _LOOSE

    data: list[RemoteFile]


class RemoteEvent(BaseModel):
    model_config = _LOOSE

    id: int
    created_at: float
    kind: str
    message: str


class EventPage(BaseModel):
    model_config = _LOOSE

    data: list[RemoteEvent]
    next_cursor: str | None = None


class Metrics(BaseModel):
    """Rows of a job's `metrics.jsonl`; the next ones begin at `next_offset`."""

    model_config = _LOOSE

    data: list[dict[str, Any]]
    next_offset: int


class LogText(BaseModel):
    model_config = _LOOSE

    lines: list[str]


class RemoteBase(BaseModel):
    model_config = _LOOSE

    name: str
    status: str
    problem: str | None = None
    bytes: int | None = None


class BaseList(BaseModel):
    model_config = _LOOSE

    data: list[RemoteBase]


class RemoteKey(BaseModel):
    model_config = _LOOSE

    id: str
    tenant: str
    name: str
    scopes: list[str]
    created_at: float
    revoked_at: float | None = None
    key: str = ""


class Deleted(BaseModel):
    model_config = _LOOSE

    id: str


class KeyList(BaseModel):
    model_config = _LOOSE

    data: list[RemoteKey]


class RemoteGroup(BaseModel):
    model_config = _LOOSE

    id: str
    base_model: str
    gpus: list[int]
    token_budget: int = 0
    jobs: list[str]
    other_jobs: int = 0


class Waiting(BaseModel):
    model_config = _LOOSE

    job: str
    name: str
    reason: str


class RemoteCluster(BaseModel):
    model_config = _LOOSE

    device: str
    gpus: list[int]
    groups: list[RemoteGroup]
    waiting: list[Waiting]
    others_waiting: int = 0
    draining: bool = False


class Drained(BaseModel):
    model_config = _LOOSE

    draining: bool
    open_jobs: int


class Link(BaseModel):
    """A link that logs in once."""

    model_config = _LOOSE

    path: str
    expires_in: int


class Sweep(BaseModel):
    model_config = _LOOSE

    id: str
    data: list[RemoteJob]
