"""Eleven bad neighbours. Each has a benign twin of the same shape, with which its neighbours' bytes are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
from torch import Tensor

from tests.numerics.world import Job
from tests.tiny import SHAPE, make_samples
from tlora.adapters.state import AdapterState
from tlora.data.dataset import Sample
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import losses

_END = 2  # the end-of-text id, which `make_samples` never draws: it marks the samples whose loss raises


@dataclass(frozen=True)
class Poison:
    """How a healthy neighbour becomes a bad one. `raises`: it is refused when it joins (`starts_broken`), or its samples make
    forward_backward raise, so that it is taken out.
    """

    name: str
    spoil: Callable[[Job], Job]
    shape: Callable[[Job], Job] = lambda job: job  # done to the benign twin as well
    raises: bool = False
    starts_broken: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def make(self, benign: bool) -> Job:
        job = self.shape(_neighbour())
        return job if benign else self.spoil(job)


def _neighbour() -> Job:
    lora = LoraConfig(r=6, lora_alpha=12, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    train = TrainConfig(learning_rate=1e-3, batch_size=3, seed=9, weight_decay=0.1)
    return Job("bad", lora, train, tuple(make_samples(4, seed=9, low=6, high=30)), steps=3)


def _filled(value: float) -> Callable[[Job], Job]:
    def fill(state: AdapterState) -> None:
        state.params.fill_(value)

    return lambda job: replace(job, spoil=fill)


def _each(change: Callable[[Sample], Sample]) -> Callable[[Job], Job]:
    return lambda job: replace(job, samples=tuple(change(s) for s in job.samples))


def _weights(value: float) -> Callable[[Job], Job]:
    return _each(lambda s: Sample(s.input_ids, np.full_like(s.loss_weights, value)))


def _last_id(value: int) -> Callable[[Job], Job]:
    return _each(lambda s: Sample(np.append(s.input_ids[:-1], np.int32(value)), s.loss_weights))


def _length(length: int) -> Callable[[Job], Job]:
    return lambda job: replace(job, samples=tuple(make_samples(4, seed=8, low=length, high=length)))


def _rate(value: float) -> Callable[[Job], Job]:
    return lambda job: replace(job, train=job.train.model_copy(update={"learning_rate": value, "lr_scheduler_type": "constant"}))


@contextmanager
def _loss_raises() -> Iterator[None]:
    healthy = losses.linear_cross_entropy

    def raising(hidden: Tensor, head: object, labels: Tensor, grad_weights: Tensor | None = None) -> object:
        if bool((labels == _END).any()):
            raise ArithmeticError("this loss cannot be computed")
        return healthy(hidden, head, labels, grad_weights)  # type: ignore[arg-type]

    with patch.object(losses, "linear_cross_entropy", raising):
        yield


POISONS = (
    Poison("NaN adapter", _filled(math.nan), raises=True, starts_broken=True),
    Poison("Inf adapter", _filled(math.inf), raises=True, starts_broken=True),
    Poison("NaN gradient", _weights(math.nan)),
    Poison("3e38 activations", _filled(3e38)),
    Poison("a loss that raises", _last_id(_END), raises=True, around=_loss_raises),
    Poison("empty batch", lambda job: job, shape=lambda job: replace(job, samples=())),
    Poison("all labels ignored", _weights(0.0)),
    Poison("token id = vocabulary size", _last_id(SHAPE["vocab_size"]), raises=True),
    Poison("length 1", lambda job: job, shape=_length(1)),
    Poison("length = max", lambda job: job, shape=_length(SHAPE["max_position_embeddings"])),
    Poison("learning rate 1e9", _rate(1e9)),
)
