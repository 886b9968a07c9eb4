"""Which job goes to which GPU: pure functions of predicted seconds. No GPU, process or file is touched here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOVE_SECONDS = 10.0  # a job's checkpoint, its load elsewhere, and the steps that neither GPU takes meanwhile
_LEAST_GAIN = 0.05  # of the time that is left, below which a move is not worth its risk


@dataclass(frozen=True)
class Placement:
    """`jobs[g]` are the names of the jobs that begin on GPU g, in the order of the file, and `seconds[g]` what they take one after
    another or together: a GPU's rate is shared, not multiplied.
    """

    jobs: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    lower_bound: float

    @property
    def end(self) -> float:
        """Predicted seconds until the last GPU is through."""
        return max(self.seconds)

    @property
    def excess(self) -> float:
        """Share by which `end` exceeds what no placement can beat; 0 where it is the best."""
        return self.end / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def told(self) -> str:
        """`excess` for a person."""
        return f"{self.excess:.0%} above what no placement can beat" if self.excess >= 0.005 else "no placement can be shorter"


def place(seconds: Mapping[str, float], gpus: int) -> Placement:
    """The longest job first, each to the GPU that is through first; then single moves and swaps while they shorten the longest GPU.

    The lower bound is the larger of the longest job and an equal share of all: no GPU ends before its longest job, nor all of them
    before the average. Ties go to the first GPU and the first job, so that every rank finds the same placement.
    """
    assert gpus >= 1, gpus
    homes: list[list[str]] = [[] for _ in range(gpus)]
    loads = [0.0] * gpus
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):  # stable: equal jobs in the order of the file
        home = loads.index(min(loads))
        homes[home].append(name)
        loads[home] += seconds[name]
    while (better := _improvement(homes, loads, seconds)) is not None:
        homes, loads = better
    order = {name: i for i, name in enumerate(seconds)}
    bound = max([sum(seconds.values()) / gpus, *seconds.values()], default=0.0)
    return Placement(tuple(tuple(sorted(home, key=order.__getitem__)) for home in homes), tuple(loads), bound)


def _improvement(homes: list[list[str]], loads: list[float], seconds: Mapping[str, float]) -> tuple[list[list[str]], list[float]] | None:
    """The move or swap between the longest GPU and another one that leaves the longer of the two the shortest. None if none helps."""
    full = loads.index(max(loads))
    best, found = loads[full] * (1 - 1e-9), None
    for other in range(len(homes)):
        if other == full:
            continue
        for mine in homes[full]:
            for theirs in (None, *homes[other]):
                shift = seconds[mine] - (seconds[theirs] if theirs is not None else 0.0)
                longer = max(loads[full] - shift, loads[other] + shift)
                if longer < best:
                    best, found = longer, (other, mine, theirs)
    if found is None:
        return None
    other, mine, theirs = found
    moved = [list(home) for home in homes]
    moved[full].remove(mine)
    moved[other].append(mine)
    if theirs is not None:
        moved[other].remove(theirs)
        moved[full].append(theirs)
    return moved, [sum(seconds[name] for name in home) for home in moved]


def best_move(left: Sequence[Mapping[str, float]], dry: int, move_seconds: float = MOVE_SECONDS) -> tuple[int, str] | None:
    """The GPU and the job there that should go on on `dry`, which has nothing left to do. `left[g]`: seconds that each job of GPU g still
    needs. None where no move shortens the end of that GPU by enough: `move_seconds`, and a twentieth of its time.
    """
    full = max((g for g in range(len(left)) if g != dry and len(left[g]) > 1), key=lambda g: sum(left[g].values()), default=None)
    if full is None:
        return None
    total = sum(left[full].values())
    name = min(left[full], key=lambda job: max(total - left[full][job], left[full][job] + move_seconds))
    end = max(total - left[full][name], left[full][name] + move_seconds)
    return (full, name) if total - end > max(move_seconds, _LEAST_GAIN * total) else None
