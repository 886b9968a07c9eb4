"""A job whose data has been read, as the cluster is given it."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Row

from tlora.cluster.reconciler import LocalJob
from tlora.job import JobSpec
from tlora.protocol import JobProfile, JobSubmitted
from tlora.service.hall import Cluster


def submit(cluster: Cluster, row: Row[Any], spec: JobSpec, gpus_there: int, least_gpus: int) -> None:
    """Of a job that an earlier server has accepted it is told when, where the cluster's workers are that server's. Raises TloraError,
    ValueError, KeyError.
    """
    intake = row.intake
    profile = JobProfile(**intake["profile"] | {"length_histogram": tuple(intake["profile"]["length_histogram"])})
    created = cluster.now() + row.created - time.time()
    deadline = None if spec.deadline_seconds is None else created + spec.deadline_seconds
    gpus = max(least_gpus, min(spec.gpus, gpus_there))  # accepted when there were more: its replicas run in turn
    rest = (row.tenant, spec.priority, deadline, spec.max_slowdown)
    submitted = JobSubmitted(row.id, row.base_model, gpus, profile, *rest, least_gpus=least_gpus)
    arrival = min(created, cluster.now())
    cluster.submit(
        submitted, LocalJob(spec, intake["train_set"], intake["eval_set"]), arrival if arrival < cluster.began_at_seconds else None
    )
