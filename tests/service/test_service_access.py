"""Who may do what, for every route of the application: no route is listed here by hand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine
from starlette.exceptions import HTTPException

from tests.service.served import ROW, Served, config_of, serving, until
from tlora.base_digest import quick_digest
from tlora.service.access import OPEN_PATHS, AccessMiddleware, needed_scope
from tlora.service.connections import Body
from tlora.service.keys import KeyRing, hash_key, revoke_key

STREAMS = "/events/stream"


def routes(served: Served) -> Iterator[tuple[str, str]]:
    """Method and path of every route."""
    found = [route for router in served.opened.app.routes for route in getattr(router, "routes", [router])]
    for route in found:
        if isinstance(route, APIRoute):
            for method in route.methods:
                yield method, route.path
        elif getattr(route, "path", None) and getattr(route, "methods", None):
            for method in route.methods or ():
                yield method, route.path


def documented(served: Served) -> set[tuple[str, str]]:
    """Method and path of every operation of the OpenAPI document."""
    document = served.opened.app.openapi()
    return {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}


def concrete(path: str, ids: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda part: ids[part[1]], path)


def body_of(served: Served, method: str, path: str, tenant: str) -> dict[str, Any]:
    """A valid request for the route, made by the tenant `tenant`."""
    bodies: dict[tuple[str, str], dict[str, Any]] = {
        ("POST", "/v1/jobs"): {"json": served.order(tenant)},
        ("POST", "/v1/sweeps"): {"json": {"job": served.order(tenant), "sweep": {"r": [1, 2]}}},
        ("POST", "/v1/jobs/{job_id}/clone"): {"json": {"set": {}}},
        ("POST", "/v1/files"): {"files": {"file": ("d.jsonl", ROW)}, "data": {"purpose": "fine-tune"}},
        ("POST", "/v1/keys"): {"json": {"name": "made", "tenant": "carol"}},
        ("POST", "/v1/bases"): {"json": {"name": "more", "path": "models/more"}},
        ("PUT", "/v1/drain"): {"json": {"draining": False}},
        ("PUT", "/v1/hosts/{host}/drain"): {"json": {"draining": False}},
        ("POST", "/v1/fine_tuning/jobs"): {"json": {"model": "base", "training_file": served.upload(tenant)}},
    }
    return bodies.get((method, path), {})


def test_every_route_is_documented(served: Served) -> None:
    missing = {(method, path) for method, path in routes(served) if method != "HEAD"} - documented(served) - {("GET", "/openapi.json")}
    assert not missing, missing
    assert len(documented(served)) >= 35


def test_every_route_against_every_credential(served: Served) -> None:
    """Without a key, with an unknown one, a revoked one, and one of each scope: what is not allowed is refused before anything is done."""
    ids = {"job_id": served.submit("alice")["id"], "file_id": served.upload("alice"), "key_id": "key-0", "name": "base", "host": "local"}
    revoked = served.key("alice", "read", "submit", "admin")
    by_scope = {scope: served.key("mallory", scope) for scope in ("read", "submit", "admin")}
    services = served.opened.services
    services.writer.do(lambda connection: revoke_key(connection, services.ring.find(revoked).key_id))  # type: ignore[union-attr]
    services.ring.forget()
    checked = 0
    for method, path in sorted({*routes(served), *documented(served)}):
        if path.endswith(STREAMS):
            continue  # their bodies do not end; their keys are looked at in test_service_streams.py
        target = concrete(path, ids)
        keyless = [{}, {"Authorization": "Bearer tml-unknown"}, {"X-API-Key": revoked}, {"Authorization": f"Basic {revoked}"}]
        for headers in [*keyless, {"Authorization": "Bearer "}, {"Authorization": "Bearer sk-123"}]:
            answer = served.client.request(method, target, headers=headers)
            wanted = {200, 405} if path in OPEN_PATHS and (method, path) != ("POST", "/login") else {401}
            assert answer.status_code in wanted, (method, path, headers, answer.status_code)
            checked += 1
        if path in OPEN_PATHS:
            continue
        for scope, key in by_scope.items():
            answer = served.client.request(method, target, headers={"X-API-Key": key})
            allowed = needed_scope(method, target) == scope
            assert (answer.status_code != 403) == allowed and answer.status_code < 500, (method, path, scope, answer.status_code)
            checked += 1
    assert checked >= 9 * 30
    assert served.ask("alice", "GET", f"/v1/jobs/{ids['job_id']}", 200)["id"] == ids["job_id"]


def test_two_tenants_and_every_route_have_no_leak(served: Served) -> None:
    """What is alice's is to bob as what there is not: the same status and the same words, and no list of his has it."""
    job = served.submit("alice", name="secret-plan")
    served.wait("alice", job["id"], "succeeded")
    file = served.upload("alice", ROW * 3, "secret-data.jsonl")
    own = {"job_id": job["id"], "file_id": file, "key_id": "key-0", "name": job["id"]}
    unknown = {"job_id": "job-0", "file_id": "file-0", "key_id": "key-0", "name": "job-0"}
    words = ("secret", job["id"], file, job["name"])
    checked = 0
    for method, path in sorted({*routes(served), *documented(served)}):
        if (path.endswith(STREAMS) and "{" not in path) or path == "/openapi.json":
            continue
        if needed_scope(method, path) == "admin" or path in OPEN_PATHS:
            continue
        body = body_of(served, method, path, "bob")
        answers = [served.ask("bob", method, concrete(path, ids), **body) for ids in (own, unknown)]
        if "{" in path:
            foreign, missing = answers
            wanted = "model_not_found" if "{name}" in path else "not_found"
            assert foreign["error"]["code"] == missing["error"]["code"] == wanted, (method, path, foreign)
            assert foreign["error"]["message"].replace(own["job_id"], "X").replace(own["file_id"], "X") == missing["error"][
                "message"
            ].replace("job-0", "X").replace("file-0", "X")
        else:
            for answer in answers:
                text = str(answer if isinstance(answer, dict) else answer.text)
                assert not any(word in text for word in words), (method, path, text)
        checked += 1
    assert checked >= 25
    for body in (
        served.order("bob", file),
        served.order("bob", start_from=job["id"]),
        served.order("bob") | {"data": {"file": [served.upload("bob"), file]}},
    ):
        assert served.ask("bob", "POST", "/v1/jobs", 404, json=body)["error"]["code"] == "not_found"
    assert served.ask("bob", "GET", "/v1/files", 404, params={"after": file})["error"]["code"] == "not_found"
    assert served.ask("alice", "GET", f"/v1/jobs/{job['id']}", 200)["status"] == "succeeded"
    assert served.ask("alice", "GET", f"/v1/files/{file}", 200)["filename"] == "secret-data.jsonl"


