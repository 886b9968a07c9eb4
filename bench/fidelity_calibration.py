"""What a machine costs, for `bench.fidelity`: measured with other jobs than those that it replays.

All that is measured goes through the back end that is to be simulated: the same processes, one per GPU, all of them busy.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path

import psutil

from bench.cost_fit import FITTED, Measured, fit
from bench.fidelity_work import BASE, COLD_SAMPLES, ENDLESS, RANKS, SHORT_STEPS, Order, Sizes, Work, make_work
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.live.cluster_run import submit_all
from tlora.protocol import GroupReady, JobFailed, JobFinished, JobGroup, ParallelPlan, StartGroup, StepsDone, StopGroup
from tlora.shape.cost import BaseConstants, CostModel

BUDGET = 4096  # tokens of a micro-batch: more than those jobs have in a step
WIDE = "wide"  # the job for several GPUs
LONGER_STEPS = 60  # against `SHORT_STEPS`, of jobs by whose times is seen what a job takes beside its steps
MOST_TURNS, FASTER = 6, 0.95  # a wide job is measured until it gets no faster than this: its ranks are new, and compile what they meet
REPORTS = 6  # of each job and measurement, about a second each; the first is left out, as it may hold the end of the one before


@dataclass(frozen=True)
class Point:
    """A measured group: members, tokens of a step of each, the budget, the seconds between their steps (mean), and its GPUs."""

    members: int
    tokens: float
    budget: int
    step_seconds: float
    gpus: int = 1


@dataclass(frozen=True)
class Calibration:
    """What this machine costs. `start_seconds` is what a job takes longer on a GPU without a worker; `job_seconds` all that it takes
    beside its steps: data, checkpoint, adapter, messages, and what first micro-batches of a shape take longer than those that follow. It
    is the median of `beside_new`, one for each of `Sizes.beside`; `beside_known` is the same where the worker knows the shape.
    """

    constants: BaseConstants
    fill_share: float
    start_seconds: float
    job_seconds: float
    worst_residual: float  # relative, of the fitted points
    points: tuple[Point, ...] = ()
    beside_new: tuple[float, ...] = ()
    beside_known: tuple[float, ...] = ()

    @property
    def cost(self) -> CostModel:
        return CostModel({BASE: self.constants}, self.fill_share)


def calibrate(machine: LocalMachine, sizes: Sizes, base: Path, directory: Path) -> Calibration:
    """Measure with other jobs than are replayed, of the same kind, on all GPUs at once; each group twice, there and back, so that a drift
    of the machine's speed does not look like a difference between groups.

    A first round of workers, which counts for nothing, trains jobs of the shapes that are replayed: it leaves on disk and in the caches
    what later ones find there.
    """
    groups = [(1, tokens) for tokens in sizes.alone] + [*sizes.groups, sizes.saturated[:2]]
    work = make_work(_calibration_orders(machine.gpus, groups, sizes), sizes, base, directory / "calibration-data", seed=10**6)
    with _calibrating(replace(machine, output_dir=directory / "warm-up"), work) as bench:
        for number in range(len(_shapes(sizes))):
            bench.seconds_to_end(f"warm{number}")
    with _calibrating(replace(machine, output_dir=directory / "calibration"), work) as bench:
        cold_seconds = bench.seconds_to_end("cold")
        found: dict[tuple[int, int], list[Point]] = {group: [] for group in groups}
        for group in (*groups, *reversed(groups)):
            found[group].append(bench.measure(*group, _budget_of(group, sizes)))
        beside_new, beside_known = list[float](), list[float]()
        for number in range(len(sizes.beside)):
            new, short, longer = (bench.seconds_to_end(f"{name}{number}") for name in ("new", "short", "longer"))
            steps = SHORT_STEPS * (longer - short) / (LONGER_STEPS - SHORT_STEPS)
            beside_new.append(new - steps)
            beside_known.append(short - steps)
        wide = bench.measure_wide(sizes) if len(machine.gpus) > 1 else None
    points = [replace(once, step_seconds=(once.step_seconds + again.step_seconds) / 2) for once, again in found.values()]
    cold_point = points[groups.index((1, COLD_SAMPLES * sizes.calibration_sample_tokens))]
    cold_seconds -= SHORT_STEPS * cold_point.step_seconds
    return _fitted(points, base, cold_seconds, beside_new, beside_known, wide)


def _shapes(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Tokens of a sample, samples of a step and rank of jobs that together have all of those which are replayed."""
    pairs = [*product(sizes.sample_tokens, dict.fromkeys(sizes.batch_sizes)), sizes.wide]
    return [(tokens, batch, rank) for (tokens, batch), rank in zip(pairs, cycle(RANKS), strict=False)]


