"""The system's clock is set, by hours and in both directions, while things are written: nothing is removed for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.served import serving
from tlora.data import scratch
from tlora.service.housekeeping import Housekeeping
from tlora.service.storage import SteadyClock
from tlora.service.uploads import SCRATCH

HOURS = 3 * 3600.0


@dataclass
class Clocks:
    """A system clock that is set by `ahead`, and a steady one."""

    passed: float = 0.0
    ahead: float = 0.0

    def wall(self) -> float:
        return time.time() + self.passed + self.ahead

    def steady(self) -> float:
        return time.monotonic() + self.passed

    def made(self) -> SteadyClock:
        return SteadyClock(self.wall, self.steady)


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.sampled_from([0.0, 0.0, HOURS, -HOURS, 0.5])), max_size=20), st.integers(0, 19))
def test_nothing_ever_seems_older_than_it_is(steps: list[tuple[float, float]], made_at: int) -> None:
    clocks = Clocks()
    clock, stamp, age = clocks.made(), clocks.wall(), 0.0
    for number, (seconds, set_by) in enumerate(steps):
        clocks.passed += seconds
        age += seconds
        clocks.ahead += set_by
        now = clock.now()
        assert now - stamp <= age + 0.5 * len(steps) + 1.0
        if number == made_at:
            stamp, age = clocks.wall(), 0.0


def test_time_that_passes_counts() -> None:
    clocks = Clocks()
    clock, began = clocks.made(), clocks.wall()
    clocks.passed += HOURS
    assert clock.now() - began >= HOURS
    clocks.ahead -= HOURS
    clocks.passed += 2 * HOURS
    assert clock.now() - began >= 2 * HOURS - 1.0, "after a jump back things seem younger by that, and no more"


@pytest.mark.parametrize("set_by", [HOURS, -HOURS], ids=["ahead", "back"])
def test_uploads_sets_and_ended_jobs_stay_when_the_clock_is_set(tmp_path: Path, set_by: float) -> None:
    with serving(tmp_path / "server", retention={"ended_jobs_seconds": 3600.0, "answers_seconds": 3600.0}) as served:
        clocks = Clocks()
        served.opened.services.storage.clock = clocks.made()
        file = served.upload("alice")
        order = served.order("alice", file)
        job = served.ask("alice", "POST", "/v1/jobs", 201, json=order, headers={"Idempotency-Key": "k"})
        served.wait("alice", job["id"], "succeeded")
        tenant = next((tmp_path / "server" / "files").iterdir()).name
        upload, making = (
            tmp_path / "server" / "files" / tenant / f"{SCRATCH}upload",
            tmp_path / "server" / "tokens" / tenant / f"{SCRATCH}set-1",
        )
        upload.write_bytes(b"half of it")
        making.mkdir(parents=True)
        (making / "tokens.bin").write_bytes(b"1")
        clocks.ahead += set_by
        if set_by < 0:  # what is written then has the time of then
            for path in (upload, making, making / "tokens.bin"):
                os.utime(path, (clocks.wall(), clocks.wall()))
        keeper = Housekeeping(served.opened.services)
        for _ in range(3):
            keeper.sweep()
            clocks.passed += 60.0
        assert upload.exists() and (making / "tokens.bin").exists()
        assert served.ask("alice", "GET", f"/v1/jobs/{job['id']}", 200)["status"] == "succeeded"
        assert served.ask("alice", "POST", "/v1/jobs", 201, json=order, headers={"Idempotency-Key": "k"})["id"] == job["id"]
        clocks.passed += 2 * HOURS
        keeper.sweep()
        assert not upload.exists() and not making.exists(), "they are old by now"
        if set_by > 0:
            served.ask("alice", "GET", f"/v1/jobs/{job['id']}", 404)


def test_a_directory_is_not_old_while_its_process_is_there(tmp_path: Path) -> None:
    """However long ago it was begun by a clock that was set."""
    own = scratch.private_directory(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"{scratch.SCRATCH_PREFIX}{ended.pid}-0123"
    left.mkdir()
    for path in (own, left):
        os.utime(path, (0, 0))
    scratch.remove_old(tmp_path)
    assert own.exists() and not left.exists()
