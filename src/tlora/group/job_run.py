"""One job on its way from its data to its adapter: what it offers next, and what follows when a batch is through.

It never touches a tensor of the model: the engine hands it losses, and it answers with the next samples or that it is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

from tlora.adapters.adamw import StepStats
from tlora.batching.flow import Flow, Item
from tlora.batching.pack import Row
from tlora.data.dataset import Dataset
from tlora.data.order import epoch_size, global_batch
from tlora.group.progress import TrainingProgress
from tlora.job import JobSpec
from tlora.objectives import OBJECTIVES, Objective
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.supermodel import JobLoss

RECENT_STEPS = 10  # "train loss" of a result is the mean over so many last steps
QUARANTINE_AFTER = 3  # optimizer steps in a row without a finite gradient


@dataclass
class Passed:
    """What has been through of a global batch or an evaluation. The losses are still on the device: reading one would wait for it."""

    parts: list[JobLoss] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Means:
    """Of a global batch or an evaluation: the loss per trained token or, with an objective, per unit; and the objective's metrics."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def means_of(parts: Sequence[Sequence[float]], names: Sequence[str]) -> Means:
    """Of parts (sum of losses, sum of weights, sums of the metrics `names`), added in the order of arrival: the bits are the job's own."""
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

    def __init__(self, spec: JobSpec, train: Dataset, evaluation: Dataset | None) -> None:
        self.spec, self.train, self.evaluation = spec, train, evaluation
        self.total_steps = spec.total_steps(epoch_size(train.epoch))
        self.steps_per_epoch = math.ceil(epoch_size(train.epoch) / spec.batch_size)
        self.progress = TrainingProgress(data=self.data_key, eval_data=self.eval_key)
        self.saved_step = -1  # of the newest checkpoint
        self.objective: Objective | None = OBJECTIVES[spec.objective](spec.beta) if spec.objective != "sft" else None
        self.flow = Flow(spec.name, spec.weight)
        self.passed = Passed()
        self._normalizer = 1.0

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
        """Tokens of its longest sample."""
        return max(int(data.lengths.max()) for data in (self.train, self.evaluation) if data is not None)

    # -- what it offers ------------------------------------------------------------------------------------------------

    @property
    def evaluating(self) -> bool:
        return self.flow.kind == "eval"

    @property
    def exhausted(self) -> bool:
        """No step is left: all taken, or stopped early."""
        return self.progress.step >= self.total_steps or stopped_early(self.spec, self.progress)

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
        self.passed = Passed()
        if self.needs_evaluation and self.evaluation is not None:
            self._offer("eval", range(len(self.evaluation)), self.evaluation)
            return
        samples = global_batch(self.progress.step, self.train.epoch, self.spec.batch_size, self.spec.seed)
        self._normalizer = float(sum(self.train.trained[i] for i in samples)) if self.objective is None else float(len(samples))
        self._offer("train", samples, self.train)

    def _offer(self, kind: str, samples: Sequence[int], data: Dataset) -> None:
        if self.flow.kind != kind or self.flow.runnable:  # a new kind of work, or one that starts over
            before, self.flow = self.flow, Flow(self.spec.name, self.spec.weight, "eval" if kind == "eval" else "train")
            self.flow.virtual_time = before.virtual_time
        self.flow.offer([Item(i, int(data.lengths[i])) for i in samples])

    def batch_row(self, row: Row) -> BatchRow:
        """The sample behind a packed row."""
        if self.evaluating and self.evaluation is not None:
            sample = self.evaluation[row.sample]
            return BatchRow(self.spec.name, sample.input_ids, sample.loss_weights, lengths=sample.lengths)
        sample = self.train[row.sample]
        key = (self.spec.seed, self.progress.step, row.sample) if self.spec.lora_dropout else None
        return BatchRow(self.spec.name, sample.input_ids, sample.loss_weights, self._normalizer, key, sample.lengths)

    def set_weight(self, weight: float) -> None:
        """This job's share of the tokens from now on. No number depends on it."""
        assert weight > 0, f"{self.spec.name}: weight {weight} must be positive"
        self.spec = self.spec.model_copy(update={"weight": weight})
        self.flow.weight = weight

    # -- what follows --------------------------------------------------------------------------------------------------

    def absorb(self, loss: JobLoss, tokens: int) -> None:
        """A part of the batch on offer has been through."""
        self.passed.parts.append(loss)
        self.passed.tokens += tokens

    def step_queued(self) -> None:
        """The global batch is through and its optimizer step on the way: the next one can be offered."""
        p = self.progress
        self.progress = replace(p, step=p.step + 1, num_tokens=p.num_tokens + self.passed.tokens)

    @property
    def goes_straight_on(self) -> bool:
        """Whether the next global batch follows, whatever came of the last step: no evaluation, no checkpoint and no end."""
        return not (self.needs_evaluation or self.exhausted or self.due(self.spec.save_steps))

    def stepped(self, stats: StepStats, loss: float) -> None:
        """What came of the optimizer step, and the loss per trained token of its batch."""
        p = self.progress
        assert p.step == stats.step + 1, f"{self.spec.name}: step {stats.step} was read at step {p.step}"
        first = loss if p.loss_first is None else p.loss_first
        self.progress = replace(p, loss_first=first, losses=(*p.losses, loss)[-RECENT_STEPS:])

    @property
    def checkpoint_due(self) -> bool:
        """At `save_steps`, and where `load_best_model_at_end` must be able to come back to; once at one step."""
        p = self.progress
        best_here = self.spec.load_best_model_at_end and p.best_step == p.step
        return (best_here or (p.step > 0 and self.due(self.spec.save_steps))) and self.saved_step != p.step

    @property
    def has_no_finite_loss(self) -> bool:
        """Whether none of the latest steps had one: such a job has learned nothing, however many steps it took."""
        return bool(self.progress.losses) and not any(map(math.isfinite, self.progress.losses))

    def evaluated(self, loss: float) -> None:
        """The evaluation is through, with `loss` per trained token; remembers whether it is the best."""
        p = self.progress
        p = replace(p, evaluated_step=p.step, eval_last=loss, eval_first=loss if p.eval_first is None else p.eval_first)
        if math.isfinite(loss) and (p.best_eval is None or loss < p.best_eval):
            self.progress = replace(p, best_eval=loss, best_step=p.step, evals_without_gain=0)
        else:
            self.progress = replace(p, evals_without_gain=p.evals_without_gain + 1)
