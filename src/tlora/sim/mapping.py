"""From a row of a trace to a LoRA job, by anchored replay: what the trace lacks is drawn, and the steps are as many as take the
recorded run time on the recorded GPUs (docs/reference/simulator.md).

Reads no file, and knows nothing of groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import NormalDist
from typing import Literal, TypeVar

from tlora.errors import ConfigError
from tlora.protocol import Action, ChangeGroup, Event, GpusAsked, JobProfile, JobSubmitted, RejectJob, StartGroup
from tlora.scheduler.admission import MOST_COUNTED, why_unsound
from tlora.scheduler.predictions import most_useful_gpus
from tlora.shape.cost import CostModel
from tlora.sim.records import FinalState
from tlora.sim.trace import Trace, TraceJob, end_of

Targets = Literal["all-linear", "attention"]
_T = TypeVar("_T")

# Two bases of one shape, as in the reference (tLoRA); the base whose constants each has, for `shape.hardware.cost_model`.
BASES = {"llama-3-8b": "llama-3-8b", "llama-3-8b-instruct": "llama-3-8b"}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """By a base's config.json: hidden size, features of all queries, of all keys, between the linears of the MLP, layers, and rows of the
    embedding. `tied`: the head is the embedding.
    """

    hidden: int
    queries: int
    keys: int
    between: int
    layers: int
    vocabulary: int
    tied: bool = False

    @property
    def attention_features(self) -> int:
        """Into and out of the linears of a layer's attention."""
        return 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)

    @property
    def mlp_features(self) -> int:
        return 3 * (self.hidden + self.between)


SHAPES = {
    "qwen3-0.6b": DecoderShape(1024, 2048, 1024, 3072, 28, 151_936, tied=True),
    "qwen3-1.7b": DecoderShape(2048, 2048, 1024, 6144, 28, 151_936, tied=True),
    "llama-3-8b": DecoderShape(4096, 4096, 1024, 14336, 32, 128_256),
    "llama-3-70b": DecoderShape(8192, 8192, 1024, 28672, 80, 128_256),
}

