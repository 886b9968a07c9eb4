"""What the last stage of a base tells the stages before it. The group runs there alone; a base in one process has no other stages.

Micro-batches are a stream without a flush: the next ones are announced while the stages before are computing them, and a job's next global
batch enters when the one before has left (`Flow`). Everything else, as a job's coming or its new weights, takes its place in that stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tlora.adapters.state import AdapterState
from tlora.batching.flow import Kind
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import JobSpec
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.optimizer_steps import DueSteps
from tlora.supermodel.supermodel import SuperModel


@dataclass(frozen=True)
class StageFailure:
    """A stage before the last has failed, in the micro-batch that was announced `later` ones before the newest."""

    later: int
    error: Exception


class Pipeline:
    """The stages before the last one, of which there are none here. Each method is called in the order of the stream.

    Each stage has the adapters of its own layers, with their moments, and steps them; the last one judges the gradient of the whole.
    """

    depth = 1
    """Micro-batches that are announced before the oldest of them is computed here."""

    def __init__(self, model: SuperModel) -> None:
        """`model`: of the last stage."""
        self._model = model
        self._measured: list[str] = []

    def announce(
        self,
        kind: Kind,
        rows: Sequence[BatchRow],
        pad_to: int,
        most_tokens: int,
        compared: Collection[str],
        through: Mapping[str, bool],
    ) -> None:
        """A micro-batch, as `collate` makes it. `compared`: jobs whose objectives compare with a reference; of those `through` it ends the
        part of a replica, and where that is said the whole global batch.
        """

    def cut(self, spec: JobSpec, state: AdapterState | None) -> AdapterState | None:
        """What of the state with which a job is going to join (None: a new adapter) is to join here."""
        return state

    def enter(self, spec: JobSpec, total_steps: int) -> None:
        """The job has joined; all that was announced is settled. Raises what it raises at another stage; it is to `drop` then."""

    def set_reference(self, job_id: str, params_P: Tensor) -> Tensor:
        """Of `SuperModel.set_reference`: what of it is to be set here."""
        return params_P

    def state(self, job_id: str) -> AdapterState:
        """Of the whole adapter, after its last step."""
        return self._model.state(job_id)

    def drop(self, job_id: str) -> None:
        """The job leaves; micro-batches with its rows have been computed here."""

    # -- optimizer steps -----------------------------------------------------------------------------------------------

    def measure(self, job_ids: Sequence[str]) -> None:
        """The global batches of these jobs are through here: their gradients can be measured."""
        self._measured = list(job_ids)

    @property
    def measured(self) -> bool:
        """Whether the jobs that were measured first, in one call, can step now."""
        return bool(self._measured)

    def due(self) -> DueSteps:
        """Their steps, once; `update` takes them at all stages, but for jobs that have left."""
        due, self._measured = self._measured, []
        return self._model.measure_gradients(due)

    @property
    def awaits(self) -> bool:
        """Whether other stages are still to measure gradients."""
        return False

    def wait_for_steps(self, *, computes: bool) -> None:
        """Return when `measured`, or where this one `computes` when the oldest micro-batch has come here, or when a stage has failed."""

    def recompute(self, plan: RecomputePlan) -> None:
        """From the next announced micro-batch on."""

    def settle(self) -> None:
        """Return when all that was announced is computed everywhere. Raises what that raises."""

    def seconds(self) -> float:
        """By the clock of the last stage, by which nano-batches are chosen; 0 where there is no other stage."""
        return 0.0

    @property
    def failure(self) -> StageFailure | None:
        """Of another stage; after it all must `begin_anew`."""
        return None

    def begin_anew(self) -> None:
        """Forget all micro-batches that were announced, and all gradients: after an error, when nothing is known of either."""
