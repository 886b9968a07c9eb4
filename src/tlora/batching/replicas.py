"""How a global batch is cut among the replicas of a job that spans several GPUs. Pure, on integers: every rank makes the same cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlora.batching.dispatch import Rank, dispatch, filled_at

# Of a replica in a step. A job of 4,096 tokens a step over an 8B is 3.2 times as fast on four H200s as on one, one of 2,048 is 1.7 times as
# fast on two (docs/benchmarks-history.md). By an H200's constants one of 1,024 would be only 1.1 to 1.3 times as fast in two replicas.
LEAST_REPLICA_TOKENS = 1024


class Held(NamedTuple):
    """What a GPU has memory for of a job that does not fit there whole: samples of up to `longest` tokens, a `share` of all its tokens."""

    longest: int
    share: float


@dataclass(frozen=True)
class ReplicaPlacement:
    """Where the replicas of a job are computed: each of `ranks` has a stretch of them, in order, at least one. The first rank, which has
    the first replica, is the job's lead rank. `weights`: of each replica its share of a global batch; none: equal ones. `longest`: of each
    rank the tokens of the longest sample that it has memory for, 0 for any; none: all ranks hold all. `shares`: of each rank what it is
    predicted to compute of the job, where that does not follow from the weights.
    """

    replicas: int
    ranks: tuple[int, ...]
    weights: tuple[float, ...] = ()
    longest: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < len(self.ranks) <= self.replicas and len(set(self.ranks)) == len(self.ranks), self
        assert not self.weights or len(self.weights) == self.replicas, self
        assert len(self.longest) == len(self.shares) and len(self.longest) in (0, len(self.ranks)), self
        assert not self.longest or self.longest[0] == 0, f"the lead rank holds all samples: {self}"

    @property
    def lead_rank(self) -> int:
        return self.ranks[0]

    @property
    def peers(self) -> tuple[int, ...]:
        return self.ranks[1:]

    def rank_of(self, replica: int) -> int:
        return self.ranks[replica * len(self.ranks) // self.replicas]

    def at(self, rank: int) -> list[int]:
        """The replicas that `rank` computes."""
        return [replica for replica in range(self.replicas) if self.rank_of(replica) == rank]

    def weight(self, rank: int) -> float:
        """Of the replicas of `rank` together."""
        here = self.at(rank)
        return sum(self.weights[replica] for replica in here) if self.weights else len(here) / self.replicas

    def part(self, rank: int) -> float:
        """The share of the job's work that `rank` has."""
        return self.shares[self.ranks.index(rank)] if self.shares else self.weight(rank)

    def longest_on(self, rank: int) -> int:
        """Tokens of the longest sample that `rank` has memory for; 0: any."""
        return self.longest[self.ranks.index(rank)] if self.longest and rank in self.ranks else 0

    @property
    def longest_of_each(self) -> tuple[int, ...]:
        """The same by replica; none: all hold all."""
        return tuple(self.longest_on(self.rank_of(replica)) for replica in range(self.replicas)) if self.longest else ()

    def to_json(self) -> dict[str, Any]:
        """As `run.json` has it."""
        found: dict[str, Any] = {"replicas": self.replicas, "gpus": list(self.ranks)}
        found |= {"weights": list(self.weights)} if self.weights else {}
        return found | ({"longest_samples": list(self.longest)} if self.longest else {})


def span_over(
    replicas: int, ranks: Sequence[int], speeds: Sequence[float] | Mapping[int, float], held: Mapping[int, Held] | None = None
) -> ReplicaPlacement:
    """On `ranks`, each with a weight by its speed. `held`: of ranks that hold no more of the job than that; the first is none of them."""
    weights = weights_of(replicas, ranks, speeds)
    if not held:
        return ReplicaPlacement(replicas, tuple(ranks), weights)
    longest = tuple(held[rank].longest if rank in held else 0 for rank in ranks)
    lies = ReplicaPlacement(replicas, tuple(ranks), weights)
    shares = _shares_of([lies.weight(rank) for rank in ranks], [held[rank].share if rank in held else 1.0 for rank in ranks])
    return ReplicaPlacement(replicas, tuple(ranks), weights, longest, shares)


def _shares_of(weights: Sequence[float], held: Sequence[float]) -> tuple[float, ...]:
    """What ranks as fast as `weights` compute of a job of which each holds the samples of so large a share of the tokens, the shortest: as
    `cut` does it, the longest go first to those that hold them, so that these are through together.
    """
    work, rest = [0.0] * len(weights), 1.0
    for bound in sorted({0.0, *held} - {1.0}, reverse=True):
        able = [rank for rank, share in enumerate(held) if share > bound]
        end = filled_at(rest - bound, [Rank(weights[rank], busy_seconds=work[rank] / weights[rank]) for rank in able])
        for rank in able:
            work[rank] = max(work[rank], end * weights[rank])
        rest = bound
    return tuple(work)


def weights_of(replicas: int, ranks: Sequence[int], speeds: Sequence[float] | Mapping[int, float]) -> tuple[float, ...]:
    """Of each replica, with which all `ranks` take equally long: by the speed of its rank, among that one's replicas; none where speeds are
    equal. `speeds`: by rank.

    >>> weights_of(3, [0, 1], [3.0, 1.0])
    (0.375, 0.375, 0.25)
    """
    if len({speeds[rank] for rank in ranks}) == 1:
        return ()
    lies, total = ReplicaPlacement(replicas, tuple(ranks)), sum(speeds[rank] for rank in ranks)
    found = [lies.rank_of(replica) for replica in range(replicas)]
    return tuple(speeds[rank] / total / found.count(rank) for rank in found)


def part_text(job: str, longest: int) -> str:
    """In words, what a rank computes of `job` that does not lead it; `longest` as of `ReplicaPlacement.longest_on`."""
    return f"a part of {job}" + (f" (samples of up to {longest:,} tokens)" if longest else "")


def cut(lengths: Sequence[int], replicas: int, weights: Sequence[float] = (), longest: Sequence[int] = ()) -> list[list[int]]:
    """Positions of the global batch for each replica, each in the batch's order; a unit (sample or pair) is never split.

    By `dispatch` over ranks as fast as `weights`, by default equal ones: the longest unit that is left goes to the replica that is through
    first. Equal replicas differ by one unit's length at most. With fewer units than replicas the last replicas are empty. `longest`: of
    each replica the tokens of the longest unit that it may get, 0 for any. Raises CapacityError for a unit that none may get.
    """
    held = {most: frozenset(place for place, tokens in enumerate(lengths) if tokens <= most) for most in {*longest} - {0}}
    ranks = [Rank(weight, held.get(most)) for weight, most in zip(weights or [1.0] * replicas, longest or [0] * replicas, strict=True)]
    return [list(share) for share in dispatch(lengths, ranks).items]
