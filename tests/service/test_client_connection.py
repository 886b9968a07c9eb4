"""Requests: what is tried again and how often it is done, where the key goes, and one error for each way to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tlora.api import BaseList, JobView
from tlora.client.access import Access
from tlora.client.connection import Connection
from tlora.client.jobs import watch
from tlora.cluster_api import Drained
from tlora.errors import ServiceError
from tlora.version import __version__

ACCESS = Access("https://host.example", "tml-secret-key", "$TLORA_URL", "$TLORA_API_KEY")
HEADERS = {"tlora-version": __version__}


def refusal(status: int, code: str, message: str = "no", **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code}}, headers=HEADERS | headers)


def answering(*answers: httpx.Response | Exception) -> tuple[Connection, list[httpx.Request], list[float]]:
    """A connection to a server that gives these answers in turn, the requests it saw, and the seconds that were waited."""
    seen, waited, left = list[httpx.Request](), list[float](), list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return Connection(ACCESS, httpx.MockTransport(handle), waited.append), seen, waited


def bases() -> httpx.Response:
    return httpx.Response(200, json={"data": []}, headers=HEADERS)


def test_busy_answers_are_asked_again_with_one_idempotency_key() -> None:
    good = httpx.Response(200, json={"draining": True, "open_jobs": 3}, headers=HEADERS)
    busy = refusal(503, "store_unavailable", **{"Retry-After": "7"})
    connection, seen, waited = answering(busy, httpx.ReadError("cut"), refusal(429, "too_many_requests"), good)
    assert connection.send("PUT", "/v1/drain", Drained, {"draining": True}).open_jobs == 3
    assert len({request.headers["idempotency-key"] for request in seen}) == 1 and len(seen) == 4
    assert waited[0] == 7.0 and len(waited) == 3
    connection.send("PUT", "/v1/drain", Drained, {"draining": True})
    assert len({request.headers["idempotency-key"] for request in seen}) == 2


@pytest.mark.parametrize("code", ["too_many_jobs", "too_many_streams"])
def test_a_quota_is_not_asked_again(code: str) -> None:
    connection, seen, _ = answering(refusal(429, code))
    with pytest.raises(ServiceError):
        connection.get("/v1/bases", BaseList)
    assert len(seen) == 1


def test_no_server_is_said_at_once_and_a_lost_one_is_asked_again() -> None:
    connection, seen, _ = answering(httpx.ConnectError("[Errno 111] Connection refused"))
    with pytest.raises(ServiceError, match=r"Connection refused.*\$TLORA_URL"):
        connection.get("/v1/bases", BaseList)
    assert len(seen) == 1
    connection, seen, _ = answering(bases(), httpx.ConnectError("refused"), bases())
    connection.get("/v1/bases", BaseList)
    connection.get("/v1/bases", BaseList)
    assert len(seen) == 3


@pytest.mark.parametrize("error", [httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("peer closed")])
def test_an_answer_that_never_comes_whole(error: Exception) -> None:
    connection, _, _ = answering(error)
    with pytest.raises(ServiceError, match=r"in time|peer closed"):
        connection.get("/v1/bases", BaseList)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_is_not_sent_across_redirects(status: int) -> None:
    connection, seen, _ = answering(httpx.Response(status, headers={"location": "https://evil.example/v1/bases"}))
    with pytest.raises(ServiceError, match=r"redirects .*evil\.example/v1/bases.*key"):
        connection.get("/v1/bases", BaseList)
    assert [request.url.host for request in seen] == ["host.example"]
    with pytest.raises(ServiceError, match="redirects"), connection.stream("/v1/jobs/job-0/adapter"):
        pass


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (httpx.Response(200, text="<html>"), "no tlora server"),
        (httpx.Response(404, text="not here"), "no tlora server"),
        (httpx.Response(502, text="bad gateway"), "A proxy before the server"),
        (httpx.Response(200, text="<html>", headers=HEADERS), "its answer is not understood"),
        (httpx.Response(200, json={"data": 3}, headers={"tlora-version": "9.9"}), f"The server is tlora 9.9, and this is {__version__}"),
        (httpx.Response(405, text="", headers={"tlora-version": "9.9"}), "use the same version"),
        (refusal(401, "invalid_key"), r"the key from \$TLORA_API_KEY is unknown there, or revoked"),
        (
            refusal(403, "missing_scope", "this key lacks the scope 'admin'"),
            r"lacks the scope 'admin' \(this key is from \$TLORA_API_KEY\)",
        ),
        (refusal(421, "wrong_host", "host is not served"), "https://host.example: host is not served"),
        (refusal(404, "not_found", "there is no job 'x'"), "there is no job 'x'"),
        (httpx.Response(500, text="oops", headers=HEADERS), r"the server refuses \(500\)"),
    ],
)
def test_what_is_not_the_answer_is_one_clear_error(found: httpx.Response, words: str) -> None:
    connection, _, _ = answering(found)
    with pytest.raises(ServiceError, match=words) as caught:
        connection.get("/v1/bases", BaseList)
    assert "tml-secret" not in str(caught.value)


def test_a_first_key_that_is_unknown_says_whose_it_is_and_where_the_right_one_lies(tmp_path: Path) -> None:
    """`tlora serve --data-dir` at the address of the server in the default directory: its first key is another's."""
    access = Access("http://127.0.0.1:8321", "tml-secret-key", "x", str(tmp_path / "first-key"), tmp_path)
    transport = httpx.MockTransport(lambda _: refusal(401, "invalid_key"))
    with Connection(access, transport) as connection, pytest.raises(ServiceError) as caught:
        connection.get("/v1/bases", BaseList)
    whose = f"the key from {tmp_path / 'first-key'} is unknown there: it is of the server that was last started over {tmp_path}"
    assert whose in str(caught.value)
    assert "If the one there has a --data-dir of its own, set TLORA_HOME to that; else save a key with `tlora login`" in str(caught.value)


