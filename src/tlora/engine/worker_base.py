"""The base of a worker, or of one rank of it, and what fits into the device's memory next to it.

Where the base does not fit on each of a worker's GPUs, these hold it in parts (`sharing/`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch

from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.data.base_download import fetch_base
from tlora.engine.messages import SetPlan
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.job import JobSpec, Recompute
from tlora.planning.allocator import tighten_allocator
from tlora.planning.memory import bytes_when_shared, can_be_cut, may_be_cut, memory_limit
from tlora.planning.memory_bound import MemoryBound
from tlora.planning.planned_job import PlannedJob
from tlora.planning.streaming import stream_for_jobs_to_come
from tlora.planning.work import known_here
from tlora.shape.memory import must_share
from tlora.shape.stages import LayerRange
from tlora.shape.token_cost import fixed_depth
from tlora.sharing.peers import Sharing
from tlora.store.metrics import check_trackers
from tlora.supermodel.held_linear import check_precision
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused
from tlora.wording.numbers import gib, place_names
from tlora.worker_protocol import Load


class WorkerMemory:
    """`share` is the last that was ordered."""

    def __init__(self, bound: MemoryBound, group: Engine, recompute: Recompute, share: SetPlan, most_tokens: int | None = None) -> None:
        """`most_tokens`: of a micro-batch, whatever memory there is."""
        self._bound, self._group, self.share, self._most_tokens = bound, group, share, most_tokens
        self._recompute: Recompute = recompute

    def check(self, planned: PlannedJob) -> None:
        """A job that does not fit by itself gets a problem that says so."""
        self._bound.check(planned, self._deepest())

    def fits(self, newcomer: JobRun) -> bool:
        """Next to those who are here; alone, it was looked at before."""
        runs = list(self._group.runs.values())
        if not runs:
            return True
        longest, jobs = self._demand([*runs, newcomer])
        return self._bound.holds(longest, self._deepest(), jobs)

    def has_room_for(self, more: Sequence[JobRun], tokens: int = 0) -> bool:
        """Whether `more` jobs fit next to all that are here and their plan, and a micro-batch of so many tokens without recomputation."""
        group = self._group
        longest, jobs = self._demand([*group.runs.values(), *more])
        fits = self._bound.holds(max(longest, group.token_budget), group.model.recompute, jobs)
        return fits and (not tokens or self._bound.holds(max(longest, tokens), same_for_all(0), jobs))

    def apply_share(self, newcomer: JobRun | None = None) -> None:
        """What the last Share says, as far as the run options leave it open; room is kept for a `newcomer`."""
        group, share = self._group, self.share
        longest, jobs = self._demand([*group.runs.values(), *([newcomer] if newcomer else [])])
        recompute = self._deepest()
        if self._recompute == "auto":
            recompute = self._bound.least_recomputed(jobs)
        budget = min(share.token_budget, self._most_tokens or share.token_budget)
        group.share(self._bound.lower(budget, longest, recompute, jobs), recompute, share.weights)

    def _deepest(self) -> RecomputePlan:
        """As many layers as may be recomputed at most: as ordered, or as many as memory asks for."""
        fixed = fixed_depth(self._recompute, self._bound.num_layers if self._group.model.num_layers else 0)
        return same_for_all(self._bound.most_recomputed if fixed is None else fixed)

    def _demand(self, runs: Sequence[JobRun]) -> tuple[int, list[PlannedJob]]:
        """The longest sample of `runs`, and the jobs as the memory model has them."""
        specs = [run.spec.model_copy(update={"gpus": run.replicas}) for run in runs]
        jobs = [PlannedJob(spec, layout=self._group.model.layout(spec)) for spec in specs]
        return max((run.longest for run in runs), default=1), jobs


_FORM = "the base is shared"
_LINE_SECONDS = 10.0
_REMEDY = "set unused_weights: ignore in the server's settings, or at the top of the jobs file,"


def load_base(
    load: Load, expected: Sequence[JobSpec], held: Sharing | Mapping[LayerRange, int] | None, note: Callable[[str], object]
) -> tuple[SuperModel, MemoryBound]:
    """The base on its device, and what `memory_limit` leaves its jobs. `held`: together with the other ranks, of a worker with several
    GPUs; or in stages with these layers and limits in bytes, of which this process has the last.

    What the `expected` jobs will launch is compiled meanwhile, as `tlora train` does it. Raises TloraError for options that cannot be had
    here.
    """
    check_trackers(list(load.report_to))
    place, compiling = torch.device(load.device), None
    sharing, in_stages = (held, {}) if isinstance(held, Sharing) else (None, held or {})
    if sharing is None:
        tighten_allocator(place, load.memory_limit)
    outlined = SuperModel(outline(load.base_model, load.dtype, load.base_precision), load.deterministic)
    fetch_base(load.base_model, _now_and_then(note))
    for line in check_unused(load.base_model, outlined.base.model.config, load.unused_weights, _REMEDY):
        if sharing is None or sharing.rank == 0:
            note(line)
    if place.type == "cuda":
        note(f"kernels: {outlined.kernels_on(place, load.deterministic)}")
        if told := known_here(place).told:
            note(told)
    if place.type == "cuda" and expected:
        compiling = outlined.compile_ahead(place, expected)
    check_precision(load.base_precision, place, outlined.base.head.weight_VH.dtype)
    base_bytes, limit_bytes = outlined.base.num_bytes, memory_limit(place, load.memory_limit)
    one, several = place_names(place.type)
    if sharing is not None and not can_be_cut(outlined):
        if sharing.rank == 0 and must_share(base_bytes, limit_bytes):
            note(f"{gib(base_bytes)} on each {one}, of {gib(limit_bytes)}: {_why_whole(outlined)}")
        sharing = None
    if sharing is not None and not _is_shared(sharing, base_bytes, limit_bytes):
        sharing = None
    if sharing is not None:
        whole, base_bytes = base_bytes, bytes_when_shared(outlined, base_bytes, sharing.world_size, sharing.slots)
        note(f"{gib(base_bytes)} of the base's {gib(whole)} on each of {sharing.world_size} {several}")
    streamed = stream_for_jobs_to_come(load, outlined, place, limit_bytes) if sharing is None and not in_stages else None
    if streamed is not None:
        whole, base_bytes = base_bytes, streamed.sizes.on_device(streamed.streaming.slots)
        part = f"{gib(base_bytes)} of the base's {gib(whole)} are on the device"
        note(f"streamed from the host's memory: {part}; {streamed.why}")
    stages, limits = tuple(in_stages), tuple(in_stages.values()) or (limit_bytes,)
    bound = MemoryBound(outlined, base_bytes, place, limits, stages, in_parts=sharing is not None or streamed is not None)
    form = stages[-1] if stages else sharing or (streamed.streaming if streamed is not None else None)
    model = SuperModel.from_pretrained(load.base_model, load.dtype, load.device, load.deterministic, load.base_precision, form)
    model.expect(expected)
    if compiling is not None:
        compiling.wait()
    return model, bound


def _why_whole(outlined: SuperModel) -> str:
    """Why GPUs do not hold a base in parts."""
    if may_be_cut(outlined):
        return "a mixture of experts is held in parts by `layout: shared` of `tlora train` alone, or cut by `layout: stages`"
    return "this base cannot be held in parts"


def _now_and_then(note: Callable[[str], object]) -> Callable[[str], None]:
    """Writes a line of progress at first, and then every 10 s."""
    last = -math.inf

    def show(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_SECONDS:
            last = time.monotonic()
            note(line)

    return show


def _is_shared(sharing: Sharing, base_bytes: int, limit_bytes: int) -> bool:
    """As the first rank finds it, for all: each may have a little more or less memory free."""
    if sharing.rank == 0:
        sharing.store.set(_FORM, "yes" if must_share(base_bytes, limit_bytes) else "no")
    sharing.store.wait([_FORM], timedelta(seconds=sharing.timeout_seconds))
    return sharing.store.get(_FORM) == b"yes"
