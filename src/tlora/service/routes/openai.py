"""OpenAI's fine-tuning API as a thin skin over the jobs of `/v1/jobs`. Own fields stand in `extra_body={"tlora": {...}}`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, Row
from starlette.background import BackgroundTask

from tlora.api import ENDED, OrderSpec
from tlora.service import result_files
from tlora.service.access import caller_of
from tlora.service.database import answer_rows, job_rows
from tlora.service.openai_orders import Creation, hyperparameters_of, in_openais_words, metadata_filter, method_of, order_of
from tlora.service.order_reader import Accepted
from tlora.service.problems import RefusedError
from tlora.service.routes import jobs as own
from tlora.service.routes.jobs import REFUSALS, JobId, Limit
from tlora.service.services import Services, services_of

router = APIRouter(prefix="/v1/fine_tuning", tags=["openai"], responses=REFUSALS)
_STATUS = {"preparing": "validating_files"}  # the others have OpenAI's names
RetryCount = Annotated[str, Header(alias="x-stainless-retry-count", max_length=100)]
After = Annotated[str | None, Query(min_length=1, max_length=64)]
_METRICS = "metrics-"  # of the ids of events that are rows of metrics


def _source(services: Services, tenant: str, creation: Creation) -> Row[Any] | None:
    """The job whose adapter or checkpoint `model` names; None for a base. Raises RefusedError."""
    job_id = creation.fine_tuned
    if creation.model in services.bases or job_id is None:
        return None
    try:
        return services.read(lambda connection: job_rows.find_job(connection, tenant, job_id))
    except RefusedError:
        message = f"model {creation.model!r}: there is no such fine-tuned model. GET /v1/models lists those that there are"
        raise RefusedError(404, "model_not_found", message, "model") from None


def _checked_order(services: Services, tenant: str, creation: Creation) -> OrderSpec:
    """Raises RefusedError, in the words of the creation."""
    row = _source(services, tenant, creation)
    try:
        order = order_of(creation, None if row is None else row.base_model)
        own.check_order(services, order)
        own.check_checkpoint(services, tenant, order)
    except RefusedError as error:
        raise in_openais_words(error, creation) from None
    return order


@router.post("/jobs")
async def create(creation: Creation, request: Request, retry_count: RetryCount = "0") -> JSONResponse:
    """The client sends no key. A retry matches a creation whose answer was not sent completely and that no retry matched before."""
    services, tenant = services_of(request), caller_of(request).tenant
    order = _checked_order(services, tenant, creation)
    payload = answer_rows.hash_payload("fine_tuning", creation.model_dump_json(exclude_unset=True).encode())
    retried, fresh = retry_count.strip("0") != "" and retry_count.isdecimal(), list[Accepted]()

    def work(connection: Connection) -> Row[Any]:
        known = answer_rows.find_retried(connection, tenant, payload) if retried else None
        if known is not None:
            return job_rows.find_job(connection, tenant, known)
        (row,) = job_rows.insert_jobs(connection, tenant, [order], services.config.limits)
        answer_rows.add_creation(connection, tenant, payload, row.id)
        fresh.append(Accepted(row, order))
        return row

    try:
        row = await services.write(work, lambda _: own.announce(services, fresh))
    except RefusedError as error:
        raise in_openais_words(error, creation) from None
    # The task runs once the last byte was handed over. The server drops an answer silently whose client has gone: that one is lost.
    gone = await request.is_disconnected()
    sent = BackgroundTask(services.write, lambda connection: answer_rows.mark_sent(connection, row.id))
    return JSONResponse(_view(services, row), background=None if gone else sent)


def _view(services: Services, row: Row[Any]) -> dict[str, Any]:
    job = services.view(row)
    order = job.order
    failed = {"code": "failed", "message": job.reason or "", "param": None} if job.status == "failed" else None
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "finished_at": int(job.ended_at) if job.ended_at else None,
        "estimated_finish": None,
        "model": order.start_from or job.base_model,
        "fine_tuned_model": job.id if job.status == "succeeded" else None,
        "status": _STATUS.get(job.status, job.status),
        "training_file": order.data.files[0].file,
        "validation_file": order.data.eval_files[0].file if order.data.eval_files else None,
        "hyperparameters": hyperparameters_of(order),
        "method": method_of(order),
        "organization_id": row.tenant,
        "result_files": result_files.ids_of(services.config.directory, row),
        "seed": order.seed,
        "trained_tokens": (job.result or {}).get("num_tokens"),
        "error": failed,
        "integrations": [],
        "metadata": order.metadata or None,
        "tlora": job.model_dump(mode="json"),
    }


@router.get("/jobs")
def list_jobs(request: Request, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """The newest first, of those before the job `after`; `metadata[KEY]=VALUE` keeps those that have it, `metadata=null` the others."""
    services, tenant = services_of(request), caller_of(request).tenant
    wanted = metadata_filter(request.query_params)

    def query(connection: Connection) -> Any:
        before = job_rows.find_job(connection, tenant, after).serial if after else None
        if wanted is not None:
            return job_rows.list_by_metadata(connection, tenant, before, limit + 1, wanted)
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
    """The newest first, from those before the event `after`: messages, and the rows of the job's metrics."""
    services, tenant = services_of(request), caller_of(request).tenant
    if after is not None and not after.removeprefix(_METRICS).isdecimal():
        raise RefusedError(400, "wrong_cursor", f"after {after!a}: is not the id of an event", "after")

    def query(connection: Connection) -> Any:
        return job_rows.find_job(connection, tenant, job_id), job_rows.list_events(connection, tenant, job_id, 0, 10_000)

    row, messages = services.read(query)
    lines = result_files.metric_lines(services.config.directory, job_id)
    ended = [event for event in messages if event.kind in ENDED]
    # metrics have no time of the day of their own: they come after what was said before the job's end, and before that
    found: list[Any] = [event for event in messages if event.kind not in ENDED] + list(range(len(lines))) + ended
    names = [f"{_METRICS}{one}" if isinstance(one, int) else str(one.serial) for one in found]
    if after is not None and after not in names:
        raise RefusedError(400, "wrong_cursor", f"after {after!a}: is not the id of an event of this job", "after")
    end = len(found) if after is None else names.index(after)
    shown = range(end - 1, max(-1, end - 1 - limit), -1)
    times = {"began": int(row.started or row.created), "ended": int(row.ended or 0), "steps": services.view(row).total_steps}
    data = [_metrics_event(names[at], lines[found[at]], times) if isinstance(found[at], int) else _message_event(found[at]) for at in shown]
    return {"object": "list", "data": data, "has_more": end > limit}


