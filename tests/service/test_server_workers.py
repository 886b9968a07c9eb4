"""`tlora serve --worker-listen`: workers come to a server over TLS, with tokens that open nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.served import Served
from tlora.cluster.credentials import WorkerTokens
from tlora.errors import ConfigError
from tlora.service.config import ServerConfig, read_config


def test_a_workers_token_is_no_key(served: Served) -> None:
    store = served.opened.services.config.directory / "workers"
    _, secret = WorkerTokens(store).create(600)
    for headers in ({"Authorization": f"Bearer {secret}"}, {"X-API-Key": secret}):
        assert served.client.get("/v1/jobs", headers=headers).status_code == 401
    assert WorkerTokens(store).find(served.key("alice")) is None


def test_workers_come_over_the_unix_socket_only_unless_asked(tmp_path: Path) -> None:
    assert ServerConfig().worker_listen is None
    (tmp_path / "server.yaml").write_text("worker_listen: tcp://127.0.0.1:8322\n")
    assert read_config(tmp_path / "server.yaml", {}).worker_listen == "tcp://127.0.0.1:8322"
    with pytest.raises(ConfigError, match="'127.0.0.1:8322': must be tcp://host:port"):
        read_config(None, {"worker_listen": "127.0.0.1:8322"})
