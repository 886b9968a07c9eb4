"""How fast the scheduler and the simulator are: jobs per second of `tlora simulate`'s own code, and milliseconds for each event.

    python -m bench.scheduler_speed [--policies fifo residual_capacity] [--jobs N] [--load 0.9] [--repeats 3] [--commit NAME] [--json FILE]

First the window of 15,000 jobs on 1,024 GPUs under each policy, on one core: scheduler, simulator and the records of the jobs, without
reading the trace. Fastest and median of the repeats; by the time of the processor too, as a machine may be shared. Then the window's
jobs of one GPU, closer together, of which about 1,000 groups run at a time while jobs come, report steps, end and queue: each event is
timed from its coming to the actions that answer it, and counts with its least time in the repeats, in which all decisions are the same.
A decision is an event at which the policy is asked. Last, the decisions on synthetic traces of jobs that are up to as wide as the
cluster, at any number of groups, in the same way. The collector of cycles is off, as it is in simulations.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench import machine, scheduler_traces
from bench.synthetic_traces import synthetic_trace
from tlora.cluster.controller import run
from tlora.errors import ConfigError
from tlora.protocol import Action, Event, GroupReady, StepsDone
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob
from tlora.sim.scenario import Scenario, Scene, cost_of, scene_of
from tlora.sim.simulate import simulate, simulated_cluster

WINDOW = Scenario("window_15k", nodes=128)
CROWD_LOAD = 1.1  # more than there is room for
WRONG = Conditions(speed_error=0.15, length_error=0.1, drift=0.1, delay=0.5)  # groups report steps where the belief is not the truth
GROUPS = (900, 1100)
WIDE_SEEDS = (139, 143, 246, 289)  # of the report's traces: overloaded clusters of 512 and 1,024 GPUs, jobs of up to all of them


@dataclass
class Timed:
    """A scheduler with the seconds that each event takes while the cluster has so many groups."""

    scheduler: Scheduler
    groups: tuple[float, float]
    decisions: list[float] = field(default_factory=list[float])
    reports: list[float] = field(default_factory=list[float])
    waiting: list[int] = field(default_factory=list[int])

    def handle(self, event: Event, now: float) -> list[Action]:
        state = self.scheduler.state
        crowded = self.groups[0] <= len(state.groups) <= self.groups[1]
        began = time.perf_counter()
        actions = self.scheduler.handle(event, now)
        seconds = time.perf_counter() - began
        if crowded:
            (self.reports if isinstance(event, StepsDone | GroupReady) else self.decisions).append(seconds)
            self.waiting.append(len(state.pending))
        return actions


def jobs_per_second(policy: str, scenario: Scenario, scene: Scene, repeats: int) -> dict[str, Any]:
    """Of whole simulations of the scenario's jobs."""
    shape = ClusterShape(scenario.nodes, scenario.gpus_per_node)
    speeds: list[float] = []
    decided: list[tuple[int, float]] = []  # how many decisions, and the seconds of all
    by_processor: list[float] = []
    for _ in range(repeats):
        began = time.process_time()
        result = simulate(scene.jobs, shape, POLICIES[policy](), cost_of(scenario, "tlora"))
        by_processor.append(len(scene.jobs) / (time.process_time() - began))
        speeds.append(len(scene.jobs) / result.wall_seconds)
        decided.append((result.decisions, result.decision_seconds))
    decisions, seconds = decided[-1]
    return {
        "jobs": len(scene.jobs),
        "gpus": shape.num_gpus,
        "load": scene.load,
        "jobs_per_second": max(speeds),
        "jobs_per_second_median": statistics.median(speeds),
        "jobs_per_processor_second": max(by_processor),
        "decisions": decisions,
        "decision_milliseconds_mean": 1e3 * seconds / decisions,
    }


def crowd() -> list[MappedJob]:
    """The window's jobs of one GPU, so densely that they ask for more GPUs than there are."""
    jobs = [job for job in scene_of(WINDOW).jobs if job.job.gpus == 1]
    span = jobs[-1].submit_seconds - jobs[0].submit_seconds
    closer = CROWD_LOAD * WINDOW.num_gpus * span / sum(job.replayed_seconds for job in jobs)
    return [replace(job, submit_seconds=(job.submit_seconds - jobs[0].submit_seconds) / closer) for job in jobs]


