"""`tlora serve --worker-listen`: workers come to a server over TLS, with tokens that open nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.served import Served, until
from tests.service.test_real_server import Server, running
from tlora.cluster.credentials import WorkerTokens
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.service.config import ServerConfig, read_config


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_comes_to_a_server_over_tls(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    directory, tlora = tmp_path / "server", [sys.executable, "-m", "tlora"]
    directory.mkdir()
    with running(directory) as servers:
        servers.append(Server(directory, "--worker-listen", address))
        store = directory / "workers"
        made = subprocess.Popen([*tlora, "worker-token", str(directory), "--json"], stdout=subprocess.PIPE)
        facts = json.loads(made.communicate()[0])
        with subprocess.Popen(
            [*tlora, "worker", "--connect", address, "--fingerprint", facts["fingerprint"], "--gpu", "1"],
            env=os.environ | {"TLORA_WORKER_TOKEN": facts["token"], "CUDA_VISIBLE_DEVICES": ""},
        ) as worker:
            until(lambda: (store / "gpu1.json").exists() or worker.poll() is not None)
            assert read_object(store / "gpu1.json")["pid"] == worker.pid
            assert WorkerTokens(store).revoke(facts["id"])
            assert worker.wait() == 0
    log = (tmp_path / "server.log").read_text()
    assert f"workers may come to {address} over TLS; `tlora worker-token {directory}`" in log
    assert f"{facts['id']} was revoked" in log and facts["token"] not in log


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
