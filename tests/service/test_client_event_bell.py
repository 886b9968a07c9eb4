"""Watching jobs by the server's events: woken by them, and as patient as before where there is no stream."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.service.served import listening, until
from tlora.client.access import Access
from tlora.client.connection import Connection
from tlora.client.jobs import EventStream, watch
from tlora.version import __version__

FOR_EVER = 1e6  # a test that is not woken ends by pytest's own limit


def test_a_watcher_is_woken_by_each_change_and_asks_for_nothing_meanwhile(tmp_path: Path) -> None:
    with listening(tmp_path / "server", eager=False, held=True) as (served, url):
        job = served.submit("alice", name="watched")["id"]
        with Connection(Access(url, served.key("alice"), "x", "x")) as connection, EventStream(connection, FOR_EVER) as event_stream:
            until(lambda: event_stream.is_open)
            seen: list[str] = []
            for sight in watch(connection, [job], every_seconds=FOR_EVER, event_stream=event_stream):
                if sight.jobs[0].status in seen[-1:]:
                    continue
                seen.append(sight.jobs[0].status)
                if seen[-1] == "preparing":
                    served.intakes[0].let_go()
                elif seen[-1] == "queued":
                    until(lambda: job in served.cluster.placed)
                    served.cluster.step(job, 1)
                elif seen[-1] == "running":
                    served.cluster.finish(job)
            assert seen == ["preparing", "queued", "running", "succeeded"]


@pytest.mark.parametrize("status", [404, 429])
def test_without_a_stream_it_only_waits(status: int) -> None:
    slept: list[float] = []
    body = {"error": {"message": "no stream", "type": "x", "code": "too_many_streams"}}
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body, headers={"tlora-version": __version__}))
    with Connection(Access("https://host.example", "tml-secret-key", "x", "x"), transport) as connection:
        event_stream = EventStream(connection, FOR_EVER, slept.append)
        event_stream._listen()  # returns: it does not ask again
        event_stream.wait(1.5, moves=False)
    assert slept == [1.5] and not event_stream.is_open


def test_a_stream_that_is_cut_off_wakes_the_watcher_and_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.client.jobs._AGAIN_SECONDS", 0.0)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, text=": open\n\ndata: {}\n\n", headers={"tlora-version": __version__})

    access = Access("https://host.example", "tml-secret-key", "x", "x")
    with Connection(access, httpx.MockTransport(answer)) as connection, EventStream(connection, FOR_EVER):
        until(lambda: len(asked) > 3)
    assert set(asked) == {"/v1/events/stream"}