def event_milliseconds(policy: str, jobs: Sequence[MappedJob], repeats: int) -> dict[str, Any]:
    """Of the events that come while there are about 1,000 groups."""
    runs = [_timed(policy, jobs) for _ in range(repeats)]
    if not (runs[0].decisions and runs[0].reports):
        raise SystemExit(f"{policy}: there never are {GROUPS[0]} to {GROUPS[1]} groups")
    return {
        "waiting_median": statistics.median(runs[0].waiting),
        "decision": _least_spread([timed.decisions for timed in runs]),
        "report": _least_spread([timed.reports for timed in runs]),
    }


def wide_decision_milliseconds(policy: str, seeds: Sequence[int], repeats: int, jobs: int | None = None) -> dict[int, dict[str, float]]:
    """Of the decisions on each synthetic trace, by its seed."""
    found: dict[int, dict[str, float]] = {}
    for seed in seeds:
        mapped, shape, cost = scheduler_traces.setting_of(synthetic_trace(seed, jobs))
        runs: list[list[float]] = []
        for _ in range(repeats):
            timed = Timed(Scheduler(POLICIES[policy](), cost), (0, math.inf))
            _run(timed, simulated_cluster(mapped, shape, cost, Conditions()))
            runs.append(timed.decisions)
        found[seed] = _least_spread(runs)
    return found


def _timed(policy: str, jobs: Sequence[MappedJob]) -> Timed:
    cost, shape = cost_of(WINDOW, "tlora"), ClusterShape(WINDOW.nodes, WINDOW.gpus_per_node)
    timed = Timed(Scheduler(POLICIES[policy](), cost), GROUPS)
    _run(timed, simulated_cluster(jobs, shape, cost, WRONG))
    return timed


def _run(timed: Timed, cluster: SimulatedCluster) -> None:
    gc.collect()
    gc.disable()
    try:
        run(timed, cluster)
    finally:
        gc.enable()


def _least_spread(runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds of events that came in the same order in each of `runs`, each with its least time in them."""
    ordered = sorted(1e3 * min(each) for each in zip(*runs, strict=True))
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "mean": statistics.mean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * last)],
        "p99.9": ordered[int(0.999 * last)],
        "worst": ordered[-1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["fifo", "residual_capacity"])
    parser.add_argument("--jobs", type=int, help="only the first so many of the window")
    parser.add_argument("--load", type=float, help="of the window; as recorded without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"{args.repeats} repeats measure nothing. Give 1 or more")
    window = replace(WINDOW, load=args.load, jobs=args.jobs)
    try:
        scene = scene_of(window)
    except ConfigError as error:
        parser.error(str(error))
    one_gpu_jobs = crowd()
    rows: dict[str, Any] = {}
    report = {"benchmark": "scheduler_speed", **machine.facts(torch.device("cpu"), args.commit), "policies": rows}
    for policy in args.policies:
        rows[policy] = found = jobs_per_second(policy, window, scene, args.repeats)
        print(f"{policy}: {found['jobs']:,} jobs on {found['gpus']:,} GPUs, load {found['load']:.2f}: ", end="")
        print(f"{found['jobs_per_second']:,.0f} jobs/s (median {found['jobs_per_second_median']:,.0f}), ", end="")
        print(f"{found['jobs_per_processor_second']:,.0f} per second of the processor")
        found["events_at_1000_groups"] = spreads = event_milliseconds(policy, one_gpu_jobs, args.repeats)
        for kind in ("decision", "report"):
            told = spreads[kind]
            print(f"    {told['count']:>8,} {kind}s at about 1,000 groups, {spreads['waiting_median']:g} jobs waiting: ", end="")
            print(", ".join(f"{name} {told[name]:.3f} ms" for name in ("median", "p99", "p99.9", "worst")))
        found["wide_decisions"] = wide = wide_decision_milliseconds(policy, WIDE_SEEDS, args.repeats, args.jobs)
        for seed, told in wide.items():
            print(f"    {told['count']:>8,} decisions on wide trace {seed}: ", end="")
            print(", ".join(f"{name} {told[name]:.3f} ms" for name in ("mean", "median", "p99", "worst")))
        machine.write(args.json, report)


if __name__ == "__main__":
    main()
