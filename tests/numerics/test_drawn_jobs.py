"""L1 over jobs drawn by hypothesis: any shapes, any packing, any coming and going."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numerics import checks
from tests.numerics.world import Job, super_model, train
from tests.tiny import make_samples
from tlora.job import LoraConfig, TrainConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCHEDULES = ["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial"]


@st.composite
def drawn_job(draw: st.DrawFn, name: str, longest: int = 128) -> Job:
    lora = LoraConfig(
        r=draw(st.integers(1, 16)),
        lora_alpha=draw(st.sampled_from([1, 8, 32])),
        lora_dropout=draw(st.sampled_from([0.0, 0.1])),
        target_modules=draw(st.one_of(st.just("all-linear"), st.lists(st.sampled_from(TARGETS), min_size=1, max_size=3, unique=True))),
        use_rslora=draw(st.booleans()),
    )
    steps = draw(st.integers(1, 3))
    config = TrainConfig(
        learning_rate=draw(st.sampled_from([1e-4, 1e-2, 1.0])),
        lr_scheduler_type=draw(st.sampled_from(SCHEDULES)),
        warmup_steps=draw(st.sampled_from([0, 0.2, 1])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        max_grad_norm=draw(st.sampled_from([0.0, 1e-3, 1.0])),
        batch_size=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    low, high = sorted((draw(st.integers(1, longest)), draw(st.integers(1, longest))))
    samples = tuple(make_samples(draw(st.integers(1, 5)), seed=draw(st.integers(0, 99)), low=low, high=high))
    pause = draw(st.one_of(st.none(), st.integers(1, 2)))
    return Job(name, lora, config, samples, steps, draw(st.integers(0, 6)), pause, draw(st.integers(0, 4)))


@st.composite
def drawn_jobs(draw: st.DrawFn) -> list[Job]:
    """Two to six jobs, the first with fewer than 8 tokens a sample."""
    count = draw(st.integers(2, 6))
    return [draw(drawn_job(f"job{i}", longest=128 if i else 7)) for i in range(count)]


@settings(max_examples=6)
@given(drawn_jobs(), st.integers(0, 999))
def test_l1_drawn(jobs: list[Job], packing_seed: int) -> None:
    checks.check_l1(super_model(), jobs, packing_seed)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@settings(max_examples=60, derandomize=False)
@given(jobs=drawn_jobs(), packing_seed=st.integers(0, 999))
def test_l1_drawn_in_full(dtype: torch.dtype, jobs: list[Job], packing_seed: int) -> None:
    checks.check_l1(super_model("llama", dtype), jobs, packing_seed)


@pytest.mark.usefixtures("two_threads")
@settings(max_examples=2)
@given(drawn_jobs(), st.integers(0, 999))
def test_l1_drawn_with_two_threads(jobs: list[Job], packing_seed: int) -> None:
    checks.check_l1(super_model(), jobs, packing_seed)


def test_one_big_product_would_not_have_these_bytes() -> None:
    """That L1 is work, and that this world can tell: in default mode some job's bytes do depend on the packing."""
    jobs = checks.standard_jobs()
    hashes = [tuple(train(super_model(), jobs, seed, deterministic=False)[job.name].sha256 for job in jobs) for seed in (1, 2)]
    assert hashes[0] != hashes[1]
