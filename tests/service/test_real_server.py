"""The real thing: `tlora serve` as a process that trains on a CPU, killed with SIGKILL while jobs train, and started again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from tests.engine.tiny_runs import job as job_fields
from tests.engine.tiny_runs import sha256, train, write_rows
from tests.process_hooks import REPORT_EACH_STEP, run_in_each_process
from tests.service import served
from tlora.json_file import read_object

T = TypeVar("T")
# No job whose seed is the number in the file HELD_FROM, or a larger one, goes beyond its tenth step: a server is killed while jobs train,
# whatever the machine's speed.
HOLD = """
import os, time
if "tlora.engine.ranks.rank" in sys.orig_argv:
    from tlora.group.job_run import JobRun
    batch_row = JobRun.batch_row
    def held_from():
        with open(os.environ["HELD_FROM"]) as file:
            return int(file.read())
    def held(run, row):
        while run.progress.step >= 10 and run.spec.seed >= held_from():
            time.sleep(0.01)
        return batch_row(run, row)
    JobRun.batch_row = held
"""
BASE = Path(__file__).parents[2] / "demo" / "base"
NEVER = 10**9
OWN_CLIENT = Path(__file__).parents[2] / "examples" / "own_client.py"


def until(look: Callable[[], T | None]) -> T:
    """Each look is a request, which takes the cores from those that train."""
    return served.until(look, 0.03)


class Server:
    """A process over `directory`, and a client of it with the first key."""

    def __init__(self, directory: Path, *options: str, settings: str = "") -> None:
        self.directory = directory
        (directory / "address").unlink(missing_ok=True)
        command = [sys.executable, "-m", "tlora", "serve", "--data-dir", str(directory), "--port", "0", "--base-model", f"base={BASE}"]
        config = directory.parent / "server.yaml"
        config.write_text(f"device: cpu\ngpus: [0, 1]\ndeterministic: true\n{settings}")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        with (directory.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(config), *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        address = until(self._address)
        headers = {"X-API-Key": (directory / "first-key").read_text().strip()}
        self.client = httpx.Client(base_url=address, headers=headers, timeout=120)
        until(self._ready)

    def _address(self) -> str | None:
        assert self.process.poll() is None, (self.directory.parent / "server.log").read_text()
        path = self.directory / "address"
        return path.read_text().strip() if path.is_file() else None

    def _ready(self) -> bool:
        assert self.process.poll() is None, (self.directory.parent / "server.log").read_text()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, method: str, path: str, **options: Any) -> Any:
        answer = self.client.request(method, path, **options)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def submit(self, **fields: Any) -> str:
        return self.ask("POST", "/v1/jobs", json={"base_model": "base"} | fields)["id"]

    def job(self, job: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/jobs/{job}")

    def all_jobs(self) -> list[str]:
        """Their ids, page by page."""
        found: list[str] = []
        page: dict[str, Any] = {"next_cursor": None, "has_more": True}
        while page["has_more"]:
            cursor = {} if page["next_cursor"] is None else {"cursor": page["next_cursor"]}
            page = self.ask("GET", "/v1/jobs", params={"limit": 100} | cursor)
            found += [job["id"] for job in page["data"]]
        return found

    def ended(self, job: str) -> dict[str, Any]:
        return until(lambda: found if (found := self.job(job))["status"] in ("succeeded", "failed", "cancelled") else None)

    def steps(self, job: str) -> list[int]:
        """Those of which its metrics tell."""
        rows = (self.directory / "jobs" / job / "metrics.jsonl").read_text().splitlines()
        return [found["step"] for found in map(json.loads, rows) if "loss" in found]

    def adapter(self, job: str) -> str:
        """The hash of the weights."""
        content = self.client.get(f"/v1/jobs/{job}/adapter").content
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            (name,) = [name for name in archive.getnames() if name.endswith("adapter_model.safetensors")]
            found = archive.extractfile(name)
            assert found is not None
            return hashlib.sha256(found.read()).hexdigest()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait()


@contextmanager
def running(directory: Path) -> Iterator[list[Server]]:
    """Servers that a test starts; the last one is ended with the block, and every process of theirs."""
    started: list[Server] = []
    try:
        yield started
    finally:
        for server in started:
            if server.process.poll() is None:
                server.end()


@pytest.fixture
def hold_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Holds all jobs of this seed and later ones back from now on, at their tenth step."""
    run_in_each_process(monkeypatch, tmp_path, REPORT_EACH_STEP + HOLD)
    monkeypatch.setenv("HELD_FROM", str(tmp_path / "held-from"))

    def hold(seed: int) -> None:
        (tmp_path / "more").write_text(str(seed))
        (tmp_path / "more").replace(tmp_path / "held-from")

    hold(0)
    return hold


