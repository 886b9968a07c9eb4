"""What the GPUs of a run are: their kinds, how fast each is, and how much memory it has. They need not be equal.

Kernels of another kind of GPU give other last bits. In a deterministic run each job stays on the kind that it was placed on, also when it
is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.batching.placement import Placement, place
from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.json_file import read_object
from tlora.planning.holders import Holders
from tlora.shape.gpu_files import gpu_here
from tlora.shape.gpu_models import GpuModel
from tlora.shape.layout import Form
from tlora.wording.numbers import gib
from tlora.worker_protocol import Memory


@dataclass(frozen=True)
class Gpus:
    """By rank. `speeds`: of training, against rank 0's; `limits`: bytes that a run may take; `flops`: of rank 0, None where not known."""

    names: tuple[str, ...]
    speeds: tuple[float, ...]
    limits: tuple[int, ...]
    flops: float | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Different names."""
        return tuple(dict.fromkeys(self.names))

    @property
    def models(self) -> tuple[GpuModel, ...]:
        """By what was measured or the table has; none where one is in neither, as are CPUs."""
        known = tuple(model for name in self.names if (model := gpu_here(name).model) is not None)
        return known if len(known) == len(self.names) else ()

    def of_kind(self, kind: str) -> tuple[int, ...]:
        return tuple(rank for rank, name in enumerate(self.names) if name == kind)

    def kinds_by_job(self, may_have: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Of jobs that may have ranks of one kind only; none where there is but one."""
        return {job: self.names[ranks[0]] for job, ranks in may_have.items()} if len(self.kinds) > 1 else {}

    def describe(self) -> list[str]:
        """In lines: where their speeds were measured, and what they are where they are of several kinds."""
        measured = [told for kind in self.kinds if (told := gpu_here(kind).told)]
        if len(self.kinds) == 1:
            return measured
        each = ", ".join(
            f"{rank} is {name} ({speed:.2f} x, {gib(limit)})"
            for rank, (name, speed, limit) in enumerate(zip(self.names, self.speeds, self.limits, strict=True))
        )
        return [*measured, f"GPUs of {len(self.kinds)} kinds: {each}; jobs are placed by each one's speed and memory"]

    def describe_kept(self, kinds: Mapping[str, str]) -> str:
        """Which job stays on which kind."""
        each = "; ".join(f"{kind}: {', '.join(job for job, own in kinds.items() if own == kind) or 'none'}" for kind in self.kinds)
        return f"deterministic: each job stays on one kind of GPU, for another gives other last bits ({each})"

    def strayed(self, kinds: Mapping[str, str], jobs: Sequence[str], ranks: Sequence[int]) -> str:
        """A line on those of `jobs` for whose kind none of `ranks` is left; "" where there are none."""
        left = {self.names[rank] for rank in ranks}
        away = [job for job in jobs if left and kinds.get(job, "") not in {"", *left}]
        return f"no GPU of their kind is left: {', '.join(away)} will not have the bytes of a run on one kind" if away else ""


def gpus_of(memory: Mapping[int, Memory], count: int) -> Gpus:
    """From what ranks have reported; one that is lost counts as the first that is there. GPUs of one kind count as equally fast."""
    first = memory[min(memory)]
    each = [memory.get(rank, first) for rank in range(count)]
    flops = {one.device: one.flops for one in reversed(each)}  # of the first of each kind
    known = min(flops.values()) > 0
    speeds = tuple(flops[one.device] / flops[each[0].device] if known else 1.0 for one in each)
    return Gpus(tuple(one.device for one in each), speeds, tuple(one.limit_bytes[0] for one in each), each[0].flops or None)


def check_stages_alike(run: RunSpec, gpus: Gpus, in_stages: bool) -> None:
    """Raises ConfigError for stages over GPUs of several kinds in a deterministic run: each job is computed by all of them."""
    if in_stages and run.deterministic and len(gpus.kinds) > 1:
        raise ConfigError(
            f"deterministic: true, and the base lies in stages over {' and '.join(gpus.kinds)}, which give other last bits. "
            f"Take GPUs of one kind (--gpus {','.join(map(str, max(map(gpus.of_kind, gpus.kinds), key=len)))},), or deterministic: false"
        )


def place_on(
    gpus: Gpus,
    seconds: Mapping[str, float],
    replicas: Mapping[str, int],
    holders: Holders,
    deterministic: bool,
    earlier: Mapping[str, str],
) -> tuple[Placement, dict[str, tuple[int, ...]]]:
    """Where jobs begin, and the ranks that each may go to later, of those that may not go to all. `holders`: ranks with memory for
    a job, where these are not all; `earlier`: kinds on which jobs were in the run that is resumed, to which they go back in a
    `deterministic` one.
    """
    count = len(gpus.names)
    if not deterministic or len(gpus.kinds) == 1:
        return place(seconds, count, replicas, gpus.speeds, holders.whole, held=holders.part), dict(holders.whole)
    able = {job: tuple(holders.whole.get(job, range(count))) for job in seconds}
    for job, kind in earlier.items():
        if back := tuple(rank for rank in able.get(job, ()) if gpus.names[rank] == kind):
            able[job] = back
    placement = place(seconds, count, replicas, gpus.speeds, able, gpus.names)
    stays = {job: gpus.names[rank] for rank, jobs in enumerate(placement.jobs) for job in jobs}
    return placement, {job: tuple(rank for rank in able[job] if gpus.names[rank] == stays[job]) for job in seconds}


def earlier_kinds(run: RunSpec) -> dict[str, str]:
    """By job, as `run.json` keeps them; none where there is no such run."""
    found = _earlier(run).get("kinds")
    return {str(job): str(kind) for job, kind in found.items()} if isinstance(found, dict) else {}


def earlier_form(run: RunSpec) -> Form | None:
    """Of the base, as `run.json` keeps it; None where there is no such run on several GPUs."""
    found = _earlier(run)
    if "base_shared" not in found:
        return None
    return "stages" if found.get("stages") else "shared" if found["base_shared"] else "whole"


def _earlier(run: RunSpec) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(read_object(Path(run.output_dir) / "run.json"))
    return {}
