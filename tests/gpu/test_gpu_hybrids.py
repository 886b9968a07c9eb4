"""Bases with recurrent layers, and jobs that train rows of the embedding, on a GPU: bytes together = alone, numbers as on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import transformers

from tests.numerics.peft_oracle import fp64_throughout
from tests.numerics.test_hybrids import jobs as hybrid_jobs
from tests.numerics.test_new_tokens import jobs as token_jobs
from tests.numerics.world import Job, Trained, delta_error, train, train_alone
from tests.tiny import make_model
from tests.tolerances import TRAINED
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDER = {"hidden_size": 256, "mamba_n_heads": 32}


LFM2 = pytest.param("lfm2", marks=pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="its convolution takes no keywords before transformers 5.23"
))  # fmt: skip


def model_on(device: str, family: str, dtype: torch.dtype, deterministic: bool) -> SuperModel:
    return SuperModel(make_base(make_model(family, dtype, **WIDER).to(device), family), deterministic)


def trained(family: str, jobs: Sequence[Job], device: str, dtype: torch.dtype, seed: int) -> dict[str, Trained]:
    """In default mode, without casts to fp32 in fp64."""
    with fp64_throughout():
        found = train(model_on(device, family, dtype, False), jobs, seed, deterministic=False)
    assert all(one.error is None for one in found.values()), found
    return found


def check_bytes(model: SuperModel, jobs: Sequence[Job]) -> None:
    """Together, in two packings and twice, alone."""
    alone = {job.name: train_alone(model, job).sha256 for job in jobs}
    for seed in (1, 2, 2):
        together = train(model, jobs, seed)
        assert all(one.error is None for one in together.values()), together
        assert {name: one.sha256 for name, one in together.items()} == alone, f"packing {seed}"


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", LFM2, "granite-4-h"])
def test_a_hybrid_together_is_alone_in_bf16(family: str) -> None:
    check_bytes(model_on("cuda", family, torch.bfloat16, True), hybrid_jobs(family, short=True))


@pytest.mark.parametrize("family", ["qwen3.5", LFM2, "granite-4-h"])
def test_a_hybrid_trains_as_on_a_cpu(family: str) -> None:
    """In fp64, in default mode: packed, adapters grouped, the library's attention, all samples of a recurrence in one call."""
    jobs = hybrid_jobs(family)
    found, true = (trained(family, jobs, device, torch.float64, 3) for device in ("cuda", "cpu"))
    for job in jobs:
        assert delta_error([x.cpu() for x in found[job.name].delta()], true[job.name].delta()) <= TRAINED[torch.float32], job.name


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_trained_rows_together_are_alone(family: str) -> None:
    jobs = [replace(job, train=job.train.model_copy(update={"adam_epsilon": 1e-5})) for job in token_jobs()]
    check_bytes(model_on("cuda", family, torch.bfloat16, True), jobs)
    found, true = (trained(family, jobs, device, torch.float32, 4) for device in ("cuda", "cpu"))
    for job in jobs:
        assert delta_error([x.cpu() for x in found[job.name].delta()], true[job.name].delta()) <= 1e-2, job.name
