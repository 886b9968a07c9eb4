"""The server's memory with many ended jobs, and what happens when its store is full or its base cannot be had."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text

from tests.service.served import Served, serving, until
from tests.service.test_service_store import prepare
from tlora.api import OrderSpec
from tlora.service.config import Limits
from tlora.service.database import job_rows
from tlora.service.database.store import open_store
from tlora.service.database.writer import Writer

ENDED = 10_000
_LISTS = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.service.served import serving
with serving(Path({directory!r}), database_url={url!r}) as served:
    pages, cursor = 0, None
    while True:
        page = served.ask("t", "GET", "/v1/jobs", 200, params={{"limit": 100}} | ({{"cursor": cursor}} if cursor else {{}}))
        pages += len(page["data"])
        cursor = page["next_cursor"]
        if cursor is None:
            break
    done = served.submit("t")
    served.wait("t", done["id"], "succeeded")
    print(json.dumps([pages, int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]), "torch" in sys.modules]))
"""


@pytest.mark.slow
def test_memory_with_ten_thousand_ended_jobs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tlora.db'}"
    with serving(tmp_path / "server", database_url=url) as served:
        served.key("t")
        caller = served.opened.services.ring.find(served.key("t"))
    assert caller is not None
    engine = open_store(url)
    writer = Writer(engine)
    order = OrderSpec.model_validate({"name": "a", "base_model": "base", "data": {"file": "file-1"}, "r": 8, "learning_rate": 1e-4})

    def fill(connection: Connection) -> None:
        prepare(connection)
        connection.execute(text("UPDATE files SET tenant = :tenant"), {"tenant": caller.tenant})
        job_rows.insert_jobs(connection, caller.tenant, [order] * ENDED, Limits())
        connection.execute(text("UPDATE jobs SET status = 'succeeded', ended = 1.0, result = '{\"train_loss\": 1.5}'"))

    writer.do(fill)
    writer.close()
    engine.dispose()
    root = str(Path(__file__).parents[2])
    code = _LISTS.format(root=root, directory=str(tmp_path / "server"), url=url)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    pages, kilobytes, torch = json.loads(ended.stdout)
    assert pages == ENDED and not torch
    assert kilobytes <= 150 << 10, f"{kilobytes >> 10} MiB"


def _limit_pages(served: Served) -> list[int]:
    """As a full disk: the store may have so many pages, whichever connection writes. The number can be changed."""
    pages = [10**6]

    def limit(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[0]}")

    event.listen(served.opened.services.engine, "begin", limit)
    return pages


def test_a_full_store_refuses_and_keeps_nothing_and_outcomes_wait_for_room(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False) as served:
        order = served.order("alice", name="x" * 60)
        job = served.submit("alice")["id"]
        until(lambda: job in served.cluster.placed)
        pages = _limit_pages(served)
        pages[0] = 1
        statuses = {served.client.post("/v1/jobs", json=order, headers={"X-API-Key": served.key("alice")}).status_code for _ in range(60)}
        assert 503 in statuses and statuses <= {201, 503}
        accepted = len(served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"])
        served.cluster.step(job, 3)
        served.cluster.finish(job)
        until(lambda: served.opened.services.live.counts.get("succeeded"))
        pages[0] = 10**6
        until(lambda: served.cluster.tick() or served.ask("alice", "GET", f"/v1/jobs/{job}", 200)["status"] == "succeeded")
        assert len(served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"]) == accepted
        served.ask("alice", "POST", "/v1/jobs", 201, json=order)
    with sqlite3.connect(tmp_path / "tlora.db") as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.close()


def test_a_controller_that_ends_is_told_and_orders_are_kept(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False) as served:
        key = served.key("alice")
        job = served.submit("alice")["id"]
        served.cluster._inbox.put("no event")  # type: ignore[arg-type]
        until(lambda: served.opened.services.live.fault)
        answer = served.client.get("/readyz")
        assert answer.status_code == 503 and "the controller ended" in answer.text
        later = served.submit("alice")["id"]
    with serving(tmp_path) as served:
        served.keys["alice ()"] = key
        assert served.wait("alice", job, "succeeded") and served.wait("alice", later, "succeeded")
