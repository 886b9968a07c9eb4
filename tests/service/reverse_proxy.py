"""A reverse proxy as a process of its own: `python reverse_proxy.py UPSTREAM PREFIX strip|keep`. It prints its port, and streams both ways.

It says to the server that it was reached by HTTPS, as one that ends TLS does.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


def proxy(upstream: str, prefix: str, strips: bool) -> Starlette:
    client = httpx.AsyncClient(base_url=upstream, timeout=None, trust_env=False)

    async def pass_on(request: Request) -> Response:
        path = request.scope["raw_path"].decode().partition("?")[0]
        if not path.startswith(prefix):
            return PlainTextResponse("nothing is served here", 404)
        there = (path.removeprefix(prefix) or "/") if strips else path
        query = request.scope["query_string"].decode()
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        headers += [("x-forwarded-for", request.client.host if request.client else ""), ("x-forwarded-proto", "https")]
        asked = client.build_request(
            request.method,
            there + (f"?{query}" if query else ""),
            headers=headers,
            content=request.stream() if _has_body(request) else None,
        )
        answer = await client.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()

        found = StreamingResponse(body(), answer.status_code)
        found.raw_headers = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in _HOP]
        return found

    methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", pass_on, methods=methods)])


def _has_body(request: Request) -> bool:
    return "content-length" in request.headers or "transfer-encoding" in request.headers


def main() -> None:
    upstream, prefix, how = sys.argv[1:]
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(proxy(upstream, prefix, how == "strip"), log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
