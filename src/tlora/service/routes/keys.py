"""Keys and base models: the operator's; and models as OpenAI's clients list them: bases, and adapters of the tenant's jobs."""

from __future__ import annotations

import time
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from sqlalchemy import Connection, delete, select
from starlette.concurrency import run_in_threadpool

from tlora.api import BaseList, BaseOrder, BaseView, Deleted, KeyList, KeyOrder, ModelList, ModelView, NewKeyView
from tlora.base_digest import quick_digest
from tlora.service import keys as keyring
from tlora.service.access import caller_of
from tlora.service.database.tables import bases, jobs, keys, tenants
from tlora.service.problems import RefusedError, missing
from tlora.service.routes.jobs import REFUSALS
from tlora.service.services import Services, key_view, new_key_view, services_of

router = APIRouter(prefix="/v1", responses=REFUSALS)
ModelName = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/-]*$", description="Its id.")]


@router.get("/keys", tags=["keys"])
def list_keys(request: Request) -> KeyList:
    """Of all tenants, without the keys themselves."""
    return services_of(request).read(read_keys)


def read_keys(connection: Connection) -> KeyList:
    query = select(keys, tenants.c.name.label("tenant_name")).join(tenants, tenants.c.id == keys.c.tenant).order_by(keys.c.created)
    return KeyList(data=[key_view(row) for row in connection.execute(query)])


@router.post("/keys", tags=["keys"], status_code=201)
async def create_key(order: KeyOrder, request: Request) -> NewKeyView:
    """The key is shown this once."""
    made = await services_of(request).write(lambda connection: keyring.create_key(connection, order.tenant, order.name, order.scopes))
    return new_key_view(made, order.tenant)


@router.delete("/keys/{key_id}", tags=["keys"])
async def revoke_key(key_id: Annotated[str, Path(max_length=64, pattern="^[a-z0-9-]+$")], request: Request) -> Deleted:
    """The key is refused from now on; what streams with it ends within seconds."""
    services = services_of(request)
    if key_id == caller_of(request).key_id:
        raise RefusedError(409, "own_key", "a key cannot revoke itself. Use another admin key, or `tlora keys revoke --local`")
    if not await services.write(lambda connection: keyring.revoke_key(connection, key_id), lambda _: services.ring.forget()):
        raise missing("key", key_id)
    return Deleted(id=key_id, object="key")


@router.get("/bases", tags=["bases"])
def list_bases(request: Request) -> BaseList:
    """Base models that orders may name."""
    services = services_of(request)
    return BaseList(data=[_view(services, name) for name in sorted(services.bases)])


@router.post("/bases", tags=["bases"], status_code=201)
async def add_base(order: BaseOrder, request: Request) -> BaseView:
    """Let orders name a base. Whether it can be trained over is seen beside; GET /v1/bases tells. One that cannot may be given anew."""
    services = services_of(request)

    def insert(connection: Connection) -> None:
        path = connection.execute(select(bases.c.path).where(bases.c.name == order.name)).scalar() or services.bases.get(order.name)
        if path is not None and path != order.path and services.job_controller.base_status(order.name)[0] != "failed":
            raise RefusedError(409, "other_base", f"base {order.name!r} is {path!r} already. Choose another name", "name")
        if path != order.path:
            connection.execute(delete(bases).where(bases.c.name == order.name))  # what lies there cannot be trained over, or was moved
            connection.execute(bases.insert().values(name=order.name, path=order.path, created=time.time()))

    def announce(_: None) -> None:
        services.bases[order.name] = order.path
        services.job_controller.base_added(order.name, order.path)

    await services.write(insert, announce)
    return await run_in_threadpool(_view, services, order.name)


def _view(services: Services, name: str) -> BaseView:
    status, problem, size = services.job_controller.base_status(name)
    digest = _digest(FilePath(services.bases[name]))
    return BaseView.model_validate({"name": name, "status": status, "problem": problem, "bytes": size, "digest": digest})


def _digest(directory: FilePath) -> str | None:
    """Read anew each time, a block of each of 512 tensors at most: the files may have been replaced."""
    try:
        return quick_digest(directory) if directory.is_dir() else None
    except OSError:  # its jobs say which file cannot be read
        return None


@router.get("/models", tags=["openai"])
def list_models(request: Request) -> ModelList:
    """Bases by name, then adapters, the newest first. Each may be the `model` of a fine-tuning job."""
    services, tenant = services_of(request), caller_of(request).tenant
    query = select(jobs.c.id, jobs.c.ended, jobs.c.base_model).where(
        jobs.c.tenant == tenant, jobs.c.status == "succeeded", jobs.c.removed.is_(None)
    )
    rows = services.read(lambda connection: connection.execute(query.order_by(jobs.c.serial.desc())).all())
    adapters = [ModelView(id=row.id, created=int(row.ended), owned_by=row.base_model) for row in rows]
    return ModelList(data=[*(_model(services, name) for name in sorted(services.bases)), *adapters])


@router.get("/models/{name:path}", tags=["openai"])
def show_model(name: ModelName, request: Request) -> ModelView:
    services, tenant = services_of(request), caller_of(request).tenant
    if name in services.bases:
        return _model(services, name)

    def query(connection: Connection) -> Any:
        return connection.execute(select(jobs).where(jobs.c.tenant == tenant, jobs.c.id == name, jobs.c.status == "succeeded")).first()

    row = services.read(query)
    if row is None or row.removed is not None:
        raise RefusedError(404, "model_not_found", f"there is no model {name!r}. GET /v1/models lists those that there are", "model")
    return ModelView(id=row.id, created=int(row.ended), owned_by=row.base_model)


def _model(services: Services, name: str) -> ModelView:
    return ModelView(id=name, created=int(services.began), owned_by="tlora")
