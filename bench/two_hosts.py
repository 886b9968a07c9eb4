"""A job on two GPUs of one host that read each other's memory, and on the same two as if of two hosts, which share nothing but a TLS line.

    python -m bench.two_hosts [--shape llama-3-8b | --base DIRECTORY] [--rank 16] [--steps 40] [--device cuda] [--json FILE]

Workers train one job of two replicas, deterministic: on one GPU, replicas in turn; on two GPUs of one worker; on one GPU and another that
the worker of a second process lends. Then both once more with the base in two stages. All adapters must have the same bytes. Seconds are
medians of the steps' own times.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.fidelity_work import SIZES, Order, Work, make_work
from bench.growth import Reports
from bench.worker_options import find_base, make_parser, write_result
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import Listen, SetGpus, SetPlan, Stop
from tlora.engine.ranks.lending import Lender
from tlora.engine.ranks.worker_group import WorkerGroup
from tlora.worker_protocol import Failed, Finished, GpusChanged, Join, Lending, Listening, Load, Report

NAME = "wide"
LENT = 1000
WARM_STEPS = 5
SMALL = (16, 2)  # tokens of a sample, samples of a step, on a CPU
BUDGET = 4096  # tokens of a micro-batch on a GPU


def lend(orders: str) -> None:
    """The second process: its GPU works for the first one's worker until that lets it go."""
    told = json.loads(orders)
    load = Load(**told["load"])
    own = 1 if load.device == "cuda" else 0  # as CUDA_VISIBLE_DEVICES names it
    lending = Lending(told["address"], told["fingerprint"], told["key"], {LENT: own})
    Lender(load, (own,), lending, lambda join: join).run(queue.SimpleQueue())


def train(work: Work, load: Load, gpus: tuple[int, ...], address: str = "") -> dict[str, Any]:
    """One job to its end on these GPUs; with `address` also on one that another process lends, which finds the worker there."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reports = Reports()
    group = WorkerGroup(load, gpus, inbox, reports.hear, Heartbeat(), tuple)
    thread = threading.Thread(target=reports.follow, args=(group.go_on,), daemon=True)
    thread.start()
    inbox.put(SetPlan(BUDGET * (len(gpus) + bool(address))))
    other = None
    if address:
        inbox.put(Listen(address))
        told = wait_for(reports, Listening)
        orders = {"address": told.address, "fingerprint": told.fingerprint, "key": told.key}
        orders["load"] = {"base_model": load.base_model, "output_dir": f"{load.output_dir}-lent", "device": load.device}
        orders["load"] |= {"started_unix_seconds": load.started_unix_seconds, "deterministic": True}
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"} if load.device == "cuda" else dict(os.environ)
        other = subprocess.Popen([sys.executable, "-m", "bench.two_hosts", "--lend"], env=environment, stdin=subprocess.PIPE, text=True)
        assert other.stdin is not None
        with other.stdin as stdin:
            stdin.write(json.dumps(orders))
        inbox.put(SetGpus((*gpus, LENT), lent=(LENT,)))
        changed = wait_for(reports, GpusChanged)
        assert not changed.refused, changed.refused
    job = work.jobs[NAME]
    inbox.put(Join(job.spec.model_copy(update={"gpus": 2}), job.train_set, job.eval_set))
    ended = wait_for(reports, Finished, Failed)
    assert isinstance(ended, Finished), ended
    inbox.put(Stop())
    thread.join()
    if other is not None:
        other.wait(60)
    out = Path(load.output_dir) / NAME
    rows = [row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in row and row["step"] > WARM_STEPS]
    seconds = [(late["seconds"] - row["seconds"]) / (late["step"] - row["step"]) for row, late in itertools.pairwise(rows)]
    adapter = out / "adapter_model.safetensors"
    return {
        "step_seconds": statistics.median(seconds),
        "steps": len(seconds),
        "adapter_bytes": adapter.stat().st_size,
        "sha256": hashlib.sha256(adapter.read_bytes()).hexdigest(),
    }


def wait_for(reports: Reports, *kinds: type[Report]) -> Any:
    """The first report of these kinds. Ends the program if the worker ends before."""
    reports.until(lambda: any(isinstance(report, kinds) for _, report in reports.heard))
    return next(report for _, report in reports.heard if isinstance(report, kinds))


def measure(base: Path, device: str, rank: int, steps: int, address: str, directory: Path) -> dict[str, Any]:
    sizes = SIZES[device]
    work = make_work([Order(NAME, *(sizes.wide if device == "cuda" else SMALL), rank, steps)], sizes, base, directory / "data", seed=0)
    found: dict[str, Any] = {}
    arms = (("one GPU", (0,), "", 0), ("one host", (0, 1), "", 0), ("two hosts", (0,), address, 0))
    for arm, gpus, there, stages in (*arms, ("stages, one host", (0, 1), "", 2), ("stages, two hosts", (0,), address, 2)):
        out = directory / arm.replace(",", "").replace(" ", "-")
        found[arm] = train(work, Load(str(base), str(out), device, time.time(), deterministic=True, stages=stages), gpus, there)
        print(f"{arm}: {1e3 * found[arm]['step_seconds']:.1f} ms a step; adapter of {found[arm]['adapter_bytes'] / 1e6:.1f} MB", flush=True)
    return {"arms": found, "same_bytes": len({arm["sha256"] for arm in found.values()}) == 1}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--address", default="127.0.0.1", help="of this host, where the second process finds the first")
    parser.add_argument("--lend", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lend:
        lend(sys.stdin.read())
        return
    if args.steps < WARM_STEPS + 2:
        parser.error(f"--steps {args.steps}: must be {WARM_STEPS + 2} or more; the time between the first {WARM_STEPS} does not count")
    with tempfile.TemporaryDirectory() as name:
        os.environ["TLORA_CACHE"] = str(Path(name) / "cache")
        if args.device == "cpu":
            os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
        base = find_base(args, Path(name))
        found = measure(base, args.device, args.rank, args.steps, args.address, Path(name))
    print("the same bytes" if found["same_bytes"] else "OTHER BYTES")
    write_result(args, found)


if __name__ == "__main__":
    main()
