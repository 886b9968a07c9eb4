"""The micro-batches of a group on their way: announced to the stages before this one, then computed here, oldest first.

In one process each is computed as soon as it is announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tlora.batching.pack import MicroBatch, Row, prepared_budget
from tlora.batching.stream_rule import StreamRule
from tlora.group.isolation import Failure, try_call
from tlora.group.job_run import JobRun
from tlora.group.pipeline import Pipeline
from tlora.objectives import UnitLoss
from tlora.supermodel.batch import PackedBatch, collate
from tlora.supermodel.losses import JobLoss
from tlora.supermodel.supermodel import SuperModel


@dataclass(frozen=True)
class Announced:
    """A micro-batch that the stages before this one compute already. `batch`: what it is here, or why it cannot be; `through`: jobs of
    which it ends what was offered.
    """

    packed: MicroBatch
    batch: PackedBatch | Failure
    objectives: Mapping[str, UnitLoss]
    through: tuple[str, ...]


class Stream:
    """Of the jobs in `runs`. `begin` is called with the jobs of each micro-batch before it is computed."""

    def __init__(self, model: SuperModel, pipeline: Pipeline, runs: Mapping[str, JobRun]) -> None:
        self._model, self._pipeline, self._runs = model, pipeline, runs
        self.begin: Callable[[tuple[str, ...]], object] = lambda _: None
        self._ahead: deque[Announced] = deque()
        self._recent: deque[MicroBatch] = deque(maxlen=3 * pipeline.depth)  # all that were announced
        self.rule = StreamRule(pipeline.depth)

    @property
    def ahead(self) -> int:
        """Micro-batches that are announced, and not computed here yet."""
        return len(self._ahead)

    def has(self, job_id: str) -> bool:
        """Whether any of them has samples of the job."""
        return any(row.job_id == job_id for announced in self._ahead for row in announced.packed.rows)

    def announced_before(self, later: int) -> MicroBatch:
        """The one that was announced `later` ones before the newest."""
        return self._recent[-1 - later]

    def announce(self, packed: MicroBatch, token_budget: int) -> None:
        """Make the batch of a micro-batch, and let the stages before this one begin with it."""
        self._recent.append(packed)
        self.rule.announce(packed, {name: self._runs[name].progress.step for name in _jobs(packed.rows)})
        through = tuple(name for name in _jobs(packed.rows) if self._runs[name].flow.complete)
        objectives = self._objectives(packed.rows)
        ends = {name: self._runs[name].is_last_replica for name in through}
        batch = try_call(self._batch, packed, token_budget, token_budget, objectives, ends)
        self._ahead.append(Announced(packed, batch, objectives, through))

    def next(self) -> Announced:
        """The oldest, which is to be computed now."""
        announced = self._ahead.popleft()
        self.rule.compute(announced.packed)
        return announced

    def compute(self, packed: MicroBatch, batch: PackedBatch | Failure, objectives: Mapping[str, UnitLoss]) -> dict[str, JobLoss]:
        """One forward-backward, or evaluation: the jobs' losses."""
        self.begin(_jobs(packed.rows))
        if isinstance(batch, Failure):
            raise batch.error
        return (self._model.evaluate if packed.kind == "eval" else self._model.forward_backward)(batch, objectives)

    def try_alone(self, name: str, packed: MicroBatch, token_budget: int) -> dict[str, JobLoss] | Failure:
        """The part of one job, by itself, at all stages."""
        rows = tuple(row for row in packed.rows if row.job_id == name)
        tried = try_call(self._compute_alone, replace(packed, rows=rows, tokens=sum(row.tokens for row in rows)), token_budget)
        if isinstance(tried, Failure):
            self._pipeline.begin_anew()
        return tried

    def begin_anew(self, names: Collection[str]) -> None:
        """Forget what was announced; the batches of these jobs start over."""
        self._ahead.clear()
        self.rule.begin_anew(names)
        self._pipeline.begin_anew()

    def _compute_alone(self, packed: MicroBatch, token_budget: int) -> dict[str, JobLoss]:
        objectives = self._objectives(packed.rows)
        losses = self.compute(packed, self._batch(packed, token_budget, 0, objectives), objectives)
        self._pipeline.settle()
        return losses

    def _objectives(self, rows: tuple[Row, ...]) -> dict[str, UnitLoss]:
        present = {name: self._runs[name].objective for name in _jobs(rows)}
        return {name: objective for name, objective in present.items() if objective is not None}

    def _batch(
        self,
        packed: MicroBatch,
        token_budget: int,
        most_tokens: int,
        objectives: Mapping[str, UnitLoss],
        through: Mapping[str, bool] = MappingProxyType({}),
    ) -> PackedBatch:
        """A micro-batch as tensors, here and at the stages before. `most_tokens`: to which it may be padded for speed; 0: to a prepared
        size at most.
        """
        device, kind = self._model.device, packed.kind
        pad_to = prepared_budget(packed.tokens, token_budget) if device.type == "cuda" else 0
        samples = [self._runs[row.job_id].batch_row(row) for row in packed.rows]
        compared = [name for name, objective in objectives.items() if objective.needs_reference]
        self._pipeline.announce(kind, samples, pad_to, most_tokens, compared, through)
        return collate(samples, device, pad_to, most_tokens)


def _jobs(rows: tuple[Row, ...]) -> tuple[str, ...]:
    """Of a micro-batch, in its order: a job's rows are adjacent."""
    return tuple(dict.fromkeys(row.job_id for row in rows))
