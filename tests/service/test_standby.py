"""Two real servers on one store: the first is killed with a hundred jobs in all states, and the second, which waited, has them all.

How long it waits is said on a clock of its own in `test_service_lease.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.postgres import make_database
from tests.service.served import until

ROOT = Path(__file__).parents[2]
ROW = b'{"prompt": "a b c", "completion": "d e f"}\n'
JOBS = 100


def start(directory: Path, url: str, port: int, log: Path, *more: str) -> subprocess.Popen[bytes]:
    options = ["--port", str(port), "--device", "cpu", "--base-model", f"base={ROOT / 'demo' / 'base'}", "--database-url", url]
    command = [sys.executable, "-m", "tlora", "serve", "--data-dir", str(directory), *options, *more]
    with log.open("wb") as output:
        own = os.environ | {"TLORA_CACHE": str(directory.parent / "cache")}
        return subprocess.Popen(command, stdout=output, stderr=output, env=own, start_new_session=True)


def jobs_of(client: httpx.Client) -> dict[str, str]:
    found: dict[str, str] = {}
    path: str = "/v1/jobs?limit=100"
    answer: Any = client.get(path).json()
    found |= {job["id"]: job["status"] for job in answer["data"]}
    assert not answer.get("has_more"), answer
    return found


@pytest.mark.slow
def test_a_second_server_has_all_jobs(tmp_path: Path, postgres: str) -> None:
    url, directory = make_database(postgres, "standby"), tmp_path / "data"
    first = start(directory, url, 0, tmp_path / "first.log")
    second = None
    try:
        until((directory / "first-key").is_file, 0.1)
        until((directory / "address").is_file, 0.1)
        address = (directory / "address").read_text().strip()
        port = int(address.rpartition(":")[2])
        with httpx.Client(base_url=address, timeout=60) as client:
            client.headers["X-API-Key"] = (directory / "first-key").read_text().strip()
            until(lambda: client.get("/readyz").status_code == 200, 0.1)
            second = start(directory, url, port, tmp_path / "second.log", "--standby")
            good, bad = (
                client.post("/v1/files", files={"file": ("data.jsonl", content)}, data={"purpose": "fine-tune"}).json()["id"]
                for content in (ROW * 8, ROW + b"{torn\n")
            )
            for number in range(JOBS):
                order: dict[str, Any] = {"name": f"j{number}", "base_model": "base", "data": {"file": bad if number == 1 else good}, "r": 4}
                order |= {"max_steps": 1 if number < 3 else 100_000, "max_slowdown": 10}
                assert client.post("/v1/jobs", json=order).status_code == 201
            ids = {job["name"]: job["id"] for job in client.get("/v1/jobs?limit=100").json()["data"]}
            for number in range(50, 60):
                client.post(f"/v1/jobs/{ids[f'j{number}']}/cancel")
                client.post(f"/v1/jobs/{ids[f'j{number + 20}']}/pause")
            wanted = {"succeeded", "failed", "cancelled", "paused", "queued", "running"}
            until(lambda: wanted <= set(jobs_of(client).values()), 0.5)
            assert second.poll() is None and b"waits until no other server" in (tmp_path / "second.log").read_bytes()
            first.send_signal(signal.SIGKILL)
            before = jobs_of_the_store(directory, url)

            def answers() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            until(answers, 0.1)
            after = jobs_of(client)
            assert len(after) == JOBS and after.keys() == before.keys() == set(ids.values())
            ended = ("succeeded", "failed", "cancelled", "paused")
            assert {job: status for job, status in before.items() if status in ended}.items() <= after.items(), Counter(after.values())
            until(lambda: "running" in jobs_of(client).values(), 0.5)
            for job, status in jobs_of(client).items():
                if status not in ended[:3]:
                    client.post(f"/v1/jobs/{job}/cancel")
            second.send_signal(signal.SIGTERM)
            assert second.wait(600) == 0
    finally:
        for server in (first, second):
            if server is not None and server.poll() is None:
                server.kill()


def jobs_of_the_store(directory: Path, url: str) -> dict[str, str]:
    from tlora.service.config import ServerConfig
    from tlora.service.server import with_store

    config = ServerConfig(data_dir=str(directory), database_url=url)
    rows: Any = with_store(config, lambda connection: connection.exec_driver_sql("SELECT id, status FROM jobs").all())
    return {row.id: row.status for row in rows}
