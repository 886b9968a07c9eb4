"""The application's root: who may pass. Everything is denied that is not allowed here, before any route is looked for.

Checks the Host header, the key, its scope and the tenant's rate, and bounds the body. Routes find the caller in `request.state.caller`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlora.api import TENANT_HEADER
from tlora.service.config import Limits, ServerConfig
from tlora.service.connection_protocol import connection_of
from tlora.service.connections import Body, shared_address
from tlora.service.keys import Caller, KeyRing
from tlora.service.problems import DATABASE_ERRORS, answer, silent_database
from tlora.service.request_log import Answered
from tlora.service.signed import BrowserSessions
from tlora.version import __version__

PAGE_FILES = ("/page/page.css", "/page/page.js", "/page/login.js", "/page/icon.svg")
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", *PAGE_FILES})  # all else needs a key, or a visitor's cookie
UPLOADS = frozenset({"/v1/files"})
_ADMIN = ("/v1/keys", "/metrics", "/v1/drain", "/v1/hosts", "/v1/tenants")  # and everything outside of /v1
_READ = ("/", "/openapi.json", "/v1/login-links")
_MULTIPART_BYTES = 64 << 10  # around the file of an upload
_SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"tlora-version", __version__.encode()),
)
_Refusal = tuple[int, str, str, Mapping[str, str]]  # status, code, message, headers
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)


@dataclass(slots=True)
class _Bucket:
    """Tokens of one tenant's rate; a request takes one."""

    tokens: float
    seen: float = field(default_factory=time.monotonic)

    def take(self, rate: float) -> bool:
        now = time.monotonic()
        self.tokens = min(rate, self.tokens + (now - self.seen) * rate)
        self.seen = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class AccessMiddleware:
    """ASGI around the application."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        ring: KeyRing,
        browser_sessions: BrowserSessions | None = None,
        welcome: ASGIApp | None = None,
        see: Callable[[Answered], None] = lambda _: None,
    ) -> None:
        """`welcome` is what a browser without a cookie gets; `see` is told of all answers."""
        self._app, self._ring, self._browser_sessions, self._welcome, self._see = app, ring, browser_sessions, welcome, see
        self._hosts, self._limits, self._tls = config.hosts, config.limits, bool(config.tls_certificate)
        self._root = config.root_path
        self._at_once, self._most_at_once = dict[str, int](), config.connections.per_address
        self._buckets: dict[str, _Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there is no web socket
            await send({"type": "websocket.close", "code": 1008})
            return
        address = shared_address(scope["client"][0]) if scope.get("client") else None
        if address is None:
            await self._answer(scope, receive, send, None)
            return
        self._at_once[address] = self._at_once.get(address, 0) + 1
        try:
            await self._answer(scope, receive, send, address)
        finally:
            self._at_once[address] -= 1
            if not self._at_once[address]:
                del self._at_once[address]

    async def _answer(self, scope: Scope, receive: Receive, send: Send, address: str | None) -> None:
        scope = _under_prefix(scope, self._root)
        body = Body(scope["method"] in ("GET", "HEAD", "DELETE"), self._limits.body_seconds, self._limits.body_bytes_per_second)
        connection = connection_of(scope)
        if connection is not None:
            connection.body = body
        began = time.monotonic()

        def see(code: int) -> None:
            caller, client = scope.get("state", {}).get("caller"), scope.get("client") or ("",)
            tenant, key_id = ("", "") if caller is None else (caller.tenant, caller.key_id)
            self._see(Answered(scope["method"], scope["path"], client[0], code, time.monotonic() - began, tenant, key_id))

        secured = _secure(send, body, see)
        headers = _headers(scope)
        try:
            refusal = self._judge_address(address) or await self._judge(scope, headers)
        except DATABASE_ERRORS as error:  # whose key it is cannot be known now
            await silent_database(error)(scope, receive, secured)
            return
        if refusal is not None and self._welcome is not None and _is_browser(scope, headers, refusal[0]):
            await self._welcome(scope, receive, secured)
            return
        if refusal is not None:
            status, code, message, more = refusal
            await answer(status, code, message, headers=more)(scope, receive, secured)
            return
        await self._app(scope, self._bound(scope, headers, receive, body), secured)

    def _judge_address(self, address: str | None) -> _Refusal | None:
        """Directly connected ones are bounded before; a proxy's clients are here."""
        most = self._most_at_once
        if address is None or self._at_once[address] <= most:
            return None
        message = f"more than {most} requests of {address} are being answered; wait until some have been"
        return 429, "too_many_connections", message, {"Retry-After": "1"}

    async def _judge(self, scope: Scope, headers: Mapping[str, str]) -> _Refusal | None:
        """None for a request that may pass. Leaves the caller in the scope's state, also of one that may not."""
        host = headers.get("host", "")
        named = _HOST.fullmatch(host)
        if named is None or named[1].strip("[]").lower() not in self._hosts:
            return 421, "wrong_host", f"host {host[:100]!a} is not served here; name it in allowed_hosts of the server's config", {}
        path = own_path(scope)
        if path in OPEN_PATHS:
            return None
        secret = key_of(headers)
        caller = await asyncio.to_thread(self._ring.find, secret) if secret and not self._ring.remembers(secret) else self._find(secret)
        if (
            caller is None
            and not secret
            and scope["method"] in ("GET", "HEAD")
            and self._browser_sessions is not None
            and "cookie" in headers
        ):
            caller = await asyncio.to_thread(self._browser_sessions.find, headers["cookie"])
        if caller is None:
            problem = "this key is unknown or revoked" if secret else "no key was given"
            message = f"{problem}. Send it as `Authorization: Bearer tml-...` or `X-API-Key: tml-...`"
            return 401, "invalid_key", message, {"WWW-Authenticate": "Bearer"}
        scope.setdefault("state", {})["caller"] = caller
        needed = needed_scope(scope["method"], path)
        if needed not in caller.scopes:
            return 403, "missing_scope", f"this key lacks the scope {needed!r}. Ask the operator for a key with it", {}
        if not self._may_ask(caller.tenant):
            rate = self._limits.requests_per_second
            return 429, "too_many_requests", f"more than {rate:g} requests a second of this tenant; wait a second", {"Retry-After": "1"}
        if (name := headers.get(TENANT_HEADER)) is not None:
            if "admin" not in caller.scopes:
                return (
                    403,
                    "missing_scope",
                    "this key lacks the scope 'admin', and another tenant is meant. Ask the operator for a key with it",
                    {},
                )
            if (tenant := await asyncio.to_thread(self._ring.find_tenant, name)) is None:
                return 404, "not_found", f"there is no tenant {name[:100]!r}. `tlora keys list` names those that there are", {}
            scope["state"]["caller"] = replace(caller, tenant=tenant, is_operator=tenant != caller.tenant)
        return None

    def _find(self, secret: str) -> Caller | None:
        return self._ring.find(secret) if secret else None

    def _may_ask(self, tenant: str) -> bool:
        rate = self._limits.requests_per_second
        return self._buckets.setdefault(tenant, _Bucket(rate)).take(rate)

    def _bound(self, scope: Scope, headers: Mapping[str, str], receive: Receive, body: Body) -> Receive:
        """`receive`, cut where the body is longer than its limit, or comes too slowly."""
        limit = _body_limit(scope, self._limits)
        claimed = headers.get("content-length", "")
        received = int(claimed) if claimed.isdecimal() and int(claimed) > limit else 0

        async def bounded() -> Message:
            nonlocal received
            if body.ended:  # what follows the body is the client's leaving, for which a stream waits as long as it takes
                return await receive()
            if received > limit:
                raise _too_large(limit)
            body.wait()
            try:
                async with asyncio.timeout(body.left):
                    message = await receive()
            except TimeoutError:
                rate, seconds = self._limits.body_bytes_per_second, self._limits.body_seconds
                raise HTTPException(408, f"the body came at less than {rate:g} bytes a second for {seconds:g} s; send it faster") from None
            body.take(len(message.get("body", b"")))
            received += len(message.get("body", b""))
            body.ended = not message.get("more_body", False)
            if received > limit:
                raise _too_large(limit)
            return message

        return bounded


