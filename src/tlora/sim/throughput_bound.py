"""How many tokens/s no schedule can exceed that keeps every job's bound on its slowdown: a fluid linear program, solved in closed form.

Let a job need at least e GPU-seconds for each of its tokens (`least_gpu_seconds`), in any group. The fluid program is

    minimise T  subject to  sum over jobs of e * tokens <= GPUs * T,  all tokens are done.

No job's tokens compete for anything but GPU time, so the program parts: T = sum(e * tokens) / GPUs. It leaves out that a job runs at one
place at a time, memory, the sizes of nodes, and that neighbours must suit each other: all of these can only make T longer. As a linear
program with the ways to part a node as columns it came out less than 0.01 % lower on ee9e8c.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tlora.costs.cost import CostModel
from tlora.costs.sharing import ROUNDING
from tlora.sim.records import JobRecord


class ThroughputBound(NamedTuple):
    """Tokens/s: `all_work` if all jobs progress in step, or over their whole work; `cheapest` if the window holds the work that takes
    least GPU time for a token, which bounds every choice of what to do in it."""

    all_work: float
    cheapest: float


def throughput_bound(jobs: Iterable[JobRecord], cost: CostModel, num_gpus: int, gpus_per_node: int, window_share: float) -> ThroughputBound:
    """The bounds for the jobs that were not rejected; a window does `window_share` of all tokens. nan without jobs."""
    work: list[tuple[float, float]] = []  # GPU-seconds for a token, tokens
    for job in jobs:
        tokens = job.steps * job.tokens_per_step
        if job.state != "rejected" and tokens > 0:
            work.append((least_gpu_seconds(job, cost, num_gpus, gpus_per_node), tokens))
    if not work:
        return ThroughputBound(math.nan, math.nan)
    total = math.fsum(tokens for _, tokens in work)
    whole = math.fsum(each * tokens for each, tokens in work)
    return ThroughputBound(num_gpus * total / whole, num_gpus * window_share * total / _cheapest(sorted(work), window_share * total))


def least_gpu_seconds(job: JobRecord, cost: CostModel, num_gpus: int, gpus_per_node: int) -> float:
    """The least GPU-seconds for a token of the job with which its step takes no more than max_slowdown * T0, alone or in company.

    Alone on G GPUs, no more than its step has samples: G * t(n, G) / n. In company every token of a micro-batch of F tokens takes
    G * t(F, G) / F, which falls with F; a step is in no fewer than one micro-batch, so t(F, G) <= max_slowdown * T0, and F is at most what
    a budget holds. Over several nodes that is the same for any G, so only the largest is tried: if its capacity is below what the job
    needs, none has it. Within a node an exchange takes longer the more GPUs there are, and all are tried.
    """
    base, tokens = job.base_model, job.tokens_per_step
    longest = job.max_slowdown * (1 + ROUNDING) * cost.alone_step_seconds(base, tokens, job.gpus, -(-job.gpus // gpus_per_node))
    choices = [math.inf]
    for gpus in range(1, min(job.most_gpus, num_gpus) + 1):
        seconds = cost.alone_step_seconds(base, tokens, gpus, -(-gpus // gpus_per_node))
        if seconds <= longest or gpus == job.gpus:
            choices.append(gpus * seconds / tokens)
    for gpus in {*range(1, min(gpus_per_node, num_gpus) + 1), num_gpus}:
        nodes = -(-gpus // gpus_per_node)
        most = min(cost.fill_share * cost.budgets[-1] * gpus, cost.largest_micro_batch(base, longest, gpus, nodes, 2))
        if most > 0:
            seconds = cost.micro_batch_seconds(base, most, gpus, nodes, 2)
            if most / seconds * (1 + ROUNDING) >= tokens / longest:
                choices.append(gpus * seconds / most)
    return min(choices)


def _cheapest(work: Sequence[tuple[float, float]], tokens: float) -> float:
    """GPU-seconds of the first `tokens` of the work."""
    left, seconds = tokens, 0.0
    for each, own in work:
        seconds += each * min(own, left)
        left -= own
        if left <= 0:
            break
    return seconds
