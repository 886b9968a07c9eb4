"""POST /v1/jobs without what a framework adds to each request, which costs more than the rest of an order.

A well-formed order is read and accepted here. All others go on to FastAPI's route of the same path, which says what is wrong with them:
so there is one schema, and one text for each mistake.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora.api import OrderSpec
from tlora.service.access import own_path
from tlora.service.database.job_rows import Origin
from tlora.service.routes.jobs import accept
from tlora.service.services import Services

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
    try:
        return OrderSpec.model_validate_json(body)
    except ValidationError:
        return None


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then what follows it."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read_again() -> Any:
        return rest.pop() if rest else await receive()

    return read_again
