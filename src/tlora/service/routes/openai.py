"""OpenAI's fine-tuning API as a thin skin over the jobs of `/v1/jobs`. Own fields stand in `extra_body={"tlora": {...}}`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Connection, Row
from starlette.background import BackgroundTask

from tlora.errors import ConfigError
from tlora.service.access import caller_of
from tlora.service.database import answer_rows, event_rows, job_rows
from tlora.service.orders import OrderSpec, describe
from tlora.service.problems import RefusedError
from tlora.service.routes import jobs as own
from tlora.service.routes.jobs import REFUSALS, JobId, Limit
from tlora.service.services import Services, services_of

router = APIRouter(prefix="/v1/fine_tuning", tags=["openai"], responses=REFUSALS)
_STATUS = {"preparing": "validating_files"}  # the others have OpenAI's names
Auto = Literal["auto"]
RetryCount = Annotated[str, Header(alias="x-stainless-retry-count", max_length=100)]
After = Annotated[str | None, Query(min_length=1, max_length=64)]


class Hyperparameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    batch_size: Auto | Annotated[int, Field(ge=1, le=10**6)] = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1e3)] = "auto"
    n_epochs: Auto | Annotated[int, Field(ge=1, le=10**6)] = "auto"
    beta: Auto | Annotated[float, Field(gt=0, le=1e6)] = "auto"  # of dpo


class MethodDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hyperparameters: Hyperparameters = Hyperparameters()


class Method(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["supervised", "dpo"]
    supervised: MethodDetail | None = None
    dpo: MethodDetail | None = None


class Creation(BaseModel):
    """As `client.fine_tuning.jobs.create` sends it. `tlora` holds fields of an order, which win."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=200)]
    training_file: Annotated[str, Field(min_length=1, max_length=64)]
    validation_file: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    tlora: Annotated[dict[str, Any], Field(max_length=100)] = {}


_LEARNING_RATE = 2e-4  # which learning_rate_multiplier multiplies: the default of an order


def order_of(creation: Creation) -> OrderSpec:
    """Raises ConfigError."""
    method = creation.method
    detail = (method.supervised if method.type == "supervised" else method.dpo) if method else None
    asked = (detail.hyperparameters if detail else None) or creation.hyperparameters or Hyperparameters()
    names = {"batch_size": "batch_size", "n_epochs": "num_train_epochs", "beta": "beta"}
    fields: dict[str, Any] = {name: getattr(asked, key) for key, name in names.items() if getattr(asked, key) != "auto"}
    if asked.learning_rate_multiplier != "auto":
        fields["learning_rate"] = _LEARNING_RATE * asked.learning_rate_multiplier
    if method is not None and method.type == "dpo":
        fields["objective"] = "dpo"
    if creation.seed is not None:
        fields["seed"] = creation.seed
    data: dict[str, Any] = {"file": creation.training_file}
    if creation.validation_file is not None:
        data["eval_file"] = creation.validation_file
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", creation.suffix or "").lstrip("-._") or "fine-tune"
    own_data = creation.tlora.get("data", {})
    if not isinstance(own_data, dict):
        raise ConfigError("tlora.data: must be a mapping of keys such as max_length")
    whole = {"name": name, "base_model": creation.model} | fields | creation.tlora | {"data": data | own_data}
    try:
        return OrderSpec.model_validate(whole)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


@router.post("/jobs")
async def create(creation: Creation, request: Request, retry_count: RetryCount = "0") -> JSONResponse:
    """The client sends no key. A retry matches a creation whose answer was not sent completely and that no retry matched before."""
    services, tenant, order = services_of(request), caller_of(request).tenant, order_of(creation)
    own.check_order(services, order)
    payload = answer_rows.hash_payload("fine_tuning", creation.model_dump_json(exclude_unset=True).encode())
    retried, fresh = retry_count.strip("0") != "" and retry_count.isdecimal(), list[Row[Any]]()

    def work(connection: Connection) -> Row[Any]:
        known = answer_rows.find_retried(connection, tenant, payload) if retried else None
        if known is not None:
            return job_rows.find_job(connection, tenant, known)
        (row,) = job_rows.insert_jobs(connection, tenant, [order], services.config.limits)
        answer_rows.add_creation(connection, tenant, payload, row.id)
        fresh.append(row)
        return row

    row = await services.write(work, lambda _: own.announce(services, fresh))
    # The task runs once the last byte was handed over. The server drops an answer silently whose client has gone: that one is lost.
    gone = await request.is_disconnected()
    sent = BackgroundTask(services.write, lambda connection: answer_rows.mark_sent(connection, row.id))
    return JSONResponse(_view(services, row), background=None if gone else sent)


