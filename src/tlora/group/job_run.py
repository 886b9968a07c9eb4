"""One job's progress from its data to its adapter: what it offers next, and what follows when a batch is through.

It never touches a tensor of the model: the engine hands it losses, and it answers with the next samples or that it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from operator import add

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats
from tlora.batching.flow import Flow, Item, Kind
from tlora.batching.pack import Row
from tlora.batching.replicas import cut
from tlora.data.dataset import Dataset
from tlora.data.order import epoch_size, global_batch
from tlora.group.reports import TrainingProgress
from tlora.job import JobSpec
from tlora.kernels.device import ToHost
from tlora.objectives import Objective, Unit, UnitLoss, objective_of
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.optimizer_steps import QueuedSteps
from tlora.supermodel.supermodel import JobLoss
from tlora.wording.losses import RECENT_STEPS
from tlora.wording.numbers import quantity

QUARANTINE_AFTER = 3  # optimizer steps in a row without a finite gradient


@dataclass
class BatchLosses:
    """The part of a global batch or an evaluation that is through. The losses are still on the device: reading one would wait for it; but
    those of other ranks' replicas, `elsewhere`, are the host's: of each part what `values` has. They come after the others.
    """

    parts: list[JobLoss] = field(default_factory=list)
    tokens: int = 0
    elsewhere: list[Sequence[float]] = field(default_factory=list)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the objective's metrics."""
        return tuple(self.parts[0].metrics) if self.parts else ()

    @property
    def values(self) -> list[Tensor]:
        """Scalars on the device, in the order of `parts`: of each the sums of losses and weights, and those of its metrics."""
        return [value for part in self.parts for value in (part.loss_sum, part.weight_sum, *part.metrics.values())]


@dataclass(frozen=True)
class Means:
    """Means over a global batch or evaluation: the loss per trained token or, with an objective, per unit; and the objective's metrics."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def means_of(parts: Sequence[Sequence[float]], names: Sequence[str]) -> Means:
    """Means of parts (sum of losses, of weights, and of the metrics `names`), added in order of arrival: the bits are the job's own."""
    sums = (reduce(add, column, 0.0) for column in zip(*parts, strict=True))  # not sum(), which from Python 3.12 on compensates
    loss, weight, *metrics = sums if parts else (0.0, 0.0)
    if not weight:
        return Means(math.nan)
    return Means(loss / weight, {name: total / weight for name, total in zip(names, metrics, strict=True)})


def stopped_early(spec: JobSpec, progress: TrainingProgress) -> bool:
    """Whether a job ends here by `early_stopping_patience`."""
    patience = spec.early_stopping_patience
    return bool(patience and progress.evals_without_gain >= patience)


