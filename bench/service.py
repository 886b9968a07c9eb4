"""How fast a server accepts jobs, and how soon it is back: `python -m bench.service [--json FILE]`, on an otherwise idle machine.

Accepting is measured over HTTP, with a server process whose cluster and intake do nothing (`service_server.py`): 64 clients that
each send the next order when they have the last answer; 100 orders a second; one sweep of 1,000 jobs. The restart is of `tlora serve` as it
is, with 100 jobs over the demo's base on a CPU, two of its workers training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.machine import facts, write

_ROOT = Path(__file__).parents[1]
_LOG = "server.log"
_ROW = b'{"prompt": "a", "completion": "b"}\n'


@dataclass
class Server:
    """A process that serves from `directory`."""

    directory: Path
    process: subprocess.Popen[bytes]
    host: str = ""
    port: int = 0
    key: str = ""

    def wait(self) -> float:
        """Until it says that it is ready; seconds."""
        began = time.monotonic()
        while not (self.directory / "address").is_file():
            self._assert_alive()
            time.sleep(0.01)
        host, port = (self.directory / "address").read_text().strip().removeprefix("http://").split(":")
        self.host, self.port, self.key = host, int(port), (self.directory / "first-key").read_text().strip()
        while (found := asyncio.run(self.ask("GET", "/readyz")))[0] != 200:
            self._assert_alive()
            assert b"ended" not in found[1], found[1].decode()
            time.sleep(0.02)
        return time.monotonic() - began

    def _assert_alive(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended: {(self.directory.parent / _LOG).read_text(errors='replace')[-2000:]}")

    def request(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n"
        return f"{head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
        """Over a connection of its own."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return 0, b""
        writer.write(self.request(method, path, body, kind))
        found = await answer(reader)
        writer.close()
        return found

    def json(self, method: str, path: str, body: Any = None) -> Any:
        status, content = asyncio.run(self.ask(method, path, json.dumps(body).encode() if body is not None else b""))
        assert status < 300, (status, content)
        return json.loads(content)

    def upload(self, content: bytes) -> str:
        form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        form += b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + content + b"\r\n--B--\r\n"
        status, found = asyncio.run(self.ask("POST", "/v1/files", form, "multipart/form-data; boundary=B"))
        assert status == 200, found
        return json.loads(found)["id"]

    def number(self, name: str) -> float:
        """Of /metrics."""
        _, content = asyncio.run(self.ask("GET", "/metrics"))
        found = re.search(rf"^{name} ([0-9.e+]+)$", content.decode(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def cpu_seconds(self) -> float:
        """That the server's process has used so far. Other processes of a busy machine change it little: compare versions by this."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user mode, and in the kernel

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    body = await reader.readexactly(int(found[1])) if found else await reader.read()
    return int(head[9:12]), body


def start(directory: Path, module: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> Server:
    (directory / "address").unlink(missing_ok=True)
    with (directory.parent / _LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env=dict(environment), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=_ROOT
        )
    return Server(directory, process)


def order(file: str, number: int) -> bytes:
    body = {"name": f"job-{number}", "base_model": "base", "data": {"file": file}, "r": 16, "learning_rate": 1e-4, "seed": number}
    return json.dumps(body).encode()


def accept_with_clients(server: Server, file: str, clients: int, jobs: int) -> dict[str, float]:
    """Each client keeps its connection and sends its next order when it has the last answer."""
    latencies: list[float] = []
    numbers = iter(range(jobs))

    async def client() -> None:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        for number in numbers:
            began = time.monotonic()
            writer.write(server.request("POST", "/v1/jobs", order(file, number)))
            status, body = await answer(reader)
            assert status == 201, body
            latencies.append(time.monotonic() - began)
        writer.close()

    async def run() -> float:
        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        return time.monotonic() - began

    commits, cpu = server.number("tlora_writer_commits_total"), server.cpu_seconds()
    seconds = asyncio.run(run())
    cpu, commits = server.cpu_seconds() - cpu, server.number("tlora_writer_commits_total") - commits
    return {
        "clients": clients,
        "jobs": jobs,
        "jobs_per_second": jobs / seconds,
        "cpu_seconds_per_1000": 1000 * cpu / jobs,
        "commits_per_1000_jobs": 1000 * commits / jobs,
        **quantiles(latencies),
    }


def accept_at_rate(server: Server, file: str, rate: float, seconds: float) -> dict[str, float]:
    """Orders leave at their times, whether or not earlier ones have been answered; 32 connections."""
    latencies: list[float] = []

    async def run() -> None:
        free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        for _ in range(32):
            free.put_nowait(await asyncio.open_connection(server.host, server.port))
        began = time.monotonic()

        async def one(number: int) -> None:
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            reader, writer = await free.get()
            writer.write(server.request("POST", "/v1/jobs", order(file, number)))
            status, body = await answer(reader)
            assert status == 201, body
            latencies.append(time.monotonic() - due)
            free.put_nowait((reader, writer))

        await asyncio.gather(*(one(number) for number in range(int(rate * seconds))))

    asyncio.run(run())
    return {"jobs_per_second": rate, "jobs": len(latencies), **quantiles(latencies)}


def quantiles(seconds: list[float]) -> dict[str, float]:
    cut = statistics.quantiles(seconds, n=100)
    return {"p50_ms": 1e3 * cut[49], "p95_ms": 1e3 * cut[94], "p99_ms": 1e3 * cut[98]}


def accept_sweep(server: Server, file: str, jobs: int) -> dict[str, float]:
    job = {"name": "sweep", "base_model": "base", "data": {"file": file}}
    began = time.monotonic()
    found = server.json("POST", "/v1/sweeps", {"job": job, "sweep": {"seed": list(range(jobs))}})
    assert len(found["data"]) == jobs
    return {"jobs": jobs, "seconds": time.monotonic() - began}


def fsync_seconds(directory: Path) -> float:
    """The median of one on this disk: what a commit waits for."""
    found: list[float] = []
    with (directory / "fsync").open("wb") as file:
        for _ in range(50):
            file.write(b"x" * 4096)
            file.flush()
            began = time.monotonic()
            os.fsync(file.fileno())
            found.append(time.monotonic() - began)
    return statistics.median(found)


def count_fsyncs(server: Server, file: str) -> int | None:
    """Of 1,000 jobs by 64 clients, in a run of its own under strace, which slows it; None where there is no strace."""
    program = shutil.which("strace")
    if program is None:
        return None
    log = server.directory / "strace"
    command = [program, "-f", "-q", "-e", "trace=fsync,fdatasync", "-e", "signal=none", "-o", str(log), "-p", str(server.process.pid)]
    tracer = subprocess.Popen(command)
    time.sleep(2)
    accept_with_clients(server, file, 64, 1000)
    tracer.terminate()
    tracer.wait()
    return len(re.findall(r"\b(?:fsync|fdatasync)\(", log.read_text()))


def restart(directory: Path, jobs: int) -> dict[str, Any]:
    """SIGKILL with `jobs` jobs of which some train, and a start: seconds until it is ready, and until a job trains again."""
    options = ["serve", "--data-dir", str(directory), "--port", "0", "--device", "cpu", "--base-model", f"base={_ROOT / 'demo' / 'base'}"]
    server = start(directory, "tlora", *options)
    server.wait()
    file = server.upload(_ROW * 400)
    job = {"name": "long", "base_model": "base", "data": {"file": file}, "max_steps": 100_000, "save_steps": 20, "batch_size": 4}
    server.json("POST", "/v1/sweeps", {"job": job, "sweep": {"seed": list(range(jobs))}})
    while not (running := server.json("GET", "/v1/jobs?status=running&limit=100")["data"]):
        time.sleep(0.2)
    server.end(signal.SIGKILL)
    began = time.monotonic()
    server = start(directory, "tlora", *options)
    server.wait()
    ready = time.monotonic() - began
    while not server.json("GET", "/v1/jobs?status=running&limit=100")["data"]:
        time.sleep(0.1)
    trains = time.monotonic() - began
    found = server.json("GET", "/v1/jobs?limit=100")["data"]
    server.end()
    assert len(found) == min(100, jobs) and all(job["status"] in ("preparing", "queued", "running") for job in found)
    return {"jobs": jobs, "running_before": len(running), "ready_seconds": ready, "trains_again_seconds": trains}


def memory(server: Server) -> float:
    """MiB of the server's process."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3000, help="of the run with 64 clients")
    parser.add_argument("--rate", type=float, default=100.0, help="orders a second of the run for latencies")
    parser.add_argument("--seconds", type=float, default=20.0, help="of that run")
    parser.add_argument("--restart-jobs", type=int, default=100)
    parser.add_argument("--database-url", help="instead of SQLite")
    parser.add_argument("--directory", type=Path, help="where the servers' files go; a real disk, not a tmpfs")
    parser.add_argument("--json", type=Path, help="a file for all numbers, such as bench/results/cpu_COMMIT_service.json")
    parser.add_argument("--commit", help="where there is no git")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=options.directory))
    found: dict[str, Any] = facts(torch.device("cpu"), options.commit) | {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    found["fsync_ms"] = 1e3 * fsync_seconds(place)
    (place / "idle").mkdir()
    server = start(place / "idle", "bench.service_server", str(place / "idle"), *([options.database_url] if options.database_url else []))
    server.wait()
    file = server.upload(_ROW * 8)
    accept_with_clients(server, file, 8, 200)  # imports and caches
    found["clients"] = accept_with_clients(server, file, 64, options.jobs)
    found["fsyncs_per_1000_jobs"] = count_fsyncs(server, file)
    found["rate"] = accept_at_rate(server, file, options.rate, options.seconds)
    found["sweep"] = accept_sweep(server, file, 1000)
    found["server_mib"] = memory(server)
    server.end()
    (place / "real").mkdir()
    found["restart"] = restart(place / "real", options.restart_jobs)
    shutil.rmtree(place)
    print(json.dumps(found, indent=1))
    write(options.json, found)


if __name__ == "__main__":
    main()