def _view(services: Services, row: Row[Any]) -> dict[str, Any]:
    job = services.view(row)
    order = job.order
    failed = {"code": "failed", "message": job.reason or "", "param": None} if job.status == "failed" else None
    numbers = {
        "n_epochs": order.num_train_epochs,
        "batch_size": order.batch_size,
        "learning_rate_multiplier": order.learning_rate / _LEARNING_RATE,
    }
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "finished_at": int(job.ended_at) if job.ended_at else None,
        "estimated_finish": None,
        "model": job.base_model,
        "fine_tuned_model": job.id if job.status == "succeeded" else None,
        "status": _STATUS.get(job.status, job.status),
        "training_file": order.data.files[0].file,
        "validation_file": order.data.eval_files[0].file if order.data.eval_files else None,
        "hyperparameters": numbers,
        "method": {"type": "dpo" if order.objective == "dpo" else "supervised"},
        "organization_id": row.tenant,
        "result_files": [],
        "seed": order.seed,
        "trained_tokens": (job.result or {}).get("num_tokens"),
        "error": failed,
        "tlora": job.model_dump(mode="json"),
    }


@router.get("/jobs")
def list_jobs(request: Request, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """The newest first, from those before the job `after`."""
    services, tenant = services_of(request), caller_of(request).tenant

    def query(connection: Connection) -> Any:
        before = job_rows.find_job(connection, tenant, after).serial if after else None
        return job_rows.list_jobs(connection, tenant, before, limit + 1, None, None)

    rows = services.read(query)
    return {"object": "list", "data": [_view(services, row) for row in rows[:limit]], "has_more": len(rows) > limit}


@router.get("/jobs/{job_id}")
def show(job_id: JobId, request: Request) -> dict[str, Any]:
    services = services_of(request)
    return _view(services, services.read(lambda connection: job_rows.find_job(connection, caller_of(request).tenant, job_id)))


@router.post("/jobs/{job_id}/pause")
async def pause(job_id: JobId, request: Request) -> dict[str, Any]:
    await own.pause_job(job_id, request)
    return show(job_id, request)


@router.post("/jobs/{job_id}/resume")
async def resume(job_id: JobId, request: Request) -> dict[str, Any]:
    await own.resume_job(job_id, request)
    return show(job_id, request)


@router.post("/jobs/{job_id}/cancel")
async def cancel(job_id: JobId, request: Request) -> dict[str, Any]:
    await own.cancel_job(job_id, request)
    return show(job_id, request)


@router.get("/jobs/{job_id}/events")
def list_events(job_id: JobId, request: Request, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """The newest first, from those before the event `after`."""
    services, tenant = services_of(request), caller_of(request).tenant
    if after is not None and not after.isdecimal():
        raise RefusedError(400, "wrong_cursor", f"after {after!a}: is not the id of an event", "after")

    def query(connection: Connection) -> Any:
        job_rows.find_job(connection, tenant, job_id)
        return event_rows.list_events(connection, tenant, job_id, 0, 10_000)

    rows = [row for row in reversed(services.read(query)) if after is None or row.serial < int(after)]
    data = [
        {
            "id": str(row.serial),
            "object": "fine_tuning.job.event",
            "created_at": int(row.time),
            "level": "error" if row.kind == "failed" else "info",
            "message": row.message,
            "type": "message",
            "data": row.data,
        }
        for row in rows[:limit]
    ]
    return {"object": "list", "data": data, "has_more": len(rows) > limit}


@router.get("/jobs/{job_id}/checkpoints")
def list_checkpoints(job_id: JobId, request: Request, after: After = None, limit: Limit = 10) -> dict[str, Any]:
    """The newest first: those that lie on the disk now."""
    services = services_of(request)
    show(job_id, request)
    found = (services.config.directory / "jobs" / job_id).glob("checkpoint-*/MANIFEST.json")
    steps = sorted((int(path.parent.name.partition("-")[2]) for path in found if path.parent.name[11:].isdecimal()), reverse=True)
    names = {step: f"{job_id}:checkpoint-{step}" for step in steps}
    kept = [step for step in steps if after is None or step < int(after.rpartition("-")[2] if after.rpartition("-")[2].isdecimal() else 0)]
    data = [
        {
            "id": names[step],
            "object": "fine_tuning.job.checkpoint",
            "created_at": int((services.config.directory / "jobs" / job_id / f"checkpoint-{step}").stat().st_mtime),
            "fine_tuned_model_checkpoint": names[step],
            "fine_tuning_job_id": job_id,
            "step_number": step,
            "metrics": {"step": step},
        }
        for step in kept[:limit]
    ]
    return {"object": "list", "data": data, "has_more": len(kept) > limit}
