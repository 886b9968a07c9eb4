"""What a scheduler must know of jobs before they run, from their data and their adapters' shapes; the base stays on the meta device.

The data is tokenized as training does it: in a process of its own, into the cache that training reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tlora.data.order import Mixture, epoch_size, global_batch
from tlora.data.prepare import Preparation, PrepareProgress
from tlora.errors import ConfigError
from tlora.job import JobSpec, RunSpec
from tlora.planning.plan import PlannedJob, plan_jobs
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
    lengths, steps = train.lengths, job.spec.total_steps(epoch_size(train.epoch))
    profile = JobProfile(
        tokens_per_step=tokens_of_steps(lengths, train.epoch, job.spec, steps) / steps,
        steps=steps,
        longest_sample_tokens=job.longest,
        adapter_parameters=job.layout.numel,
        length_histogram=_histogram(lengths),
    )
    evaluation = job.data.eval if job.spec.data.eval_path else None
    return ProfiledJob(profile, str(train.directory), str(evaluation.directory) if evaluation is not None else None)


def tokens_of_steps(lengths: npt.NDArray[np.int64], samples: int | Mixture, spec: JobSpec, steps: int) -> int:
    """Tokens of the job's first `steps` global batches; `samples` is what an epoch takes. Whole epochs take all samples, unless they are
    drawn from a mixture; batches of other epochs are looked up.
    """
    steps_per_epoch = math.ceil(epoch_size(samples) / spec.batch_size)
    epochs = steps // steps_per_epoch if isinstance(samples, int) else 0
    rest = (global_batch(step, samples, spec.batch_size, spec.seed) for step in range(epochs * steps_per_epoch, steps))
    return epochs * int(lengths.sum()) + sum(int(lengths[samples].sum()) for samples in rest)


def _histogram(lengths: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Samples of 2^k to 2^(k+1) - 1 tokens, for each k up to the longest's."""
    _, bits = np.frexp(lengths.astype(np.float64))  # n = m * 2^bits with m in [1/2, 1): exact below 2^53
    return tuple(np.bincount(bits - 1).tolist())
