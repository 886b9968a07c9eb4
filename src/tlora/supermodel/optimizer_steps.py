"""What the super-model asks of an optimizer over its bank, and what passes between the two halves of a step.

There are two files of optimizers: `device_optimizer.py` with kernels, and `job_by_job.py` with torch's operations, for a CPU and for a GPU
that runs no kernels of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tlora.adapters.adamw import StepStats
from tlora.adapters.layout import AdapterShape
from tlora.adapters.state import AdapterState
from tlora.job import TrainConfig


class StepError(Exception):
    """Steps of some jobs raised (`errors`), and those have not stepped; the others have (`stats`)."""

    def __init__(self, stats: dict[str, StepStats], errors: dict[str, Exception]) -> None:
        super().__init__("; ".join(f"{job_id}: {type(error).__name__}: {error}" for job_id, error in errors.items()))
        self.stats, self.errors = stats, errors


@dataclass(frozen=True)
class QueuedSteps:
    """Optimizer steps under way. `read` waits for them and tells what they did; `errors`: jobs that do not step, and why."""

    read: Callable[[], dict[str, StepStats]]
    errors: dict[str, Exception]
    done: bool  # reading does not wait


class Stepping(Protocol):
    """What a step needs of a resident job."""

    @property
    def state(self) -> AdapterState: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def total_steps(self) -> int: ...


class DueSteps(Protocol):
    """Steps whose gradients are measured, and of which nothing is changed yet."""

    def update(self) -> QueuedSteps:
        """The second half, once: clip, apply AdamW, write the weights into the bank, forget the gradient. Does not wait for the device."""
        ...


class MeasuredSteps(DueSteps, Protocol):
    """With what was measured."""

    @property
    def verdicts(self) -> Mapping[str, Tensor]:
        """For each measured job two fp64 numbers on the bank's device: the gradient's norm before clipping, not finite where the job
        will skip the step, and the factor that clips it. To be read before `update`.
        """
        ...

    @property
    def errors(self) -> Mapping[str, Exception]:
        """Jobs whose gradient could not be measured, and why: they do not step."""
        ...


REFUSED, PROVEN, OPEN = 0.0, 1.0, 2.0
"""What a verdict says of an update: it is not made, it is finite, or each part has to look."""


@dataclass(frozen=True)
class PartRule:
    """How parts are measured: `rows`, and `columns` of a module."""

    rows: int
    columns: Callable[[AdapterShape], int]


class PartStep(Protocol):
    """A step of an adapter whose other modules lie in other processes, each of which takes it of its own. It has been measured.

    `measured_RE` of all modules, put together in the order of the whole adapter, is judged once. Where the verdict is `OPEN`, every
    part is checked. Then all parts apply the step, or none does.
    """

    measured_RE: Tensor
    """fp64 on the bank's device: what the verdict follows from, by columns of the modules here (`PartRule`)."""

    def judge(self, measured_RE: Tensor) -> Tensor:
        """Of the whole adapter's: fp64 [3] on the device, the norm before clipping, the factor that clips, and the verdict. Queued on the
        current stream.
        """
        ...

    def check(self, clip: float) -> Tensor:
        """fp64 [1] on the device: whether the update of this part would hold a number that is not finite (0: it does not)."""
        ...

    def apply(self, norm: float, clip: float, *, applied: bool) -> StepStats:
        """Update (unless the step is not `applied`), forget the gradient, and count the step. Does not wait for a GPU."""
        ...


class Optimizer(Protocol):
    """AdamW of the adapters in a bank, each by itself."""

    part_rule: PartRule

    def add(self, job_id: str, state: AdapterState) -> None:
        """Make what the steps of a job need; it has its slot. May run out of memory; nothing is kept then."""
        ...

    def remove(self, job_id: str) -> None:
        """Forget the job, if it is there."""
        ...

    def gradient(self, job_id: str) -> Tensor:
        """A copy of the job's summed gradient: flat [P] in the order of its layout, in the bank's `sum_dtype`."""
        ...

    def set_gradient(self, job_id: str, gradient_P: Tensor) -> None:
        """Replace the job's sums by a contiguous tensor like that of `gradient`."""
        ...

    def write(self, job_id: str, params_P: Tensor) -> None:
        """Replace the job's weights in the bank by contiguous ones [P], like those of its state."""
        ...

    def measure(self, due: Mapping[str, Stepping]) -> MeasuredSteps:
        """The first half of the steps of all jobs of `due`: norm of each one's sums, finite or not, and how to clip."""
        ...

    def begin_part(self, job_id: str, job: Stepping) -> PartStep:
        """Measure the sums of a part of an adapter. Does not wait for a GPU with kernels of ours."""
        ...
