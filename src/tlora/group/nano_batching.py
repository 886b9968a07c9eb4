"""What a group computes next, and into how many slices global batches are cut where the stages of its base would wait.

Stages wait at the end of a job's batch where the others offer less than a full micro-batch for each stage. How many slices a step is
fastest with is tried by the clock of the last stage, and kept until other jobs are here; each job's progress records it, and a resume with
the same jobs begins with it. With `deterministic` slices are stretches of a job's cursor, so that no bit depends on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tlora.batching.nano_batches import SliceCount, Slicing, pack_slices
from tlora.batching.pack import MicroBatch, pack
from tlora.data.order import row_tokens
from tlora.group.job_run import JobRun
from tlora.group.pipeline import Pipeline
from tlora.shape.work import SampleWork
from tlora.supermodel.multiply_adds import work_of_samples
from tlora.supermodel.supermodel import SuperModel

_MOST_UNMEASURED = 4  # steps of a count, in which passes are launched that graphs will replay: where lengths are ever others, all would be
MOST_PER_STAGE = 16  # slices for each stage: more shorten a step by less than a sixteenth


@dataclass(frozen=True)
class _Batch:
    """A job's global batches: the work of a sample, and of all of them tokens and work on average."""

    sample: SampleWork
    tokens: float
    work: float


class NanoBatching:
    """Of the jobs in `runs`. `note` gets what was chosen."""

    def __init__(self, model: SuperModel, pipeline: Pipeline, runs: Mapping[str, JobRun], note: Callable[[str], object]) -> None:
        self._model, self._pipeline, self._runs, self._note = model, pipeline, runs, note
        self.make_choice: Callable[[int, int], SliceCount] = SliceCount
        self._choice = SliceCount(1, 1)
        self._of = ""  # stages and jobs that the choice is for
        self._jobs: list[JobRun] = []  # those jobs
        self._batches: dict[str, _Batch] = {}
        self._all_tokens = self._all_work = self._largest_tokens = 0.0
        self._most = 1
        self._cuts = False  # whether stages would wait
        self._since: float | None = None  # when what is measured began
        self._work, self._stepped = 0.0, set[str]()  # since then
        self._launched = self._unmeasured = 0  # passes before it that were no replays; steps of this count in which there were others

    @property
    def slices(self) -> int | None:
        """Of the global batches of all jobs together; None where no stage waits."""
        return self._choice.count if self._cuts else None

    def pack(self, budget: int) -> MicroBatch | None:
        """The next micro-batch, of at most `budget` tokens; None where nothing is pending."""
        flows, in_order = [run.flow for run in self._runs.values()], self._model.deterministic
        self._look(budget)
        if self._cuts:
            for run in self._runs.values():
                run.flow.slices = run.flow.slices or self._slices_of(run)
            sliced = pack_slices(flows, budget, Slicing(self._work_of, self._all_work / self._choice.count), in_order=in_order)
            if sliced is not None:
                return sliced
        return pack(flows, budget, in_order=in_order, stages=self._pipeline.depth)

    def _look(self, budget: int) -> None:
        """Whether stages would wait for the jobs that are here now."""
        if self._pipeline.depth == 1 or not self._runs:
            return
        if (jobs := list(self._runs.values())) != self._jobs:
            self._jobs, self._of = jobs, f"{self._pipeline.depth} stages: {', '.join(sorted(self._runs))}"
            self._open(jobs, budget)
        others = self._all_tokens - self._largest_tokens
        cuts = others < self._pipeline.depth * budget and self._all_tokens < self._most * budget
        if cuts != self._cuts:
            self._cuts = cuts
            self.forget_time()

    def _open(self, runs: list[JobRun], budget: int) -> None:
        """The jobs are others than before: take up what was recorded of these, or try anew."""
        depth = self._pipeline.depth
        self._batches = {name: self._batch(run) for name, run in self._runs.items()}
        tokens = [batch.tokens for batch in self._batches.values()]
        self._all_tokens, self._largest_tokens = sum(tokens), max(tokens)
        self._all_work = sum(batch.work for batch in self._batches.values())
        self._most = min(sum(run.spec.batch_size for run in runs), MOST_PER_STAGE * depth)
        recorded = {(run.progress.nano_batches, run.progress.nano_batches_of) for run in runs}
        (count, of), *more = recorded
        least = max(depth, math.ceil(self._all_tokens / budget))
        self._choice = SliceCount(self._most, count, trials=0) if of == self._of and not more else self.make_choice(self._most, least)
        self.forget_time()

    def _batch(self, run: JobRun) -> _Batch:
        sample, lengths = work_of_samples(self._model, run.spec), run.train.lengths.astype(np.float64)
        rows = len(row_tokens(run.train.lengths, run.train.epoch))
        share = min(run.spec.batch_size, rows) / rows
        work = float((lengths * (sample.per_token + sample.per_square * lengths)).sum())
        return _Batch(sample, share * float(lengths.sum()), share * work)

    def _slices_of(self, run: JobRun) -> int:
        """For what the job has on offer: its part of all slices, in proportion to its work, and of that a replica's."""
        part = self._batches[run.spec.name].work / self._all_work / max(1, len(run.shared_among))
        return max(1, round(self._choice.count * part))

    def _work_of(self, job_id: str, tokens: int) -> float:
        return self._batches[job_id].sample.of(tokens)

    # -- by the clock of the last stage --------------------------------------------------------------------------------

    def computed(self, packed: MicroBatch) -> None:
        """A micro-batch was computed. One of an evaluation belongs to no step."""
        if not self._cuts:
            return
        if any(row.job_id in self._runs and self._runs[row.job_id].evaluating for row in packed.rows):
            self.forget_time()
        elif packed.kind == "train":
            self._work += sum(self._work_of(row.job_id, row.tokens) for row in packed.rows if row.job_id in self._batches)

    def forget_time(self) -> None:
        """What has passed since the last step is not the time of a step."""
        self._since = None

    def stepped(self, job_ids: list[str]) -> None:
        """Optimizer steps of these jobs are queued, and their next batches are not on offer yet. What was measured is the time of a step of
        all jobs, for batches of average work, once each has taken one.
        """
        if not self._cuts or self._choice.settled:
            return
        now = self._pipeline.seconds()
        self._stepped.update(job_ids)
        if self._since is None:
            self._begin(now)
        elif self._work and self._stepped >= self._runs.keys():  # steps may follow each other with no micro-batch between
            if self._launched_passes != self._launched and self._unmeasured < _MOST_UNMEASURED:
                self._unmeasured += 1
                self._begin(now)
                return
            tried = self._choice.count
            self._choice.see((now - self._since) * self._all_work / self._work)
            self._begin(now)
            self._unmeasured = self._unmeasured if tried == self._choice.count else 0
            if self._choice.settled:
                self._record()
            elif tried != self._choice.count and len(self._runs) > 1:
                self.forget_time()  # others are in the midst of a batch that is cut as before

    def _begin(self, now: float) -> None:
        self._since, self._work, self._stepped, self._launched = now, 0.0, set(), self._launched_passes

    @property
    def _launched_passes(self) -> int:
        """Of this stage. With the next batch of the same slices fewer are."""
        return self._model.fast_path.launched_passes if self._model.fast_path is not None else 0

    def _record(self) -> None:
        count, tried = self._choice.count, self._choice.tried
        for run in self._runs.values():
            run.progress = replace(run.progress, nano_batches=count, nano_batches_of=self._of)
        steps = ", ".join(f"{slices}: {seconds:.3g} s" for slices, seconds in tried.items())
        self._note(f"nano-batches: global batches are cut into {count} (a step with {steps})")
