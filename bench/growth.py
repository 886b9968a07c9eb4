"""How long a group of jobs takes to grow by a GPU and to give it back, and how long each job stands still for it.

    python -m bench.growth [--shape llama-3-8b | --base DIRECTORY] [--jobs 4] [--rank 16] [--rounds 2] [--device cuda] [--json FILE]

One real worker leads its ranks from this process: on GPU 0, then on 0 and 1, then on 0, and so on; kernels are compiled in the first round.
A job's pause is the longest time between two of its steps from the command until the change is through and it has stepped again, less its
usual time. Steps are counted in its metrics.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.fidelity_work import ENDLESS, SIZES, Order, make_work
from bench.worker_options import find_base, make_parser, write_result
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import SetGpus, SetPlan, Stop
from tlora.engine.ranks.worker_group import WorkerGroup
from tlora.worker_protocol import GpusChanged, Join, Load, Report, Stepped

USUAL_REPORTS = 5  # of each job before a change and after it


@dataclass
class Reports:
    """What the worker says, and when."""

    heard: list[tuple[float, Report]] = field(default_factory=list[tuple[float, Report]])
    news: threading.Condition = field(default_factory=threading.Condition)
    ended: threading.Event = field(default_factory=threading.Event)

    def follow(self, work: Callable[[], None]) -> None:
        """Do `work`; whoever waits for news hears when it has ended, also by an error."""
        try:
            work()
        finally:
            self.ended.set()
            with self.news:
                self.news.notify_all()

    def hear(self, report: Report) -> None:
        with self.news:
            self.heard.append((time.monotonic(), report))
            self.news.notify_all()

    def steps(self, name: str) -> list[float]:
        return [at for at, report in self.heard if isinstance(report, Stepped) and report.job_id == name]

    def until(self, done: Callable[[], bool]) -> None:
        with self.news:
            self.news.wait_for(lambda: done() or self.ended.is_set())
            if not done():
                raise SystemExit("error: the worker has ended, as it says above")

    def until_all_step(self, names: list[str], times: int) -> None:
        with self.news:
            before = {name: len(self.steps(name)) for name in names}
        self.until(lambda: all(len(self.steps(name)) >= before[name] + times for name in names))

    def change(self, names: list[str], inbox: queue.SimpleQueue[Any], gpus: tuple[int, ...]) -> dict[str, Any]:
        """Seconds until the worker has these GPUs, and of each job's pause."""
        self.until_all_step(names, USUAL_REPORTS)
        asked, before = time.monotonic(), len(self.heard)
        inbox.put(SetGpus(gpus))
        self.until(lambda: any(isinstance(report, GpusChanged) for _, report in self.heard[before:]))
        through, report = next(each for each in self.heard[before:] if isinstance(each[1], GpusChanged))
        assert isinstance(report, GpusChanged) and not report.refused, report
        self.until_all_step(names, USUAL_REPORTS)
        pauses: dict[str, float] = {}
        for name in names:
            gaps = [(late, late - early) for early, late in zip(self.steps(name), self.steps(name)[1:], strict=False)]
            usual = statistics.median(gap for at, gap in gaps if at < asked)
            pauses[name] = max(0.0, max(gap for at, gap in gaps if at >= asked) - usual)
        return {"gpus": gpus, "seconds": through - asked, "pauses": pauses}


def measure(base: Path, device: str, rank: int, count: int, rounds: int, directory: Path) -> dict[str, Any]:
    """All changes, and how many steps each job has taken twice or never."""
    sizes = SIZES[device]
    names = [f"job{number}" for number in range(count)]
    work = make_work([Order(name, sizes.sample_tokens[0], 2, rank, ENDLESS) for name in names], sizes, base, directory / "data", seed=0)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reports = Reports()
    load = Load(str(base), str(directory / "jobs"), device, time.time())
    group = WorkerGroup(load, (0,), inbox, reports.hear, Heartbeat(), tuple)
    thread = threading.Thread(target=reports.follow, args=(group.go_on,))
    thread.start()
    inbox.put(SetPlan(4096))
    for name in names:
        job = work.jobs[name]
        inbox.put(Join(job.spec, job.train_set, job.eval_set))
    changes = [reports.change(names, inbox, gpus) for gpus in ((0, 1), (0,)) * rounds]
    inbox.put(Stop())
    thread.join()
    wrong: dict[str, int] = {}
    for name in names:
        rows = [json.loads(line) for line in (directory / "jobs" / name / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows if "loss" in row]
        wrong[name] = len(set(range(1, max(steps) + 1)) ^ set(steps)) + len(steps) - len(set(steps))
    return {"changes": changes, "steps_lost_or_doubled": wrong}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="times that the group grows and gives back")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["TLORA_CACHE"] = str(Path(name) / "cache")
        if args.device == "cpu":
            os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
        base = find_base(args, Path(name))
        if args.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(torch.cuda.device_count())))
        found = measure(base, args.device, args.rank, args.jobs, args.rounds, Path(name))
    for change in found["changes"]:
        print(f"GPUs {change['gpus']}: {change['seconds']:.2f} s; longest pause of a job {max(change['pauses'].values()):.2f} s")
    print(f"steps lost or taken twice: {sum(found['steps_lost_or_doubled'].values())}")
    write_result(args, found)


if __name__ == "__main__":
    main()
