"""POST /v1/jobs is answered without FastAPI where the order is good, and exactly as FastAPI's route answers it everywhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import update

from tests.service.served import Served
from tlora.api import OrderedData, OrderSpec
from tlora.service import app
from tlora.service.database.tables import answers
from tlora.service.keys import SCOPES

DIRECT, BY_ROUTE = "application/json", "application/vnd.tlora+json"  # the second is JSON for FastAPI alone
NUMBERS = "0 1 -1 7 1.0 1.5 1e3 1e400 -0.0 NaN Infinity 9223372036854775808 1180591620717411303424"
WORDS = r'"" "1" "1.5" "true" "x" "all-linear" "auto" "epoch" "dpo" "cosine" "divide" "base" "last" "drop" "file-2" "\ud800" "\u0000"'
NEEDS = {"expert_rank": {"target_parameters": '["experts.up_proj"]'}}  # what a field is refused without
LISTS = '[] [1] [1,2] ["q_proj"] ["file-1",{"file":"file-2","weight":2}] [null] [[1]]'
MAPPINGS = '{} {"a":1} {"a":1.5,"b":true,"c":"x"} {"a":"b"} {"file":"file-1"} {"a":1,"a":2} {"a":{}}'
VALUES = [*f"{NUMBERS} true false null {WORDS} {LISTS} {MAPPINGS}".split(), "1" * 5000]


def read_by_route(body: bytes) -> str | None:
    """What FastAPI makes of it: parsed, and then validated."""
    try:
        order = OrderSpec.model_validate(json.loads(body))
    except ValueError:
        return None
    return repr(order)


def body_with(key: str, value: str) -> bytes:
    """An order whose `key` has this JSON."""
    data = {"file": '"file-1"'} | ({key.removeprefix("data."): value} if key.startswith("data.") else {})
    fields = {"name": '"job"', "base_model": '"base"', "data": _object(data)} | NEEDS.get(key, {})
    return _object(fields if key.startswith("data.") else fields | {key: value}).encode()


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


@pytest.mark.parametrize("key", [*OrderSpec.model_fields, *(f"data.{key}" for key in OrderedData.model_fields), "unknown"])
def test_what_is_read_directly_is_what_the_route_reads(key: str) -> None:
    accepted = 0
    for body in (body_with(key, value) for value in VALUES):
        direct = app._order_in(body)
        if direct is not None:
            accepted += 1
            assert repr(direct) == read_by_route(body), body
    assert (accepted > 0) == (key != "unknown"), key


@pytest.fixture
def accepted_directly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    accept = app.accept

    async def note_and_accept(*arguments: Any) -> Any:
        found.append(arguments[2][0].name)
        return await accept(*arguments)

    monkeypatch.setattr(app, "accept", note_and_accept)
    return found


def both(served: Served, body: bytes, **headers: str) -> list[tuple[int, Any]]:
    key = {"Authorization": f"Bearer {served.key('alice')}"}
    found: list[tuple[int, Any]] = []
    for kind in (DIRECT, BY_ROUTE):
        answer = served.client.post("/v1/jobs", content=body, headers=key | {"Content-Type": kind} | headers)
        found.append((answer.status_code, answer.json()))
    return found


def test_good_orders_are_taken_directly_and_by_the_route_alike(served: Served, accepted_directly: list[str]) -> None:
    order = served.order("alice", r=8)
    direct, other = both(served, json.dumps(order).encode())
    assert accepted_directly == [order["name"]] and direct[0] == other[0] == 201
    own = dict.fromkeys(("id", "created_at"))
    assert direct[1] | own == other[1] | own


def test_refusals_are_the_routes_own(served: Served, accepted_directly: list[str]) -> None:
    order = served.order("alice")
    bodies = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"name": NaN}', b"[" * 100_000]
    for changes in (
        *({"r": 0}, {"r": 257}, {"rr": 3}, {"name": "a b"}, {"data": {}}, {"data": {"file": "file-0", "packing": "often"}}),
        *({"base_model": "other"}, {"data": {"file": "file-0"}}, {"gpus": 5, "batch_size": 2}, {"start_from": "job-0"}, {"gpus": 8}),
    ):
        bodies.append(json.dumps(order | changes).encode())
    for body in bodies:
        direct, other = both(served, body)
        assert direct == other and direct[0] >= 400, body
    assert accepted_directly  # those that only the store or this server's settings refuse


@pytest.mark.parametrize(
    ("old", "new", "twice"),
    [
        ('"name":', '"name": "first", "name":', "name"),
        ('"data": {', '"metadata": {"a": "1", "a": "1"}, "data": {', "a"),
        ('"data": {', '"data": {"file": 3, ', "file"),
    ],
)
def test_an_order_with_a_json_key_twice_is_refused(served: Served, accepted_directly: list[str], old: str, new: str, twice: str) -> None:
    body = json.dumps(served.order("alice"))
    assert old in body
    direct, other = both(served, body.replace(old, new, 1).encode())
    said = f"the body: the key '{twice}' stands twice in one object; keep one of the two"
    assert direct == other and direct[0] == 422 and direct[1]["error"]["message"] == said
    assert not accepted_directly


def test_every_route_refuses_a_json_key_twice(served: Served) -> None:
    """Where it takes JSON: a sweep, a clone, OpenAI's jobs, and what the operator sends."""
    takes: list[Any] = [route for router in app.ROUTERS for route in router.routes if route.dependant.body_params]  # type: ignore[attr-defined]
    assert {route.path for route in takes} >= {"/v1/jobs", "/v1/sweeps", "/v1/jobs/{job_id}/clone", "/v1/fine_tuning/jobs"}
    for route in takes:
        path = route.path_format.format(**dict.fromkeys(route.param_convertors, "job-1"))
        headers = {"Authorization": f"Bearer {served.key('operator', *SCOPES)}", "Content-Type": "application/json"}
        answer = served.client.request(*route.methods, path, content=b'{"a": 1, "a": 2}', headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid"), (path, answer.text)
        assert "the key 'a' stands twice" in answer.json()["error"]["message"], path
        answer = served.client.request(*route.methods, path, content=b"\xff{", headers=headers | {"Content-Type": "text/plain"})
        assert 400 <= answer.status_code < 500, "what is no text is no failure of the server"


def test_a_key_is_one_for_both_ways(served: Served, accepted_directly: list[str]) -> None:
    body = json.dumps(served.order("alice")).encode()
    direct, other = both(served, body, **{"Idempotency-Key": "once"})
    assert direct == other and direct[0] == 201 and accepted_directly
    other = json.dumps(json.loads(body) | {"seed": 7}).encode()
    direct, other = both(served, other, **{"Idempotency-Key": "once"})
    assert direct == other and direct[0] == 409
    direct, other = both(served, body, **{"Idempotency-Key": "k" * 256})
    assert direct == other and direct[0] == 422


def test_a_key_that_an_older_server_has_answered_is_answered_again(served: Served) -> None:
    """It kept the hash of an order whose keys were in another order."""
    body = json.dumps(served.order("alice")).encode()
    first, _ = both(served, body, **{"Idempotency-Key": "once"})
    served.opened.services.writer.do(lambda connection: connection.execute(update(answers).values(payload="0" * 64)))
    assert both(served, body, **{"Idempotency-Key": "once"}) == [first, first] and first[0] == 201