def test_cursors_belong_to_a_tenant_and_a_list(served: Served) -> None:
    for tenant in ("alice", "bob"):
        for _ in range(3):
            served.submit(tenant)
    cursor = served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 1})["next_cursor"]
    assert served.ask("alice", "GET", "/v1/jobs", 200, params={"cursor": cursor})["data"]
    for tenant, path in (("bob", "/v1/jobs"), ("alice", "/v1/files"), ("alice", "/v1/events")):
        assert served.ask(tenant, "GET", path, 400, params={"cursor": cursor})["error"]["code"] == "wrong_cursor"
    for forged in ("A" * 32, cursor[:-1], cursor[::-1], "é", "%00", "=" * 8):
        assert served.ask("alice", "GET", "/v1/jobs", 400, params={"cursor": forged})["error"]["code"] == "wrong_cursor"


def test_unknown_routes_and_methods_need_a_key_too(served: Served) -> None:
    assert served.client.get("/v1/nothing").status_code == 401
    unknown = served.ask("alice", "GET", "/v1/nothing", 404)["error"]
    assert unknown["code"] == "unknown_route"
    assert unknown["message"] == "there is no route '/v1/nothing'. GET /openapi.json lists those that there are"
    assert served.ask("alice", "GET", "/nothing", 403)["error"]["code"] == "missing_scope"
    for method, path, allowed in (("POST", "/v1/cluster", "GET"), ("DELETE", "/v1/jobs", "GET, POST")):
        error = served.ask("alice", method, path, 405)["error"]
        assert (error["code"], error["message"]) == ("wrong_method", f"{method} is not for this route; it has {allowed}")


