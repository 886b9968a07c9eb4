"""A full disk for checkpoints under the real service: what was accepted waits for room, and nothing of it is lost."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import write_rows
from tests.service.test_real_server import Server, running, until
from tests.small_disks import mounted, resize

_ORDER: dict[str, Any] = {"max_steps": 12, "batch_size": 4, "r": 32, "save_steps": 5, "learning_rate": 1e-3}
_SMALL = "size=64k"
"""No checkpoint of such a job has room there, nor its adapter alone, however soon or late it is filled up. That it has begun has room."""


def fill(disk: Path) -> Path:
    """Somebody else's file, which takes all the space that there is."""
    path = disk / "ballast"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path


def logs(directory: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in (directory / "workers").glob("*.log"))


def test_jobs_wait_for_room_and_end_with_the_adapters_of_an_untroubled_run(tmp_path: Path) -> None:
    """Full while one trains: its end waits, as does a job that begins; a kill of the server changes nothing."""
    directory = tmp_path / "server"
    directory.mkdir()
    data = write_rows(tmp_path / "data.jsonl", 40)
    with mounted(directory / "jobs", _SMALL) as disk, running(directory) as servers:
        servers.append(Server(directory))
        file = servers[0].ask("POST", "/v1/files", files={"file": ("d.jsonl", data.read_bytes())}, data={"purpose": "fine-tune"})["id"]
        jobs = {"trains": servers[0].submit(name="trains", seed=1, data={"file": file}, **_ORDER)}
        until(lambda: servers[0].job(jobs["trains"])["steps"] > 0)
        fill(disk)
        jobs["begins"] = servers[0].submit(name="begins", seed=2, data={"file": file}, **_ORDER)
        until(lambda: "waits until there is room" in logs(directory))
        until(lambda: servers[0].job(jobs["trains"])["steps"] == _ORDER["max_steps"])
        for job in jobs.values():
            until(lambda job=job: "room on the disk" in (servers[0].job(job)["waiting_for"] or ""))
        assert servers[0].job(jobs["trains"])["status"] == "running"
        assert "Remedy: free some space there. It waits until there is room, and then goes on by itself" in logs(directory)
        assert "output_dir" not in logs(directory)
        assert servers[0].end(signal.SIGKILL) == -signal.SIGKILL
        servers.append(Server(directory))
        found = [servers[1].job(job)["status"] for job in jobs.values()]
        assert set(found) <= {"running", "queued"}, found
        resize(disk, "16m")
        ends = {name: servers[1].ended(job) for name, job in jobs.items()}
        assert {end["status"] for end in ends.values()} == {"succeeded"}, [end["reason"] for end in ends.values()]
        for seed, name in ((1, "trains"), (2, "begins")):
            again = servers[1].submit(name="again", seed=seed, data={"file": file}, **_ORDER)
            assert servers[1].ended(again)["status"] == "succeeded"
            assert servers[1].adapter(jobs[name]) == servers[1].adapter(again), name


@pytest.mark.soak
def test_a_server_ends_while_its_jobs_wait_for_room(tmp_path: Path) -> None:
    """What it cannot write is trained once more, from the last checkpoint that it could."""
    directory = tmp_path / "server"
    directory.mkdir()
    data = write_rows(tmp_path / "data.jsonl", 40)
    with mounted(directory / "jobs", _SMALL) as disk, running(directory) as servers:
        servers.append(Server(directory))
        file = servers[0].ask("POST", "/v1/files", files={"file": ("d.jsonl", data.read_bytes())}, data={"purpose": "fine-tune"})["id"]
        job = servers[0].submit(name="a", data={"file": file}, **_ORDER)
        until(lambda: servers[0].job(job)["steps"] > 0)
        fill(disk)
        until(lambda: "waits until there is room" in logs(directory))
        assert servers[0].end() == 0
        resize(disk, "16m")
        servers.append(Server(directory))
        end = servers[1].ended(job)
        assert (end["status"], end["steps"]) == ("succeeded", _ORDER["max_steps"]), end["reason"]
