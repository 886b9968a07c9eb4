"""`--backend ray` on raylets of this machine with fake GPUs: jobs train while everything that Ray has started is killed, and what Ray has
not; the adapters are those of one process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ray_cluster import ROOT, RayCluster, free_port, ray_cluster
from tests.cluster.test_ray import with_ray
from tests.process_hooks import let_hold, slow_down
from tests.service.served import until

pytestmark = [with_ray, pytest.mark.slow]
STEPS = 48
NAMES = ("sql", "fields")
JOBS = """
base_model: demo/base
output_dir: {out}
deterministic: true
defaults: {{target_modules: all-linear, max_length: 64, max_steps: {steps}, logging_steps: 4, save_steps: 4, max_slowdown: 4}}
jobs:
  - {{name: sql, data: demo/data/sql.alpaca.json, gpus: {gpus}}}
  - {{name: fields, data: demo/data/fields.chat.jsonl, r: 8, seed: 7, gpus: {gpus}}}
"""


class Training:
    """`tlora cluster` of two jobs through a Ray cluster, started again where it is killed."""

    let_go: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, directory: Path, cluster: RayCluster, hosts: int = 2, gpus: int = 1) -> None:
        """`gpus`: that each job orders. `let_go` lets the jobs come to their end."""
        self._gpus = gpus
        self.out, self._log, self._directory = directory / "out", directory / "log", directory
        self._environment = {**cluster.environment, "TLORA_CACHE": str(directory / "cache")}
        (directory / "demo").symlink_to(ROOT / "demo")
        self._at = f"tcp://127.0.0.1:{free_port()}"
        at = ["--ray-address", cluster.address, "--worker-listen", self._at, "--min-hosts", str(hosts)]
        self._command = ["cluster", self._jobs("out"), "--device", "cpu", "--backend", "ray", *at]
        self._process = self._start()

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until_said(self, words: str, times: int = 1) -> None:
        self._until(lambda: self.said.count(words) >= times)

    def until_it_trains(self) -> None:
        """On from here: a row more of some job."""
        before = self._rows()
        self._until(lambda: self._rows() > before)

    def until_workers_have_ended(self) -> None:
        self._until(lambda: not processes("tethered_worker", self._at))

    def kill_worker(self) -> None:
        os.kill(processes("tethered_worker", self._at)[0], signal.SIGKILL)

    def kill_driver(self) -> None:
        (driver,) = processes("tlora.cluster.ray_driver", "--address", parent=self._process.pid)
        os.kill(driver, signal.SIGKILL)

    def kill_controller(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def check_end(self) -> None:
        """All jobs end, with the adapters that one process makes."""
        self.let_go()
        assert self._process.wait() == 0, self.said[-4000:]
        subprocess.run(self._tlora("train", self._jobs("alone"), "--device", "cpu", "--quiet"), **self._as(), check=True)
        for name in NAMES:
            adapter = f"{name}/adapter_model.safetensors"
            whole = (self._directory / "alone" / adapter).read_bytes()
            assert (self.out / "jobs" / adapter).read_bytes() == whole, self.said[-4000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._tlora(*self._command), stdout=log, stderr=log, **self._as())

    def _jobs(self, out: str) -> str:
        path = self._directory / f"{out}.yaml"
        path.write_text(JOBS.format(out=self._directory / out, steps=STEPS, gpus=self._gpus))
        return str(path)

    def _tlora(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tlora", *arguments]

    def _as(self) -> dict[str, Any]:
        return {"cwd": self._directory, "env": self._environment}

    def _rows(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.out.glob("jobs/*/metrics.jsonl"))

    def _until(self, look: Callable[[], bool]) -> None:
        def found() -> bool:
            assert self._process.poll() is None, self.said[-4000:]
            return look()

        until(found, 0.1)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Training, RayCluster]]:
    """The jobs do not end before `check_end`."""
    let_hold(monkeypatch, tmp_path, "")
    with slow_down(STEPS) as go_on, ray_cluster(1, 1) as cluster:
        made = Training(tmp_path, cluster)
        made.let_go = go_on
        try:
            made.until_it_trains()
            yield made, cluster
        finally:
            made.close()


def processes(*words: str, parent: int | None = None) -> list[int]:
    """Those of this machine whose command lines have all these words."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, of = (path / "cmdline").read_text().split("\0"), int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if all(any(word in argument for argument in line) for word in words) and parent in (None, of):
            found.append(int(path.name))
    return found


def test_jobs_have_both_gpus_of_a_host(tmp_path: Path) -> None:
    """Each of them has a worker of its own."""
    with ray_cluster(2) as cluster:
        made = Training(tmp_path, cluster, hosts=1, gpus=2)
        try:
            made.check_end()
            assert '"gpus":[1000,1001]' in (made.out / "events.jsonl").read_text().replace(" ", "")
        finally:
            made.close()


def test_an_agent_and_a_node_are_killed(training: tuple[Training, RayCluster]) -> None:
    jobs, cluster = training
    cluster.say("actor")
    jobs.until_said("the agent on")
    jobs.until_it_trains()
    cluster.say("node")
    jobs.until_said("is gone: Ray has lost its node")
    jobs.check_end()
    assert "and its lease of" not in jobs.said, jobs.said[-4000:]


def test_a_worker_the_driver_and_the_controller_are_killed(training: tuple[Training, RayCluster]) -> None:
    jobs, _ = training
    jobs.kill_worker()
    jobs.until_said("killed by signal 9")
    jobs.until_it_trains()
    jobs.kill_driver()
    jobs.until_said("Ray cannot be reached")
    jobs.until_said("Ray is there again")
    jobs.kill_controller()
    jobs.check_end()
    assert "and its lease of" not in jobs.said, jobs.said[-4000:]


def test_the_head_is_lost_and_another_comes(training: tuple[Training, RayCluster]) -> None:
    """Workers save their jobs and end with their raylets; on the next head's hosts the jobs go on from there."""
    jobs, cluster = training
    cluster.say("head")
    jobs.until_said("Ray cannot be reached")
    jobs.until_workers_have_ended()
    cluster.say("new head")
    jobs.until_said("Ray is there again")
    jobs.check_end()
    assert "and its lease of" not in jobs.said, jobs.said[-4000:]
