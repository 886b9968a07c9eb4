"""The work of `bench.fidelity`: real small jobs with arrivals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tlora.cluster.reconciler import LocalJob
from tlora.job import JobSpec, RunSpec
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.protocol import (
    JobSubmitted,
)
from tlora.shape.cost import CostModel

BASE = "base"  # the base's name in all groups
ENDLESS = 10**6  # optimizer steps: calibration ends, not its jobs
TOKEN_IDS = (10, 500)  # which every base has
SAMPLES = 64  # of a job's data; its epochs go over them again and again
RANKS = (4, 8, 16, 32)
COLD_SAMPLES = 4  # of a step of the calibration's jobs that end
SHORT_STEPS = 20  # of the smallest jobs
SWEEP = 6  # jobs that arrive at once
WIDE_EVERY = 4  # jobs, of which one is wide
OPENING_SECONDS, OPENING_STARTS = 5.0, 1.5  # after which workers are up: these, and so many times what a start took in the calibration


@dataclass(frozen=True)
class Sizes:
    """How large jobs are: those that are replayed have samples of about one of `sample_tokens` (lognormal with `sigma`) and one of
    `batch_sizes`; those of the calibration `alone` tokens a step, in `groups` of (members, tokens of a step of each) that fit into one
    micro-batch, and `saturated` (members, tokens, micro-batch, which holds two of them). `beside` are the samples' tokens of the jobs by
    which is seen what a job takes beside its steps. One job in four is a `wide` one (tokens of a sample, samples), of which each step is
    worth several GPUs (`batching.replicas.LEAST_REPLICA_TOKENS`).
    """

    sample_tokens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    sigma: float
    longest_tokens: int
    alone: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    saturated: tuple[int, int, int]
    beside: tuple[int, ...]
    calibration_sample_tokens: int
    wide: tuple[int, int]


SIZES = {
    "cpu": Sizes(
        sample_tokens=(16, 32, 64, 96),
        batch_sizes=(1, 1, 2, 4),
        sigma=0.4,
        longest_tokens=256,
        alone=(64, 256, 1024, 2048),
        groups=((2, 128), (4, 128), (8, 64)),
        saturated=(6, 1024, 2048),
        beside=(40, 64, 88),
        calibration_sample_tokens=64,
        wide=(96, 48),
    ),
    "cuda": Sizes(  # samples of one length, as packed ones are: the first micro-batches of each shape are not replayed yet, and slower
        sample_tokens=(128, 256, 512, 1024),
        batch_sizes=(1, 2, 4),
        sigma=0.0,
        longest_tokens=1024,
        alone=(256, 1024, 2048, 4096, 8192),
        groups=((2, 1024), (4, 512), (8, 256)),
        saturated=(6, 4096, 8192),
        beside=(320, 448, 704),
        calibration_sample_tokens=256,
        wide=(1024, 8),
    ),
}


@dataclass(frozen=True)
class Work:
    """Orders with their profiles, as a back end takes them."""

    jobs: Mapping[str, LocalJob]
    submitted: Mapping[str, JobSubmitted]


# -- orders --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """A job to be: samples of about `mean_tokens`, so many a step."""

    name: str
    mean_tokens: int
    batch_size: int
    rank: int
    steps: int
    max_slowdown: float = 1.5


def make_work(orders: Sequence[Order], sizes: Sizes, base: Path, directory: Path, seed: int) -> Work:
    """Write the orders' data, tokenize it, profile them."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = [_spec(order, sizes, _write_data(order, sizes, directory, seed + number)) for number, order in enumerate(orders)]
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


def _spec(order: Order, sizes: Sizes, data: Path) -> JobSpec:
    fields = {"data": {"path": str(data), "max_length": sizes.longest_tokens}, "r": order.rank, "batch_size": order.batch_size}
    return JobSpec.model_validate({"name": order.name, **fields, "max_steps": order.steps, "save_steps": ENDLESS})


def _write_data(order: Order, sizes: Sizes, directory: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    lengths = order.mean_tokens * rng.lognormal(0.0, sizes.sigma, SAMPLES)
    path = directory / f"{order.name}.jsonl"
    rows = [rng.integers(*TOKEN_IDS, int(min(max(length, 8), sizes.longest_tokens))).tolist() for length in lengths]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def draw_orders(count: int, mean_seconds: float, sizes: Sizes, cost: CostModel, seed: int) -> list[Order]:
    """`count` jobs of about `mean_seconds` each by itself, from one to four times that apart (lognormal, sigma 0.7).

    Their steps are short enough that what each micro-batch costs besides its tokens is worth sharing.
    """
    rng = np.random.default_rng(seed)
    orders: list[Order] = []
    for number in range(count):
        mean_tokens, batch = int(rng.choice(sizes.sample_tokens)), int(rng.choice(sizes.batch_sizes))
        if number % WIDE_EVERY == 0:
            mean_tokens, batch = sizes.wide
        seconds = rng.lognormal(math.log(mean_seconds) - 0.7**2 / 2, 0.7)
        step_seconds = cost.alone_step_seconds(BASE, mean_tokens * batch, 1)
        steps = max(10, round(seconds / step_seconds))
        slowdown = float(rng.choice([1.2, 1.5, 2.0], p=[0.25, 0.5, 0.25]))
        orders.append(Order(f"job{number}", mean_tokens, batch, int(rng.choice(RANKS)), steps, slowdown))
    return orders


def draw_openers(gpus: int, sizes: Sizes) -> list[Order]:
    """A small job for each GPU, which it has for itself: it starts the worker that then serves others."""
    return [Order(f"opener{gpu}", sizes.calibration_sample_tokens, COLD_SAMPLES, 16, SHORT_STEPS, max_slowdown=1.0) for gpu in range(gpus)]


def is_opener(job_id: str) -> bool:
    return job_id.startswith("opener")


def draw_arrivals(work: Work, load: float, gpus: int, cost: CostModel, start_seconds: float, seed: int) -> list[tuple[float, JobSubmitted]]:
    """Openers at once and, when those should be through, sweeps of jobs that arrive together, at random times (Poisson), so that in their
    span the jobs by themselves would take `load` of the GPUs' time. One by one, who is the shortest when a GPU falls free would hang on
    fractions of a second, and repeats differ by it.
    """
    rng = np.random.default_rng(seed)
    jobs = [event for name, event in work.submitted.items() if not is_opener(name)]
    openers = [event for name, event in work.submitted.items() if is_opener(name)]
    alone = [cost.alone_step_seconds(BASE, job.profile.tokens_per_step, 1) * job.profile.steps for job in jobs]
    gaps = rng.exponential(1.0, -(-len(alone) // SWEEP))
    times = np.cumsum(gaps) - gaps[0]
    times *= sum(alone) / (load * gpus) / max(times[-1], 1e-9)  # of a single sweep: 0
    if openers:
        times += OPENING_SECONDS + OPENING_STARTS * start_seconds
    return [(0.0, event) for event in openers] + [(float(times[number // SWEEP]), event) for number, event in enumerate(jobs)]
