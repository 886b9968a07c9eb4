"""A server in this process over a fake cluster, and clients of its tenants."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.testclient import TestClient

from tests.service.fake_cluster import FakeCluster, FakeIntake, fake_hall
from tlora.service.config import Limits, ServerConfig
from tlora.service.database.store import default_url, open_store
from tlora.service.keys import create_key
from tlora.service.server import ServerParts, open_server, uvicorn_config

T = TypeVar("T")
ROW = b'{"prompt": "a", "completion": "b"}\n'


@dataclass
class Served:
    """A running server. `operator` has the first key, `alice` and `bob` are tenants with read and submit."""

    opened: ServerParts
    client: Any  # of httpx, or its twin for tests
    clusters: list[FakeCluster]
    intakes: list[FakeIntake]
    keys: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def cluster(self) -> FakeCluster:
        return until(lambda: self.clusters[0] if self.clusters else None)

    def key(self, tenant: str, *scopes: str) -> str:
        """A key of the tenant; the same for the same scopes."""
        name = f"{tenant} {scopes}"
        if name not in self.keys:
            chosen = scopes or ("read", "submit")
            self.keys[name] = self.opened.services.writer.do(lambda connection: create_key(connection, tenant, "test", chosen)).secret
        return self.keys[name]

    def ask(self, tenant: str, method: str, path: str, status: int | None = None, **options: Any) -> Any:
        """The JSON of an answer; asserts its status where one is given."""
        headers = {"Authorization": f"Bearer {self.key(tenant)}"} | options.pop("headers", {})
        answer = self.client.request(method, path, headers=headers, **options)
        assert status is None or answer.status_code == status, (answer.status_code, answer.text)
        return answer.json() if answer.headers.get("content-type") == "application/json" else answer

    def upload(self, tenant: str, content: bytes = ROW * 8, name: str = "data.jsonl") -> str:
        found = self.ask(tenant, "POST", "/v1/files", 200, files={"file": (name, content)}, data={"purpose": "fine-tune"})
        return found["id"]

    def order(self, tenant: str, file: str | None = None, **fields: Any) -> dict[str, Any]:
        """The body of an order."""
        return {"name": "one", "base_model": "base", "data": {"file": file or self.upload(tenant)}} | fields

    def submit(self, tenant: str, **fields: Any) -> dict[str, Any]:
        return self.ask(tenant, "POST", "/v1/jobs", 201, json=self.order(tenant, **fields))

    def wait(self, tenant: str, job: str, *statuses: str) -> dict[str, Any]:
        """The job, once it has one of `statuses`."""

        def look() -> dict[str, Any] | None:
            found = self.ask(tenant, "GET", f"/v1/jobs/{job}", 200)
            return found if found["status"] in statuses else None

        return until(look)


def until(look: Callable[[], T | None], pause_seconds: float = 0.005) -> T:
    """What `look` finds, which is asked again after each pause. A test that waits in vain ends by pytest's own limit.

    Pauses grow to a twentieth of a second: a look is mostly a request, which takes the cores from what is waited for.
    """
    while not (found := look()):
        time.sleep(pause_seconds)
        pause_seconds = max(pause_seconds, min(1.5 * pause_seconds, 0.05))
    return found


def config_of(directory: Path, **changes: Any) -> ServerConfig:
    limits = {"requests_per_second": 1e6} | changes.pop("limits", {})
    fields: dict[str, Any] = {"data_dir": str(directory), "base_models": {"base": "models/base"}, "allowed_hosts": ["testserver"]}
    return ServerConfig.model_validate(fields | {"limits": Limits(**limits)} | changes)


@cache
def _empty_store() -> bytes:
    """Made once: the migrations of a store take 40 ms, as much as all else that opens a server."""
    with tempfile.TemporaryDirectory() as directory:
        open_store(default_url(Path(directory))).dispose()
        return (Path(directory) / "tlora.db").read_bytes()


def _put_store(config: ServerConfig) -> None:
    """In a directory that is not there yet."""
    if config.database_url is None and not config.directory.exists():
        config.directory.mkdir(parents=True)
        (config.directory / "tlora.db").write_bytes(_empty_store())


@contextmanager
def serving(
    directory: Path, *, eager: bool = True, held: bool = False, failpoint: Callable[[str], None] = lambda _: None, **changes: Any
) -> Iterator[Served]:
    """A server over `directory`, which may have been another's before."""
    config = config_of(directory, **changes)
    _put_store(config)
    backend_factory, clusters, intakes = fake_hall(config.directory, eager, held)
    opened = open_server(config, backend_factory, failpoint)
    with TestClient(opened.app) as client:
        until(lambda: opened.services.live.fault is None)
        yield Served(opened, client, clusters, intakes)


@contextmanager
def listening(
    directory: Path, *, eager: bool = True, held: bool = False, tls: ssl.SSLContext | None = None, **changes: Any
) -> Iterator[tuple[Served, str]]:
    """A server on a socket of its own, and its URL: for clients that are somebody else's, and for streams."""
    config = config_of(directory, **changes)
    _put_store(config)
    backend_factory, clusters, intakes = fake_hall(config.directory, eager, held)
    opened = open_server(config, backend_factory)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    settings = uvicorn_config(opened.app, config, opened.services.connections, tls)
    settings.timeout_graceful_shutdown = 1
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: opened.services.live.fault is None)
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            yield Served(opened, client, clusters, intakes), url
    finally:
        server.should_exit = True
        thread.join()
        opened.close()
        listener.close()