def needed_scope(method: str, path: str) -> str:
    """The scope that a request needs. What is not known here needs the highest."""
    if path in _READ or path.startswith("/jobs/"):
        return "read"
    if not path.startswith("/v1/") or path.startswith(_ADMIN):
        return "admin"
    if method in ("GET", "HEAD"):
        return "read"
    return "admin" if path.startswith("/v1/bases") else "submit"


def _under_prefix(scope: Scope, root: str) -> Scope:
    """With the prefix `root` in the path once, as ASGI has it: some proxies take it away, and some do not."""
    path: str = scope["path"]
    if not root:
        return scope
    if path == root or path.startswith(root + "/"):
        raw: bytes = scope.get("raw_path") or path.encode()
        bare, raw = path.removeprefix(root), raw.removeprefix(root.encode())
    else:
        bare, raw = path, scope.get("raw_path") or path.encode()
    return {**scope, "root_path": root, "path": root + (bare or "/"), "raw_path": root.encode() + (raw or b"/")}


def own_path(scope: Scope) -> str:
    """Without the prefix: what the routes go by."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_browser(scope: Scope, headers: Mapping[str, str], status: int) -> bool:
    """Whether the refusal is of a page that somebody opened without having logged in."""
    path = own_path(scope)
    is_page = path == "/" or path.startswith("/jobs/")
    return status == 401 and is_page and "text/html" in headers.get("accept", "")


def caller_of(request: Request) -> Caller:
    """Whom the request is from; the guard has put it there."""
    caller = request.state.caller
    assert isinstance(caller, Caller), caller
    return caller


def key_of(headers: Mapping[str, str]) -> str:
    """The key in a request's headers; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _body_limit(scope: Scope, limits: Limits) -> int:
    return limits.upload_bytes + _MULTIPART_BYTES if own_path(scope) in UPLOADS else limits.body_bytes


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body has more than {limit:,} bytes; send less")


def _secure(send: Send, body: Body, see: Callable[[int], None]) -> Send:
    """With the headers of every answer. The connection is closed where a body is refused that has not been read: it may have no end."""

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            see(message["status"])
            names = {name for name, _ in message["headers"]}
            added = [pair for pair in _SECURITY if pair[0] not in names]
            if message["status"] >= 400 and not body.ended:
                added.append((b"connection", b"close"))
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return secured
