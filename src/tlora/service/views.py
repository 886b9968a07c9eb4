"""Rows of the store as what the API answers with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Row

from tlora.api import EventView, FileView, JobView, KeyView, NewKeyView, OrderSpec, Scope
from tlora.service.keys import SCOPES, NewKey


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
