"""What a request can be answered with when it is refused: one status, one message with value, rule and remedy, in one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from tlora.api import OrderedData, OrderSpec
from tlora.errors import TloraError
from tlora.jobs_file import suggest
from tlora.service.database.writer import StoreError, driver_words
from tlora.service.orders import known_keys

_MOST_SHOWN = 200  # characters of a value that is refused
_MOST_PROBLEMS = 20
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """As OpenAI's API has it, so that its clients show the message."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer from 400 on."""

    error: ErrorDetail


class RefusedError(TloraError):
    """A request that is refused with `status`."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param


def missing(what: str, name: str) -> RefusedError:
    """The same for an object that there is not and for another tenant's."""
    return RefusedError(404, "not_found", f"there is no {what} {name!r}. GET /v1/{what}s lists those that there are")


DATABASE_ERRORS = (OperationalError, InterfaceError, PoolTimeoutError)  # of a database that does not answer


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer(status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, code, message, param), status, headers=dict(headers or {}))


async def on_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    return answer(error.status, error.code, error.message, error.param)


async def on_store_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StoreError)
    return _unavailable(str(error))


async def on_database_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SQLAlchemyError)
    return silent_database(error)


def silent_database(error: SQLAlchemyError) -> JSONResponse:
    """The answer to a read that the database did not answer."""
    return _unavailable(f"the database does not answer ({driver_words(error)}). Send the request again later")


def _unavailable(message: str) -> JSONResponse:
    return answer(503, "store_unavailable", message, headers={"Retry-After": "5"})


async def on_tlora_error(_: Request, error: Exception) -> JSONResponse:
    return answer(400, "refused", str(error))


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Of the framework: unknown routes and methods, bodies that are cut."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(_methods_of(request))
        return answer(405, "wrong_method", f"{request.method} is not for this route; it has {allowed}", headers={"Allow": allowed})
    if error.status_code == 404:
        route = ascii(request.url.path[:_MOST_SHOWN])
        return answer(404, "unknown_route", f"there is no route {route}. GET /openapi.json lists those that there are")
    code = {405: "wrong_method", 408: "too_slow", 413: "too_large"}.get(error.status_code, "refused")
    return answer(error.status_code, code, str(error.detail), headers=error.headers)


def _methods_of(request: Request) -> list[str]:
    """Of all routes of the path: the framework names those of the first one alone."""
    routers = [getattr(route, "original_router", route) for route in request.app.routes]  # FastAPI from 0.165 keeps included ones whole
    nested = [route for router in routers for route in getattr(router, "routes", [router])]
    fitting = [route for route in nested if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in fitting for method in getattr(route, "methods", None) or ()})


async def on_gone(_: Request, error: Exception) -> Response:
    """The client has gone before the end of its body: no answer reaches it."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=400)


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = _body_of(request)
    problems = list(dict.fromkeys(_told(item, body) for item in error.errors()))
    first = error.errors()[0]["loc"] if error.errors() else ()
    param = ".".join(str(part) for part in first[1:]) or None
    more = [] if len(problems) <= _MOST_PROBLEMS else [f"and {len(problems) - _MOST_PROBLEMS} more"]
    rules = all(item["type"] == "value_error" for item in error.errors())  # the body is as documented; what it says breaks a rule
    return answer(400 if rules else 422, "refused" if rules else "invalid", "; ".join([*problems[:_MOST_PROBLEMS], *more]), param)


async def on_bug(_: Request, error: Exception) -> JSONResponse:
    return answer(500, "internal", f"the server failed ({type(error).__name__}); its log has the traceback")


def _body_of(request: Request) -> type[BaseModel]:
    """What the route takes for a body; an order where it takes none."""
    dependant = getattr(request.scope.get("route"), "dependant", None)
    for field in getattr(dependant, "body_params", ()):
        if isinstance(model := field.field_info.annotation, type) and issubclass(model, BaseModel):
            return model
    return OrderSpec


def _told(item: Mapping[str, Any], body: type[BaseModel]) -> str:
    """One of pydantic's problems in words. A value that is no text for JSON is shown escaped."""
    loc: Sequence[Any] = item["loc"]
    where = ".".join(str(part) for part in (loc[1:] or loc)).encode("ascii", "backslashreplace").decode()[:_MOST_SHOWN]
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        if body is OrderSpec and "data" not in loc and loc[-1] in OrderedData.model_fields:
            return f'{where}: unknown key; it belongs in data: {{"data": {{"{loc[-1]}": ...}}}}'
        return f"{where}: unknown key; {suggest(str(loc[-1]), known_keys(body, loc[1:]))}"
    if item["type"] == "value_error":
        return text
    if item["type"] == "missing":
        return f"{where}: missing; it must be given"
    if isinstance(item["input"], bytes):
        return "the body is not sent as JSON. Send it with `Content-Type: application/json`"
    if item["type"] == "json_invalid":
        return f"the body is not JSON: {item.get('ctx', {}).get('error', text)}"
    return f"{where}: {ascii(item['input'])[:_MOST_SHOWN]} is refused: {text}"
