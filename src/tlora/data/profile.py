"""Computes a job's profile for the scheduler from the lengths of its samples. No tensors: a server's intake does it too."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tlora.data.dataset import Dataset
from tlora.data.order import Epoch, epoch_size, global_batch, takes_all
from tlora.job import JobSpec
from tlora.protocol import JobProfile


def profile_of(train: Dataset, spec: JobSpec, longest_tokens: int, adapter_parameters: int) -> JobProfile:
    """The profile of a job that trains on `train`; `longest_tokens` is that of its longest sample, evaluation included."""
    lengths, steps = train.lengths, spec.total_steps(epoch_size(train.epoch))
    return JobProfile(
        tokens_per_step=tokens_of_steps(lengths, train.epoch, spec, steps) / steps,
        steps=steps,
        longest_sample_tokens=longest_tokens,
        adapter_parameters=adapter_parameters,
        length_histogram=_histogram(lengths),
    )


def tokens_of_steps(lengths: npt.NDArray[np.int64], epoch: Epoch, spec: JobSpec, steps: int) -> int:
    """Tokens of the job's first `steps` global batches. Whole epochs take all samples, unless they are drawn from a mixture; batches of
    other epochs are looked up.
    """
    steps_per_epoch = math.ceil(epoch_size(epoch) / spec.batch_size)
    epochs = steps // steps_per_epoch if takes_all(epoch) else 0
    rest = (global_batch(step, epoch, spec.batch_size, spec.seed) for step in range(epochs * steps_per_epoch, steps))
    return epochs * int(lengths.sum()) + sum(int(lengths[samples].sum()) for samples in rest)


def _histogram(lengths: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Samples of 2^k to 2^(k+1) - 1 tokens, for each k up to the longest's."""
    _, bits = np.frexp(lengths.astype(np.float64))  # n = m * 2^bits with m in [1/2, 1): exact below 2^53
    return tuple(np.bincount(bits - 1).tolist())
