"""How long a run takes from its last step, or from a SIGTERM, to its exit, beside what the disk takes for the same bytes.

    python -m bench.ending [--shape qwen3-1.7b-layer] [--rank 256] [--jobs 8] [--device cuda] [--directory DIR] [--json FILE]

`tlora train` runs as a process of its own. The clock starts when the last optimizer step has been read, or when the signal is sent, and
stops when the process is gone. The disk is measured in the same directory right after each run: as many bytes as the ending left there
are written and fsynced, by one thread and by one thread per job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.machine import facts, write
from bench.shapes import SHAPES, write_base

if TYPE_CHECKING:
    from tlora.adapters.adamw import StepStats

STEPS, ENDLESS, SIGNAL_AFTER = 2, 100_000, 1  # of each job: until its end, without an end, and before the signal
_PIECE = bytes(os.urandom(1 << 20)) * 8
_MARKS = "TLORA_BENCH_MARKS"


@dataclass(frozen=True)
class Shape:
    """So many equal jobs, and the tokens of an optimizer step of each."""

    jobs: int
    rank: int
    tokens: int


@dataclass(frozen=True)
class Ended:
    """One run's ending. `left_bytes`: what it left on the disk since the clock started, each inode once; `written_bytes`: what the
    process wrote in all, by the kernel's count.
    """

    seconds: float
    left_bytes: int
    written_bytes: int
    disk_seconds_one_thread: float
    disk_seconds_thread_per_job: float

    @property
    def beyond_the_disk(self) -> float:
        """Seconds more than the disk takes for those bytes."""
        return self.seconds - min(self.disk_seconds_one_thread, self.disk_seconds_thread_per_job)


def disk_seconds(directory: Path, size: int, threads: int) -> float:
    """Write and fsync `size` bytes in `threads` files at once."""
    paths = [directory / f"disk-{number}" for number in range(threads)]

    def fill(path: Path) -> None:
        left = size // threads
        with path.open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(_PIECE[:left])
            os.fsync(file.fileno())

    os.sync()
    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, paths))
    seconds = time.monotonic() - start
    for path in paths:
        path.unlink()
    return seconds


def write_jobs(directory: Path, base: Path, shape: Shape, steps: int, device: str) -> Path:
    """A jobs file of equal jobs (`shape`: how many, their rank, the tokens of a step), each with data of its own."""
    orders: list[dict[str, Any]] = []
    for number in range(shape.jobs):
        data = directory / f"data-{number}.jsonl"
        rows = [[10 + number, 10 + row, *[9] * shape.tokens] for row in range(4)]  # ids that every base has
        data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        orders.append({"name": f"job-{number}", "data": str(data)})
    shared = {"r": shape.rank, "batch_size": 1, "max_steps": steps, "save_steps": ENDLESS, "learning_rate": 1e-4}
    file = directory / f"jobs-{steps}.yaml"
    content = {"base_model": str(base), "output_dir": str(directory / f"out-{steps}"), "defaults": shared, "jobs": orders}
    content |= {"dtype": "float32"} if device == "cpu" else {}  # products of 16 bits take a CPU a hundred times as long
    file.write_text(json.dumps(content))  # JSON is YAML
    return file


def occupied(directory: Path) -> dict[int, int]:
    """Inode -> bytes of each file that is there."""
    return {stat.st_ino: stat.st_size for path in directory.rglob("*") if path.is_file() and (stat := path.stat())}


def ending(directory: Path, jobs_file: Path, jobs: int, device: str, *, signalled: bool) -> Ended:
    """Run `tlora train` to its end, or to SIGTERM after some steps."""
    out = Path(json.loads(jobs_file.read_text())["output_dir"])
    log = directory / f"{out.name}.log"
    reading, giving = os.pipe()
    command = [sys.executable, "-m", "bench.ending", "--child", "train", str(jobs_file), "--device", device]
    with os.fdopen(reading) as steps, log.open("w") as lines:
        environment = {**os.environ, _MARKS: str(giving)}
        process = subprocess.Popen(command, env=environment, pass_fds=[giving], stdout=lines, stderr=lines)
        os.close(giving)
        began, before = 0.0, dict[int, int]()
        for line in steps:  # until the process is gone
            name, step, now = line.split()
            if signalled and name == f"job-{jobs - 1}" and int(step) == SIGNAL_AFTER:
                before, began = occupied(out), time.monotonic()
                process.send_signal(signal.SIGTERM)
            elif not signalled:
                before, began = before or occupied(out), float(now)
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != (128 + signal.SIGTERM if signalled else 0):
        raise SystemExit(f"tlora train ended with {process.returncode}:\n{log.read_text()}")
    after = occupied(out)
    left = sum(size for inode, size in after.items() if inode not in before)
    shutil.rmtree(out)
    one, many = disk_seconds(directory, left, 1), disk_seconds(directory, left, jobs)
    return Ended(ended - began, left, usage.ru_oublock * 512, one, many)


def run_marked(arguments: list[str]) -> None:
    """In the process of its own: the command line, with a mark at every optimizer step that has been read."""
    from tlora.cli import main as command_line
    from tlora.group.job_run import JobRun

    stepped, giving = JobRun.stepped, int(os.environ[_MARKS])

    def marked(self: JobRun, stats: StepStats, loss: float) -> None:
        stepped(self, stats, loss)
        os.write(giving, f"{self.spec.name} {self.progress.step} {time.monotonic()}\n".encode())

    JobRun.stepped = marked
    sys.argv = ["tlora", *arguments]
    command_line()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        run_marked(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-1.7b-layer")
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of an optimizer step of each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; the temporary directory without it")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"last step": [], "SIGTERM": []}
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        os.environ["TLORA_CACHE"] = str(directory / "cache")
        base = write_base(args.shape, directory / "base", torch.device(args.device))
        for _ in range(args.repeats):
            for kind, steps in (("last step", STEPS), ("SIGTERM", ENDLESS)):
                jobs_file = write_jobs(directory, base, Shape(args.jobs, args.rank, args.tokens), steps, args.device)
                ended = ending(directory, jobs_file, args.jobs, args.device, signalled=kind == "SIGTERM")
                found[kind].append(asdict(ended) | {"beyond_the_disk": ended.beyond_the_disk})
                print(
                    f"{kind:9} -> exit {ended.seconds:6.2f} s   {ended.left_bytes / 1e9:5.2f} GB left, {ended.written_bytes / 1e9:5.2f} GB "
                    f"written   disk {ended.disk_seconds_one_thread:5.2f} s by one thread, {ended.disk_seconds_thread_per_job:5.2f} s by "
                    f"{args.jobs}   beyond it {ended.beyond_the_disk:+6.2f} s",
                    flush=True,
                )
    settings = {key: str(value) for key, value in vars(args).items()}
    write(args.json, facts(torch.device(args.device), args.commit) | {"settings": settings, "endings": found})


if __name__ == "__main__":
    main()
