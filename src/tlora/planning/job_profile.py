"""What a scheduler must know of jobs before they run, from their data and their adapters' shapes; the base stays on the meta device.

The data is tokenized as training does it: in a process of its own, into the cache that training reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tlora.data.prepare import Preparation, PrepareProgress
from tlora.data.profile import profile_of
from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.planning.job_plan import plan_jobs
from tlora.planning.planned_job import PlannedJob
from tlora.protocol import JobProfile
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel


@dataclass(frozen=True, slots=True)
class ProfiledJob:
    """A job's profile, and the directories of its tokenized data (`eval_set`: of `eval_path`, if it has one)."""

    profile: JobProfile
    train_set: str
    eval_set: str | None


def profile_jobs(run: RunSpec, on_progress: Callable[[PrepareProgress], None] = lambda _: None) -> dict[str, ProfiledJob | ConfigError]:
    """The profile of each job of `run` by its name, or what is wrong with the job.

    Whether a job fits into memory, and what its evaluations take, is not in it. Raises ModelError for a base or tokenizer that
    cannot be read.
    """
    model = SuperModel(outline(run.base_model, run.dtype, run.base_precision))
    return {job.spec.name: _profile(job) for job in plan_jobs(run, model, Preparation(on_progress), None)}


def _profile(job: PlannedJob) -> ProfiledJob | ConfigError:
    if job.problems or job.data is None or job.layout is None:
        return ConfigError("; ".join(job.problems))
    train = job.data.train
    profile = profile_of(train, job.spec, job.longest, job.layout.numel)
    evaluation = job.data.eval if job.spec.data.eval_path else None
    return ProfiledJob(profile, str(train.directory), str(evaluation.directory) if evaluation is not None else None)
