"""Files: uploaded, listed, shown, read back, deleted. The shapes are OpenAI's, so that its clients upload too."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import FileResponse
from sqlalchemy import Connection

from tlora.api import Deleted, FileList, FileView, Purpose, StorageView
from tlora.service import result_files
from tlora.service.access import caller_of
from tlora.service.database import file_rows, job_rows
from tlora.service.database.answer_rows import Answer, hash_payload, once
from tlora.service.problems import ErrorBody, RefusedError
from tlora.service.routes.jobs import REFUSALS, Cursor, IdempotencyKey
from tlora.service.services import file_view, services_of
from tlora.service.uploads import receive_upload

router = APIRouter(prefix="/v1", tags=["files"], responses=REFUSALS | {507: {"model": ErrorBody}})
FileId = Annotated[str, Path(min_length=1, max_length=64, pattern="^[a-z0-9-]+$", description="The file's id.")]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSONL, JSON, CSV, Parquet, Arrow or text."},
                        "purpose": {"type": "string", "enum": ["fine-tune", "evals", "user_data"]},
                    },
                }
            }
        },
    }
}
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/files", response_model=FileView, openapi_extra=_FORM)
async def upload_file(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Keep a file. It is on the disk when this is answered."""
    services, tenant = services_of(request), caller_of(request).tenant
    upload = await receive_upload(request, services.config.directory, tenant, services.config.limits)
    payload = hash_payload("POST /v1/files", f"{upload.sha256}\0{upload.filename}\0{upload.purpose}".encode())

    def work(connection: Connection) -> Answer:
        def insert() -> Answer:
            if not file_rows.content_path(services.config.directory, tenant, upload.sha256, upload.suffix).is_file():
                raise RefusedError(503, "upload_lost", "the same bytes were refused and removed at this moment; send the file again")
            services.storage.check(connection, tenant, upload.bytes)
            return Answer(200, file_view(file_rows.insert_file(connection, upload)).model_dump_json())

        return once(connection, tenant, idempotency_key, payload, insert)

    try:
        answer = await services.write(work)
    except RefusedError:  # beyond the tenant's storage: bytes without a row would stay for ever
        await services.write(lambda connection: file_rows.drop_unrecorded(connection, services.config.directory, upload))
        raise
    return Response(answer.body, answer.status, media_type="application/json")


def _wanted(
    purpose: Purpose | None = None,
    sha256: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="Of its bytes: whether an upload can be saved.")] = None,
) -> file_rows.Wanted:
    return file_rows.Wanted(purpose, sha256)


@router.get("/files")
def list_files(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 20,
    cursor: Cursor = None,
    after: Annotated[str | None, Query(min_length=1, max_length=64, description="A file's id, as OpenAI's clients page.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of the upload.")] = "desc",
    wanted: Annotated[file_rows.Wanted, Depends(_wanted)] = file_rows.Wanted(),  # noqa: B008 (it is frozen)
) -> FileList:
    """The newest first, or the oldest."""
    services, tenant = services_of(request), caller_of(request).tenant
    kind, wanted = ("files", wanted) if order == "desc" else ("files asc", replace(wanted, oldest_first=True))
    before = services.cursors.read(tenant, kind, cursor)
    if after is not None:
        if cursor is not None:
            raise RefusedError(400, "two_cursors", "cursor and after are both given; give one")
        before = services.read(lambda connection: file_rows.find_file(connection, tenant, after)).serial
    rows = services.read(lambda connection: file_rows.list_files(connection, tenant, before, limit + 1, wanted))
    shown, more = rows[:limit], len(rows) > limit
    found = [file_view(row) for row in shown]
    following = services.cursors.make(tenant, kind, shown[-1].serial) if more else None
    ids = (found[0].id, found[-1].id) if found else (None, None)
    return FileList(data=found, has_more=more, next_cursor=following, first_id=ids[0], last_id=ids[1])


@router.get("/storage")
def show_storage(request: Request) -> StorageView:
    """What counts in the tenant's storage. Tokenized data that no unfinished job needs is removed where room is needed."""
    services, tenant = services_of(request), caller_of(request).tenant
    used = services.read(lambda connection: services.storage.used(connection, tenant))
    return StorageView(files_bytes=used.files, tokenized_bytes=used.tokens, limit_bytes=services.config.limits.storage_bytes)


@router.get("/files/{file_id}")
def show_file(file_id: FileId, request: Request) -> FileView:
    services, tenant = services_of(request), caller_of(request).tenant
    if (job_id := result_files.job_of(file_id)) is not None:
        row = services.read(lambda connection: job_rows.find_job(connection, tenant, job_id))
        return result_files.view_of(services.config.directory, row)
    return file_view(services.read(lambda connection: file_rows.find_file(connection, tenant, file_id)))


@router.get("/files/{file_id}/content", response_class=Response, responses=_BYTES)
def read_file(file_id: FileId, request: Request) -> Response:
    """The bytes as they were uploaded."""
    services, tenant = services_of(request), caller_of(request).tenant
    if (job_id := result_files.job_of(file_id)) is not None:
        job = services.read(lambda connection: job_rows.find_job(connection, tenant, job_id))
        content = result_files.content_of(services.config.directory, job)
        return Response(content, media_type="application/octet-stream")
    row = services.read(lambda connection: file_rows.find_file(connection, tenant, file_id))
    path = file_rows.content_path(services.config.directory, tenant, row.sha256, row.suffix)
    return FileResponse(path, media_type="application/octet-stream", filename=row.filename)


@router.delete("/files/{file_id}")
async def delete_file(file_id: FileId, request: Request) -> Deleted:
    """Refused while a job that has not ended learns from it."""
    services, tenant = services_of(request), caller_of(request).tenant
    if result_files.job_of(file_id) is not None:
        raise RefusedError(409, "result_file", f"file {file_id!r} is made of its job's metrics, and goes with the job")
    await services.write(lambda connection: file_rows.delete_file(connection, tenant, file_id))
    return Deleted(id=file_id, object="file")
