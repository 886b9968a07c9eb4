"""A run that may begin: what `train` hands to the processes that compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tlora.engine.watcher import Watcher
from tlora.job import RunSpec
from tlora.store.fingerprint import BaseGuard
from tlora.store.job_result import JobResult


@dataclass(frozen=True)
class CheckedRun:
    """A run that has been checked as far as its files allow."""

    run: RunSpec
    resume: bool
    overwrite: bool
    watcher: Watcher
    guard: BaseGuard
    digest: str = ""  # of the jobs file as it was read, where a launcher's ranks have read it too
    again: bool = False  # after the loss of a GPU: jobs that fitted before must fit now
    ended: Mapping[str, JobResult] = field(default_factory=dict[str, JobResult])  # by an earlier run
