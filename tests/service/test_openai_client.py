"""The official `openai` client, unmodified, against a server on a socket; and retries, for which it sends no key."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from tests.service.served import ROW, Served, listening, until
from tlora.service.database.tables import creations


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Served, str]]:
    with listening(tmp_path / "server", eager=False) as found:
        yield found


def client_of(live: tuple[Served, str], tenant: str = "alice") -> openai.OpenAI:
    served, url = live
    return openai.OpenAI(base_url=f"{url}/v1", api_key=served.key(tenant), max_retries=0)


def test_the_official_client_uploads_creates_lists_pauses_resumes_cancels(live: tuple[Served, str], tmp_path: Path) -> None:
    served, _ = live
    data = tmp_path / "polite.jsonl"
    data.write_bytes(ROW * 20)
    with client_of(live) as client, data.open("rb") as opened:
        file = client.files.create(file=opened, purpose="fine-tune")
        assert (file.bytes, file.filename, file.purpose) == (len(ROW) * 20, "polite.jsonl", "fine-tune")
        assert client.files.retrieve(file.id).id == file.id
        assert client.files.content(file.id).read() == ROW * 20
        job = client.fine_tuning.jobs.create(
            model="base",
            training_file=file.id,
            suffix="polite",
            seed=7,
            method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.5}}},
            extra_body={"tlora": {"r": 8, "priority": 3, "data": {"max_length": 64}}},
        )
        assert (job.status, job.model, job.training_file, job.seed, job.object) == (
            "validating_files",
            "base",
            file.id,
            7,
            "fine_tuning.job",
        )
        order = served.ask("alice", "GET", f"/v1/jobs/{job.id}", 200)["order"]
        assert (order["r"], order["priority"], order["num_train_epochs"], order["learning_rate"]) == (8, 3, 2, 1e-4)
        assert order["data"]["max_length"] == 64 and order["name"] == "polite"
        until(lambda: job.id in served.cluster.placed)
        served.cluster.step(job.id, 1)
        until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "running")
        assert client.fine_tuning.jobs.pause(job.id).status == "paused"
        assert client.fine_tuning.jobs.resume(job.id).status == "queued"
        other = client.fine_tuning.jobs.create(model="base", training_file=file.id, hyperparameters={"batch_size": 4})
        assert client.fine_tuning.jobs.cancel(other.id).status == "cancelled"
        assert [found.id for found in client.fine_tuning.jobs.list()] == [other.id, job.id]
        page = client.fine_tuning.jobs.list(limit=1)
        assert page.has_more and [found.id for found in page] == [other.id, job.id]  # the iterator asks for the next page
        until(lambda: job.id in served.cluster.placed)
        served.cluster.finish(job.id)
        until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
        assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model == job.id
        messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=2)]
        assert messages[0] == "trained 10 steps" and messages[-1] == "accepted; its data will be read"
        place = served.opened.services.config.directory / "jobs" / job.id
        for step in (5, 10):
            (place / f"checkpoint-{step}").mkdir()
            (place / f"checkpoint-{step}" / "MANIFEST.json").write_text("{}")
        assert [found.step_number for found in client.fine_tuning.jobs.checkpoints.list(job.id)] == [10, 5]
        assert [found.step_number for found in client.fine_tuning.jobs.checkpoints.list(job.id, limit=1)] == [10, 5]
        assert client.files.delete(file.id).deleted


def test_its_errors_are_the_clients_own(live: tuple[Served, str]) -> None:
    with client_of(live) as client:
        with pytest.raises(openai.NotFoundError, match="there is no job"):
            client.fine_tuning.jobs.retrieve("ftjob-unknown")
        with pytest.raises(openai.BadRequestError, match="^Error code: 400 - model 'gpt-9'"):
            client.fine_tuning.jobs.create(model="gpt-9", training_file="file-0")
        with pytest.raises(openai.BadRequestError, match="did you mean|Extra inputs|unknown"):
            client.fine_tuning.jobs.create(model="base", training_file="file-0", extra_body={"tlora": {"lora_rank": 8}})
        with pytest.raises(openai.BadRequestError, match="tlora.data"):
            client.fine_tuning.jobs.create(model="base", training_file="file-0", extra_body={"tlora": {"data": 3}})
        with pytest.raises(openai.UnprocessableEntityError):
            client.fine_tuning.jobs.create(model="base", training_file="file-0", method={"type": "reinforcement"})
        with pytest.raises(openai.BadRequestError, match="event"):
            client.fine_tuning.jobs.list_events("job-0", after="x")
    with openai.OpenAI(base_url=f"{live[1]}/v1", api_key="tml-wrong", max_retries=0) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.fine_tuning.jobs.list()
    with client_of(live, "bob") as bob:
        assert list(bob.fine_tuning.jobs.list()) == []


def creation(live: tuple[Served, str], file: str, retry: int, **fields: Any) -> dict[str, Any]:
    served, url = live
    headers = {"Authorization": f"Bearer {served.key('alice')}", "x-stainless-retry-count": str(retry)}
    answer = httpx.post(f"{url}/v1/fine_tuning/jobs", json={"model": "base", "training_file": file} | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lose_answer(live: tuple[Served, str], file: str) -> str:
    """A creation whose client is gone before the answer: its job."""
    served, url = live
    gate = served.opened.services.writer
    before = {job["id"] for job in served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"]}
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "base", "training_file": file}).encode()
    head = f"POST /v1/fine_tuning/jobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {served.key('alice')}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nx-stainless-retry-count: 0\r\n\r\n"
    reached, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        reached.set()
        go.wait()

    blocked = gate.submit(hold)  # the creation waits behind it, and its client leaves meanwhile
    reached.wait()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        until(lambda: gate._queue.qsize() >= 1)
        connected = served.opened.services.connections.count
    until(lambda: served.opened.services.connections.count < connected)  # the server has seen the end of the connection
    go.set()
    blocked.result()
    made = until(lambda: {job["id"] for job in served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"]} - before)
    return next(iter(made))


def test_a_retry_matches_only_a_creation_whose_answer_was_lost(live: tuple[Served, str]) -> None:
    served, _ = live
    file = served.upload("alice")
    first = creation(live, file, 0)
    second = creation(live, file, 0)
    assert first["id"] != second["id"], "two orders of the same are two jobs"
    until(lambda: all(_sent(served)))
    third = creation(live, file, 1)
    assert third["id"] not in (first["id"], second["id"]), "its first try never reached the server: both answers before were sent"
    until(lambda: all(_sent(served)))
    lost = lose_answer(live, file)
    assert creation(live, file, 1, seed=5)["id"] != lost, "another body is another order"
    until(lambda: sum(not one for one in _sent(served)) == 1)
    assert creation(live, file, 1)["id"] == lost
    until(lambda: all(_sent(served)))
    assert creation(live, file, 2)["id"] != lost, "a retry has had it"


def _sent(served: Served) -> list[bool]:
    return list(served.opened.services.read(lambda connection: connection.execute(select(creations.c.sent)).scalars().all()))
