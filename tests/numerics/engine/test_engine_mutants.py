"""Bugs planted in the engine's own path, from a job's data to its optimizer step: each must break the promise that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.numerics.engine import engine_mutants as m
from tests.numerics.engine import promises as p
from tests.numerics.engine.promises import Runs
from tests.planted import Change, planted
from tlora.adapters import adamw
from tlora.group import engine, job_run
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.store import checkpoint
from tlora.supermodel.job_by_job import JobByJobOptimizer, JobByJobSteps
from tlora.supermodel.supermodel import SuperModel

Promise = Callable[[Runs], None]


@dataclass(frozen=True)
class Mutant:
    """What is planted must make `caught_by` fail; `gets_past` holds with it, which is why that promise alone would not do."""

    name: str
    change: Change
    caught_by: Promise
    gets_past: Promise | None = None
    soak: bool = False  # like another one here


MUTANTS = (
    Mutant(
        "of several micro-batches only the last counts",
        (Engine, "run_micro_batch", m.only_the_last_micro_batch),
        p.a_run_alone_is_one_together,
        p.a_run_is_pefts,
    ),
    Mutant("samples are taken as they fit best", (engine, "pack", m.pack_as_fits_best), p.a_run_alone_is_one_together, soak=True),
    Mutant("gradients of the try alone stay", (SuperModel, "zero_grad_of", m.keep_gradients), p.a_neighbour_that_raises_changes_nothing),
    Mutant(
        "loss divided by the tokens of the batch that was offered last, whoever's",
        (JobRun, "_normalizer", m.NormalizerOfAll()),
        p.a_run_alone_is_one_together,
    ),
    Mutant(
        "dropout by the place in the queue",
        (JobRun, "batch_row", m.dropout_by_the_place_in_the_queue),
        p.a_run_alone_is_one_together,
        p.a_run_is_pefts,
        soak=True,
    ),
    Mutant(
        "a batch of the step before",
        (job_run, "global_batch", m.batch_of_the_step_before),
        p.a_run_is_pefts,
        p.a_run_alone_is_one_together,
        soak=True,
    ),
    Mutant(
        "the learning rate of the next step",
        (adamw, "learning_rate", m.rate_of_the_next_step),
        p.a_run_is_pefts,
        p.a_run_alone_is_one_together,
    ),
    Mutant(
        "the rule of the first due job for all",
        (JobByJobSteps, "update", m.update_by_the_first_rule),
        p.a_run_alone_is_one_together,
        p.a_run_is_pefts,
        soak=True,
    ),
    Mutant(
        "clipped by the norm of all gradients that are due",
        (JobByJobOptimizer, "measure", m.clip_by_the_norm_of_all),
        p.a_run_alone_is_one_together,
    ),
    Mutant(
        "no step where a neighbour's gradient is not finite",
        (JobByJobOptimizer, "measure", m.refuse_where_a_neighbour_must),
        p.a_neighbour_of_nan_changes_nothing,
    ),
    Mutant(
        "a checkpoint without the moments",
        (checkpoint, "_read_moments", m.moments_of_zero),
        p.a_run_that_is_resumed_is_the_same,
        p.a_run_alone_is_one_together,
        soak=True,
    ),
    Mutant(
        "a checkpoint without the number of updates",
        (checkpoint, "_read_state", m.state_without_updates),
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
@pytest.mark.slow
def test_without_a_mutant_the_promise_is_kept(promise: Promise, runs: Runs) -> None:
    promise(runs)


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name, marks=[pytest.mark.soak] if m.soak else []) for m in MUTANTS])
@pytest.mark.slow
def test_mutant_is_caught(mutant: Mutant, runs: Runs) -> None:
    with planted(mutant.change):
        with pytest.raises(AssertionError) as caught:
            mutant.caught_by(runs)
        if mutant.gets_past is not None:
            mutant.gets_past(runs)
    print(f"{mutant.name}: {caught.value}")
