"""Behind a reverse proxy that is a process of its own: API, streams, downloads, the official client and the page under its prefix."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.service import reverse_proxy
from tests.service.served import ROW, Served, listening, until
from tlora.api import JobView
from tlora.client.access import Access
from tlora.client.connection import Connection
from tlora.client.jobs import watch
from tlora.client.transfers import download_adapter

PREFIX = "/team/tlora"


@contextmanager
def proxied(upstream: str, how: str = "strip") -> Iterator[str]:
    """The URL under which the proxy serves."""
    command = [sys.executable, reverse_proxy.__file__, upstream, PREFIX, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}{PREFIX}"
        finally:
            process.kill()


@pytest.fixture(params=["strip", pytest.param("keep", marks=pytest.mark.slow)])
def behind(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Served, str]]:
    """A server, and its URL at a proxy that takes the prefix away or leaves it."""
    settings = {"root_path": PREFIX, "trusted_proxies": ["127.0.0.1"]}
    with listening(tmp_path / "server", eager=False, **settings) as (served, url), proxied(url, request.param) as found:
        yield served, found


def test_the_official_client_and_our_own_work_through_it(behind: tuple[Served, str], tmp_path: Path) -> None:
    served, url = behind
    key = served.key("alice")
    assert httpx.get(f"{url}/healthz").status_code == 200 and httpx.get(f"{url}/v1/jobs").status_code == 401
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        data = tmp_path / "polite.jsonl"
        data.write_bytes(ROW * 100_000)  # more than a proxy would hold in one piece
        with data.open("rb") as opened:
            file = client.files.create(file=opened, purpose="fine-tune")
        assert file.bytes == data.stat().st_size and client.files.content(file.id).read() == data.read_bytes()
        job = client.fine_tuning.jobs.create(model="base", training_file=file.id, suffix="polite")
        until(lambda: job.id in served.cluster.placed)
        served.cluster.step(job.id, 3)
        until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "running")
        assert client.fine_tuning.jobs.pause(job.id).status == "paused"
        client.fine_tuning.jobs.resume(job.id)
    kinds: list[str] = []
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/v1/jobs/{job.id}/events/stream", headers=headers, timeout=None) as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: "))
                if kinds[-1] == "queued" and kinds.count("queued") == 2:  # comes while the stream is open
                    until(lambda: job.id in served.cluster.placed)
                    served.cluster.finish(job.id)
    assert kinds[0] == "created" and kinds[-1] == "succeeded", kinds
    with Connection(Access(url, key, "x", "x")) as connection:
        *_, last = watch(connection, [job.id])
        assert last.jobs[0].status == "succeeded"
        found = download_adapter(connection, connection.get(f"/v1/jobs/{job.id}", JobView), tmp_path / "out")
        assert (found / "adapter_model.safetensors").read_bytes() == b"weights of " + job.id.encode()
    document = httpx.get(f"{url}/openapi.json", headers=headers).json()
    assert document["servers"] == [{"url": PREFIX}] and "/v1/jobs" in document["paths"]


def test_the_page_works_under_its_prefix(behind: tuple[Served, str]) -> None:
    """Its cookie is for the prefix alone, and only for HTTPS, which the trusted proxy says that it is."""
    served, url = behind
    job = served.submit("alice", name="shown")["id"]
    html = {"Accept": "text/html"}
    stranger = httpx.get(f"{url}/", headers=html)
    assert stranger.status_code == 401 and f'src="{PREFIX}/page/login.js"' in stranger.text
    link = httpx.post(f"{url}/v1/login-links", headers={"Authorization": f"Bearer {served.key('alice')}"}).json()["path"]
    login, _, token = link.partition("#")
    assert httpx.get(f"{url}{login}", headers=html).status_code == 200
    answer = httpx.post(f"{url}{login}", json={"token": token})
    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 204 and f"Path={PREFIX};" in cookie and "Secure" in cookie and "HttpOnly" in cookie
    visitor = html | {"Cookie": cookie.partition(";")[0]}
    page = httpx.get(f"{url}/", headers=visitor)
    assert page.status_code == 200 and "shown" in page.text
    places = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    assert places and all(place.startswith(f"{PREFIX}/") for place in places), places
    origin = url.removesuffix(PREFIX)
    for place in {*places, f"{PREFIX}/jobs/{job}"}:
        assert httpx.get(f"{origin}{place}", headers=visitor).status_code == 200, place
    assert httpx.get(f"{origin}/", headers=visitor).status_code == 404, "the proxy serves others beside"


def test_who_is_no_trusted_proxy_is_not_believed(tmp_path: Path) -> None:
    with listening(tmp_path / "server", trusted_proxies=["192.0.2.1"]) as (served, url):
        token = served.ask("alice", "POST", "/v1/login-links", 201)["path"].partition("#")[2]
        answer = httpx.post(f"{url}/login", json={"token": token}, headers={"X-Forwarded-Proto": "https", "X-Forwarded-For": "127.0.0.1"})
        assert answer.status_code == 204 and "Secure" not in answer.headers["set-cookie"]


def test_a_prefix_gives_no_way_around_the_guard(behind: tuple[Served, str]) -> None:
    """What the guard looks at is what the routes look at, however often the prefix stands there."""
    served, url = behind
    reader = {"Authorization": f"Bearer {served.key('alice', 'read')}"}
    for path in (f"{PREFIX}/v1/keys", f"{PREFIX}{PREFIX}/v1/keys", f"/healthz/..{PREFIX}/v1/keys", f"//{PREFIX}/v1/keys", "/v1/keys"):
        answer = httpx.get(f"{url}{path}")
        assert answer.status_code in (401, 404), (path, answer.status_code)
        assert httpx.get(f"{url}{path}", headers=reader).status_code in (403, 404), path
    assert json.loads(httpx.get(f"{url}/v1/jobs", headers=reader).text)["data"] == []
