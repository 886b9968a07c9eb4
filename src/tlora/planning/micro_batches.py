"""How large micro-batches are, and how many layers each of them recomputes: the fastest choice that memory allows, by predicted seconds.

Samples fill micro-batches up to the token budget. A longer one is a micro-batch by itself, and alone pays for its recomputation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tlora.adapters.layout import AdapterLayout
from tlora.batching.flow import Item
from tlora.batching.pack import SMALLEST_BUDGET, auto_token_budget, prepared_budget
from tlora.batching.pipeline_model import Entry, OfferedJob, Pipeline, StageOverhead, Stream, most_open
from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.data.order import global_batch, row_tokens
from tlora.job import RunSpec
from tlora.planning.planned_job import PlannedJob
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import GRAPH_PRICE, HIDES_LAUNCHES, PipelineCost, TokenCost, fixed_depth, recompute_factor

_UNFILLED = 0.9, 0.25  # of `_filled`: samples of 128 to 2,048 tokens, and mostly short ones, of four jobs in budgets of 1,024 to 4,096
_PIPELINED, _PIPELINED_STEP = (
    120,
    512,
)  # micro-batches that are sent through a pipeline in prediction; tokens between budgets that are tried
_NO_CAP = 1 << 40  # tokens
_MOST_SLOWED = 1.5  # rather than that, jobs take turns


class MicroBatches(NamedTuple):
    """Tokens up to which samples share a micro-batch, and the layers that one of so many tokens recomputes."""

    token_budget: int
    recompute: RecomputePlan


@dataclass(frozen=True)
class SampleLengths:
    """Of the samples that a run trains on: lengths without repetition, shortest first, and what share of all tokens lies in each. Jobs
    count alike: while they train together, each computes as many tokens. `offered`: the budget that holds a global batch of each job: no
    micro-batch gets more, since the next batch of a job enters when its last one is through.
    """

    tokens: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]
    offered: float = math.inf


def sample_lengths(jobs: Sequence[PlannedJob]) -> SampleLengths:
    """Of `jobs`, as far as they are computed here; those without data do not count."""
    lengths = [job.data.train.lengths[job.data.train.lengths <= job.longest] for job in jobs if job.data is not None]
    found = [np.unique(own, return_counts=True) for own in lengths if len(own)]
    if not found:
        return SampleLengths(np.zeros(0, np.int64), np.zeros(0))
    parts = [tokens * counts / (tokens * counts).sum() / len(found) for tokens, counts in found]
    tokens, places = np.unique(np.concatenate([tokens for tokens, _ in found]), return_inverse=True)
    means, spreads = zip(*(replica_batch(job) for job in jobs if job.data is not None), strict=True)
    offered = auto_token_budget(1, means, _NO_CAP, filled=False, spreads=spreads)
    return SampleLengths(tokens, np.bincount(places, np.concatenate(parts), len(tokens)).astype(np.float64), offered)


def in_stages(cost: TokenCost, stages: int, jobs: Sequence[PlannedJob], overhead: StageOverhead, run_tokens: int) -> TokenCost:
    """`cost` of one of so many stages, which `jobs` share: with micro-batches so large that jobs offer too few of them, stages wait.
    `overhead`: in the time of one token's ideal products through the whole base. Of a run that trains on `run_tokens`, each of which pays
    its part of the graphs that are captured.
    """
    drawn = {job.spec.name: _batches(job) for job in jobs if job.data is not None}  # once, for all budgets
    if stages == 1 or not drawn:
        return cost

    @lru_cache(maxsize=64)
    def through(token_budget: int) -> PipelineCost:
        offered, shapes = dict[str, OfferedJob](), set[int]()
        for name in drawn:
            drawn[name], own = itertools.tee(drawn[name])
            offered[name] = OfferedJob(name, own)

        def seconds_of(entry: Entry) -> float:
            shapes.add(prepared_budget(entry.tokens, token_budget))
            return entry.tokens + cost.fixed_tokens

        found = Pipeline(Stream(offered, token_budget, stages), seconds_of, stages, overhead).run(_PIPELINED, _PIPELINED // 6)
        mean = found.tokens / found.micro_batches
        each = max(0.0, GRAPH_PRICE * overhead.launch - (mean + cost.fixed_tokens) / stages)
        captured = captured_graphs(stages, len(shapes), run_tokens / mean) * each / max(run_tokens, 1)
        return PipelineCost((found.seconds / found.tokens + captured) * stages, found.waited_seconds / found.seconds)

    return replace(cost, pipeline=through)


def captured_graphs(stages: int, shapes: int, micro_batches: float) -> float:
    """Of all stages, which capture one after another, as each waits for its neighbours. A stage has graphs of its own for each of the
    `most_open` micro-batches that it has open, and launches each shape once before, a third of a graph's price, for all of them.
    """
    graphs = sum((2 * most_open(stage, stages) + 1) / 3 for stage in range(stages))
    return min(graphs * shapes, stages * micro_batches / 2)


def _batches(job: PlannedJob) -> Iterator[list[Item]]:
    """Of one of its replicas, without end."""
    assert job.data is not None
    train, spec = job.data.train, job.spec
    for step in itertools.count():
        samples = global_batch(step, train.epoch, spec.batch_size, spec.seed)
        yield [Item(sample, int(train.lengths[sample])) for sample in samples[: -(-len(samples) // job.replicas)]]


def choose(run: RunSpec, jobs: Sequence[PlannedJob], longest: int, memory: MemoryModel, limit_bytes: int, cost: TokenCost) -> MicroBatches:
    """The fastest that hold all `jobs` at once below the limit, if that does not slow them down too much; or else the fastest that hold
    the largest of the jobs that can be held at all, and as many others as do not slow it down too much. `longest`: tokens of the longest
    sample, which is never split.
    """
    budgets, fixed = _budgets(run, jobs, longest, memory, cost), fixed_depth(run.recompute, memory.num_layers)
    lengths, layouts = sample_lengths(jobs), [job.layout for job in jobs if job.layout is not None]
    deepest = same_for_all(memory.most_recomputed if fixed is None else fixed)
    worst = _MOST_SLOWED * cost_of(MicroBatches(budgets[0], same_for_all(fixed or 0)), lengths, cost)

    def best(held: Sequence[AdapterLayout]) -> MicroBatches | None:
        room = memory.room(held, limit_bytes)
        recompute = memory.least_recomputed(room) if fixed is None else deepest
        steps = _PIPELINED_STEP if cost.pipeline is not None else SMALLEST_BUDGET if recompute.varies else 0
        largest = budgets[0] if cost.pipeline is None else min(budgets[0], cost.full_tokens)
        more = range(steps, largest, steps) if run.token_budget == "auto" and steps else ()
        tried = [MicroBatches(budget, recompute) for budget in sorted({*budgets, *more}, reverse=True)]
        return _fastest([found for found in tried if _fits(found, longest, memory, room)], lengths, cost)

    def good(held: Sequence[AdapterLayout]) -> MicroBatches | None:
        found = best(held)
        return found if found is not None and cost_of(found, lengths, cost) <= worst else None

    if (together := good(layouts)) is not None:
        return together
    held, others = list[AdapterLayout](), [layout for layout in layouts if best([layout]) is not None]
    if others:
        held.append(others.pop(max(range(len(others)), key=lambda i: memory.job_bytes(others[i]))))
    for other in others:
        if good([*held, other]) is not None:
            held.append(other)
    return (best(held) if held else None) or MicroBatches(min([b for b in budgets if b >= longest], default=budgets[0]), deepest)


def _fastest(choices: Sequence[MicroBatches], lengths: SampleLengths, cost: TokenCost) -> MicroBatches | None:
    """Those that promise most come first, so that no pipeline is tried which even without waiting would be slower than one before."""

    def least(found: MicroBatches) -> float:
        return cost.products(found.token_budget, found.recompute.layers(found.token_budget))

    best, fewest = None, math.inf
    for found in sorted(choices, key=least) if cost.pipeline is not None else choices:
        if cost.pipeline is not None and least(found) >= fewest:
            break
        if (seconds := cost_of(found, lengths, cost)) < fewest:
            best, fewest = found, seconds
    return best


def largest_micro_batch(token_budget: int, longest: int) -> int:
    """Tokens of the largest micro-batch that there can be: full, or the longest sample by itself."""
    return max(token_budget, prepared_budget(longest, token_budget))


def _fits(found: MicroBatches, longest: int, memory: MemoryModel, room_bytes: int) -> bool:
    sizes = found.token_budget, largest_micro_batch(found.token_budget, longest)
    return all(memory.activation_bytes(tokens, found.recompute.layers(tokens)) <= room_bytes for tokens in sizes)


def cost_of(found: MicroBatches, lengths: SampleLengths, cost: TokenCost) -> float:
    """Time per token of samples of such lengths; 1 where micro-batches and layers are ideal."""
    budget, recompute, long = found.token_budget, found.recompute, lengths.tokens > found.token_budget

    def each(tokens: int) -> float:
        return cost.at(tokens, recompute.layers(prepared_budget(tokens, budget)))

    if cost.pipeline is not None:  # over stages all micro-batches recompute what the largest must
        longest = int(lengths.tokens[-1]) if len(lengths.tokens) else budget
        deepest = recompute.layers(largest_micro_batch(budget, longest))
        return cost.pipeline(budget).token * recompute_factor(deepest, cost.num_layers)

    shares = lengths.shares[long]
    alone = np.array([each(tokens) for tokens in lengths.tokens[long].tolist()])
    return each(_filled(budget, lengths)) * (1 - float(shares.sum())) + float(shares @ alone)


def _filled(budget: int, lengths: SampleLengths) -> int:
    """Tokens of a micro-batch that samples share, on average. With a mean of m tokens a sample and n = budget / m of them what is left is
    about 0.9 m / n^2, and no more than m / 4, as `pack` fills them. No budget gets more tokens than the jobs offer.
    """
    short = lengths.tokens <= budget
    shares = lengths.shares[short]
    if not (shared := float(shares.sum())):
        return budget
    mean = shared / float((shares / lengths.tokens[short]).sum())
    few, most = _UNFILLED
    return max(1, round(min(budget - mean * min(most, few * (mean / budget) ** 2), shared * lengths.offered)))


def fastest_budget(largest: int, recompute: RecomputePlan, cost: TokenCost) -> int:
    """Of `largest` and its halves, for samples that are all shorter."""
    budgets = [largest]
    while budgets[-1] // 2 >= SMALLEST_BUDGET:
        budgets.append(budgets[-1] // 2)
    fitting = [budget for budget in budgets if budget <= recompute.most_tokens[-1]] or budgets[-1:]
    return min(fitting, key=lambda budget: cost.at(budget, recompute.layers(budget)))


def _budgets(run: RunSpec, jobs: Sequence[PlannedJob], longest: int, memory: MemoryModel, cost: TokenCost) -> list[int]:
    """What the user set, or the largest that the jobs can fill and the device gains from, and halves of it down to the longest sample."""
    if run.token_budget != "auto":
        return [run.token_budget]
    batches = [replica_batch(job) for job in jobs if job.data]
    offered, spreads = [mean for mean, _ in batches], [spread for _, spread in batches]
    launched = min(sum(offered), cost.full_tokens) * memory.layer_weights if memory.num_layers else 0  # the plain path hides none
    filled = launched < HIDES_LAUNCHES
    budget = auto_token_budget(longest, offered, cost.full_tokens, filled=filled, spreads=spreads)
    if filled and budget < cost.link_tokens:  # a streamed base is fetched as often as there are micro-batches, which waits then
        budget = auto_token_budget(longest, offered, cost.full_tokens, filled=False, spreads=spreads)
    budgets = [budget]
    while budgets[-1] // 2 >= longest:
        budgets.append(budgets[-1] // 2)
    return budgets


def replica_batch(job: PlannedJob) -> tuple[float, float]:
    """Mean and standard deviation of the tokens of one replica's part of a global batch, which is drawn without replacement."""
    assert job.data is not None
    tokens = row_tokens(job.data.train.lengths, job.data.train.epoch)
    rows = min(job.spec.batch_size, len(tokens)) / job.replicas
    return float(tokens.mean()) * rows, float(tokens.std()) * math.sqrt(rows * (1 - rows / len(tokens)))
