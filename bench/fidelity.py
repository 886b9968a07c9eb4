"""The simulator against the real thing: the same small jobs, with the same arrivals, through the same scheduler and controller.

    python -m bench.fidelity [--jobs 24] [--repeats 3] [--policies fifo,sjf,residual_capacity] [--device cuda --shape NAME] [--json FILE]
    python -m bench.fidelity --directory DIR --repeats 1 ...   # again there: the same base, kernels and calibration, one more repeat

Real: workers (one-thread processes on a CPU, or one GPU each; a group that has grown has one for all its GPUs), a base, jobs that are
trained to their adapters. Simulated: constants from a calibration with other jobs, before. Policies take turns within each repeat, so that
a change of the machine's speed meets all. Jobs arrive three times as fast as they could be served one by one: then a queue stands from the
first moments to the last, and what a job waits is a sum of others' times. At a load near 1 it is a small difference between large ones:
3 % in a machine's speed made 11 % of the mean job completion time. Groups grow only while no job waits: without --load it is lowered from
there as far as a group needs that is to grow. The workers are up before: a small job on each GPU, which counts for nothing, starts them. To
be started took them 12.5 to 17.4 s on two H200s, and whoever arrives first hands that difference on to all that wait behind it. For the
same reason a job lasts, on average, at least four times as long as a start was measured to take in this run.
Where the repeats of one policy differ by more than 3 %, this machine cannot decide about the 5 % that are asked for, and it says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from bench.fidelity_calibration import Calibration, calibrate
from bench.fidelity_work import BASE, SIZES, Work, draw_arrivals, draw_openers, draw_orders, is_opener, make_work
from bench.machine import facts, write
from bench.shapes import DEMO_BASE, SHAPES, write_base
from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.live.cluster_run import submit_all
from tlora.protocol import ChangeGroup, JobFinished, JobGroup, JobSubmitted, StartGroup
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.settings import Settings
from tlora.shape.moves import MoveCosts
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob
from tlora.sim.metrics import metrics
from tlora.sim.records import GroupSpan
from tlora.sim.simulate import simulate
from tlora.sim.trace import read_event_log

LEAST_STARTS = 4.0  # a job lasts at least so many times a start
RESIDENCE_STARTS = 2.0  # for so many of them a group is left as it is
MOST_ERROR, MOST_SPREAD = 0.05, 0.03  # what is asked for, and beyond which repeats decide nothing
FEWEST_REPEATS = 3
LOADS = 3.0, 1.5, 1.0, 0.7  # of the GPUs, while jobs arrive
GROWS = "residual_capacity"
KEPT = "kept.json"
SAME = ("jobs", "mean_seconds", "load", "policies", "gpus", "device", "shape", "seed")  # settings of all runs in one directory
Arrivals = Sequence[tuple[float, JobSubmitted]]


@dataclass(frozen=True)
class Times:
    """Of one run, openers left out: mean job completion time, and first submission to last end, in seconds."""

    mean_jct_seconds: float
    makespan_seconds: float
    late_start_seconds: float = 0.0  # by which the workers were up after the first job had come
    times_grown: int = 0  # that a group came to have several GPUs


@dataclass(frozen=True)
class Compared:
    """One figure of one policy. `spread`: (most - least) / mean of the repeats; `error`: simulated / mean real - 1."""

    real: tuple[float, ...]
    simulated: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.real)

    @property
    def spread(self) -> float:
        return (max(self.real) - min(self.real)) / self.mean

    @property
    def error(self) -> float:
        return self.simulated / self.mean - 1


def policy_of(name: str, calibration: Calibration, gpus: int) -> Policy:
    """The policy by its name; ours with what moves were measured to cost."""
    return residual_capacity(settings_of(calibration, gpus)) if name == "residual_capacity" else POLICIES[name]()


def settings_of(calibration: Calibration, gpus: int) -> Settings:
    """Of our policy. Jobs are a few starts long here, and a group may change again after two of them."""
    start = calibration.start_seconds
    return Settings(
        elastic=gpus > 1,
        moves=moves_of(start, calibration.job_seconds),
        min_residence_seconds=RESIDENCE_STARTS * start,
    )


def moves_of(start_seconds: float, job_seconds: float) -> MoveCosts:
    """As this machine was calibrated, where no kernels are compiled for a GPU that comes."""
    return MoveCosts(start_seconds, start_seconds, job_seconds, 0.0, 0.0, new_gpu_seconds=0.0)


def features_of(policies: Sequence[str], calibration: Calibration, gpus: int) -> str:
    """Which features of our policy were on in this comparison, and which were not."""
    if "residual_capacity" not in policies:
        return "residual_capacity was not compared"
    found = settings_of(calibration, gpus)
    features = {"sharing": found.sharing, "growth": found.elastic, "preemption": found.preemption, "groups of several GPUs": gpus > 1}
    return "residual_capacity with " + ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in features.items())


def job_seconds(asked: float, calibration: Calibration) -> float:
    """The mean length of a job: as asked, or so many times a start as measured here."""
    return max(asked, LEAST_STARTS * calibration.start_seconds)


def run_really(machine: LocalMachine, work: Work, arrivals: Arrivals, policy: str, calibration: Calibration) -> Times:
    """Train all jobs to their ends."""
    machine.output_dir.mkdir(parents=True)
    path = machine.output_dir / "events.jsonl"
    with LocalBackend(machine) as backend, closing(EventLog(path)) as log:
        submit_all(backend, work.jobs, arrivals)
        run(Scheduler(policy_of(policy, calibration, len(machine.gpus)), calibration.cost), backend, log.write)
    submitted = {event.job_id: at for at, event in arrivals}
    rows = read_event_log(path)
    ended = {item.job_id: seconds for seconds, item in rows if isinstance(item, JobFinished)}
    if ended.keys() != submitted.keys():
        raise SystemExit(f"{policy}: {sorted(submitted.keys() - ended.keys())} did not finish; see {path}")
    counted = {name: at for name, at in submitted.items() if not is_opener(name)}
    first, opened = min(counted.values()), max((ended[name] for name in submitted.keys() - counted.keys()), default=0.0)
    if opened > first:
        print(f"{policy}: workers were up {opened - first:.1f} s after the first job had come, which lengthens what is measured")
    late = max(0.0, opened - first)
    mean = statistics.mean(ended[name] - at for name, at in counted.items())
    grown = times_grown([item.group for _, item in rows if isinstance(item, StartGroup | ChangeGroup)])
    return Times(mean, max(ended.values()) - first, late, grown)


def times_grown(groups: Iterable[JobGroup | GroupSpan]) -> int:
    """How often one of the groups, told in the order of their changes, came to have several GPUs."""
    wide, count = set[str](), 0
    for group in groups:
        if len(group.gpus) > 1:
            count += group.group_id not in wide
            wide.add(group.group_id)
        else:
            wide.discard(group.group_id)
    return count


def run_simulated(machine: LocalMachine, arrivals: Arrivals, policy: str, calibration: Calibration) -> Times:
    """The same in the simulator. What a job takes beside its steps (a join, a checkpoint) counts whenever it joins."""
    cost = calibration.cost
    mapped: list[MappedJob] = []
    for at, event in arrivals:
        step_seconds = cost.alone_step_seconds(BASE, event.profile.tokens_per_step, 1)
        mapped.append(MappedJob(at, step_seconds * event.profile.steps, step_seconds, event))
    beside = calibration.job_seconds
    start = calibration.start_seconds + beside
    moves = moves_of(start, beside)
    gpus = len(machine.gpus)
    shape = ClusterShape(1, gpus, tick_seconds=machine.tick_seconds)
    result = simulate(mapped, shape, policy_of(policy, calibration, gpus), cost, Conditions(moves=moves))
    found = metrics(replace(result, jobs=[job for job in result.jobs if not is_opener(job.job_id)]))
    spans = sorted(result.spans, key=lambda span: span.start_seconds)
    return Times(found["mean_jct_seconds"], found["makespan_seconds"], times_grown=times_grown(spans))


def choose_load(
    asked: float | None, work: Work, machine: LocalMachine, calibration: Calibration, policies: Sequence[str], seed: int
) -> tuple[float, Arrivals]:
    """The load, and when jobs arrive. Where none is asked for: the highest of `LOADS` at which a group of ours grows in the simulator, as a
    run in which none does says nothing of growth.
    """

    def arrivals_at(load: float) -> Arrivals:
        return draw_arrivals(work, load, len(machine.gpus), calibration.cost, calibration.start_seconds, seed + 1)

    if asked is not None or GROWS not in policies or len(machine.gpus) == 1:
        load = LOADS[0] if asked is None else asked
        return load, arrivals_at(load)
    for load in LOADS:
        if run_simulated(machine, arrivals := arrivals_at(load), GROWS, calibration).times_grown:
            print(f"load {load:g}: the highest of {', '.join(f'{each:g}' for each in LOADS)} at which a group grows in the simulator")
            return load, arrivals
    print(f"no group grows at a load of {LOADS[-1]:g} or more, so that this says nothing of growth: give more --jobs, or another --seed")
    return LOADS[0], arrivals_at(LOADS[0])


def compare(real: dict[str, list[Times]], simulated: dict[str, Times]) -> dict[str, dict[str, Compared]]:
    """Policy -> figure -> both sides."""
    return {
        policy: {
            figure: Compared(tuple(getattr(times, figure) for times in found), getattr(simulated[policy], figure))
            for figure in ("mean_jct_seconds", "makespan_seconds")
        }
        for policy, found in real.items()
    }


def misranked(values: dict[str, tuple[float, float]]) -> list[str]:
    """Pairs of policies of which another is the better one really than in the simulator, by (real, simulated) of each policy. Two that
    both sides see nearer to each other than the error asked for have no order.
    """
    wrong: list[str] = []
    for (one, (real, simulated)), (other, (real_other, simulated_other)) in combinations(values.items(), 2):
        apart, simulated_apart = real_other / real - 1, simulated_other / simulated - 1
        if apart * simulated_apart < 0 and max(abs(apart), abs(simulated_apart)) > MOST_ERROR:
            wrong.append(f"{other} against {one}: really {apart:+.1%}, simulated {simulated_apart:+.1%}")
    return wrong


def verdict(compared: dict[str, dict[str, Compared]], late_start_seconds: float = 0.0) -> list[str]:
    """What follows from it, a sentence each. Where nothing is decided, the sentence with the error says so."""
    figures = [found for own in compared.values() for found in own.values()]
    spread, error = max(found.spread for found in figures), max(abs(found.error) for found in figures)
    jct = {policy: own["mean_jct_seconds"] for policy, own in compared.items()}
    wrong = misranked({policy: (found.mean, found.simulated) for policy, found in jct.items()})
    told = f"largest error {error:.1%} (asked for: {MOST_ERROR:.0%}); largest spread of the repeats {spread:.1%}"
    ranking = f"ranking by mean JCT {'NOT kept: ' + '; '.join(wrong) if wrong else 'kept'}"
    if min(len(found.real) for found in figures) < FEWEST_REPEATS:
        return [f"{told}: fewer than {FEWEST_REPEATS} repeats decide nothing", ranking]
    if late_start_seconds > 0:
        return [f"{told}: workers were up {late_start_seconds:.1f} s after the first job had come, so that this run cannot decide", ranking]
    if spread > MOST_SPREAD:
        return [f"{told}: above {MOST_SPREAD:.0%} this machine, as busy as it was, cannot decide", ranking]
    return [told, ranking, "the simulator does NOT hold" if wrong or error > MOST_ERROR else "the simulator holds"]


@dataclass
class Kept:
    """What an earlier run in a directory leaves for the next: what its machine costs, and its repeats."""

    settings: dict[str, str]
    calibration: Calibration
    real: dict[str, list[Times]]


def kept_in(directory: Path, settings: dict[str, str]) -> Kept | None:
    """Of a run with the same settings; None where there was none. Raises SystemExit for one with others."""
    path = directory / KEPT
    if not path.is_file():
        return None
    found = TypeAdapter(Kept).validate_json(path.read_bytes())
    if found.settings != settings:
        raise SystemExit(f"--directory {directory}: an earlier run there had other settings, {found.settings}. Give another directory")
    return found


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The whole of it; prints as it goes, and keeps what it has after the calibration and after each repeat."""
    base = directory / "base" if args.shape else DEMO_BASE
    if args.shape and not (base / "config.json").is_file():
        base = write_base(args.shape, base, torch.device(args.device))
    machine = LocalMachine(tuple(range(args.gpus)), args.device, {BASE: str(base)}, directory / "real")
    sizes, settings = SIZES[args.device], {key: str(getattr(args, key)) for key in SAME}
    policies: list[str] = args.policies.split(",")
    kept = kept_in(directory, settings)
    if kept is None:
        kept = Kept(settings, calibrate(machine, sizes, base, directory), {policy: [] for policy in policies})
        write(directory / KEPT, asdict(kept))
    calibration = kept.calibration
    constants = calibration.constants
    print(
        f"calibrated: {constants.tokens_per_second:,.0f} tokens/s, {constants.launch_seconds * 1e3:.1f} ms a micro-batch, "
        f"{constants.member_seconds * 1e3:.1f} ms a further member, {constants.exchange_seconds * 1e3:.1f} ms an exchange, "
        f"fill {calibration.fill_share:.1%}, "
        f"start {calibration.start_seconds:.1f} s, {calibration.job_seconds * 1e3:.0f} ms a job beside its steps "
        f"({statistics.median(calibration.beside_known) * 1e3:.0f} if its worker knows its shape); "
        f"worst residual {calibration.worst_residual:.1%}",
        flush=True,
    )
    mean_seconds, features = job_seconds(args.mean_seconds, calibration), features_of(policies, calibration, args.gpus)
    print(f"jobs of {mean_seconds:.1f} s on average, {mean_seconds / calibration.start_seconds:.1f} times a start; {features}", flush=True)
    orders = draw_orders(args.jobs, mean_seconds, sizes, calibration.cost, args.seed)
    work = make_work([*orders, *draw_openers(args.gpus, sizes)], sizes, base, directory / "data", args.seed)
    load, arrivals = choose_load(args.load, work, machine, calibration, policies, args.seed)
    simulated = {policy: run_simulated(machine, arrivals, policy, calibration) for policy in policies}
    for policy, times in simulated.items():
        grown = f"grown {times.times_grown} times"
        print(f"simulated, {policy}: mean JCT {times.mean_jct_seconds:.2f} s, makespan {times.makespan_seconds:.2f} s, {grown}", flush=True)
    real = kept.real
    before = len(real[policies[-1]])
    for repeat in range(before, before + args.repeats):
        for policy in policies:
            own = replace(machine, output_dir=directory / f"{policy}-{repeat}")
            shutil.rmtree(own.output_dir, ignore_errors=True)  # of a run that was cut off in it
            times = run_really(own, work, arrivals, policy, calibration)
            real[policy].append(times)
            line = f"mean JCT {times.mean_jct_seconds:.2f} s, makespan {times.makespan_seconds:.2f} s, grown {times.times_grown} times"
            print(f"repeat {repeat}, {policy}: {line}", flush=True)
        write(directory / KEPT, asdict(kept))
    compared = compare(real, simulated) if all(real.values()) else {}
    for policy, own in compared.items():
        for figure, found in own.items():
            real_side = f"real {found.mean:8.2f} (spread {found.spread:5.1%})"
            print(f"{policy:20} {figure:18} {real_side}  simulated {found.simulated:8.2f} ({found.error:+.1%})")
    late_start_seconds = max((times.late_start_seconds for found in real.values() for times in found), default=0.0)
    lines = verdict(compared, late_start_seconds) if compared else ["nothing was run really"]
    print("\n".join(lines))
    return {
        "features": features,
        "load": load,
        "mean_job_seconds": mean_seconds,
        "calibration": asdict(calibration),
        "real": {policy: [asdict(times) for times in found] for policy, found in real.items()},
        "simulated": {policy: asdict(times) for policy, times in simulated.items()},
        "verdict": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--mean-seconds", type=float, default=5.0, help="of a job by itself")
    parser.add_argument("--load", type=float, help="of the GPUs, while jobs arrive; default: the highest at which a group grows")
    parser.add_argument("--policies", default="fifo,sjf,residual_capacity")
    parser.add_argument("--repeats", type=int, default=3, help="0: calibrate only, for a later run in the same directory")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of the base, with random weights; the demo's base without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="is kept; of a run that was there before, what it measured counts too")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with nullcontext(args.directory) if args.directory else tempfile.TemporaryDirectory() as name:
        Path(name).mkdir(parents=True, exist_ok=True)
        os.environ["TLORA_CACHE"] = str(Path(name) / "cache")
        found = measure(args, Path(name))
    settings = {key: str(value) for key, value in vars(args).items()}
    write(args.json, facts(torch.device(args.device), args.commit) | {"settings": settings} | found)


if __name__ == "__main__":
    main()
