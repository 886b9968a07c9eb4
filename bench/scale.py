"""One controller over many hosts of fake workers: decisions, messages, memory, and how long it takes to settle.

    nice -n 15 python -m bench.scale [--hosts 10 100 1000] [--jobs 10000] [--seconds 60] [--commit NAME] [--json FILE]

Each host has eight GPUs with a worker each (`bench.scale_workers`: nothing is trained), all of which talk to the one controller
(`bench.scale_controller`) over connections of their own, in the real protocol, under leases that are on disk. Jobs ask for one GPU and
wait in the controller's queue where there is none. When all GPUs train and all jobs are submitted, steps are heard for so many seconds;
then all hosts of a rack are killed at once; then the controller is killed, and another starts on its store. It has settled when the lost
rack is known to be lost and 99 % of the GPUs that are left train again. At the end each job must have ended at most once.

Milliseconds are of the processor's time of the controller's thread, which is what they take on an idle machine, and by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.scale_controller import RACK_LOST, Shape
from bench.scale_workers import GPUS_PER_HOST

MOST_WORKERS_OF_A_PROCESS = 4000
_ENOUGH = 0.99  # of the GPUs: at any moment a few wait for the next job
_GIVEN_UP_SECONDS = 1200.0
_RELEASED_SECONDS = 5.0  # for the leases of the rack that is lost to go from the disk; the next controller would wait for its workers
_COME = "a worker has come for "  # of which the log has a line for each worker, as of each whose rack is lost


class Controller:
    """A controller's process, and what it has said of itself."""

    def __init__(self, store: Path, shape: Shape, log: Path) -> None:
        command = [sys.executable, "-m", "bench.scale_controller", str(store), json.dumps(asdict(shape))]
        self.began = time.monotonic()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.last: dict[str, Any] = {}
        self.decided: list[tuple[float, float]] = []
        self.answered: list[tuple[float, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            status = json.loads(line)
            self.decided += status.pop("decided")
            self.answered += status.pop("answered")
            self.last = status

    def wait(self, reached: Callable[[dict[str, Any]], bool], what: str) -> float:
        """The seconds until its status is so."""
        began = time.monotonic()
        while not (self.last and reached(self.last)):
            if self._process.poll() is not None or time.monotonic() - began > _GIVEN_UP_SECONDS:
                raise SystemExit(f"{what}: not within {time.monotonic() - began:.0f} s; last {self.last}")
            time.sleep(0.05)
        return time.monotonic() - began

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


def start_fleets(shape: Shape, store: Path, processes: list[subprocess.Popen[bytes]]) -> Shape:
    """The first rack in a process of its own, the other hosts in as few as hold them."""
    hosts_of_one = MOST_WORKERS_OF_A_PROCESS // GPUS_PER_HOST
    places = [(0, shape.hosts_per_rack - 1)]
    while places[-1][1] < shape.hosts - 1:
        first = places[-1][1] + 1
        places.append((first, min(shape.hosts, first + hosts_of_one) - 1))
    for number, (first, last) in enumerate(places):
        arguments = [str(store), *map(str, (shape.jobs, 1 + 1_000_000 * number, first, last, shape.hosts_per_rack))]
        processes.append(subprocess.Popen([sys.executable, "-m", "bench.scale_workers", *arguments]))
    return replace(shape, fleets=tuple((process.pid, *place) for process, place in zip(processes, places, strict=True)))


def all_train(status: dict[str, Any], gpus: int) -> bool:
    return status["gpus"] == gpus and status["gpus_that_train"] >= _ENOUGH * gpus


def measure(hosts: int, jobs: int, seconds: float) -> dict[str, Any]:
    """One cluster's row."""
    directory = Path(tempfile.mkdtemp(prefix="scale"))
    store = directory / "s"
    (store / "workers").mkdir(parents=True)
    (store / "workers" / "address").write_text(f"unix:{store}/workers/link/controller.sock\n")
    shape = Shape(hosts, min(8, max(1, hosts // 5)), jobs)
    row: dict[str, Any] = {"hosts": hosts, "gpus": shape.gpus, "jobs": jobs, "hosts_of_the_lost_rack": shape.hosts_per_rack}
    controllers: list[Controller] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        shape = start_fleets(shape, store, processes)
        first = Controller(store, shape, directory / "controller.log")
        controllers.append(first)
        row["first_start_seconds"] = first.wait(lambda status: all_train(status, shape.gpus), "the first start")
        row["first_start_processor_seconds"] = first.last["processor_seconds"]
        print(f"{hosts} hosts: all train after {row['first_start_seconds']:.1f} s", flush=True)
        first.wait(lambda status: status["submitted"] == jobs, "the submission of all jobs")
        before = first.last
        heard = lambda status: status["seconds"] >= before["seconds"] + seconds and status["messages"] > before["messages"]  # noqa: E731
        first.wait(heard, "messages of workers")
        after = first.last
        span = after["seconds"] - before["seconds"]
        row["messages_per_second"] = (after["messages"] - before["messages"]) / span
        row["processor_share"] = (after["processor_seconds"] - before["processor_seconds"]) / span
        left = shape.gpus - shape.hosts_per_rack * GPUS_PER_HOST
        busy = first.last["processor_seconds"]
        processes[0].kill()
        row["rack_lost_seconds"] = first.wait(lambda status: all_train(status, left), "the loss of a rack")
        row["rack_lost_processor_seconds"] = first.last["processor_seconds"] - busy
        print(f"{hosts} hosts: a rack of {shape.hosts_per_rack} lost, settled after {row['rack_lost_seconds']:.1f} s", flush=True)
        time.sleep(_RELEASED_SECONDS)
        first.kill()
        controllers.append(Controller(store, replace(shape, fleets=shape.fleets[1:]), directory / "controller.log"))
        row["restart_seconds"] = controllers[1].wait(lambda status: all_train(status, left), "a restart")
        row["restart_processor_seconds"] = controllers[1].last["processor_seconds"]
        print(f"{hosts} hosts: controller restarted, settled after {row['restart_seconds']:.1f} s", flush=True)
        time.sleep(seconds / 4)
        ends = np.fromfile(store / "ends", np.int64)
        if ends.max() > 1:
            raise SystemExit(f"{int((ends > 1).sum())} jobs have ended more than once")
        row |= {"jobs_ended": int(ends.sum()), "peak_gigabytes": max(one.last["peak_bytes"] for one in controllers) / 1e9}
        for name in ("decided", "answered"):
            both = [spans for one in controllers for spans in getattr(one, name)]
            row[name] = {kind: spread([span[place] for span in both]) for place, kind in enumerate(("clock", "processor"))}
        lines = (directory / "controller.log").read_text().splitlines()
        row["log"] = [line for line in lines if not line.startswith(_COME) and not line.endswith(RACK_LOST)][-5:]
    finally:
        for one in controllers:
            one.kill()
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)
    return row


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "median_milliseconds": ordered[last // 2],
        "p99_milliseconds": ordered[int(0.99 * last)],
        "worst_milliseconds": ordered[-1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training that are measured")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if min(args.hosts) < 2 or args.jobs <= GPUS_PER_HOST * max(args.hosts):
        parser.error("give at least two hosts, and more jobs than GPUs: what waits is a part of the work")
    rows: list[dict[str, Any]] = []
    report = {"benchmark": "scale", **machine.facts(torch.device("cpu"), args.commit), "cores": os.cpu_count(), "rows": rows}
    for hosts in args.hosts:
        load = os.getloadavg()[0]
        rows.append({**measure(hosts, args.jobs, args.seconds), "load_average_before": load, "load_average_after": os.getloadavg()[0]})
        machine.write(args.json, report)
        print(json.dumps(rows[-1], indent=1), flush=True)


if __name__ == "__main__":
    main()