def _message_event(row: Row[Any]) -> dict[str, Any]:
    return {
        "id": str(row.serial),
        "object": "fine_tuning.job.event",
        "created_at": int(row.time),
        "level": "error" if row.kind == "failed" else "info",
        "message": row.message,
        "type": "message",
        "data": row.data,
    }


def _metrics_event(name: str, line: bytes, times: dict[str, Any]) -> dict[str, Any]:
    """Of one row. A damaged one says so."""
    numbers = result_files.numbers_of(line)
    message = result_files.event_message(numbers, times["steps"]) if numbers else "a row of metrics is damaged"
    return {
        "id": name,
        "object": "fine_tuning.job.event",
        "created_at": times["ended"] or times["began"],
        "level": "info" if numbers else "warn",
        "message": message,
        "type": "metrics",
        "data": numbers | {"total_steps": times["steps"]},
    }


@router.get("/jobs/{job_id}/checkpoints")
def list_checkpoints(job_id: JobId, request: Request, after: After = None, limit: Limit = 10) -> dict[str, Any]:
    """The newest first: those that lie on the disk now. Each is a `model` that another job can start from, once this one has ended."""
    services = services_of(request)
    show(job_id, request)
    place = services.config.directory / "jobs" / job_id
    found = place.glob("checkpoint-*/MANIFEST.json")
    steps = sorted((int(path.parent.name.partition("-")[2]) for path in found if path.parent.name[11:].isdecimal()), reverse=True)
    names = {step: f"{job_id}:checkpoint-{step}" for step in steps}
    last = (after or "").removeprefix(f"{job_id}:checkpoint-")
    if after is not None and (last == after or not last.isdecimal()):
        raise RefusedError(400, "wrong_cursor", f"after {after!a}: is not the id of a checkpoint of this job", "after")
    kept = [step for step in steps if after is None or step < int(last)]
    numbers = result_files.numbers_by_step(result_files.metric_lines(services.config.directory, job_id))
    data = [
        {
            "id": names[step],
            "object": "fine_tuning.job.checkpoint",
            "created_at": int((place / f"checkpoint-{step}").stat().st_mtime),
            "fine_tuned_model_checkpoint": names[step],
            "fine_tuning_job_id": job_id,
            "step_number": step,
            "metrics": {"step": step} | numbers.get(step, {}),
        }
        for step in kept[:limit]
    ]
    return {"object": "list", "data": data, "has_more": len(kept) > limit}