# Mean length of a job's samples, in tokens: lognormal, and clipped.
_TOKENS_SIGMA, _LEAST_TOKENS, MOST_TOKENS = 0.8, 64, 4096
_ALL_LINEAR_SHARE = 0.7
# Lengths within a job are in no trace. Assumed: lognormal, and the longest of 128 samples four times the mean, but never above the most.
_SAMPLES, _LONGEST_BY_MEAN = 128, 4


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The distributions that vary between modes: values and their shares, which sum to 1. Batches are samples per GPU and step."""

    ranks: tuple[tuple[int, float], ...]
    batches: tuple[tuple[int, float], ...]
    slowdowns: tuple[tuple[float, float], ...] = ((1.2, 0.25), (1.5, 0.5), (2.0, 0.25))
    bases: tuple[tuple[str, float], ...] = tuple((base, 1 / len(BASES)) for base in BASES)
    median_tokens: int = 512


_UNIFORM_BATCHES = ((1, 0.25), (2, 0.25), (4, 0.25), (8, 0.25))
RULES = {
    "default": DrawRules(((4, 0.10), (8, 0.25), (16, 0.30), (32, 0.20), (64, 0.15)), _UNIFORM_BATCHES),
    # As small as recipes are: 8 samples a step and rank 8 or 32 (LLaMA-Factory's llama3_lora_sft.yaml, axolotl's llama-3/lora-8b.yml, TRL's
    # default of 8), 16 and 8 (torchtune's 8B_lora_single_device.yaml), over sets of short samples. The shares are assumed.
    "mixed": DrawRules(
        ((8, 0.40), (16, 0.30), (32, 0.20), (64, 0.10)),
        ((1, 0.10), (2, 0.15), (4, 0.20), (8, 0.40), (16, 0.15)),
        bases=(("qwen3-0.6b", 0.20), ("qwen3-1.7b", 0.30), ("llama-3-8b", 0.35), ("llama-3-70b", 0.15)),
        median_tokens=256,
    ),
    "paper": DrawRules(((2, 0.25), (4, 0.25), (8, 0.25), (16, 0.25)), _UNIFORM_BATCHES),  # arXiv 2602.07263: uniform
}


@dataclass(frozen=True, slots=True)
class LoraDraw:
    """What a trace does not tell of a job. `mean_tokens` is of its samples."""

    base_model: str
    rank: int
    batch_per_gpu: int
    mean_tokens: int
    targets: Targets
    max_slowdown: float


@dataclass(frozen=True, slots=True)
class MappedJob:
    """A job as it is submitted, and its anchor: `recorded_seconds` in all, `alone_step_seconds` for a step without our kernels.

    `ends` is the state in which it ends when its steps are through: rows that were cancelled or failed are replayed by theirs.
    `samples_per_step` are those of an optimizer step, 0 if its source does not tell.
    """

    submit_seconds: float
    recorded_seconds: float
    alone_step_seconds: float
    job: JobSubmitted
    ends: FinalState = "done"
    samples_per_step: int = 0

    @property
    def most_gpus(self) -> int:
        """The most that have a sample of each step to work on; of a job with an unknown number of samples, what the scheduler assumes."""
        return max(self.job.gpus, self.samples_per_step) if self.samples_per_step else most_useful_gpus(self.job)

    @property
    def replayed_seconds(self) -> float:
        """What its steps take by themselves: the recorded run time, up to half a step."""
        return self.job.profile.steps * self.alone_step_seconds


def mapped_jobs(trace: Trace, anchor: CostModel, seed: int, gpus_per_node: int = 8, rules: DrawRules = RULES["default"]) -> list[MappedJob]:
    """The LoRA job of each row: steps = max(1, round(duration / T0)), T0 its step alone on its recorded GPUs by `anchor`.

    `anchor` is the cost model without the kernels' gain ("peft"), for all bases of `rules`; a job lies on as few nodes as can hold it.
    """
    return [_mapped(row, draw_lora(trace.name, row, seed, rules), anchor, gpus_per_node) for row in trace.jobs]


def logged_jobs(log: Iterable[tuple[float, Event | Action]], anchor: CostModel, gpus_per_node: int = 8) -> list[MappedJob]:
    """The jobs that an event log tells of, as they were submitted and when. Their recorded time is that of their steps by `anchor`. One
    that asked for other GPUs before it began is replayed on those that it asked for last.

    One that was submitted twice is one, as of the first time: after a restart all are submitted again, and go on. Only an order that was
    rejected gives way to a later one. A job that cannot be priced comes without steps and takes no time: the scheduler rejects it again.
    Raises ConfigError where that is every job.
    """
    orders = _orders(log)
    reasons = [why_unsound(anchor, order) for _, order in orders]
    if orders and all(reasons):
        raise ConfigError(f"no job of this event log can be replayed. {orders[0][1].job_id!r}, the first, is rejected: {reasons[0]}")
    jobs: list[MappedJob] = []
    for (seconds, order), reason in zip(orders, reasons, strict=True):
        if reason is None:
            step_seconds = _alone_step_seconds(anchor, order.base_model, order.profile.tokens_per_step, order.gpus, gpus_per_node)
            jobs.append(MappedJob(seconds, order.profile.steps * step_seconds, step_seconds, order))
        else:
            empty = replace(order, gpus=min(order.gpus, MOST_COUNTED), profile=JobProfile(0.0, 0, 0, 0))
            jobs.append(MappedJob(seconds, 0.0, 0.0, empty))
    return jobs


def draw_lora(trace_name: str, row: TraceJob, seed: int, rules: DrawRules) -> LoraDraw:
    """What is drawn for a row: each field from a hash of seed, trace, job and field, so that neither order nor company matters.

    A user stays with one base; where a trace names no users (Philly), each job draws its own.
    """

    def uniform(name: str, who: str = row.job_id) -> float:
        return _uniform(f"{seed}|{trace_name}|{who}|{name}")

    tokens = rules.median_tokens * math.exp(_TOKENS_SIGMA * NormalDist().inv_cdf(uniform("mean_tokens")))
    return LoraDraw(
        base_model=_pick(rules.bases, uniform("base_model", row.user or row.job_id)),
        rank=_pick(rules.ranks, uniform("rank")),
        batch_per_gpu=_pick(rules.batches, uniform("batch_per_gpu")),
        mean_tokens=round(min(max(tokens, _LEAST_TOKENS), MOST_TOKENS)),
        targets="all-linear" if uniform("targets") < _ALL_LINEAR_SHARE else "attention",
        max_slowdown=_pick(rules.slowdowns, uniform("max_slowdown")),
    )


def adapter_parameters(rank: int, targets: Targets, base: str = "llama-3-8b") -> int:
    """Trained parameters of a LoRA: rank * (in + out) of each linear. On Llama 3 8B 2.62 M per rank on all of them, 0.85 M on attention."""
    shape = SHAPES[base]
    return rank * shape.layers * (shape.attention_features + (shape.mlp_features if targets == "all-linear" else 0))


@functools.cache
def sample_lengths(mean_tokens: int) -> tuple[int, ...]:
    """Lengths of 128 samples of a job, ascending: the middles of as many equal shares of a lognormal with this mean.

    The last is min(4 * mean, 4096). With r that over the mean and z its normal quantile: spread = z - sqrt(z^2 - 2 ln r).
    """
    quantiles = [NormalDist().inv_cdf((k + 0.5) / _SAMPLES) for k in range(_SAMPLES)]
    longest = min(_LONGEST_BY_MEAN * mean_tokens, MOST_TOKENS)
    spread = quantiles[-1] - math.sqrt(quantiles[-1] ** 2 - 2 * math.log(longest / mean_tokens))
    median = mean_tokens * math.exp(-(spread**2) / 2)
    return tuple(round(median * math.exp(spread * quantile)) for quantile in quantiles)


@functools.cache
def _length_histogram(mean_tokens: int) -> tuple[int, ...]:
    """As `JobProfile` has it: samples of 2^k to 2^(k+1) - 1 tokens."""
    lengths = sample_lengths(mean_tokens)
    counts = [0] * lengths[-1].bit_length()
    for length in lengths:
        counts[length.bit_length() - 1] += 1
    return tuple(counts)


def _orders(log: Iterable[tuple[float, Event | Action]]) -> list[tuple[float, JobSubmitted]]:
    submissions: dict[str, tuple[float, JobSubmitted]] = {}
    rejected, begun = set[str](), set[str]()
    for seconds, entry in log:
        if isinstance(entry, RejectJob):
            rejected.add(entry.job_id)
        elif isinstance(entry, StartGroup | ChangeGroup):
            begun.update(entry.group.job_ids)
        elif isinstance(entry, GpusAsked):
            if entry.job_id in submissions and entry.job_id not in begun:
                at, order = submissions[entry.job_id]
                submissions[entry.job_id] = at, entry.change(order)
        elif isinstance(entry, JobSubmitted) and (entry.job_id not in submissions or entry.job_id in rejected):
            rejected.discard(entry.job_id)
            submissions.pop(entry.job_id, None)  # the new one stands where its time is
            submissions[entry.job_id] = seconds, entry
    return list(submissions.values())


def _mapped(row: TraceJob, draw: LoraDraw, anchor: CostModel, gpus_per_node: int) -> MappedJob:
    tokens_per_step = float(draw.batch_per_gpu * row.gpus * draw.mean_tokens)
    step_seconds = _alone_step_seconds(anchor, draw.base_model, tokens_per_step, row.gpus, gpus_per_node)
    profile = JobProfile(
        tokens_per_step=tokens_per_step,
        steps=max(1, round(row.duration_seconds / step_seconds)),
        longest_sample_tokens=sample_lengths(draw.mean_tokens)[-1],
        adapter_parameters=adapter_parameters(draw.rank, draw.targets, BASES.get(draw.base_model, draw.base_model)),
        length_histogram=_length_histogram(draw.mean_tokens),
    )
    job = JobSubmitted(row.job_id, draw.base_model, row.gpus, profile, tenant=row.user or row.vc, max_slowdown=draw.max_slowdown)
    return MappedJob(row.submit_seconds, row.duration_seconds, step_seconds, job, end_of(row.state), draw.batch_per_gpu * row.gpus)


def _alone_step_seconds(anchor: CostModel, base: str, tokens_per_step: float, gpus: int, gpus_per_node: int) -> float:
    return anchor.alone_step_seconds(base, tokens_per_step, gpus, math.ceil(gpus / gpus_per_node))


def _uniform(key: str) -> float:
    """A number in (0, 1), neither end included: 52 bits of the hash, and the middle between it and the next."""
    bits = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 12
    return (bits + 0.5) / 2**52


def _pick(shares: Sequence[tuple[_T, float]], uniform: float) -> _T:
    """The value in whose share of (0, 1) `uniform` lies."""
    for value, share in shares:
        uniform -= share
        if uniform < 0:
            return value
    return shares[-1][0]
