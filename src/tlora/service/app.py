"""The application: its parts put together, its routers, and what happens to what they raise. One more router is a line here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tlora.errors import TloraError
from tlora.service import problems
from tlora.service.access import OPEN_PATHS, Guard
from tlora.service.database.writer import StoreError
from tlora.service.direct_orders import DirectOrders
from tlora.service.problems import RefusedError
from tlora.service.routes import cluster, files, jobs, keys, models, openai, page, streams
from tlora.service.services import Services
from tlora.version import __version__

# jobs first: routes are tried in their order, and most requests are orders
ROUTERS = (jobs.router, files.router, streams.router, keys.router, cluster.router, openai.router, models.router, page.router)
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, tml-..."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def make_app(services: Services, start: Callable[[], None] = lambda: None, stop: Callable[[], None] = lambda: None) -> FastAPI:
    """`start` is called before the first request, `stop` after the last; both may take their time."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.bell.attach()
        start()
        try:
            yield
        finally:
            stop()

    # no pages of documentation: their scripts would come from another host
    app = FastAPI(title="tlora", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.services = services
    for router in ROUTERS:
        app.include_router(router)
    handlers: dict[Any, Any] = {
        RefusedError: problems.on_problem,
        StoreError: problems.on_store_error,
        **dict.fromkeys((OperationalError, InterfaceError, PoolTimeoutError), problems.on_database_error),
        ClientDisconnect: problems.on_gone,
        TloraError: problems.on_tlora_error,
        HTTPException: problems.on_http_exception,
        RequestValidationError: problems.on_invalid,
    }
    # within the guard, as what is added later is around what was added before
    app.add_middleware(DirectOrders, services=services, handlers=dict(handlers))
    handlers[Exception] = problems.on_bug
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    welcome = page.login_page(services.config.root_path)
    parts = {"ring": services.ring, "visits": services.visits, "see": services.see}
    app.add_middleware(Guard, config=services.config, welcome=welcome, **parts)
    app.openapi = lambda: _document(app, services.config.root_path)
    return app


def _document(app: FastAPI, root_path: str) -> dict[str, Any]:
    """With what the guard demands of every route but the open ones."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes, openapi_version=app.openapi_version)
        if root_path:
            found["servers"] = [{"url": root_path}]
        found.setdefault("components", {})["securitySchemes"] = _SECURITY
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path in OPEN_PATHS else [{"bearer": []}, {"header": []}]
        app.openapi_schema = found
    return app.openapi_schema
