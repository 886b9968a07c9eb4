"""On which ranks of a worker a job is computed. Pure: it depends on the job, and on what is on the ranks already."""

from __future__ import annotations

from collections.abc import Iterable

from tlora.batching.replicas import LEAST_REPLICA_TOKENS, Span
from tlora.worker_protocol import Join


def choose_span(join: Join, count: int, others: Iterable[Span], deterministic: bool) -> Span:
    """The job's replicas on ranks that have the least to do; of one rank, all of them there.

    With `deterministic` there are as many replicas as the job orders, so that its bytes do not depend on the group. Otherwise a job fills
    its group, as its scheduler counts on it: it has as many replicas as there are ranks, if its steps have samples and tokens for these
    (`LEAST_REPLICA_TOKENS`), and no fewer than it orders.
    """
    spec = join.job
    spans = list(others)
    loads = [sum(span.part(rank) for span in spans if rank in span.ranks) for rank in range(count)]
    homes = [sum(span.home == rank for span in spans) for rank in range(count)]
    replicas = spec.gpus
    if not deterministic:
        worth = count if join.tokens_per_step is None else int(join.tokens_per_step // LEAST_REPLICA_TOKENS)
        replicas = max(spec.gpus, min(count, spec.batch_size, worth))
    if spec.needs_whole_batch:
        replicas = 1
    ranks = sorted(range(count), key=lambda rank: (loads[rank], homes[rank]))[: min(replicas, count)]
    ranks.sort(key=lambda rank: homes[rank])  # the home evaluates
    return Span(replicas, tuple(ranks))