def test_plain_connections_ask_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # it would read the key
    plain = Access("http://127.0.0.1:1", "tml-secret-key", "x", "x")
    with Connection(plain) as connection, pytest.raises(ServiceError, match=r"127\.0\.0\.1:1: no server"):
        connection.get("/v1/bases", BaseList)


def job(status: str, **fields: object) -> httpx.Response:
    body = {"id": "job-1", "name": "one", "status": status, "base_model": "base", "created_at": 1.0}
    body |= {"order": {"name": "one", "base_model": "base", "data": {"file": "file-1"}}} | fields
    return httpx.Response(200, json=body, headers=HEADERS)


def test_what_a_newer_server_says_is_kept_though_it_is_not_known() -> None:
    order = {"name": "one", "base_model": "base", "data": {"file": "file-1", "colour": "red"}, "objective": "of next year"}
    connection, _, _ = answering(job("evaluated", order=order, mood="good"))
    found = connection.get("/v1/jobs/job-1", JobView)
    assert found.status == "evaluated" and not found.has_ended and found.order_fields == order
    assert found.model_dump(mode="json").items() >= {"status": "evaluated", "order": order, "mood": "good"}.items()


def test_a_server_that_restarts_while_jobs_are_watched_is_waited_for() -> None:
    gone = [httpx.ConnectError("refused")] * 6  # one look's tries
    connection, _, _ = answering(job("queued"), *gone, job("succeeded", steps=3))
    slept: list[float] = []
    sights = list(watch(connection, ["job-1"], sleep=slept.append))
    assert [(sight.jobs[0].status, bool(sight.away)) for sight in sights] == [("queued", False), ("queued", True), ("succeeded", False)]


@pytest.mark.parametrize("found", [refusal(401, "invalid_key"), refusal(404, "not_found")])
def test_a_key_that_is_revoked_while_jobs_are_watched_ends_it(found: httpx.Response) -> None:
    connection, _, _ = answering(job("queued"), found)
    with pytest.raises(ServiceError):
        list(watch(connection, ["job-1"], sleep=lambda _: None))


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.client.jobs._PATIENCE_SECONDS", -1.0)
    connection, _, _ = answering(job("queued"), httpx.ConnectError("refused"))
    with pytest.raises(ServiceError, match="no server answers"):
        list(watch(connection, ["job-1"], sleep=lambda _: None))


def test_the_client_and_its_commands_import_no_torch_and_no_server() -> None:
    modules = (
        "tlora.cli.commands, tlora.client.transfers, tlora.client.transfers, tlora.cli.submission, tlora.cli.service_view, tlora.jobs_file"
    )
    heavy = ("torch", "transformers", "numpy", "pyarrow", "datasets", "fastapi", "sqlalchemy")
    code = f"import sys, {modules}; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("tenant", ["", "b\xf6b", "\u4e2d", "bob\n", " bob", "a\0b", "b" * 64])
def test_a_name_that_no_tenant_can_have_is_refused_before_anything_is_sent(tenant: str) -> None:
    with pytest.raises(ServiceError, match="there is no tenant .* `tlora keys list`"):
        Connection(ACCESS, httpx.MockTransport(lambda _: pytest.fail("it was sent")), tenant=tenant)