class JobRun:
    """A job's progress through its global batches and evaluations. `flow` is what it offers now."""

    def __init__(
        self,
        spec: JobSpec,
        train: Dataset,
        evaluation: Dataset | None,
        replicas: int | None = None,
        weights: Sequence[float] = (),
        held: Sequence[int] = (),
    ) -> None:
        """`replicas` that each global batch is cut among; by default the job's `gpus`. `weights`: their shares; none: equal ones. `held`:
        of each the tokens of the longest sample that it gets, 0 for any; all replicas of a process have the same.
        """
        self.spec, self.train, self.evaluation = spec, train, evaluation
        self.replicas, self.weights, self.held = replicas or spec.gpus, tuple(weights), tuple(held)
        self.here: Sequence[int] = range(self.replicas)
        """Which of the replicas this process computes."""
        self.total_steps = spec.total_steps(epoch_size(train.epoch))
        self.steps_per_epoch = math.ceil(epoch_size(train.epoch) / spec.batch_size)
        self.progress = TrainingProgress(data=self.data_key, eval_data=self.eval_key)
        self.saved_step = -1  # of the newest checkpoint
        self._objective: Objective | None = objective_of(spec)
        self.objective: UnitLoss | None = self._objective
        """The objective of what is on offer now; None for cross-entropy."""
        self.flow = Flow(spec.name, spec.weight)
        self.passed = BatchLosses()
        self.reference: Callable[[], Tensor] | None = None
        """Gives the weights [P] of the adapter that its objective compares with, once, when the job begins; None: the base alone."""
        self._normalizer = 1.0
        self._evaluates = False
        self._offered: tuple[Dataset, Sequence[int]] = (train, ())
        self.shared_among: Sequence[int] = ()  # replicas that have samples of the global batch on offer, anywhere
        self._shares: list[tuple[int, Sequence[int]]] = []  # of the replicas here, but for those that were on offer
        self.samples_here = 0  # of what is on offer, in all replicas here
        self.replica = 0  # that is on offer now
        self.awaiting = False  # all replicas of this process are through, and others are not
        self._is_sent = False  # and the other processes know
        self._before: dict[int, int] | None = None  # the row before each, while a statistic of the batch is measured

    @property
    def data_key(self) -> str:
        """Names the tokenized training set: its cache key covers file, tokenizer, template and settings."""
        return f"{self.train.directory.name}/{len(self.train)}"

    @property
    def eval_key(self) -> str:
        """As `data_key`, of the evaluation set; "" without one."""
        return f"{self.evaluation.directory.name}/{len(self.evaluation)}" if self.evaluation is not None else ""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that this process computes."""
        longest = max(int(data.lengths.max()) for data in (self.train, self.evaluation) if data is not None)
        return min(longest, (self.held[self.here[0]] if self.held and self.here else 0) or longest)

    # -- of several replicas -------------------------------------------------------------------------------------------

    @property
    def is_lead(self) -> bool:
        """Whether reports, evaluations and checkpoints are this process's."""
        return 0 in self.here

    @property
    def spans(self) -> bool:
        """Whether other processes compute some of the replicas."""
        return len(self.here) < self.replicas

    @property
    def unsent(self) -> bool:
        """Whether the other processes still have to learn that all replicas of this one are through."""
        return self.spans and self.awaiting and not self._is_sent

    def sent(self) -> None:
        """Note that the other processes were sent this."""
        self._is_sent = True

    def follow(self, step: int) -> None:
        """Begin the job after `step` steps, away from its lead rank. Offers what this process computes, if any step is left."""
        self.progress = replace(self.progress, step=step)
        if not self.exhausted:
            self.offer()

    def completed(self, elsewhere: Sequence[Sequence[float]], tokens: int, weights: tuple[float, ...] | None = None) -> bool:
        """Note that the other processes' replicas are through. True: the `weights` of the next global batch are others."""
        self.awaiting = False
        self.passed.elsewhere = list(elsewhere)
        self.passed.tokens += tokens
        if weights is None or weights == self.weights:
            return False
        self.weights = weights
        self.progress = replace(self.progress, replica_weights=weights, weights_since=self.progress.step + 1)
        return True

    # -- what it offers ------------------------------------------------------------------------------------------------

    @property
    def evaluating(self) -> bool:
        return self._evaluates

    @property
    def measuring(self) -> bool:
        """Whether a statistic is on offer, and not yet the batch that needs it."""
        return self._before is not None

    @property
    def exhausted(self) -> bool:
        """Whether no step is left: all are taken, or it stopped early."""
        return self.progress.step >= self.total_steps or stopped_early(self.spec, self.progress)

    @property
    def early_stop(self) -> str:
        """Why the job has ended before its last step; "" where it has not."""
        p = self.progress
        if p.step >= self.total_steps or not stopped_early(self.spec, p):
            return ""
        best = f"lower than {p.best_eval:.6g}, at step {p.best_step}" if p.best_eval is not None else "that is finite"
        waited = quantity(p.evals_without_gain, "evaluation")
        return f"stopped early at step {p.step}/{self.total_steps}: {waited} in a row without a loss {best}"

    @property
    def epoch(self) -> float:
        return self.progress.step / self.steps_per_epoch

    def due(self, every: int | str | None) -> bool:
        """Whether something that happens every so many steps (or each "epoch") happens at the present step."""
        period = self.steps_per_epoch if every == "epoch" else every
        return bool(period) and self.progress.step % int(period or 1) == 0

    @property
    def needs_evaluation(self) -> bool:
        """Before the first step, after the last, and every `eval_steps`; not twice at one step."""
        at = self.progress.step
        wanted = at == 0 or self.exhausted or self.due(self.spec.eval_steps)
        return self.evaluation is not None and wanted and self.progress.evaluated_step != at

    def offer(self) -> None:
        """Put the next evaluation or global batch on offer."""
        self._evaluates = self.needs_evaluation
        if self._evaluates and self.evaluation is not None:
            self._offered = self.evaluation, range(len(self.evaluation))
        else:
            samples = global_batch(self.progress.step, self.train.epoch, self.spec.batch_size, self.spec.seed)
            self._normalizer = float(sum(self.train.trained[i] for i in samples)) if self._objective is None else float(len(samples))
            self._offered = self.train, samples
        self.objective, self._before = self._objective, None
        if self._objective is not None and self._objective.statistic is not None:
            self.objective, samples = self._objective.statistic, self._offered[1]
            self._before = dict(zip(samples, [samples[-1], *samples[:-1]], strict=True))
        self._offer()

    def measured(self) -> None:
        """Offer the batch itself once all of its statistic is through. The value stays on the device."""
        assert self._objective is not None and self._objective.statistic is not None
        parts, self._before = self.passed.parts, None
        total, count = (reduce(add, column) for column in zip(*((part.loss_sum, part.weight_sum) for part in parts), strict=True))
        self.objective = self._objective.statistic.objective(total / count)
        self._offer()

    def summary(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """What metrics show of the objective's means."""
        return self._objective.summarise(metrics) if self._objective is not None and metrics else metrics

    def _offer(self) -> None:
        self.passed, (data, samples) = BatchLosses(), self._offered
        kind: Kind = "eval" if self.evaluating or self.measuring else "train"
        shares: list[Sequence[int]] = [samples]
        if kind == "train" and self.replicas > 1:
            cuts = cut([int(data.lengths[i]) for i in samples], self.replicas, self.weights, self.held)
            shares = [[samples[position] for position in positions] for positions in cuts]
        self.shared_among = [replica for replica, share in enumerate(shares) if share]
        self._shares = [(replica, share) for replica, share in enumerate(shares) if share and (replica in self.here or kind == "eval")]
        self.samples_here = sum(len(share) for _, share in self._shares)
        if self.flow.kind != kind or self.flow.runnable:  # a new kind of work, or one that starts over
            before, self.flow = self.flow, Flow(self.spec.name, self.spec.weight, kind)
            self.flow.virtual_time = before.virtual_time
        self.awaiting, self._is_sent = not self.offer_next_replica(), False

    @property
    def is_last_replica(self) -> bool:
        """Whether the share on offer is the last one of its global batch here."""
        return not self._shares

    def offer_next_replica(self) -> bool:
        """Put the share of the next replica here on offer; False when all have been. Replicas without samples are left out."""
        if not self._shares:
            return False
        data, (self.replica, share) = self._offered[0], self._shares.pop(0)
        most = self.held[self.replica] if self.held else 0
        assert not most or max(int(data.lengths[i]) for i in share) <= most, f"{self.spec.name}: a sample of more than {most} tokens"
        self.flow.offer([Item(i, len(self._measured_unit(i).input_ids) if self.measuring else int(data.lengths[i])) for i in share])
        return True

    def _measured_unit(self, sample: int) -> Unit:
        data = self._offered[0]
        assert self._objective is not None and self._objective.statistic is not None and self._before is not None
        own, before = (Unit(s.input_ids, s.loss_weights) for s in (data[sample], data[self._before[sample]]))
        return self._objective.statistic.unit(own, before, int(data.lengths.max()))

    def batch_row(self, row: Row) -> BatchRow:
        """The sample behind a packed row."""
        if self.measuring:
            unit = self._measured_unit(row.sample)
            return BatchRow(self.spec.name, unit.input_ids, unit.loss_weights)
        sample = self._offered[0][row.sample]
        if self.evaluating:
            return BatchRow(self.spec.name, sample.input_ids, sample.loss_weights, lengths=sample.lengths)
        key = (self.spec.seed, self.progress.step, row.sample) if self.spec.lora_dropout else None
        return BatchRow(self.spec.name, sample.input_ids, sample.loss_weights, self._normalizer, key, sample.lengths)

    def set_weight(self, weight: float) -> None:
        """This job's share of the tokens from now on. No number depends on it."""
        assert weight > 0, f"{self.spec.name}: weight {weight} must be positive"
        self.spec = self.spec.model_copy(update={"weight": weight})
        self.flow.weight = weight

    # -- what follows --------------------------------------------------------------------------------------------------

    def absorb(self, loss: JobLoss, tokens: int) -> None:
        """Add a part of the offered batch that is through."""
        self.passed.parts.append(loss)
        self.passed.tokens += tokens

    def step_queued(self) -> None:
        """Note that the global batch is through and its optimizer step under way: the next one can be offered."""
        p = self.progress
        self.progress = replace(p, step=p.step + 1, num_tokens=p.num_tokens + self.passed.tokens)

    @property
    def goes_straight_on(self) -> bool:
        """Whether the next global batch follows regardless of the last step's outcome: no evaluation, no checkpoint and no end is due."""
        return not (self.needs_evaluation or self.exhausted or (self.is_lead and self.due(self.spec.save_steps)))

    def stepped(self, stats: StepStats, loss: float) -> None:
        """Record the outcome of the optimizer step, and the loss per trained token of its batch."""
        p = self.progress
        assert p.step == stats.step + 1, f"{self.spec.name}: step {stats.step} was read at step {p.step}"
        first = loss if p.loss_first is None else p.loss_first
        self.progress = replace(p, loss_first=first, losses=(*p.losses, loss)[-RECENT_STEPS:])
        if not stats.applied:
            skipped = p.step if p.first_skipped < 0 else p.first_skipped
            self.progress = replace(self.progress, skipped_steps=p.skipped_steps + 1, first_skipped=skipped)

    @property
    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due: at `save_steps`, and where `load_best_model_at_end` may have to return to; once per step."""
        p = self.progress
        best_here = self.spec.load_best_model_at_end and p.best_step == p.step
        return (best_here or (p.step > 0 and self.due(self.spec.save_steps))) and self.saved_step != p.step

    @property
    def has_no_finite_loss(self) -> bool:
        """Whether none of the latest steps had a finite loss: such a job has learned nothing in any of them."""
        return bool(self.progress.losses) and not any(map(math.isfinite, self.progress.losses))

    def evaluated(self, loss: float) -> None:
        """The evaluation is through, with `loss` per trained token; remembers whether it is the best of those after a step. Before the
        first step nothing has been trained: it is not what a job hands over, and patience does not count from it. A loss that is not
        finite decides nothing.
        """
        p = self.progress
        p = replace(p, evaluated_step=p.step, eval_last=loss, eval_first=loss if p.eval_first is None else p.eval_first)
        if p.step == 0:
            self.progress = p
        elif math.isfinite(loss) and (p.best_eval is None or loss < p.best_eval):
            self.progress = replace(p, best_eval=loss, best_step=p.step, evals_without_gain=0)
        else:
            self.progress = replace(p, evals_without_gain=p.evals_without_gain + math.isfinite(loss))


class Losses:
    """Of runs whose batch or evaluation is through, on their way to the host in one copy."""

    def __init__(self, passed: Sequence[BatchLosses]) -> None:
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
