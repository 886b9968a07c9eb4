"""`--backend ray` on two raylets of this machine with a fake GPU each: jobs train, an agent and a whole node are killed meanwhile, and the
adapters are those of one process. Where Ray is not installed, only its absence is tested.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.served import until
from tlora.cluster import ray_engine
from tlora.cluster.host_keeper import HostLimits
from tlora.cluster.ray_engine import check_address, check_installed
from tlora.cluster.ray_keeper import RayOptions
from tlora.errors import ConfigError

ROOT = Path(__file__).parents[2]
JOBS = """
base_model: demo/base
output_dir: {out}
deterministic: true
defaults: {{target_modules: all-linear, max_length: 64, max_steps: {steps}, logging_steps: 4, save_steps: 4, max_slowdown: 4}}
jobs:
  - {{name: sql, data: demo/data/sql.alpaca.json}}
  - {{name: fields, data: demo/data/fields.chat.jsonl, r: 8, seed: 7}}
"""


def has_ray() -> bool:
    try:
        check_installed()
    except ConfigError:
        return False
    return True


with_ray = pytest.mark.skipif(not has_ray(), reason="ray is not installed: pip install 'tlora[ray]'")


def test_without_the_package_there_is_one_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ray_engine, "version", no_version)
    with pytest.raises(ConfigError, match=r"needs the package 'ray': pip install 'tlora\[ray\]'"):
        check_installed()
    monkeypatch.setattr(ray_engine, "version", lambda _: "2.9.3")
    with pytest.raises(ConfigError, match=r"needs ray 2\.56 or newer, and this is 2\.9\.3"):
        check_installed()
    monkeypatch.setattr(ray_engine, "version", lambda _: "2.60.0")
    check_installed()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1", ":6379", "head:port"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be host:port of the cluster's head"):
        check_address(address, tmp_path / "log")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RayOptions("head:6379"), "Give --worker-listen"),
        (RayOptions("head:6379", "tcp://0.0.0.0:8322"), "an address that they can dial"),
        (RayOptions(limits=HostLimits(3, 2)), r"max_hosts 2: must be at least 1 and min_hosts \(3\)"),
    ],
)
def test_options_that_cannot_work_are_refused(options: RayOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.check()


def test_only_one_file_imports_ray() -> None:
    files = [path for path in (ROOT / "src").rglob("*.py") if "import ray" in path.read_text() or "from ray" in path.read_text()]
    assert [path.name for path in files] == ["ray_driver.py"]


class RayCluster:
    def __init__(self, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self._process, self.environment = process, environment
        self.address = self._answer()

    def say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith(("127.0.0.1:", "done")):
            assert line, "the cluster has ended"
        return line.strip()


@contextmanager
def ray_cluster(*places: int, token: bool = True) -> Iterator[RayCluster]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TLORA_", "CUDA_"))}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if token else {"RAY_AUTH_MODE": "disabled"}
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), own.get("PYTHONPATH")]))
    environment = {**own, **auth, "PYTHONPATH": source, "RAY_USAGE_STATS_ENABLED": "0", **ray_engine.LOOPBACK}
    command = [sys.executable, "-m", "tests.cluster.ray_cluster", *map(str, places)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield RayCluster(process, environment)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@with_ray
@pytest.mark.slow
def test_a_cluster_that_lets_in_anybody_is_refused(tmp_path: Path) -> None:
    with ray_cluster(token=False) as cluster, pytest.raises(ConfigError, match="asks for no token.*RAY_AUTH_MODE=token"):
        check_address(cluster.address, tmp_path / "log")
    with pytest.raises(ConfigError, match="no Ray answers there"):
        check_address(cluster.address, tmp_path / "log")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def lines_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@with_ray
@pytest.mark.slow
def test_jobs_train_through_ray_while_an_agent_and_a_node_are_killed(tmp_path: Path) -> None:
    steps, out = 48, tmp_path / "out"
    (tmp_path / "jobs.yaml").write_text(JOBS.format(out=out, steps=steps))
    (tmp_path / "alone.yaml").write_text(JOBS.format(out=tmp_path / "alone", steps=steps))
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    tlora, log = [sys.executable, "-m", "tlora"], tmp_path / "log"
    with ray_cluster(1, 1) as cluster:
        at = ["--ray-address", cluster.address, "--worker-listen", f"tcp://127.0.0.1:{free_port()}", "--min-hosts", "2"]
        command = [*tlora, "cluster", str(tmp_path / "jobs.yaml"), "--device", "cpu", "--backend", "ray", *at]
        own = {**cluster.environment, "TLORA_CACHE": str(tmp_path / "cache")}
        with log.open("w") as output, subprocess.Popen(command, cwd=tmp_path, env=own, stdout=output, stderr=output) as training:
            try:

                def has_trained(rows: int) -> bool:
                    assert training.poll() is None, log.read_text()[-4000:]
                    return any(len(lines_of(path).splitlines()) >= rows for path in out.glob("jobs/*/metrics.jsonl"))

                until(lambda: has_trained(1), 0.1)
                cluster.say("actor")
                until(lambda: "the agent on" in log.read_text(), 0.1)
                until(lambda: has_trained(3), 0.1)
                cluster.say("node")
                assert training.wait(600) == 0, log.read_text()[-4000:]
            finally:
                if training.poll() is None:
                    training.kill()
        said = log.read_text()
        subprocess.run([*tlora, "train", str(tmp_path / "alone.yaml"), "--device", "cpu", "--quiet"], cwd=tmp_path, env=own, check=True)
    assert "is gone: Ray has lost its node" in said and "and its lease of" not in said, said[-4000:]
    for name in ("sql", "fields"):
        adapter = "adapter_model.safetensors"
        assert (out / "jobs" / name / adapter).read_bytes() == (tmp_path / "alone" / name / adapter).read_bytes(), said[-4000:]
