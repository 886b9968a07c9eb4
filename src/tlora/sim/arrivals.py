"""Which jobs of a trace are replayed, and how densely they arrive.

What filters a trace or changes its arrivals gives a new `Trace` that says what was done to it; names, and so what is drawn for a job, stay
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from tlora.errors import ConfigError
from tlora.sim.trace import Trace, rebased
from tlora.wording.numbers import quantity

LOADS = (0.001, 10.0)  # the least and the most that can be asked for: above 1 jobs wait ever longer, and --closed has no end


def first(trace: Trace, count: int) -> Trace:
    """The `count` jobs that were submitted first."""
    if count < 1:
        raise ConfigError(f"the first {count} jobs of a trace are none. Ask for 1 or more")
    return replace(trace, jobs=rebased(trace.jobs[:count]), filters=(*trace.filters, f"first {quantity(count, 'job')}"))


def only(trace: Trace, job_ids: Collection[str]) -> Trace:
    """These of its jobs, at the times that they have."""
    return replace(trace, jobs=tuple(job for job in trace.jobs if job.job_id in job_ids))


def span_seconds(trace: Trace) -> float:
    """From the first submission to the last."""
    return trace.jobs[-1].submit_seconds - trace.jobs[0].submit_seconds


def demand_gpus(trace: Trace) -> float:
    """Mean number of GPUs that the jobs keep busy: sum(gpus * duration) / span. Raises ConfigError where all came at one moment."""
    span = span_seconds(trace)
    if span == 0:
        raise ConfigError(
            f"{trace.name}: all of its jobs ({len(trace.jobs)}) were submitted at one moment, so that it has no load. Take more of its jobs"
        )
    return math.fsum(job.gpus * job.duration_seconds for job in trace.jobs) / span


def natural_load(trace: Trace, gpus: int) -> float:
    """`demand_gpus` as a share of a cluster of `gpus`: above 1 the queue grows without end."""
    if gpus < 1:
        raise ConfigError(f"a cluster of {gpus} GPUs runs nothing. Give it 1 or more")
    return demand_gpus(trace) / gpus


def compressed(trace: Trace, factor: float) -> Trace:
    """All times of submission divided by `factor`; run times stay. Below 1 the arrivals are stretched."""
    if not (0 < factor < math.inf):
        raise ConfigError(f"arrivals cannot be compressed by {factor}. Give a number above 0")
    jobs = tuple(replace(job, submit_seconds=job.submit_seconds / factor) for job in trace.jobs)
    return replace(trace, jobs=jobs, compression=trace.compression * factor)


def at_load(trace: Trace, gpus: int, load: float, counted: Trace | None = None) -> Trace:
    """The trace compressed, or stretched, so that its load on `gpus` GPUs is `load`; by how much stands in `compression`.

    `counted` are those of its jobs that make the load, all if None.
    """
    least, most = LOADS
    if not least <= load <= most:
        raise ConfigError(
            f"load {load:g}: it is the share of the GPUs that the jobs ask for, from {least:g} to {most:g}. Give 0.9 for 90 %, or --closed "
            "for all jobs at once"
        )
    return compressed(trace, load / natural_load(counted or trace, gpus))
