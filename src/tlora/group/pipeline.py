"""What the last stage of a base tells the stages before it. The group runs there alone; a base in one process has no other stages.

Micro-batches are a stream without a flush: the next ones are announced while the stages before are computing them, and a job's next global
batch enters when the one before has left (`Flow`). Everything else, as a job's coming or its new weights, takes its place in that stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from tlora.batching.flow import Kind
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import JobSpec
from tlora.supermodel.batch import BatchRow


@dataclass(frozen=True)
class StageFailure:
    """A stage before the last has failed, in the micro-batch that was announced `later` ones before the newest."""

    later: int
    error: Exception


class Pipeline:
    """The stages before the last one, of which there are none here. Each method is called in the order of the stream."""

    depth = 1
    """Micro-batches that are announced before the oldest of them is computed here."""

    def announce(
        self, kind: Kind, rows: Sequence[BatchRow], pad_to: int, most_tokens: int, compared: Collection[str], through: Sequence[str]
    ) -> None:
        """A micro-batch, as `collate` makes it. `compared`: jobs whose objectives compare with a reference; of those `through` it ends a
        global batch, or the part of a replica.
        """

    def enter(self, spec: JobSpec, total_steps: int) -> None:
        """The job has joined; all that was announced is settled. Raises what it raises at another stage; it is to `leave` then."""

    def set_reference(self, job_id: str, params_P: Tensor) -> None:
        """Of `SuperModel.set_reference`."""

    def updated(self, job_ids: Sequence[str]) -> None:
        """Optimizer steps of these jobs are queued: their weights are new."""

    def leave(self, job_id: str) -> None:
        """The job has left; micro-batches with its rows have been computed here."""

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
