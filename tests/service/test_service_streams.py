"""Server-sent events on a socket: as they are committed, from where a client was, and not after its key is revoked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.served import ROW, Served, listening, until
from tlora.service.keys import revoke_key
from tlora.service.routes import streams


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Served, str]]:
    with listening(tmp_path / "server", eager=False) as found:
        yield found


def read_events(answer: httpx.Response) -> Iterator[tuple[int, str, dict[str, object]]]:
    number, kind = 0, ""
    for line in answer.iter_lines():
        key, _, value = line.partition(": ")
        if key == "id":
            number = int(value)
        elif key == "event":
            kind = value
        elif key == "data":
            yield number, kind, json.loads(value)


def test_a_jobs_events_come_as_they_happen_and_end_with_the_job(live: tuple[Served, str]) -> None:
    served, _ = live
    job = served.submit("alice")["id"]
    key = {"X-API-Key": served.key("alice")}
    with served.client.stream("GET", f"/v1/jobs/{job}/events/stream", headers=key) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read_events(answer)
        found = [next(events), next(events)]
        until(lambda: job in served.cluster.placed)
        served.cluster.step(job, 1)
        found.append(next(events))
        served.cluster.finish(job)
        found += list(events)  # it ends by itself
    assert [kind for _, kind, _ in found] == ["created", "queued", "running", "succeeded"]
    assert all(data["job"] == job for _, _, data in found)
    with served.client.stream("GET", f"/v1/jobs/{job}/events/stream", headers=key | {"Last-Event-ID": str(found[1][0])}) as answer:
        assert [kind for _, kind, _ in read_events(answer)] == ["running", "succeeded"]


def test_a_tenants_stream_has_all_its_jobs_and_no_other_tenants(live: tuple[Served, str]) -> None:
    served, _ = live
    before = served.submit("alice", name="before")["id"]
    served.wait("alice", before, "queued")  # and nothing happens to it from then on
    with served.client.stream("GET", "/v1/events/stream", headers={"X-API-Key": served.key("alice")}) as answer:
        events = read_events(answer)
        made: list[str] = []

        def submit() -> None:
            served.submit("bob")
            made.append(served.submit("alice")["id"])

        until(lambda: served.opened.services.streams.get(_tenant(served), 0) == 1)
        thread = threading.Thread(target=submit)
        thread.start()
        first = next(events)
        thread.join()
        assert first[1] == "created" and first[2]["job"] == made[0]


def _tenant(served: Served) -> str:
    caller = served.opened.services.ring.find(served.key("alice"))
    assert caller is not None
    return caller.tenant


def test_a_key_that_is_revoked_while_it_streams_streams_no_more(live: tuple[Served, str], monkeypatch: pytest.MonkeyPatch) -> None:
    served, _ = live
    monkeypatch.setattr(streams, "_ALIVE_SECONDS", 0.01)
    services = served.opened.services
    caller = services.ring.find(served.key("alice"))
    assert caller is not None
    with served.client.stream("GET", "/v1/events/stream", headers={"X-API-Key": served.key("alice")}) as answer:
        until(lambda: services.streams.get(caller.tenant, 0) == 1)
        services.writer.do(lambda connection: revoke_key(connection, caller.key_id))
        services.ring.forget()
        found = list(read_events(answer))
    assert [kind for _, kind, _ in found] == ["end"]
    until(lambda: services.streams[caller.tenant] == 0)


def test_an_adapter_that_is_being_sent_is_cut_when_the_key_is_revoked(live: tuple[Served, str]) -> None:
    served, _ = live
    services = served.opened.services
    job = served.submit("alice")["id"]
    until(lambda: job in served.cluster.placed)
    served.cluster.finish(job)
    served.wait("alice", job, "succeeded")
    (services.config.directory / "jobs" / job / "adapter_model.safetensors").write_bytes(bytes(64 << 20))
    caller = services.ring.find(served.key("alice"))
    assert caller is not None
    with served.client.stream("GET", f"/v1/jobs/{job}/adapter", headers={"X-API-Key": served.key("alice")}) as answer:
        chunks = answer.iter_raw(1 << 16)
        next(chunks)
        services.writer.do(lambda connection: revoke_key(connection, caller.key_id))
        services.ring.forget()
        with pytest.raises(httpx.RemoteProtocolError):  # less came than was promised
            for _ in chunks:
                pass


def test_streams_of_a_tenant_are_counted(tmp_path: Path) -> None:
    with listening(tmp_path / "server", eager=False, limits={"streams": 1}) as (served, _):
        key = {"X-API-Key": served.key("alice")}
        with served.client.stream("GET", "/v1/events/stream", headers=key):
            until(lambda: served.opened.services.streams.get(_tenant(served), 0) == 1)
            assert served.ask("alice", "GET", "/v1/events/stream", 429)["error"]["code"] == "too_many_streams"
        until(lambda: served.opened.services.streams[_tenant(served)] == 0)
        assert served.upload("alice", ROW)


def test_of_a_burst_of_streams_those_above_the_limit_are_refused_and_none_is_cut(tmp_path: Path) -> None:
    with listening(tmp_path / "server", eager=False, limits={"streams": 3}) as (served, _):
        key, over, found = {"X-API-Key": served.key("alice")}, threading.Event(), list[int]()
        begin = threading.Barrier(12)

        def watch() -> None:
            begin.wait()
            with served.client.stream("GET", "/v1/events/stream", headers=key) as answer:
                found.append(answer.status_code)
                over.wait()

        threads = [threading.Thread(target=watch) for _ in range(12)]
        for thread in threads:
            thread.start()
        until(lambda: len(found) == 12)
        assert sorted(found) == [200] * 3 + [429] * 9
        over.set()
        for thread in threads:
            thread.join()
        until(lambda: served.opened.services.streams[_tenant(served)] == 0)


@pytest.mark.parametrize("number", ["9" * 18, "9" * 19, "9" * 400])
def test_an_event_that_no_store_can_number_is_refused_or_waited_for(served: Served, number: str) -> None:
    job = served.submit("alice")["id"]
    served.wait("alice", job, "succeeded")
    headers = {"X-API-Key": served.key("alice"), "Last-Event-ID": number}
    answer = served.client.get(f"/v1/jobs/{job}/events/stream", headers=headers)
    assert answer.status_code == (200 if len(number) == 18 else 422), answer.text
    assert served.client.get("/v1/events", headers=headers, params={"after": number}).status_code in (200, 422)


@pytest.mark.parametrize("after", [0, 1])
def test_a_stream_that_begins_at_or_after_the_last_event_of_an_ended_job_ends(served: Served, after: int) -> None:
    job = served.submit("alice")["id"]
    served.wait("alice", job, "succeeded")
    last = served.ask("alice", "GET", f"/v1/jobs/{job}/events", 200)["data"][-1]["id"]
    found = served.ask("alice", "GET", f"/v1/jobs/{job}/events/stream", 200, headers={"Last-Event-ID": str(last + after)})
    assert "data:" not in found.text
    assert not any(served.opened.services.streams.values()), "its slot is free again"