def _calibration_orders(gpus: Sequence[int], groups: Sequence[tuple[int, int]], sizes: Sizes) -> list[Order]:
    """For each GPU: the endless jobs of the groups, those that warm up, the first of a new worker, and for each of `sizes.beside` one whose
    shape is new to its worker, another of the same shape, and one that is longer.
    """
    sample, steps = sizes.calibration_sample_tokens, {"new": SHORT_STEPS, "short": SHORT_STEPS, "longer": LONGER_STEPS}
    orders: list[Order] = []
    for gpu in gpus:
        for tokens in sorted({tokens for _, tokens in groups}):
            most = max(members for members, own in groups if own == tokens)
            batch = max(1, tokens // sample)
            orders += [Order(f"c{tokens}-{member}-{gpu}", min(tokens, sample), batch, 16, ENDLESS) for member in range(most)]
        orders += [Order(f"warm{number}-{gpu}", *shape, SHORT_STEPS) for number, shape in enumerate(_shapes(sizes))]
        orders.append(Order(f"cold-{gpu}", sample, COLD_SAMPLES, 16, SHORT_STEPS))
        for number, tokens in enumerate(sizes.beside):
            orders += [Order(f"{name}{number}-{gpu}", tokens, COLD_SAMPLES, 16, count) for name, count in steps.items()]
    return [*orders, Order(WIDE, *sizes.wide, 16, ENDLESS)]


def _budget_of(group: tuple[int, int], sizes: Sizes) -> int:
    """Of the micro-batches: a group's steps fit into one, whatever samples they have, but for the saturated one's."""
    members, tokens = group
    if group == sizes.saturated[:2]:
        return sizes.saturated[2]
    return next(budget for budget in CostModel.budgets if budget >= 1.5 * members * tokens)


@contextmanager
def _calibrating(machine: LocalMachine, work: Work) -> Iterator[_Bench]:
    arrivals = [(0.0, event) for event in work.submitted.values()]
    with LocalBackend(machine) as backend:
        submit_all(backend, work.jobs, arrivals)
        yield _Bench(backend, machine.gpus, work)


class _Bench:
    """Runs groups by hand, the same on all GPUs at once."""

    def __init__(self, backend: LocalBackend, gpus: Sequence[int], work: Work) -> None:
        self._backend, self._gpus, self._work, self._groups = backend, gpus, work, 0
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

    def _until_ready(self, groups: Sequence[str]) -> None:
        waiting = set(groups)
        while waiting:
            for event in self._backend.poll():
                assert not isinstance(event, JobFailed), event
                if isinstance(event, GroupReady):
                    waiting.discard(event.group_id)

    def _stop(self, groups: Sequence[str]) -> None:
        for group in groups:
            self._backend.execute(StopGroup(group))

    def measure(self, members: int, tokens: int, budget: int) -> Point:
        """Seconds between the optimizer steps of so many like jobs: the mean of what they report, over all GPUs."""
        names = {gpu: [f"c{tokens}-{member}-{gpu}" for member in range(members)] for gpu in self._gpus}
        groups = self._start(names, budget)
        self._until_ready(groups)
        reports: dict[str, list[float]] = {name: [] for own in names.values() for name in own}
        while min(len(found) for found in reports.values()) < REPORTS:
            for event in self._backend.poll():
                if isinstance(event, StepsDone) and event.group_id in groups:
                    reports[event.job_id].append(event.step_seconds)
        self._stop(groups)
        profiles = [self._work.submitted[name].profile for name in reports]
        mean_tokens = statistics.mean(profile.tokens_per_step for profile in profiles)
        return Point(members, mean_tokens, budget, statistics.fmean(s for found in reports.values() for s in found[1:]))

    def measure_wide(self, sizes: Sizes) -> Point:
        """The same of one job on all GPUs together, in micro-batches that hold its whole step, once it gets no faster."""
        tokens, samples = sizes.wide
        plan = ParallelPlan(len(self._gpus), next(budget for budget in CostModel.budgets if budget >= 1.5 * tokens * samples))
        group = JobGroup("wide", BASE, tuple(self._gpus), plan, (WIDE,), (1.0,))
        self._backend.execute(StartGroup(group))
        self._until_ready([group.group_id])
        found, before = math.inf, math.inf
        for _ in range(MOST_TURNS):
            seconds: list[float] = []
            while len(seconds) < REPORTS:
                seconds += [event.step_seconds for event in self._backend.poll() if isinstance(event, StepsDone) and event.job_id == WIDE]
            before, found = found, statistics.fmean(seconds[1:])
            if found > FASTER * before:
                break
        self._stop([group.group_id])
        return Point(1, self._work.submitted[WIDE].profile.tokens_per_step, plan.token_budget, found, len(self._gpus))

    def seconds_to_end(self, name: str) -> float:
        """Seconds from the start of a group of one job on each GPU to the job's end, the mean over the GPUs."""
        began, taken = self._backend.now(), list[float]()
        groups = self._start({gpu: [f"{name}-{gpu}"] for gpu in self._gpus}, BUDGET)
        while len(taken) < len(groups):
            for event in self._backend.poll():
                assert not isinstance(event, JobFailed), event
                if isinstance(event, JobFinished):
                    taken.append(self._backend.now() - began)
        self._stop(groups)
        return statistics.mean(taken)


def _fitted(
    points: Sequence[Point],
    base: Path,
    cold_seconds: float,
    beside_new: Sequence[float],
    beside_known: Sequence[float],
    wide: Point | None = None,
) -> Calibration:
    """The fit of `bench.cost_fit`; the saturated point gives the fill, and the wide one, of a step in one micro-batch on several GPUs, the
    exchange.

    `cold_seconds` is what the first job of a new worker took beside its steps.
    """
    *plain, saturated = points
    measured = [Measured(str(number), p.members * p.tokens, p.members, p.step_seconds, False, "") for number, p in enumerate(plain)]
    found = fit(measured)
    speed, launch, floor, member = found.values
    residual = max(abs(error) for error in found.errors.values())
    tokens = _tokens_of_a_micro_batch(saturated, speed, launch + member * (saturated.members - 1), floor)
    where = f"bench.fidelity's calibration, {time.strftime('%Y-%m-%d')}, {len(points)} groups on all GPUs at once"
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    source: dict[str, str] = dict.fromkeys(FITTED, where)
    exchange = 0.0
    if wide is not None:
        above = math.sqrt(max(0.0, wide.step_seconds**2 - floor**2))
        exchange = max(0.0, above - launch - wide.tokens / (speed * wide.gpus))
    source["exchange_seconds"] = where if wide is not None else "extrapolated: no group has more than one GPU"
    source["exchange_gpu_seconds"] = "extrapolated: none, the exchange is that of the widest group"
    source["exchange_between_nodes_seconds"] = "extrapolated: there is one node"
    source |= {"base_bytes": "size of its files", "gpu_bytes": "this machine's memory"}
    source |= {"activation_bytes_per_token": "extrapolated: taken as none, small beside the memory"}
    constants = BaseConstants(
        speed, launch, member, exchange, exchange, float(weights), 0.0, float(psutil.virtual_memory().total), source, floor
    )
    fill_share = min(1.0, max(0.5, tokens / saturated.budget))
    job_seconds = max(0.0, statistics.median(beside_new))
    kept = ((*points, *([wide] if wide is not None else [])), tuple(beside_new), tuple(beside_known))
    return Calibration(constants, fill_share, cold_seconds - job_seconds, job_seconds, residual, *kept)


def _tokens_of_a_micro_batch(saturated: Point, speed: float, fixed: float, floor: float) -> float:
    """E of which t(E) / E is what a token takes in the saturated group, with t(E) = sqrt((fixed + E / speed)^2 + floor^2)."""
    each = saturated.step_seconds / (saturated.members * saturated.tokens)
    square = each**2 - 1 / speed**2
    if square <= 0:
        return math.inf
    half = fixed / speed
    return (half + math.sqrt(half**2 + square * (fixed**2 + floor**2))) / square
