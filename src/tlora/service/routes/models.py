"""Models as OpenAI's clients list them: the bases that orders may name, and the adapters of the tenant's own jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from sqlalchemy import Connection, select

from tlora.api import ModelList, ModelView
from tlora.service.access import caller_of
from tlora.service.database.tables import jobs
from tlora.service.problems import RefusedError
from tlora.service.routes.jobs import REFUSALS
from tlora.service.services import Services, services_of

router = APIRouter(prefix="/v1", tags=["openai"], responses=REFUSALS)
ModelName = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/-]*$", description="Its id.")]


@router.get("/models")
def list_models(request: Request) -> ModelList:
    """Bases by name, then adapters, the newest first. Each may be the `model` of a fine-tuning job."""
    services, tenant = services_of(request), caller_of(request).tenant
    query = select(jobs.c.id, jobs.c.ended, jobs.c.base_model).where(
        jobs.c.tenant == tenant, jobs.c.status == "succeeded", jobs.c.removed.is_(None)
    )
    rows = services.read(lambda connection: connection.execute(query.order_by(jobs.c.serial.desc())).all())
    adapters = [ModelView(id=row.id, created=int(row.ended), owned_by=row.base_model) for row in rows]
    return ModelList(data=[*(_base(services, name) for name in sorted(services.bases)), *adapters])


@router.get("/models/{name:path}")
def show_model(name: ModelName, request: Request) -> ModelView:
    services, tenant = services_of(request), caller_of(request).tenant
    if name in services.bases:
        return _base(services, name)

    def query(connection: Connection) -> Any:
        return connection.execute(select(jobs).where(jobs.c.tenant == tenant, jobs.c.id == name, jobs.c.status == "succeeded")).first()

    row = services.read(query)
    if row is None or row.removed is not None:
        raise RefusedError(404, "model_not_found", f"there is no model {name!r}. GET /v1/models lists those that there are", "model")
    return ModelView(id=row.id, created=int(row.ended), owned_by=row.base_model)


def _base(services: Services, name: str) -> ModelView:
    return ModelView(id=name, created=int(services.began), owned_by="tlora")
