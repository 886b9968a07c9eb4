"""Bugs planted in the engine's own path, from a job's data to its optimizer step: each must break the promise that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.numerics.engine import promises as p
from tests.numerics.engine.promises import Runs
from tests.planted import Changes, planted
from tlora.adapters import adamw
from tlora.group import engine, job_run
from tlora.store import checkpoint
from tlora.supermodel import job_by_job

Promise = Callable[[Runs], None]


@dataclass(frozen=True)
class Mutant:
    """What `changes` plants must make `caught_by` fail; `gets_past` holds with it, which is why that promise alone would not do."""

    name: str
    module: ModuleType
    changes: Changes
    caught_by: Promise
    gets_past: Promise | None = None
    soak: bool = False  # like another one here


MEASURED = "        return JobByJobSteps(self._bank, self._step, due, verdicts, errors)"
NORM_OF_ALL = "        norm = sum(v[0] ** 2 for v in verdicts.values()) ** 0.5\n        for job_id, v in verdicts.items():\n"
MUTANTS = (
    Mutant(
        "of several micro-batches only the last counts",
        engine,
        [
            (
                "        for name, loss in losses.items():\n",
                "        [self.model.zero_grad_of(n) for n in losses if n in self.runs and not self.runs[n].flow.complete]\n"
                "        for name, loss in losses.items():\n",
            )
        ],
        p.a_run_alone_is_one_together,
        p.a_run_is_pefts,
    ),
    Mutant(
        "samples are taken as they fit best",
        engine,
        [("in_order=self.model.deterministic", "in_order=False")],
        p.a_run_alone_is_one_together,
        soak=True,
    ),
    Mutant(
        "gradients of the try alone stay",
        engine,
        [
            (
                "            if name in self.runs:\n                self.model.zero_grad_of(name)\n",
                "            if name in self.runs:\n",
            )
        ],
        p.a_neighbour_that_raises_changes_nothing,
    ),
    Mutant(
        "loss divided by the tokens of the batch that was offered last, whoever's",
        job_run,
        [
            ("self._normalizer = float(sum(", "JobRun.last = float(sum("),
            ("sample.loss_weights, self._normalizer, key, sample.lengths)", "sample.loss_weights, JobRun.last, key, sample.lengths)"),
        ],
        p.a_run_alone_is_one_together,
    ),
    Mutant(
        "dropout by the place in the queue",
        job_run,
        [("(self.spec.seed, self.progress.step, row.sample)", "(self.spec.seed, self.progress.step, self.flow.pending_tokens)")],
        p.a_run_alone_is_one_together,
        p.a_run_is_pefts,
        soak=True,
    ),
    Mutant(
        "a batch of the step before",
        job_run,
        [("samples = global_batch(self.progress.step,", "samples = global_batch(max(0, self.progress.step - 1),")],
        p.a_run_is_pefts,
        p.a_run_alone_is_one_together,
        soak=True,
    ),
    Mutant(
        "the learning rate of the next step",
        adamw,
        [("rate = learning_rate(config, state.step, total_steps)", "rate = learning_rate(config, state.step + 1, total_steps)")],
        p.a_run_is_pefts,
        p.a_run_alone_is_one_together,
    ),
    Mutant(
        "the rule of the first due job for all",
        job_by_job,
        [
            ("job = self.due[job_id]", "job = _as_first(self.due, job_id)"),
            (
                "@dataclass(frozen=True)\nclass JobByJobSteps:",
                "def _as_first(due, job_id):\n"
                "    from types import SimpleNamespace\n"
                "    job, first = due[job_id], next(iter(due.values()))\n"
                "    return SimpleNamespace(state=job.state, train=first.train, total_steps=job.total_steps)\n\n\n"
                "@dataclass(frozen=True)\nclass JobByJobSteps:",
            ),
        ],
        p.a_run_alone_is_one_together,
        p.a_run_is_pefts,
        soak=True,
    ),
    Mutant(
        "clipped by the norm of all gradients that are due",
        job_by_job,
        [
            (
                MEASURED,
                NORM_OF_ALL + "            clip = ((due[job_id].train.max_grad_norm or 1e9) / (norm + 1e-6)).clamp(max=1.0)\n"
                "            verdicts[job_id] = torch.stack([v[0], clip])\n" + MEASURED,
            )
        ],
        p.a_run_alone_is_one_together,
    ),
    Mutant(
        "no step where a neighbour's gradient is not finite",
        job_by_job,
        [(MEASURED, NORM_OF_ALL + "            verdicts[job_id] = torch.stack([v[0] + 0 * norm, v[1]])\n" + MEASURED)],
        p.a_neighbour_of_nan_changes_nothing,
    ),
    Mutant(
        "a checkpoint without the moments",
        checkpoint,
        [("(moments[name].to(dtype) for name in", "(moments[name].to(dtype) * 0 for name in")],
        p.a_run_that_is_resumed_is_the_same,
        p.a_run_alone_is_one_together,
        soak=True,
    ),
    Mutant(
        "a checkpoint without the number of updates",
        checkpoint,
        [("progress.step, **counters), progress", 'progress.step, **counters | {"updates": 0}), progress')],
        p.a_run_that_is_resumed_is_the_same,
    ),
)
PROMISES = list(dict.fromkeys(mutant.caught_by for mutant in MUTANTS))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return p.write_data(tmp_path_factory.mktemp("written"))


@pytest.fixture
def runs(wide_base: Path, written: Path, tmp_path: Path) -> Runs:
    return Runs(wide_base, written, tmp_path)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_without_a_mutant_the_promise_is_kept(promise: Promise, runs: Runs) -> None:
    promise(runs)


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name, marks=[pytest.mark.soak] if m.soak else []) for m in MUTANTS])
@pytest.mark.slow
def test_mutant_is_caught(mutant: Mutant, runs: Runs, tmp_path: Path) -> None:
    with planted(mutant.module, mutant.changes, tmp_path):
        with pytest.raises(AssertionError) as caught:
            mutant.caught_by(runs)
        if mutant.gets_past is not None:
            mutant.gets_past(runs)
    print(f"{mutant.name}: {caught.value}")
