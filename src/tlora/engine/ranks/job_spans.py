"""On which ranks of a worker its jobs are: where a job comes, and what moves when ranks have come or shall go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

from tlora.batching.replicas import LEAST_REPLICA_TOKENS, ReplicaPlacement
from tlora.worker_protocol import Join


def choose_span(
    join: Join, ranks: Sequence[int], others: Iterable[ReplicaPlacement], deterministic: bool, lent: Collection[int] = ()
) -> ReplicaPlacement:
    """The job's replicas on those of `ranks` that have the least to do; of one rank, all of them there.

    With `deterministic` there are as many replicas as the job orders, so that its bytes do not depend on the group. Otherwise a job fills
    its group, as its scheduler counts on it: it has as many replicas as there are ranks, if its steps have samples and tokens for these
    (`LEAST_REPLICA_TOKENS`), and no fewer than it orders. Ranks that are `lent` by other hosts lead none.
    """
    spec, spans, count = join.job, list(others), len(ranks)
    loads = rank_loads(ranks, spans)
    led = {rank: sum(span.lead_rank == rank for span in spans) for rank in ranks}
    replicas = spec.gpus
    if not deterministic:
        worth = count if join.tokens_per_step is None else int(join.tokens_per_step // LEAST_REPLICA_TOKENS)
        replicas = max(spec.gpus, min(count, spec.batch_size, worth))
    if spec.needs_whole_batch:
        replicas = 1
    emptiest = sorted(ranks, key=lambda rank: (loads[rank], led[rank]))
    own = next(rank for rank in emptiest if rank not in lent)
    chosen = [own, *(rank for rank in emptiest if rank != own)][: min(replicas, count)]
    chosen.sort(key=lambda rank: (rank in lent, led[rank]))  # the lead rank evaluates, and writes
    return ReplicaPlacement(replicas, tuple(chosen))


def rank_loads(ranks: Iterable[int], spans: Sequence[ReplicaPlacement]) -> dict[int, Fraction]:
    """How many jobs each rank has, with the shares of those that it computes a part of. Sums are exact: `moves` would move a job to and
    fro for ever between two that rounding alone keeps apart.
    """
    return {rank: sum((Fraction(span.part(rank)) for span in spans if rank in span.ranks), Fraction()) for rank in ranks}


def moves(
    joins: Mapping[str, Join],
    spans: Mapping[str, ReplicaPlacement],
    ranks: Sequence[int],
    deterministic: bool,
    pinned: Iterable[str] = (),
    lent: Collection[int] = (),
) -> dict[str, ReplicaPlacement]:
    """The jobs that shall be elsewhere, now that `ranks` are those that take jobs, and where. `spans` has all jobs as they are; one that is
    `pinned`, because a rank could not compute its part of it, stays on one rank.

    First jobs on ranks that are no longer there move, and those that more or fewer ranks would compute; then, one by one, jobs of one rank
    move from the one with the most to the one with the least, as long as that has less afterwards than the other had.
    """
    there, placed, pinned = set(ranks), dict(spans), set(pinned)
    moved: dict[str, ReplicaPlacement] = {}

    def place(name: str, span: ReplicaPlacement) -> None:
        placed[name] = moved[name] = span

    for name, span in spans.items():
        others = [other for job, other in placed.items() if job != name and there.issuperset(other.ranks)]
        wanted = choose_span(joins[name], ranks, others, deterministic, lent)
        if name in pinned:
            wanted = ReplicaPlacement(wanted.replicas, wanted.ranks[:1])
        gone = not there.issuperset(span.ranks)
        if gone or (name not in pinned and (len(wanted.ranks), wanted.replicas) != (len(span.ranks), span.replicas)):
            place(name, wanted)
    own = [rank for rank in ranks if rank not in lent]
    while True:
        loads = rank_loads(ranks, list(placed.values()))
        full, empty = max(own, key=loads.__getitem__), min(own, key=loads.__getitem__)
        movable = [name for name, span in placed.items() if span.ranks == (full,)]
        if not movable or loads[empty] + 1 >= loads[full]:
            return moved
        place(movable[-1], ReplicaPlacement(placed[movable[-1]].replicas, (empty,)))
