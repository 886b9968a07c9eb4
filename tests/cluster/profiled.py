"""The jobs of a run as a controller submits them: their data tokenized, and profiled."""

from __future__ import annotations

from tlora.cluster.reconciler import LocalJob
from tlora.job import RunSpec
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.protocol import JobSubmitted


def submitted_at_once(spec: RunSpec) -> tuple[dict[str, LocalJob], list[tuple[float, JobSubmitted]]]:
    """Jobs and arrivals for `submit_all`, over a base that the cluster calls "tiny"."""
    made, jobs = profile_jobs(spec), dict[str, LocalJob]()
    arrivals: list[tuple[float, JobSubmitted]] = []
    for order in spec.jobs:
        profiled = made[order.name]
        assert isinstance(profiled, ProfiledJob)
        arrivals.append((0.0, JobSubmitted(order.name, "tiny", order.gpus, profiled.profile)))
        jobs[order.name] = LocalJob(order, profiled.train_set, profiled.eval_set)
    return jobs, arrivals