@pytest.mark.parametrize(
    "host", ["evil.example", "testserver.evil.example", "127.0.0.1.evil", "", "testserver:x", "[::1", "a b", "testserver@evil"]
)
def test_a_wrong_host_is_refused_before_the_key_is_looked_at(served: Served, host: str) -> None:
    answer = served.client.get("/healthz", headers={"Host": host})
    assert answer.status_code == 421 and answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost:8321", "127.0.0.1", "[::1]:80", "TESTSERVER"])
def test_names_of_this_machine_are_served(served: Served, host: str) -> None:
    assert served.client.get("/healthz", headers={"Host": host}).status_code == 200


def test_no_answer_may_be_read_by_a_page_of_another_origin(served: Served) -> None:
    answer = served.client.options("/v1/jobs", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    assert answer.status_code == 401 and not [name for name in answer.headers if name.startswith("access-control")]
    answer = served.client.get("/healthz", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"


def test_one_tenants_flood_is_turned_away_and_leaves_the_other_alone(tmp_path: Path) -> None:
    with serving(tmp_path, limits={"requests_per_second": 5}) as served:
        statuses = {served.client.get("/v1/jobs", headers={"X-API-Key": served.key("alice")}).status_code for _ in range(50)}
        assert statuses == {200, 429}
        assert served.ask("bob", "GET", "/v1/jobs", 200)["data"] == []


def test_bodies_are_cut_at_their_limit_whatever_they_claim(served: Served) -> None:
    key = {"X-API-Key": served.key("alice")}

    long = b'{"name": "' + b"x" * served.opened.services.config.limits.body_bytes
    answer = served.client.post("/v1/jobs", content=iter([long, long]), headers=key | {"Content-Type": "application/json"})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_large"
    answer = served.client.post(
        "/v1/jobs", content=b"{}", headers=key | {"Content-Length": str(1 << 40), "Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    deep = b'{"a":' * 100_000
    assert served.client.post("/v1/jobs", content=deep, headers=key | {"Content-Type": "application/json"}).status_code in (400, 422)


def test_a_body_that_comes_too_slowly_is_cut() -> None:
    config = config_of(Path("/nowhere"), limits={"body_seconds": 0.01})
    guard = AccessMiddleware(lambda *_: None, config, ring=None)  # type: ignore[arg-type]
    body = Body(False, 0.01, 1.0)

    async def never() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "path": "/v1/jobs", "headers": []}
    with pytest.raises(HTTPException) as found:
        asyncio.run(guard._bound(scope, {}, never, body)())
    assert found.value.status_code == 408


def test_web_sockets_are_closed() -> None:
    guard = AccessMiddleware(lambda *_: None, config_of(Path("/nowhere")), ring=None)  # type: ignore[arg-type]
    sent: list[Any] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        await guard({"type": "websocket", "headers": []}, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_keys_are_made_listed_and_revoked_by_the_operator(served: Served) -> None:
    admin = {"Authorization": f"Bearer {served.key('operator', 'admin')}"}
    made = served.ask("operator", "POST", "/v1/keys", 201, json={"name": "ci", "tenant": "carol"}, headers=admin)
    assert made["key"].startswith("tml-") and made["scopes"] == ["read", "submit"]
    headers = {"Authorization": f"Bearer {made['key']}"}
    assert served.client.get("/v1/jobs", headers=headers).status_code == 200
    listed = served.ask("operator", "GET", "/v1/keys", 200, headers=admin)["data"]
    assert made["key"] not in str(listed) and {"carol"} <= {key["tenant"] for key in listed}
    assert served.ask("operator", "DELETE", f"/v1/keys/{made['id']}", 200, headers=admin)["deleted"] is True
    assert served.client.get("/v1/jobs", headers=headers).status_code == 401
    assert served.ask("operator", "DELETE", f"/v1/keys/{made['id']}", 404, headers=admin)["error"]["code"] == "not_found"
    own = served.opened.services.ring.find(served.key("operator", "admin"))
    assert own is not None
    assert served.ask("operator", "DELETE", f"/v1/keys/{own.key_id}", 409, headers=admin)["error"]["code"] == "own_key"
    for bad in ({"name": "x", "scopes": ["root"]}, {"name": "../x"}, {"name": "x", "tenant": "a b"}, {"name": "x", "scopes": []}):
        assert served.ask("operator", "POST", "/v1/keys", 422, json=bad, headers=admin)


def test_a_key_is_stored_as_its_hash_alone(served: Served) -> None:
    secret = served.key("alice")
    found = b"".join(path.read_bytes() for path in served.opened.services.config.directory.glob("tlora.db*"))
    assert secret.encode() not in found and secret[4:].encode() not in found
    assert hash_key(secret).encode() in found


def test_a_key_that_another_process_revokes_is_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    services, secret = served.opened.services, served.key("alice")
    monkeypatch.setattr("tlora.service.keys._REMEMBER_SECONDS", 1e6)
    ring = KeyRing(services.engine)
    assert ring.find(secret) is not None and ring.remembers(secret)
    monkeypatch.setattr("tlora.service.keys._REMEMBER_SECONDS", 0.1)
    ring = KeyRing(services.engine)
    caller = ring.find(secret)
    assert caller is not None and ring.is_valid(caller.key_id)
    services.writer.do(lambda connection: revoke_key(connection, caller.key_id))
    assert until(lambda: ring.find(secret) is None) and until(lambda: not ring.is_valid(caller.key_id))


def test_bases_are_added_by_the_operator(served: Served, tmp_path: Path) -> None:
    admin = {"Authorization": f"Bearer {served.key('operator', 'admin', 'read')}"}
    assert served.ask("alice", "POST", "/v1/bases", 403, json={"name": "new", "path": "models/new"})
    served.ask("operator", "POST", "/v1/bases", 201, json={"name": "new", "path": "models/new"}, headers=admin)
    served.ask("operator", "POST", "/v1/bases", 201, json={"name": "new", "path": "models/new"}, headers=admin)
    again = served.ask("operator", "POST", "/v1/bases", 409, json={"name": "new", "path": "models/other"}, headers=admin)
    assert again["error"]["code"] == "other_base"
    until(
        lambda: {"base", "new"} == {base["name"] for base in served.ask("alice", "GET", "/v1/bases")["data"] if base["status"] == "ready"}
    )
    assert served.wait("alice", served.submit("alice", base_model="new")["id"], "succeeded")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w" * 100)
    served.ask("operator", "POST", "/v1/bases", 201, json={"name": "here", "path": str(tmp_path)}, headers=admin)
    digests = {base["name"]: base.get("digest") for base in served.ask("alice", "GET", "/v1/bases")["data"]}
    assert digests["here"] == quick_digest(tmp_path) and digests["here"] and digests["new"] is None


def test_health_readiness_and_numbers(served: Served) -> None:
    assert served.client.get("/healthz").text == "ok\n"
    assert served.client.get("/readyz").text == "ready\n"
    served.wait("alice", served.submit("alice")["id"], "succeeded")
    text = served.client.get("/metrics", headers={"X-API-Key": served.key("operator", "admin")}).text
    assert 'tlora_jobs{status="succeeded"} 1.0' in text and "tlora_ready 1.0" in text
    served.opened.services.live.fault = "the controller ended"
    answer = served.client.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "the controller ended\n")
    served.opened.services.engine.dispose()


def test_prometheus_reads_counters_latencies_codes_and_tenants(served: Served) -> None:
    served.wait("alice", served.submit("alice")["id"], "succeeded")
    served.ask("bob", "GET", "/v1/jobs/job-0", 404)
    assert served.client.get("/v1/jobs").status_code == 401
    text = served.client.get("/metrics", headers={"X-API-Key": served.key("operator", "admin")}).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name: family.type for name, family in families.items()}
    for name in ("tlora_writer_commits", "tlora_writer_operations", "tlora_connections_ended", "tlora_events", "tlora_requests"):
        assert kinds[name] == "counter", name
    assert kinds["tlora_jobs"] == kinds["tlora_ready"] == "gauge" and kinds["tlora_request_seconds"] == "histogram"
    counted = {tuple(sorted(sample.labels.items())): sample.value for sample in families["tlora_requests"].samples}

    def count(method: str, code: str, tenant: str) -> float:
        return counted.get((("code", code), ("method", method), ("tenant", tenant)), 0.0)

    assert count("POST", "201", "alice") == 1 and count("GET", "404", "bob") == 1 and count("GET", "401", "") == 1
    posts = [sample for sample in families["tlora_request_seconds"].samples if sample.labels.get("method") == "POST"]
    assert next(sample.value for sample in posts if sample.name.endswith("_count")) == 2, "an upload and an order"


def test_a_store_that_is_down_is_said(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are answered 503 with the driver's words and when to ask again, and whoever asks whether the server is ready hears it."""
    services = served.opened.services
    headers = {"X-API-Key": served.key("alice")}
    operator = {"X-API-Key": served.key("operator", "admin")}
    with monkeypatch.context() as patch:
        never_mended = property(lambda _: "the database cannot be written (disk full)", lambda *_: None)  # a write may go well meanwhile
        patch.setattr(type(services.writer), "problem", never_mended, raising=False)
        answer = served.client.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "the database cannot be written (disk full)\n")
        assert "\ntlora_ready 0.0\n" in served.client.get("/metrics", headers=operator).text
    with monkeypatch.context() as patch:
        patch.setattr(services, "engine", create_engine(f"sqlite:///{tmp_path / 'gone' / 'tlora.db'}"))
        for path in ("/v1/jobs", "/v1/files", "/v1/fine_tuning/jobs"):
            answer = served.client.get(path, headers=headers)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5", answer.text
            assert "unable to open database file" in answer.json()["error"]["message"]
        assert served.client.get("/readyz").status_code == 503
    assert served.client.get("/readyz").text == "ready\n" and served.client.get("/v1/jobs", headers=headers).status_code == 200


def test_a_database_that_does_not_say_whose_key_it_is(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a driver that finds nothing at its address."""
    served.key("alice")
    monkeypatch.setattr(served.opened.services.ring, "_engine", create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none"))
    served.opened.services.ring.forget()
    for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/events/stream")):
        refused = served.ask("alice", method, path, 503)["error"]
        assert refused["code"] == "store_unavailable" and refused["message"].startswith("the database does not answer (")
        assert "127.0.0.1" not in refused["message"] and "nobody" not in refused["message"]  # anyone may ask
        assert refused["message"].endswith("Send the request again later")
    assert served.client.get("/healthz").status_code == 200


def test_a_body_that_is_not_sent_as_json_is_told_how(served: Served) -> None:
    """curl -d without a header, the most common slip."""
    order = json.dumps(served.order("alice"))
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    refused = served.ask("alice", "POST", "/v1/jobs", 422, content=order, headers=headers)["error"]
    assert refused["message"] == "the body is not sent as JSON. Send it with `Content-Type: application/json`"


@pytest.mark.parametrize("name", [b"", b"b\xf6b", b"\xff", b"a\0b", b"bob' or 1=1", b"b" * 5000, b"B\xc3\xb6b"])
def test_a_tenant_that_cannot_be_is_not_looked_for(served: Served, name: bytes) -> None:
    """A database may refuse the name itself, as PostgreSQL does one with a NUL."""
    no_database: Any = None
    assert KeyRing(no_database).find_tenant(name.decode("latin-1")) is None
    operator = served.key("operator", "admin", "read").encode()
    answer = served.client.get("/v1/jobs", headers=[(b"x-api-key", operator), (b"tlora-tenant", name)])
    assert answer.status_code == 404 and "there is no tenant" in answer.json()["error"]["message"]


def test_a_tenant_on_whose_jobs_an_operator_acts_is_counted_by_its_name(served: Served) -> None:
    """Also where no key of its own has been seen."""
    served.key("dave")
    operator = {"X-API-Key": served.key("operator", "admin", "read")}
    assert served.client.get("/v1/jobs", headers=operator | {"Tlora-Tenant": "dave"}).status_code == 200
    text = served.client.get("/metrics", headers=operator).text
    assert 'tlora_requests_total{code="200",method="GET",tenant="dave"} 1.0' in text
