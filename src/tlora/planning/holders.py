"""Which GPUs of unequal memory hold which jobs beside a whole base: the one rule of a run, `tlora check` and `tlora plan`. No torch.

A GPU that has too little memory for a job's longest samples may train its others, where the job is cut among GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tlora.batching.replicas import LEAST_REPLICA_TOKENS, Held
from tlora.data.order import epoch_size
from tlora.job import RunSpec
from tlora.planning.job_work import counting_jobs, trained_tokens
from tlora.planning.planned_job import PlannedJob
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import fixed_depth

_STEP = 128  # to which a sample that is a micro-batch by itself is padded (`batching/pack.py`)


@dataclass(frozen=True)
class Holders:
    """By name, of jobs for which some GPUs have too little memory: those that hold them `whole`, and what others hold in `part`."""

    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    part: Mapping[str, Mapping[int, Held]] = field(default_factory=dict[str, dict[int, Held]])


def find_holders(
    jobs: Sequence[PlannedJob],
    limits: Sequence[int],
    refused: Callable[[Sequence[PlannedJob], int], Sequence[PlannedJob]],
    parts: Callable[[PlannedJob, int], Iterator[PlannedJob]],
) -> Holders | None:
    """On GPUs with `limits` bytes. `refused(jobs, limit)`: those that do not fit on such a GPU where `jobs` share it; `parts(job, limit)`:
    what of a job might fit there, the most first. None where a job fits on none.

    The job with the longest sample, then the largest adapter, goes first, as micro-batches are made for the longest sample of all that are
    left. A part displaces no other job.
    """
    whole, part = dict[str, tuple[int, ...]](), dict[str, dict[int, Held]]()
    for limit in sorted(set(limits)):  # the largest last: what `refused` leaves behind is as of there
        here, out = list(jobs), list[PlannedJob]()
        while away := refused(here, limit):
            out.append(max(away, key=lambda job: (job.longest, job.layout.numel if job.layout is not None else 0)))
            here = [job for job in here if job is not out[-1]]
        for job in out:
            whole[job.spec.name] = tuple(gpu for gpu, other in enumerate(limits) if other > limit)
            found = next((each for each in parts(job, limit) if not refused([*here, each], limit)), None)
            if found is not None:
                here.append(found)
                held = Held(found.longest, _share(found, found.longest))
                part.setdefault(job.spec.name, {}).update({gpu: held for gpu, other in enumerate(limits) if other == limit})
    return Holders(whole, part) if all(whole.values()) else None


def longest_parts(run: RunSpec, job: PlannedJob, memory: MemoryModel, limit_bytes: int) -> Iterator[int]:
    """Tokens up to which samples of `job`, which spans GPUs, may have memory on one with `limit_bytes`, the most first: with all layers
    recomputed that may be, and half of that, in budgets of which half is left to other samples. None where it is not cut among GPUs, or too
    little of it would be left there. A deterministic run cuts by lengths alone, so that no bit depends on a GPU's memory.
    """
    if run.deterministic or job.data is None or job.layout is None or job.spec.needs_whole_batch:
        return
    counted, depth = counting_jobs(memory, [job], run.deterministic), fixed_depth(run.recompute, memory.num_layers)
    room = counted.room([job.layout], limit_bytes)
    most = counted.most_tokens(room, counted.most_recomputed if depth is None else depth)
    tokens = trained_tokens(job) / job.spec.total_steps(epoch_size(job.data.train.epoch))
    for longest in (most // _STEP * _STEP, most // 2 // _STEP * _STEP):
        share = _share(job, longest)
        if share and (job.spec.gpus > 1 or share * tokens >= LEAST_REPLICA_TOKENS):
            yield longest


def _share(job: PlannedJob, longest: int) -> float:
    """Of its tokens, in samples of up to `longest`."""
    assert job.data is not None, job.spec.name
    lengths = job.data.train.lengths
    return float(lengths[lengths <= longest].sum() / lengths.sum())
