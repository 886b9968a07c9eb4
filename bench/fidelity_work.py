"""The work of `bench.fidelity`: real small jobs with arrivals, and what its machine costs, measured with other jobs than those.

All that is measured goes through the back end that is to be simulated: the same processes, one per GPU, all of them busy.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tlora.cluster.local import LocalBackend, LocalJob, LocalMachine
from tlora.engine.profile import ProfiledJob, profile_jobs
from tlora.job import JobSpec, RunSpec
from tlora.planner.cost import BaseConstants, CostModel
from tlora.protocol import (
    GroupReady,
    JobFailed,
    JobFinished,
    JobGroup,
    JobSubmitted,
    ParallelPlan,
    StartGroup,
    StepsDone,
    StopGroup,
)

BASE = "base"  # the base's name in all groups
ENDLESS = 10**6  # optimizer steps: calibration ends, not its jobs
SAMPLES = 64  # of a job's data; its epochs go over them again and again
LONGEST_TOKENS = 256
ALONE_TOKENS = (64, 256, 1024, 2048)  # of a step of a job by itself
GROUPS = ((2, 128), (4, 128), (8, 64))  # members, and tokens of a step of each: they fit into one micro-batch
SATURATED = (6, 1024, 2048)  # members, tokens of a step of each, and the micro-batch, which holds two of them
SHORT_STEPS = 20  # of the jobs whose other costs than steps are measured
REPORTS = 4  # of each job and measurement, about a second each; the first is left out, as it may hold the end of the one before


@dataclass(frozen=True)
class Work:
    """Orders with their profiles, as a back end takes them."""

    jobs: Mapping[str, LocalJob]
    submitted: Mapping[str, JobSubmitted]


@dataclass(frozen=True)
class Calibration:
    """What this machine costs. `job_seconds` is all that a job takes beside its steps: data, checkpoint, adapter, messages."""

    constants: BaseConstants
    fill_share: float
    start_seconds: float
    job_seconds: float
    worst_residual: float  # relative, of the fitted points

    @property
    def cost(self) -> CostModel:
        return CostModel({BASE: self.constants}, self.fill_share)


# -- orders --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """A job to be: samples of about `mean_tokens` (all equal with `even`), so many a step."""

    name: str
    mean_tokens: int
    batch_size: int
    rank: int
    steps: int
    max_slowdown: float = 1.5
    even: bool = False


def make_work(orders: Sequence[Order], base: Path, directory: Path, seed: int) -> Work:
    """Write the orders' data, tokenize it, profile them."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = [_spec(order, _write_data(order, directory, seed + number)) for number, order in enumerate(orders)]
    made = profile_jobs(RunSpec(base_model=str(base), output_dir=str(directory / "none"), jobs=specs))
    jobs: dict[str, LocalJob] = {}
    submitted: dict[str, JobSubmitted] = {}
    for order, spec in zip(orders, specs, strict=True):
        found = made[spec.name]
        if not isinstance(found, ProfiledJob):
            raise found
        jobs[spec.name] = LocalJob(spec, found.train_set, found.eval_set)
        submitted[spec.name] = JobSubmitted(spec.name, BASE, 1, found.profile, max_slowdown=order.max_slowdown)
    return Work(jobs, submitted)


def _spec(order: Order, data: Path) -> JobSpec:
    fields = {"data": {"path": str(data), "max_length": LONGEST_TOKENS}, "r": order.rank, "batch_size": order.batch_size}
    return JobSpec.model_validate({"name": order.name, **fields, "max_steps": order.steps, "save_steps": ENDLESS})


