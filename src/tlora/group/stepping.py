"""Optimizer steps under way, and the losses that come to the host with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from tlora.group.job_run import JobRun, Means, Passed, means_of
from tlora.kernels.device import ToHost
from tlora.supermodel.optimizer_steps import QueuedSteps


class Losses:
    """Of runs whose batch or evaluation is through, on their way to the host in one copy."""

    def __init__(self, passed: Sequence[Passed]) -> None:
        self._names = [each.metrics for each in passed]
        self._counts = [len(each.parts) for each in passed]
        self._elsewhere = [each.elsewhere for each in passed]
        values = [value for each in passed for value in each.values]
        self._values = ToHost(torch.stack(values)) if values else None

    def read(self) -> list[Means]:
        """Of each."""
        values = iter(self._values.read() if self._values is not None else ())
        shapes = zip(self._counts, self._names, self._elsewhere, strict=True)
        return [means_of([*(list(islice(values, 2 + len(names))) for _ in range(count)), *more], names) for count, names, more in shapes]


@dataclass(frozen=True)
class Stepping:
    """Runs whose optimizer steps are under way, but for those in `steps.errors`; with `offered` each of them has its next global batch on
    offer.
    """

    runs: list[JobRun]
    steps: QueuedSteps
    losses: Losses
    offered: bool
