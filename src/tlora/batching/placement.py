"""Which job goes to which GPU: pure functions of predicted seconds. No GPU, process or file is touched here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tlora.batching.dispatch import Rank, dispatch
from tlora.batching.replicas import Held, ReplicaPlacement, part_text, span_over
from tlora.wording.numbers import duration_text

MOVE_SECONDS = 10.0  # a job's checkpoint, its load elsewhere, and the steps that neither GPU takes meanwhile
_LEAST_GAIN = 0.05  # of the time that is left, below which a move, or a GPU that holds a part of a job, is not worth its risk


@dataclass(frozen=True)
class Placement:
    """`jobs[g]` are the names of the jobs that GPU g leads, those that span several first, else in the order of the file;
    `seconds[g]` is what GPU g computes of all jobs, one after another or together: a GPU's rate is shared, not multiplied.
    """

    jobs: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    lower_bound: float
    spans: Mapping[str, ReplicaPlacement] = field(default_factory=dict[str, ReplicaPlacement])

    def parts(self, gpu: int) -> tuple[str, ...]:
        """Names of the jobs that GPU `gpu` computes a part of, and that another rank leads."""
        return tuple(name for name, span in self.spans.items() if gpu in span.peers)

    def longest_samples(self, gpu: int) -> dict[str, int]:
        """Of the jobs of which GPU `gpu` has the shorter samples alone, the tokens up to which."""
        return {name: most for name, span in self.spans.items() if (most := span.longest_on(gpu))}

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
        """`excess` in words."""
        return f"{self.excess:.0%} above what no placement can beat" if self.excess >= 0.005 else "no placement can be shorter"


def place(
    seconds: Mapping[str, float],
    gpus: int,
    replicas: Mapping[str, int] | None = None,
    speeds: Sequence[float] = (),
    holds: Mapping[str, Collection[int]] | None = None,
    kinds: Sequence[str] = (),
    held: Mapping[str, Mapping[int, Held]] | None = None,
) -> Placement:
    """By `dispatch`, the longest job first; then single moves and swaps while they shorten the longest GPU.

    Jobs of several `replicas` come before the others: each is spread over as many GPUs, or all where there are fewer. Evaluations are
    the lead rank's, so they alternate. The lower bound is the larger of the longest job that does not span and an equal
    share of all: no GPU ends before its longest job, nor all of them before the average. Ties go to the first GPU and the first job, so
    that every rank finds the same placement. `speeds`: of GPUs that differ, against that which `seconds` are of; a job that spans them
    has a part on each by its speed. `holds`: of a job that not all GPUs have memory for, those that do. `kinds`: what each GPU is, where a
    job may span GPUs of one kind only. `held`: what other GPUs than those of `holds` have memory for of a job: it spans them as well if
    that is shorter by enough; its lead rank holds all of it. Raises CapacityError for a job that no GPU holds.
    """
    speeds = tuple(speeds) or (1.0,) * gpus
    assert gpus == len(speeds) >= 1, (gpus, speeds)
    order, able = {name: i for i, name in enumerate(seconds)}, _Able(gpus, holds or {}, tuple(kinds), held or {})
    spans, fixed = _spread(seconds, speeds, replicas or {}, able)
    narrow = {name: value for name, value in seconds.items() if name not in spans}
    names = list(narrow)
    ranks = [Rank(speeds[gpu], able.items(names, gpu), busy_seconds=fixed[gpu]) for gpu in range(gpus)]
    given = dispatch(list(narrow.values()), ranks)
    led = [sorted([names[item] for item in items], key=narrow.__getitem__, reverse=True) for items in given.items]
    loads = list(given.ends)
    while (better := _improvement(led, loads, narrow, ranks, able)) is not None:
        led, loads = better
    spans = {name: spans[name] for name in seconds if name in spans}
    first = [[name for name, span in spans.items() if span.lead_rank == gpu] for gpu in range(gpus)]
    bound = max([sum(seconds.values()) / sum(speeds), *(own / max(speeds) for own in narrow.values())], default=0.0)
    jobs = tuple((*ahead, *sorted(own, key=order.__getitem__)) for ahead, own in zip(first, led, strict=True))
    return Placement(jobs, tuple(loads), bound, spans)


@dataclass(frozen=True)
class _Able:
    """Which GPUs may have which job, as of `place`."""

    gpus: int
    holds: Mapping[str, Collection[int]]
    kinds: tuple[str, ...]
    held: Mapping[str, Mapping[int, Held]]

    def __post_init__(self) -> None:
        assert not (self.kinds and self.held), "a deterministic run is cut by lengths alone"

    def of(self, name: str) -> list[int]:
        """Those with memory for it."""
        return [gpu for gpu in range(self.gpus) if gpu in self.holds.get(name, range(self.gpus))]

    def items(self, names: Sequence[str], gpu: int) -> Collection[int] | None:
        """Positions of the jobs that a GPU holds; None: all."""
        found = frozenset(item for item, name in enumerate(names) if gpu in self.holds.get(name, (gpu,)))
        return None if len(found) == len(names) else found

    def together(self, name: str) -> list[list[int]]:
        """GPUs that it may span, by kind."""
        if not self.kinds:
            return [self.of(name)]
        return [
            [gpu for gpu in self.of(name) if self.kinds[gpu] == kind] for kind in dict.fromkeys(self.kinds[gpu] for gpu in self.of(name))
        ]


def at_last_stage(seconds: Mapping[str, float], stages: int) -> Placement:
    """Of a base in stages: the rank of the last one leads all jobs, and each GPU computes an equal part."""
    total = sum(seconds.values()) / stages
    return Placement(((),) * (stages - 1) + (tuple(seconds),), (total,) * stages, total)


def _spread(
    seconds: Mapping[str, float], speeds: Sequence[float], replicas: Mapping[str, int], able: _Able
) -> tuple[dict[str, ReplicaPlacement], list[float]]:
    """Where the jobs of several replicas lie, and the seconds that each GPU computes of them."""
    gpus = len(speeds)
    spans: dict[str, ReplicaPlacement] = {}
    fixed, at_home = [0.0] * gpus, [0.0] * gpus  # `at_home`: of the jobs that it leads, on any rank
    wide = [name for name in seconds if replicas.get(name, 1) > 1]

    def span_on(group: list[int], count: int, held: Mapping[int, Held] | None = None) -> ReplicaPlacement:
        """`held`: of more GPUs, which come behind."""
        part, group = held or {}, sorted(group, key=fixed.__getitem__)
        ranks = [*group[:1], *sorted([*group[1:], *part], key=fixed.__getitem__)][:count]
        uneven = count % len(ranks) > 0  # the lead rank then computes a replica more than the last: it is the GPU with the least to do
        ranks.sort(key=lambda gpu: (gpu in part, *((fixed[gpu], at_home[gpu]) if uneven else (at_home[gpu], fixed[gpu]))))
        return span_over(count, ranks, speeds, {gpu: part[gpu] for gpu in ranks if gpu in part})

    def through(span: ReplicaPlacement, name: str) -> float:
        return max(ends(span, name).values())

    def ends(span: ReplicaPlacement, name: str) -> dict[int, float]:
        return {rank: fixed[rank] + seconds[name] * span.part(rank) / speeds[rank] for rank in span.ranks}

    for name in sorted(wide, key=seconds.__getitem__, reverse=True):  # stable: equal jobs in the order of the file
        tried = [span_on(group, replicas[name]) for group in able.together(name) if len(group) > 1]
        span = min(tried, key=lambda span: through(span, name), default=None)
        if part := able.held.get(name):
            end = through(span, name) if span is not None else min(fixed[gpu] + seconds[name] / speeds[gpu] for gpu in able.of(name))
            wider = span_on(able.of(name), replicas[name], part)
            span = wider if wider.longest and through(wider, name) < (1 - _LEAST_GAIN) * end else span
        if span is None:
            continue
        spans[name] = span
        at_home[span.lead_rank] += seconds[name]
        for rank, end in ends(span, name).items():
            fixed[rank] = end
    return spans, fixed


def describe_placement(placement: Placement, place: str = "GPU") -> str:
    """What begins where, in a line. `place`: what one of the devices is called."""
    each = (
        ", ".join([*jobs, *(part_text(name, placement.spans[name].longest_on(gpu)) for name in placement.parts(gpu))]) or "none"
        for gpu, jobs in enumerate(placement.jobs)
    )
    line = "; ".join(f"{place} {gpu}: {jobs}" for gpu, jobs in enumerate(each))
    return f"{line} (predicted {duration_text(placement.end)}, {placement.told})"


def _improvement(
    led: list[list[str]], loads: list[float], seconds: Mapping[str, float], ranks: Sequence[Rank], able: _Able
) -> tuple[list[list[str]], list[float]] | None:
    """The move or swap between the longest GPU and another one that leaves the longer of the two the shortest. None if none helps."""
    full = loads.index(max(loads))
    best, found = loads[full] * (1 - 1e-9), None
    for other in range(len(led)):
        if other == full:
            continue
        for mine in led[full]:
            for theirs in (None, *led[other]):
                if able.holds and (other not in able.of(mine) or (theirs is not None and full not in able.of(theirs))):
                    continue
                shift = seconds[mine] - (seconds[theirs] if theirs is not None else 0.0)
                longer = max(loads[full] - shift / ranks[full].speed, loads[other] + shift / ranks[other].speed)
                if longer < best:
                    best, found = longer, (other, mine, theirs)
    if found is None:
        return None
    other, mine, theirs = found
    moved = [list(own) for own in led]
    moved[full].remove(mine)
    moved[other].append(mine)
    if theirs is not None:
        moved[other].remove(theirs)
        moved[full].append(theirs)
    return moved, [sum((seconds[name] / rank.speed for name in own), rank.busy_seconds) for own, rank in zip(moved, ranks, strict=True)]


def best_move(
    left: Sequence[Mapping[str, float]],
    dry: int,
    move_seconds: float = MOVE_SECONDS,
    stays: Sequence[float] | None = None,
    speeds: Sequence[float] = (),
) -> tuple[int, str] | None:
    """The GPU and the job there that should go on on `dry`, which has nothing left to do. `left[g]`: seconds that each job of GPU g still
    needs there; `stays[g]`: those of what cannot move from there; `speeds`: of GPUs that differ. None where no move shortens the end of
    that GPU by enough: `move_seconds`, and a twentieth of its time.
    """
    rest, speed = stays or [0.0] * len(left), tuple(speeds) or (1.0,) * len(left)
    totals = [sum(each.values()) + more for each, more in zip(left, rest, strict=True)]
    movable = [g for g in range(len(left)) if g != dry and len(left[g]) + (rest[g] > 0) > 1 and left[g]]
    full = max(movable, key=totals.__getitem__, default=None)
    if full is None:
        return None
    total, slower = totals[full], speed[full] / speed[dry]
    ends = {job: max(total - seconds, slower * seconds + move_seconds) for job, seconds in left[full].items()}
    name = min(ends, key=ends.__getitem__)
    return (full, name) if total - ends[name] > max(move_seconds, _LEAST_GAIN * total) else None
