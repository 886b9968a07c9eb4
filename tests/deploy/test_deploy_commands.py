"""The command lines of `deploy/` start a server and workers: taken from the files, with this machine's paths and ports in them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.commands import SBATCH, command_lines, compose, manifest, settings
from tests.service.served import until
from tlora.cluster.credentials import open_certificate

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Machine:
    """One machine in place of the cluster: what the files call by name is here."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.http, self.workers = free_ports(2)
        tls = directory / "etc" / "tls"
        tls.mkdir(parents=True)
        open_certificate(tls)
        for name in ("tls.crt", "tls.key"):
            (tls / name).write_bytes((tls / "worker-tls.pem").read_bytes())
        (directory / "etc" / "server.yaml").write_text(self.here(settings()["kubernetes"]))
        (directory / "data-database").mkdir()
        programs = directory / "bin"
        programs.mkdir()
        for name, line in {"tlora": f'exec {shlex.quote(sys.executable)} -m tlora "$@"', "srun": 'exec "$@"'}.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        own = {name: value for name, value in os.environ.items() if not name.startswith("TLORA_")}
        self.environment = own | {
            "PATH": f"{programs}{os.pathsep}{own['PATH']}",
            "HOME": str(directory),
            "TLORA_HOME": str(directory / "data" / "server"),
            "TLORA_CACHE": str(directory / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def here(self, text: str) -> str:
        for there, here in {
            "/var/lib/tlora": f"{self.directory}/data",
            "/etc/tlora": f"{self.directory}/etc",
            "tcp://tlora:8322": f"tcp://127.0.0.1:{self.workers}",
            "0.0.0.0:8322": f"127.0.0.1:{self.workers}",
            "0.0.0.0": "127.0.0.1",
            "8321": str(self.http),
            "device: cuda": "device: cpu",
            "Qwen/Qwen3-0.6B": str(ROOT / "demo" / "base"),
            "Qwen/Qwen3-1.7B": str(ROOT / "demo" / "base"),
        }.items():
            text = text.replace(there, here)
        return text

    def start(self, *words: str, **more: str) -> subprocess.Popen[bytes]:
        log = (self.directory / f"{words[0].rpartition('/')[2]}-{words[-1].rpartition('/')[2]}.log").open("ab")
        with log:
            return subprocess.Popen(words, env={**self.environment, **more}, stdout=log, stderr=log, start_new_session=True)

    def probe(self, kind: str) -> bool:
        """As the kubelet does."""
        (container,) = manifest("Deployment", "tlora-server")["spec"]["template"]["spec"]["containers"]
        get = container[f"{kind}Probe"]["httpGet"]
        connection = HTTPSConnection("127.0.0.1", self.http, timeout=30, context=ssl._create_unverified_context())
        try:
            connection.request("GET", get["path"], headers={one["name"]: one["value"] for one in get["httpHeaders"]})
            return 200 <= connection.getresponse().status < 400
        except OSError:
            return False
        finally:
            connection.close()

    def workers_so_far(self) -> int:
        """How many have been let in, as the server notes."""
        return (self.directory / "tlora-server.yaml.log").read_text().count("a worker has come for GPU 0")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)


def words_of(file: str, first: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    (found,) = [line for line in command_lines() if line.file == file and line.words[0] == first]
    return found.words, found.variables


def test_the_manifests_lines_start_a_server_and_its_workers_and_the_batch_script_another(machine: Machine) -> None:
    serve, _ = words_of("kubernetes Deployment", "serve")
    with machine.start("tlora", *map(machine.here, serve)) as server:
        try:
            until(lambda: machine.probe("startup") or (server.poll() is not None and pytest.fail("the server has ended")), 0.2)
            until(lambda: machine.probe("readiness"), 0.2)
            made = subprocess.run(
                ["tlora", "worker-token", "--valid-hours", "87600", "--json"], env=machine.environment, capture_output=True, check=True
            )
            secret = json.loads(made.stdout)  # of which the page makes the Secret
            for number, kind in enumerate(("Deployment", "Job"), 1):
                words, variables = words_of(f"kubernetes {kind}", "worker")
                values = {name: secret[one["valueFrom"]["secretKeyRef"]["key"]] for name, one in variables.items()}
                for name, value in values.items():
                    words = tuple(word.replace(f"$({name})", value) for word in words)
                with machine.start("tlora", *map(machine.here, words), **values) as worker:
                    until(lambda number=number, worker=worker: machine.workers_so_far() == number or worker.poll() is not None, 0.1)
                    worker.send_signal(signal.SIGTERM)
                    assert worker.wait(600) == 143
            token = machine.directory / ".config" / "tlora" / "worker-token"
            token.parent.mkdir(parents=True)
            token.write_text(secret["token"])
            token.chmod(0o600)
            slurm = {"TLORA_CONTROLLER": f"tcp://127.0.0.1:{machine.workers}", "TLORA_FINGERPRINT": secret["fingerprint"]}
            with machine.start("bash", str(SBATCH), **slurm) as batch:
                children = Path(f"/proc/{batch.pid}/task/{batch.pid}/children")
                (step,) = until(lambda: children.read_text().split(), 0.1)
                until(lambda: machine.workers_so_far() == 3 or batch.poll() is not None, 0.1)
                os.kill(int(step), signal.SIGTERM)  # as Slurm does
                assert batch.wait(600) == 0
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(600)
    assert status == 0


def test_the_units_lines_start_a_server_and_the_workers_of_a_host(machine: Machine) -> None:
    """Those end when the server stops, and systemd starts them again; while it is away they say so."""
    words, _ = words_of("systemd", "serve")
    with machine.start("tlora", *map(machine.here, words)) as server:
        until(lambda: machine.probe("readiness") or (server.poll() is not None and pytest.fail("the server has ended")), 0.2)
        made = subprocess.run(["tlora", "worker-token", "--json"], env=machine.environment, capture_output=True, check=True)
        secret, token = json.loads(made.stdout), machine.directory / "etc" / "worker-token"
        token.write_text(secret["token"])
        token.chmod(0o600)
        worker_words, _ = words_of("systemd", "worker")
        for name, value in {"TLORA_CONTROLLER": f"tcp://127.0.0.1:{machine.workers}", "TLORA_FINGERPRINT": secret["fingerprint"]}.items():
            worker_words = tuple(word.replace(f"${{{name}}}", value) for word in worker_words)
        with machine.start("tlora", *map(machine.here, worker_words)) as worker:
            until(lambda: machine.workers_so_far() == 1 or worker.poll() is not None, 0.1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(600) == 0 and worker.wait(600) == 0
    with machine.start("tlora", *map(machine.here, worker_words)) as worker:
        assert worker.wait(600) == 2


def test_the_compose_files_lines_start_a_server(machine: Machine) -> None:
    """Over plain HTTP, with its own settings, and the health check's own program."""
    (machine.directory / "etc" / "server.yaml").write_text(machine.here(settings()["compose"]))
    words, _ = words_of("compose", "serve")
    _, program, *check = compose()["services"]["server"]["healthcheck"]["test"]
    assert program == "python"
    with machine.start("tlora", *map(machine.here, words)) as server:

        def healthy() -> bool:
            assert server.poll() is None, "it has ended"
            return subprocess.run([sys.executable, *map(machine.here, check)], check=False, capture_output=True).returncode == 0

        until(healthy, 0.5)
        server.send_signal(signal.SIGTERM)
        assert server.wait(600) == 0
