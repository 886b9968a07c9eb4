"""The application: its parts put together, its routers, and what happens to what they raise. One more router is a line here."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora.api import OrderSpec
from tlora.errors import TloraError
from tlora.json_file import KeyTwiceError, refuse_key_twice
from tlora.service import problems
from tlora.service.access import OPEN_PATHS, AccessMiddleware, own_path
from tlora.service.database.job_rows import Origin
from tlora.service.database.writer import StoreError
from tlora.service.problems import RefusedError
from tlora.service.routes import cluster, files, jobs, keys, openai, page, streams
from tlora.service.routes.jobs import accept
from tlora.service.services import Services
from tlora.version import __version__

PATH = "/v1/jobs"
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}")
_READ = frozenset({b"content-type", b"idempotency-key"})
Handler = Callable[[Request, Exception], Awaitable[Response]]


class DirectOrders:
    """ASGI within the guard, around the application."""

    def __init__(self, app: ASGIApp, services: Services, handlers: Mapping[type[Exception], Handler]) -> None:
        """`handlers` answer what is raised, as they do for the application's routes."""
        self._app, self._services, self._handlers = app, services, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or own_path(scope) != PATH or (key := _key_of(scope)) is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await _read(receive)
            order = _order_in(body)
            found = None if order is None else await accept(self._services, request, [order], Origin(), key or None)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None:  # a bug: the application's outermost part logs it
                raise
            body, found = b"", await handler(request, error)
        if found is None:
            await self._app(scope, _again(body, receive), send)
        else:
            await found(scope, receive, send)


def _key_of(scope: Scope) -> str | None:
    """The request's Idempotency-Key, empty without one; None where its headers are not the usual ones of an order."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in _READ:
            if name in found:
                return None
            found[name] = value.decode("latin-1")
    if found.get(b"content-type", "").partition(";")[0].strip().lower() != "application/json":
        return None
    key = found.get(b"idempotency-key", "")
    return key if b"idempotency-key" not in found or _IDEMPOTENCY_KEY.fullmatch(key) else None


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _order_in(body: bytes) -> OrderSpec | None:
    """None where the application's route shall answer."""
    try:
        refuse_key_twice(body)
        return OrderSpec.model_validate_json(body)
    except (ValidationError, KeyTwiceError):
        return None


async def _refuse_key_twice(request: Request) -> None:
    """In the JSON that the route takes. Raises RefusedError."""
    if getattr(request.scope["route"].dependant, "body_params", ()):
        try:
            refuse_key_twice(await request.body())
        except KeyTwiceError as error:
            raise RefusedError(422, "invalid", f"the body: {error}") from None


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then what follows it."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read_again() -> Any:
        return rest.pop() if rest else await receive()

    return read_again


# jobs first: routes are tried in their order, and most requests are orders
ROUTERS = (jobs.router, files.router, streams.router, keys.router, cluster.router, openai.router, page.router)
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, tml-..."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def make_app(services: Services, start: Callable[[], None] = lambda: None, stop: Callable[[], None] = lambda: None) -> FastAPI:
    """`start` is called before the first request, `stop` after the last; both may take their time."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.notifier.attach()
        start()
        try:
            yield
        finally:
            stop()

    # no pages of documentation: their scripts would come from another host
    app = FastAPI(
        title="tlora", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, dependencies=[Depends(_refuse_key_twice)]
    )
    app.state.services = services
    for router in ROUTERS:
        app.include_router(router)
    handlers: dict[Any, Any] = {
        RefusedError: problems.on_problem,
        StoreError: problems.on_store_error,
        **dict.fromkeys(problems.DATABASE_ERRORS, problems.on_database_error),
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
    parts = {"ring": services.ring, "browser_sessions": services.browser_sessions, "see": services.see}
    app.add_middleware(AccessMiddleware, config=services.config, welcome=welcome, **parts)
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