def test_killed_while_jobs_train_it_loses_none_and_their_adapters_are_those_of_an_untroubled_run(
    tmp_path: Path, hold_from: Callable[[int], None]
) -> None:
    kill_and_compare(tmp_path, hold_from, kills=1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_killed_a_hundred_times(tmp_path: Path, hold_from: Callable[[int], None]) -> None:
    kill_and_compare(tmp_path, hold_from, kills=100)


def kill_and_compare(tmp_path: Path, hold_from: Callable[[int], None], kills: int) -> None:
    """`kills` times SIGKILL at a step of a job, with a job accepted just before each; then the same orders undisturbed."""
    directory = tmp_path / "server"
    data = write_rows(tmp_path / "data.jsonl", 40)
    order: dict[str, Any] = {"max_steps": 40, "batch_size": 4, "r": 4, "save_steps": 5, "learning_rate": 1e-3}
    directory.mkdir()
    with running(directory) as servers:
        servers.append(Server(directory))
        file = servers[-1].ask("POST", "/v1/files", files={"file": ("d.jsonl", data.read_bytes())}, data={"purpose": "fine-tune"})["id"]
        jobs: dict[str, int] = {}
        brief: list[str] = []
        for number in range(kills):
            server = servers[-1]
            for seed in (2 * number, 2 * number + 1):
                jobs[server.submit(name=f"j{seed}", seed=seed, data={"file": file}, **order)] = seed
            until(lambda server=server: any(0 < server.job(job)["steps"] < 40 for job in jobs if server.job(job)["status"] == "running"))
            brief.append(server.submit(name="last", seed=10_000 + number, data={"file": file}, **order | {"max_steps": 1}))
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            hold_from(2 * number + 2)
            servers.append(Server(directory))
        server = servers[-1]
        hold_from(NEVER)
        ends = {job: server.ended(job) for job in (*jobs, *brief)}
        assert {end["status"] for end in ends.values()} == {"succeeded"}, [end["reason"] for end in ends.values()]
        assert all(ends[job]["steps"] == 40 for job in jobs)
        assert sorted(server.all_jobs()) == sorted((*jobs, *brief)), "none lost, none doubled"
        for job in ends:
            kinds = [event["kind"] for event in server.ask("GET", f"/v1/jobs/{job}/events", params={"limit": 100})["data"]]
            assert kinds.count("created") == kinds.count("succeeded") == 1, kinds
            steps = server.steps(job)
            assert steps == sorted(set(steps)), f"{job}: a step was done twice"
        some = list(jobs.items())[:: max(1, kills // 4)]
        again = {seed: server.submit(name=f"again{seed}", seed=seed, data={"file": file}, **order) for _, seed in some}
        for job, seed in some:
            server.ended(again[seed])
            assert server.adapter(job) == server.adapter(again[seed]), f"seed {seed}"
        run_own_client(server, data, tmp_path / "own")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.end() == 0
        until(lambda: not any(is_running(child) for child in children))  # it leaves no process


def run_own_client(server: Server, data: Path, out: Path) -> None:
    """The example of a client, as a program: its job's events, and its adapter as this client gets it."""
    command = [sys.executable, str(OWN_CLIENT), str(server.client.base_url).rstrip("/"), "base", str(data), str(out)]
    environment = os.environ | {"TLORA_API_KEY": server.client.headers["X-API-Key"]}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    events = [json.loads(line) for line in printed[:-1]]
    assert [event["kind"] for event in events][:: len(events) - 1] == ["created", "succeeded"] and "'succeeded'" in printed[-1]
    (weights,) = out.rglob("adapter_model.safetensors")
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == server.adapter(events[0]["job"])


@pytest.mark.slow
def test_workers_train_on_while_the_server_is_away_and_are_found_with_their_jobs(tmp_path: Path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    data = write_rows(tmp_path / "data.jsonl", 40)
    with running(directory) as servers:
        servers.append(Server(directory))
        file = servers[0].ask("POST", "/v1/files", files={"file": ("d.jsonl", data.read_bytes())}, data={"purpose": "fine-tune"})["id"]
        job = servers[0].submit(name="long", data={"file": file}, max_steps=100_000, batch_size=4, r=4)
        until(lambda: servers[0].job(job)["status"] == "running" and servers[0].job(job)["steps"] > 0)
        before = servers[0].job(job)
        workers = workers_of(directory)
        assert servers[0].end(signal.SIGKILL) == -signal.SIGKILL
        servers.append(Server(directory))
        seen: list[dict[str, Any]] = [servers[1].job(job)]
        until(lambda: seen.append(servers[1].job(job)) or seen[-1]["steps"] > before["steps"])
        assert {one["status"] for one in seen} == {"running"}, "it is shown as what it is, also before its worker is found"
        assert workers_of(directory) == workers and workers, "the same processes"
        processes = [psutil.Process(pid) for pid in workers]
        assert servers[1].job(job)["started_at"] == before["started_at"]
        events = f"/v1/jobs/{job}/events"  # in which it is said after its steps can be seen
        until(lambda: any("while the server was away" in event["message"] for event in servers[1].ask("GET", events)["data"]))
        steps = servers[1].steps(job)
        assert steps == sorted(set(steps)), "no step was done twice"
        assert servers[1].end() == 0
    until(lambda: not any(is_running(worker) for worker in processes))  # it leaves no process


def workers_of(directory: Path) -> set[int]:
    """Processes that train for the server on `directory`, by its records."""
    return {read_object(path)["pid"] for path in (directory / "workers").glob("gpu*.json")}


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.soak  # what finds it is tested in tests/cluster/test_wide_training.py
def test_a_job_of_two_gpus_is_found_by_the_next_server(tmp_path: Path, hold_from: Callable[[int], None]) -> None:
    directory = tmp_path / "server"
    data = write_rows(tmp_path / "data.jsonl", 40)
    order: dict[str, Any] = {"gpus": 2, "max_steps": 30, "batch_size": 4, "r": 4, "save_steps": 5, "learning_rate": 1e-3}
    directory.mkdir()
    with running(directory) as servers:
        servers.append(Server(directory))
        server = servers[-1]
        file = server.ask("POST", "/v1/files", files={"file": ("d.jsonl", data.read_bytes())}, data={"purpose": "fine-tune"})["id"]
        wide = order | {"data": {"file": file}}
        refused = server.client.post("/v1/jobs", json={"base_model": "base", "name": "wider"} | wide | {"gpus": 3})
        assert refused.status_code == 400 and "more than this server's 2" in refused.text
        job = server.submit(name="wide", **wide)
        until(lambda: 0 < server.job(job)["steps"] < 30)
        assert [group["gpus"] for group in server.ask("GET", "/v1/cluster")["groups"]] == [[0, 1]]
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        hold_from(NEVER)
        servers.append(Server(directory))
        server = servers[-1]
        end = server.ended(job)
        assert (end["status"], end["steps"]) == ("succeeded", 30), end["reason"]
        again = server.submit(name="again", **wide)
        assert server.ended(again)["status"] == "succeeded" and server.adapter(again) == server.adapter(job)


@pytest.mark.slow
def test_a_base_is_cut_where_the_settings_say_so(tmp_path: Path) -> None:
    """A job that orders one GPU gets two, with a stage each, and the bytes of one process."""
    directory, data = tmp_path / "server", write_rows(tmp_path / "data.jsonl", 40)
    order: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "r": 4, "learning_rate": 1e-3}
    directory.mkdir()
    train(BASE, tmp_path / "alone", [job_fields("cut", str(data), **order)], deterministic=True)
    with running(directory) as servers:
        servers.append(server := Server(directory, settings="layout: stages\n"))
        file = server.ask("POST", "/v1/files", files={"file": ("d.jsonl", data.read_bytes())}, data={"purpose": "fine-tune"})["id"]
        job = server.submit(name="cut", data={"file": file}, **order)
        end = server.ended(job)
        assert end["status"] == "succeeded", end["reason"]
        assert sha256(directory / "jobs" / job) == sha256(tmp_path / "alone" / "cut")
        assert server.end() == 0
    said = "".join(path.read_text() for path in (directory / "workers").glob("gpu*.log"))
    assert "layers 0 to 2 of 4 are loaded" in said and f"{BASE} is loaded" in said, said
    started = [
        json.loads(line)["group"] for line in (directory / "logs" / "events.jsonl").read_text().splitlines() if '"StartGroup"' in line
    ]
    assert [group["gpus"] for group in started] == [[0, 1]], started