def _write_data(order: Order, directory: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    lengths = np.full(SAMPLES, order.mean_tokens) if order.even else rng.lognormal(math.log(order.mean_tokens), 0.4, SAMPLES)
    path = directory / f"{order.name}.jsonl"
    rows = [rng.integers(10, 1000, int(min(max(length, 8), LONGEST_TOKENS))).tolist() for length in lengths]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def draw_orders(count: int, mean_seconds: float, cost: CostModel, seed: int) -> list[Order]:
    """`count` jobs of about `mean_seconds` each by itself, from one to four times that apart (lognormal, sigma 0.7)."""
    rng = np.random.default_rng(seed)
    orders: list[Order] = []
    for number in range(count):
        mean_tokens, batch = int(rng.choice([24, 48, 96, 160])), int(rng.choice([1, 2, 4, 8]))
        seconds = rng.lognormal(math.log(mean_seconds) - 0.7**2 / 2, 0.7)
        step_seconds = cost.alone_step_seconds(BASE, mean_tokens * batch, 1)
        steps = max(10, round(seconds / step_seconds))
        slowdown = float(rng.choice([1.2, 1.5, 2.0], p=[0.25, 0.5, 0.25]))
        orders.append(Order(f"job{number}", mean_tokens, batch, int(rng.choice([4, 8, 16, 32])), steps, slowdown))
    return orders


def draw_arrivals(work: Work, load: float, gpus: int, cost: CostModel, seed: int) -> list[tuple[float, JobSubmitted]]:
    """Arrivals at random (Poisson), so that in their span the jobs by themselves would take `load` of the GPUs' time."""
    rng = np.random.default_rng(seed)
    alone = [cost.alone_step_seconds(BASE, s.profile.tokens_per_step, 1) * s.profile.steps for s in work.submitted.values()]
    gaps = rng.exponential(1.0, len(alone))
    times = np.cumsum(gaps) - gaps[0]
    times *= sum(alone) / (load * gpus) / times[-1]
    return [(float(at), event) for at, event in zip(times, work.submitted.values(), strict=True)]


# -- calibration ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Point:
    """A measured group: members, tokens of a step of each, the budget, and the seconds between their steps (median)."""

    members: int
    tokens: float
    budget: int
    step_seconds: float


def calibrate(machine: LocalMachine, base: Path, directory: Path) -> Calibration:
    """Measure with jobs of equal samples, which are none of those that are replayed, all GPUs at once."""
    machine = LocalMachine(machine.gpus, machine.device, machine.base_models, directory / "calibration")
    groups = [(1, tokens) for tokens in ALONE_TOKENS] + [*GROUPS, SATURATED[:2]]
    orders = [
        Order(f"c{tokens}-{member}-{gpu}", min(tokens, 64), max(1, tokens // 64), 16, ENDLESS, even=True)
        for gpu in machine.gpus
        for tokens in sorted({tokens for _, tokens in groups})
        for member in range(max(members for members, own in groups if own == tokens))
    ]
    orders += [Order(f"short{gpu}-{number}", 64, 4, 16, SHORT_STEPS, even=True) for gpu in machine.gpus for number in range(REPORTS)]
    work = make_work(orders, base, directory / "calibration-data", seed=10**6)
    with _calibrating(machine, work) as bench:
        start_seconds = bench.first_start()
        budgets = CostModel.budgets
        points: list[_Point] = []
        for members, tokens in groups:
            budget = SATURATED[2] if (members, tokens) == SATURATED[:2] else next(b for b in budgets if b >= members * tokens)
            points.append(bench.measure(members, tokens, budget))
        alone_seconds = next(point.step_seconds for point in points if (point.members, point.tokens) == (1, 256))
        job_seconds = bench.short_job_seconds() - SHORT_STEPS * alone_seconds
    return _fitted(points, base, start_seconds, max(0.0, job_seconds))


@contextmanager
def _calibrating(machine: LocalMachine, work: Work) -> Iterator[_Bench]:
    arrivals = [(0.0, event) for event in work.submitted.values()]
    with LocalBackend(machine, work.jobs, arrivals) as backend:
        yield _Bench(backend, machine.gpus)


class _Bench:
    """Runs groups by hand, the same on all GPUs at once."""

    def __init__(self, backend: LocalBackend, gpus: Sequence[int]) -> None:
        self._backend, self._gpus, self._groups = backend, gpus, 0
        arrived = 0
        while arrived < 2:  # the node, then all jobs at once
            arrived += bool(backend.poll())

    def _start(self, names_of: Mapping[int, Sequence[str]], budget: int) -> list[str]:
        made: list[str] = []
        for gpu, names in names_of.items():
            made.append(f"g{self._groups}")
            self._groups += 1
            plan = ParallelPlan(1, budget)
            self._backend.execute(StartGroup(JobGroup(made[-1], BASE, (gpu,), plan, tuple(names), tuple(1.0 for _ in names))))
        return made

    def _until_ready(self, groups: Sequence[str]) -> dict[str, float]:
        ready: dict[str, float] = {}
        while len(ready) < len(groups):
            for event in self._backend.poll():
                if isinstance(event, GroupReady):
                    ready[event.group_id] = self._backend.now()
                assert not isinstance(event, JobFailed), event
        return ready

    def _stop(self, groups: Sequence[str]) -> None:
        for group in groups:
            self._backend.execute(StopGroup(group))

    def first_start(self) -> float:
        """Seconds from the start of a group on a GPU without a worker until it trains, the mean over the GPUs."""
        began = self._backend.now()
        groups = self._start({gpu: [f"c64-0-{gpu}"] for gpu in self._gpus}, 1024)
        ready = self._until_ready(groups)
        self._stop(groups)
        return statistics.mean(ready.values()) - began

    def measure(self, members: int, tokens: int, budget: int) -> _Point:
        """Seconds between the optimizer steps of so many equal jobs: the median of what they report, over all GPUs."""
        names = {gpu: [f"c{tokens}-{member}-{gpu}" for member in range(members)] for gpu in self._gpus}
        groups = self._start(names, budget)
        self._until_ready(groups)
        reports: dict[str, list[float]] = {name: [] for own in names.values() for name in own}
        while min(len(found) for found in reports.values()) < REPORTS:
            for event in self._backend.poll():
                if isinstance(event, StepsDone) and event.group_id in groups:
                    reports[event.job_id].append(event.step_seconds)
        self._stop(groups)
        return _Point(members, float(tokens), budget, statistics.median(s for found in reports.values() for s in found[1:]))

    def short_job_seconds(self) -> float:
        """Seconds from the start of a group of one short job, on a GPU with a worker, to the job's end: the median."""
        taken: list[float] = []
        for number in range(REPORTS):
            began = self._backend.now()
            groups = self._start({gpu: [f"short{gpu}-{number}"] for gpu in self._gpus}, 1024)
            ended = 0
            while ended < len(self._gpus):
                for event in self._backend.poll():
                    if isinstance(event, JobFinished):
                        taken.append(self._backend.now() - began)
                        ended += 1
            self._stop(groups)
        return statistics.median(taken)


def _fitted(points: Sequence[_Point], base: Path, start_seconds: float, job_seconds: float) -> Calibration:
    """Least squares of t = launch + member * (members - 1) + tokens / P, each point by its own size; the saturated one gives the fill."""
    *plain, saturated = points
    rows = np.array([[1.0, point.members - 1, point.members * point.tokens] for point in plain])
    seconds = np.array([point.step_seconds for point in plain])
    solution, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(plain)), rcond=None)
    launch, member, per_token = (max(float(value), 0.0) for value in solution)
    residual = float(np.max(np.abs(rows @ solution / seconds - 1)))
    # n t(E) / x with x = E / members, t(E) = fixed + E / P: step = members n (fixed / E + 1 / P)
    fixed = launch + member * (saturated.members - 1)
    filled = fixed / max(saturated.step_seconds / (saturated.members * saturated.tokens) - per_token, 1e-12)
    where = f"bench.fidelity's calibration, {time.strftime('%Y-%m-%d')}, {len(points)} groups on all GPUs at once"
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    source = dict.fromkeys(("tokens_per_second", "launch_seconds", "member_seconds"), where)
    source |= dict.fromkeys(("exchange_seconds", "exchange_between_nodes_seconds"), "extrapolated: no group has more than one GPU")
    source |= {"base_bytes": "size of its files", "gpu_bytes": "this machine's memory"}
    source |= {"activation_bytes_per_token": "extrapolated: taken as none, small beside the memory"}
    constants = BaseConstants(1 / per_token, launch, member, 0.0, 0.0, float(weights), 0.0, float(psutil.virtual_memory().total), source)
    return Calibration(constants, min(1.0, max(0.5, filled / saturated.budget)), start_seconds, job_seconds, residual)
