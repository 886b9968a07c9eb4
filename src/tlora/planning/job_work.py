"""What jobs compute, from their tokens and the base's shape, which of them are cut among several GPUs, and what a run of them takes beside
its base. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tlora.batching.replicas import LEAST_REPLICA_TOKENS
from tlora.data.order import epoch_size
from tlora.data.profile import tokens_of_steps
from tlora.planning.planned_job import PlannedJob
from tlora.registry import OBJECTIVES
from tlora.shape.memory import MemoryModel
from tlora.shape.work import JobWork
from tlora.sharing.regions import lay_out_regions, slots_of

_MOST_ALONE = 1.1  # times an equal share of all seconds: a longer job spans several GPUs


def choose_replicas(jobs: Sequence[PlannedJob], seconds: Mapping[str, float], gpus: int, deterministic: bool) -> dict[str, int]:
    """How many replicas each job has, by name, of those that have more than one and may lie on several GPUs.

    What a job's `gpus` orders is done. Otherwise, without `deterministic`, a job that alone would take longer than an equal share of all
    jobs is cut until it does not, as far as its batches have samples and tokens for that. A statistic of the whole global batch (kto's)
    needs all of it in one place.
    """
    fair = sum(seconds.values()) / gpus
    found: dict[str, int] = {}
    for job in jobs:
        spec, needed = job.spec, seconds[job.spec.name]
        if job.problems or job.data is None or spec.needs_whole_batch:
            continue
        count = spec.gpus
        if count == 1 and not deterministic and needed > _MOST_ALONE * fair:
            tokens = trained_tokens(job) / spec.total_steps(epoch_size(job.data.train.epoch))
            count = min(gpus, spec.batch_size, int(tokens // LEAST_REPLICA_TOKENS), math.ceil(needed / fair))
        if count > 1:
            found[spec.name] = count
    return found


def trained_tokens(job: PlannedJob) -> int:
    """Of all its optimizer steps; 0 for a job with problems."""
    if job.problems or job.data is None:
        return 0
    train, spec = job.data.train, job.spec
    return tokens_of_steps(train.lengths, train.epoch, spec, spec.total_steps(epoch_size(train.epoch)))


def multiply_adds(job: PlannedJob, weights: int, width: int) -> float:
    """Of a job; 0 for one with problems. `weights`: that each token is multiplied with; `width`: of the hidden states of all layers."""
    if job.problems or job.data is None:
        return 0.0
    train, spec = job.data.train, job.spec
    mean = float((train.lengths.astype(float) ** 2).sum() / max(train.lengths.sum(), 1))
    evaluated = 0.0
    if job.data.eval is not None:
        every, steps = spec.eval_steps, spec.total_steps(epoch_size(train.epoch))
        times = 2 + (steps // every if isinstance(every, int) and every else 0)
        evaluated = times * float(job.data.eval.lengths.sum())
    return JobWork(trained_tokens(job), mean, 2 + OBJECTIVES[spec.objective].forwards_beside, evaluated).multiply_adds(weights, width)


def counting_jobs(memory: MemoryModel, jobs: Sequence[PlannedJob], deterministic: bool) -> MemoryModel:
    """`memory` for a run of `jobs`: with the references that they bring, their replicas, and how short the samples are that come here. The
    mailbox is that of the jobs that span ranks. In a deterministic run the token budget must not follow from that: it is counted as with
    the fewest ranks that need one, for all jobs of several replicas, beside one another.
    """
    layouts = {job.spec.name: job.layout for job in jobs if job.layout is not None and job.replicas > 1}
    sizes = {name: layout.numel for name, layout in layouts.items()}
    if deterministic:
        counted = [job for job in jobs if job.spec.name in sizes and not job.problems]
        mailbox = memory.sum_bytes * sum(slots_of(-(-job.replicas // 2)) * sizes[job.spec.name] for job in counted)
    else:
        spans = {job.spec.name: job.span for job in jobs if job.spec.name in sizes and job.span is not None}
        _, mailbox = lay_out_regions(spans, sizes, memory.sum_bytes)
    compared = frozenset(job.layout for job in jobs if job.layout is not None and job.compares_with_start)
    counts = any(phase.sample_bytes for phase in memory.phases)
    trained = [(job.data.train, job.longest) for job in jobs if counts and job.data is not None and not job.problems]
    sequences = [train.longest_sequences[train.lengths <= longest] for train, longest in trained]
    samples = max((len(own) / max(1, int(own.sum())) for own in sequences), default=0.0)
    refers = any(OBJECTIVES[job.spec.objective].forwards_beside for job in jobs)
    for_jobs = replace(memory, spanning=frozenset(layouts.values()), compared=compared, mailbox_bytes=mailbox)
    return replace(for_jobs, samples_per_token=samples, refers=refers)
