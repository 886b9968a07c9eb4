"""The promises as plain functions that raise AssertionError: tests call them, and the mutants must not get past them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tests.numerics.peft_oracle import fp64_throughout, peft_train
from tests.numerics.poisons import Poison
from tests.numerics.world import WIDE, Job, Trained, delta_error, super_model, train, train_alone
from tests.tiny import make_model, make_samples
from tests.tolerances import TRAINED
from tlora.adapters.state import init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.supermodel import SuperModel

FP32 = torch.float32


def standard_jobs() -> list[Job]:
    """Three jobs that touch all that can go wrong: dropout, decay, clipping, a pause, a late joiner, fewer than 8 tokens."""
    return [
        Job(
            "small",  # its samples together have fewer than 8 tokens
            LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]),
            TrainConfig(learning_rate=5e-3, batch_size=2, seed=1, max_grad_norm=0.2),
            tuple(make_samples(2, seed=1, low=3, high=3)),
            steps=4,
            pause_after=2,
            pause_for=1,
        ),
        Job(
            "long",
            LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "up_proj", "down_proj"]),
            TrainConfig(learning_rate=5e-3, batch_size=4, seed=2, weight_decay=0.5, lr_scheduler_type="constant"),
            tuple(make_samples(5, seed=2, low=10, high=40)),
            steps=4,
        ),
        Job(
            "late",
            LoraConfig(r=8, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "up_proj", "down_proj"]),
            TrainConfig(learning_rate=5e-3, batch_size=2, seed=3, weight_decay=0.1, lr_scheduler_type="cosine"),
            tuple(make_samples(4, seed=3, low=10, high=40)),
            steps=3,
            join_at=4,
        ),
    ]


def check_l0(model: SuperModel, job: Job) -> None:
    """Two runs alone give the same bytes, in either mode."""
    for deterministic in (True, False):
        first, second = (train_alone(model, job, deterministic).sha256 for _ in range(2))
        assert first == second, f"{job.name}: two runs alone differ (deterministic={deterministic})"


def check_in_fp64(
    family: str,
    jobs: Sequence[Job],
    short: Sequence[Job] = (),
    dtype: torch.dtype = torch.float64,
    make: Callable[[str, torch.dtype, tuple[()]], SuperModel] = super_model,
) -> None:
    """Equality with PEFT and with alone, of the latter of `short` jobs where there are any. `dtype`: products of experts take no fp64."""
    with fp64_throughout():
        model = make(family, dtype, ())
        check_peft(model, jobs, family, dtype, ())
        check_l1(model, short or jobs, packing_seed=12)


def check_in_fp32(model: SuperModel, jobs: Sequence[Job], poisons: Sequence[Poison]) -> None:
    """All promises but equality with PEFT, beside each of the poisons."""
    check_l0(model, jobs[0])
    check_l3(model, jobs, packing_seed=13)
    alone = all_alone(model, jobs)
    check_l1(model, jobs, 14, alone)
    for poison in poisons:
        check_l2(model, jobs, poison, alone)


def all_alone(model: SuperModel, jobs: Sequence[Job]) -> dict[str, Trained]:
    """Each job by itself, in deterministic mode."""
    return {job.name: train_alone(model, job) for job in jobs}


def check_l1(model: SuperModel, jobs: Sequence[Job], packing_seed: int = 0, alone: Mapping[str, Trained] | None = None) -> None:
    """Deterministic mode: together, in any packing and file order, gives the bytes and the losses of alone.

    `alone` is what `all_alone` gave, where several checks compare with it.
    """
    alone = alone or all_alone(model, jobs)
    for order in (jobs, list(reversed(jobs))):
        together = train(model, order, packing_seed)
        for name, own in alone.items():
            assert together[name].sha256 == own.sha256, f"{name}: other bytes than alone, packing {packing_seed}"
            losses = [*zip(together[name].losses, own.losses, strict=True)]
            assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in losses), (
                f"{name}: other losses than alone, packing {packing_seed}"
            )


def check_l2(
    model: SuperModel, jobs: Sequence[Job], poison: Poison, alone: Mapping[str, Trained] | None = None, *, routed_alike: bool = True
) -> None:
    """A poisoned neighbour changes nothing: in default mode against a benign neighbour of the same shape, and L1 throughout.

    `routed_alike`: both neighbours' tokens go to the same experts. Else the products of experts have other numbers of rows, by which a
    library may choose another loop, and default mode promises the job's weights but for rounding.
    """
    alone = alone or all_alone(model, jobs)
    benign, bad = poison.make(benign=True), poison.make(benign=False)
    with poison.around():
        found = train(model, [bad, *jobs], packing_seed=5, deterministic=False)
        exact = train(model, [bad, *jobs], packing_seed=6)
    assert (found[bad.name].error is not None) == poison.raises, f"{poison.name}: {found[bad.name].error!r}"
    if poison.starts_broken:
        assert "NaN or Inf" in str(found[bad.name].error) and bad.name in str(found[bad.name].error)
    state = found[bad.name].state
    assert poison.starts_broken or bool(state.params.isfinite().all()), f"{poison.name}: its own weights became NaN or Inf"
    expected = train(model, [benign, *jobs], packing_seed=5, deterministic=False)
    for job in jobs:
        assert exact[job.name].sha256 == alone[job.name].sha256, f"{poison.name} changed {job.name} in deterministic mode"
        if not poison.raises and routed_alike:
            assert found[job.name].sha256 == expected[job.name].sha256, f"{poison.name} changed {job.name}"
        error = delta_error(found[job.name].delta(), expected[job.name].delta())
        assert error <= TRAINED[FP32], f"{poison.name} changed {job.name} by {error:.1e}"


def check_l3(model: SuperModel, jobs: Sequence[Job], packing_seed: int = 0, dtype: torch.dtype = FP32) -> None:
    """Default mode: the weight change is that of alone, but for rounding."""
    together = train(model, jobs, packing_seed, deterministic=False)
    for job in jobs:
        error = delta_error(together[job.name].delta(), train_alone(model, job, deterministic=False).delta())
        assert error <= TRAINED[dtype], f"{job.name}: ΔW differs from alone by {error:.1e}"


def check_peft(model: SuperModel, jobs: Sequence[Job], family: str = "llama", dtype: torch.dtype = FP32, changes: object = WIDE) -> None:
    """Default mode, packed as it comes: weight change and losses are those of PEFT and `torch.optim.AdamW`, one job at a time."""
    found = train(model, jobs, packing_seed=11, deterministic=False)
    for job in jobs:
        layout = model.layout(job.lora)
        start = init_state(layout, job.train.seed, dtype).params
        delta, losses = peft_train(make_model(family, dtype, **dict(changes)), job, layout, start)  # type: ignore[call-overload]
        error = delta_error(found[job.name].delta(), delta)
        assert error <= TRAINED[dtype], f"{family} {job.name}: ΔW differs from PEFT's by {error:.1e}"
        wide = [torch.tensor(values, dtype=torch.float64) for values in (found[job.name].losses, losses)]
        torch.testing.assert_close(*wide, rtol=TRAINED[dtype], atol=0)


def check_everything(poison: Poison) -> None:
    """All five on the standard jobs: what a mutant has to get past."""
    model, jobs = super_model(), standard_jobs()
    check_l1(model, jobs)
    check_l3(model, jobs)
    check_peft(model, [replace(job, pause_after=None) for job in jobs])
    check_l2(model, jobs, poison)
    for job in jobs:
        check_l0(model, job)
