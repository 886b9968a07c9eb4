"""The queue that a user sees is the policy's own: its order is that in which jobs then start, with the reason and an expected start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import in_every_run
from tests.service.served import Served, serving, until
from tlora.protocol import JobGroup
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.state import ClusterState


def queue_of(served: Served, tenant: str) -> dict[str, dict[str, Any]]:
    """Jobs of the tenant that wait for a GPU, by id, in their order. Those that have one and load their base are not among them."""
    found = served.ask(tenant, "GET", "/v1/cluster", 200)["waiting"]
    return {one["job"]: one for one in found if one["place"] is not None}


def running(served: Served) -> set[str]:
    return {job for job in served.cluster.placed if job in served.cluster.specs}


@pytest.mark.parametrize("policy", in_every_run(["residual_capacity", "fifo"], 0))
def test_jobs_start_in_the_order_that_is_shown_until_the_queue_is_empty(tmp_path: Path, policy: str) -> None:
    """Eight jobs on two places; the later one was submitted, the higher is its priority."""
    with serving(tmp_path / "server", eager=False, policy=policy) as served:
        file = served.upload("alice")
        jobs = [served.submit("alice", file=file, name=f"j{n}", priority=n // 2, max_slowdown=1.0)["id"] for n in range(8)]
        until(lambda: len(queue_of(served, "alice")) == 6 and len(running(served)) == 2)
        while True:
            waiting = [job for job in jobs if job not in running(served) and job in served.cluster.specs]
            if not waiting:
                break
            wanted = sorted(waiting, key=lambda job: (-(jobs.index(job) // 2), jobs.index(job)))

            def shown(wanted: list[str] = wanted) -> bool:
                served.cluster.tick()
                return list(queue_of(served, "alice")) == wanted

            until(shown)
            queue = queue_of(served, "alice")
            assert [one["place"] for one in queue.values()] == list(range(1, len(wanted) + 1))
            first = served.ask("alice", "GET", f"/v1/jobs/{wanted[0]}", 200)
            assert first["queue_place"] == 1 and "it is the next" in first["waiting_for"]
            before = running(served)
            served.cluster.finish(min(before))
            started = until(lambda before=before: running(served) - before)
            assert started == {wanted[0]}, "the one that was shown as the next"


def test_a_waiting_job_names_the_setting_and_when_it_is_expected_to_start(tmp_path: Path) -> None:
    with serving(tmp_path / "server", eager=False) as served:
        file = served.upload("alice")
        jobs = [served.submit("alice", file=file, name=f"j{n}", max_slowdown=1.0)["id"] for n in range(4)]

        def look() -> dict[str, Any] | None:
            served.cluster.tick()
            found = served.ask("alice", "GET", f"/v1/jobs/{jobs[-1]}", 200)
            return found if found["queue_place"] == 2 and "max_slowdown" in found["waiting_for"] else None

        last = until(look)
        assert "1 job waits before it" in last["waiting_for"] and "expected to start" in last["waiting_for"]
        assert last["estimated_start"] >= time.time() - 60.0
        before = queue_of(served, "alice")[jobs[-2]]
        assert before["place"] == 1 and before["estimated_start"] <= last["estimated_start"] + 1.0
        served.ask("alice", "POST", f"/v1/jobs/{jobs[-1]}/pause", 200)
        paused = served.ask("alice", "GET", f"/v1/jobs/{jobs[-1]}", 200)
        assert (paused["queue_place"], paused["estimated_start"]) == (None, None)


@pytest.mark.parametrize("policy", ["residual_capacity", "easy"])
def test_a_wide_job_has_a_reservation_and_both_sides_are_told(tmp_path: Path, policy: str) -> None:
    """Two places, of which one is free: the job behind would not end before the other comes free."""
    with serving(tmp_path / "server", eager=False, policy=policy) as served:
        file = served.upload("alice")

        def submit(name: str, **fields: Any) -> str:
            job = served.submit("alice", file=file, name=name, max_slowdown=1.0, **fields)["id"]
            until(lambda: job in served.cluster.specs)
            return job

        runs, wide, narrow = submit("runs"), submit("wide", gpus=2, priority=1), submit("narrow")

        def told(job: str, words: str) -> bool:
            served.cluster.tick()
            return words in (served.ask("alice", "GET", f"/v1/jobs/{job}", 200)["waiting_for"] or "")

        until(lambda: told(wide, "will soonest start are kept for it"))
        until(lambda: told(narrow, "kept for a job before it that asks for 2"))
        assert running(served) == {runs}
        served.cluster.finish(runs)
        until(lambda: running(served) == {wide})
        served.cluster.finish(wide)
        until(lambda: running(served) == {narrow})


def test_a_tenant_that_has_used_less_is_shown_and_is_the_next(tmp_path: Path) -> None:
    with serving(tmp_path / "server", eager=False) as served:
        file = served.upload("alice")
        many = [served.submit("alice", file=file, name=f"a{n}", max_slowdown=1.0)["id"] for n in range(30)]
        until(lambda: len(queue_of(served, "alice")) == 28)
        own = served.submit("bob", max_slowdown=1.0)["id"]
        until(lambda: own in served.cluster.specs)

        def shown() -> bool:
            served.cluster.tick()
            reasons = [one["reason"] for one in queue_of(served, "alice").values()]
            own_places = [one["place"] for one in queue_of(served, "bob").values()]
            return own_places == [1] and all("used less CPU time" in reason for reason in reasons)

        until(shown)
        assert served.ask("alice", "GET", "/v1/cluster", 200)["others_waiting"] == 1
        before = running(served)
        served.cluster.finish(min(before))
        assert until(lambda: running(served) - before) == {own} and many


def test_a_forecast_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("tlora.service.waiting_queue.forecast", broken)
    with serving(tmp_path / "server", eager=False) as served:
        file = served.upload("alice")
        jobs = [served.submit("alice", file=file, max_slowdown=1.0)["id"] for _ in range(3)]
        until(lambda: len(running(served)) == 2)
        assert served.ask("alice", "GET", f"/v1/jobs/{jobs[-1]}", 200)["estimated_start"] is None
        served.cluster.finish(min(running(served)))
        until(lambda: jobs[-1] in running(served))
    assert "the queue's order is not known" in caplog.text


def test_a_policy_that_fails_is_logged_once_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decide, faults = LIVE_POLICIES["residual_capacity"](), ["first", "second", "first"]

    def fails(state: ClusterState) -> list[JobGroup]:
        if state.pending and faults:
            raise ZeroDivisionError(faults.pop())
        return decide(state)

    monkeypatch.setattr("tlora.service.controller.LIVE_POLICIES", {"residual_capacity": lambda: fails})
    with serving(tmp_path / "server", eager=False) as served:
        job = served.submit("alice", file=served.upload("alice"))["id"]

        def starts() -> bool:
            served.cluster.tick()
            return job in running(served)

        until(starts)
        assert served.opened.services.live.counts["policy_fault"] == 3
    assert caplog.text.count("the policy could not decide (ZeroDivisionError: first)") == 1
    assert caplog.text.count("the policy could not decide (ZeroDivisionError: second)") == 1
