"""How a global batch is cut among the replicas of a job that spans several GPUs. Pure, on integers: every rank makes the same cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlora.batching.dispatch import Rank, dispatch

# Of a replica in a step. A job of 4,096 tokens a step over an 8B is 3.2 times as fast on four H200s as on one, one of 2,048 is 1.7 times as
# fast on two (docs/benchmarks-history.md). By an H200's constants one of 1,024 would be only 1.1 to 1.3 times as fast in two replicas.
LEAST_REPLICA_TOKENS = 1024


@dataclass(frozen=True)
class ReplicaPlacement:
    """Where the replicas of a job are computed: each of `ranks` has a stretch of them, in order, at least one. The first rank, which has
    the first replica, is the job's lead rank. `weights`: of each replica its share of a global batch; none: equal ones.
    """

    replicas: int
    ranks: tuple[int, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < len(self.ranks) <= self.replicas and len(set(self.ranks)) == len(self.ranks), self
        assert not self.weights or len(self.weights) == self.replicas, self

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

    def part(self, rank: int) -> float:
        """The share of the job's work that `rank` has."""
        here = self.at(rank)
        return sum(self.weights[replica] for replica in here) if self.weights else len(here) / self.replicas

    def to_json(self) -> dict[str, Any]:
        """As `run.json` has it."""
        found: dict[str, Any] = {"replicas": self.replicas, "gpus": list(self.ranks)}
        return found | ({"weights": list(self.weights)} if self.weights else {})


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


def cut(lengths: Sequence[int], replicas: int, weights: Sequence[float] = ()) -> list[list[int]]:
    """Positions of the global batch for each replica, each in the batch's order; a unit (sample or pair) is never split.

    By `dispatch` over ranks as fast as `weights`, by default equal ones: the longest unit that is left goes to the replica that is through
    first. Equal replicas differ by one unit's length at most. With fewer units than replicas the last replicas are empty.
    """
    return [list(share) for share in dispatch(lengths, [Rank(weight) for weight in weights or [1.0] * replicas]).items]
