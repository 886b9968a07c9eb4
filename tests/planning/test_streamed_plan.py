"""A streamed base: micro-batches, recomputed layers and layers on the device are chosen together, by the predicted time per token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.planning.test_micro_batches import EIGHT_B, GPU, jobs_with
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import RunSpec
from tlora.kernels.device import as_if_on
from tlora.planning.micro_batches import MicroBatches, cost_of, sample_lengths
from tlora.planning.plan import RunPlan
from tlora.planning.streaming import _fastest, _refused, stream_for_jobs_to_come
from tlora.planning.work import rate_here, token_cost
from tlora.shape.gpu_models import find_gpu, gpu_called
from tlora.shape.memory import StreamedBytes, must_share
from tlora.shape.token_cost import fetched_layers
from tlora.shape.work import FEATURE_WEIGHTS
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Load

GIB = 1 << 30
SIZES = StreamedBytes(host_bytes=13 * GIB, layer_bytes=13 * GIB // 32, num_layers=32, other_bytes=2 * GIB)
LENGTHS = [2048, *range(128, 2048, 48)]


def streamed(limit_gib: float, bytes_per_token: float, **settings: Any) -> tuple[RunSpec, RunPlan]:
    """Of four jobs over an 8B whose link brings so many bytes while products of one token run."""
    jobs = jobs_with(LENGTHS)
    run = RunSpec.model_validate({"base_model": "b", "jobs": [job.spec for job in jobs]} | settings)
    plan = RunPlan(jobs, 2048, RecomputePlan(), EIGHT_B, int(limit_gib * GIB), 2048, {})
    return run, _fastest(run, plan, SIZES, GPU, bytes_per_token, 31)


def cost(plan: RunPlan) -> float:
    return cost_of(plan.micro_batches, sample_lengths(plan.jobs), token_cost(plan.memory, GPU, plan.link_tokens))


# 25 and 12 GB/s, of a card that makes 5,000 tokens/s
@pytest.mark.parametrize("bytes_per_token", [25e9 / 5000, 12e9 / 5000])
@pytest.mark.parametrize("limit_gib", [12.0, 22.0])
def test_no_other_choice_of_budget_and_slots_is_clearly_faster(limit_gib: float, bytes_per_token: float) -> None:
    _, plan = streamed(limit_gib, bytes_per_token)
    assert plan.streaming is not None and len(plan.resident) == 4 and not _refused(plan)
    assert plan.total_bytes(plan.resident) <= plan.limit_bytes
    mix, layouts, costs = sample_lengths(plan.jobs), plan.resident, list[float]()
    for slots in range(2, 32):
        memory = replace(plan.memory, base_bytes=SIZES.on_device(slots))
        room = memory.room(layouts, plan.limit_bytes if slots == 2 else int(0.95 * plan.limit_bytes))
        recompute = memory.least_recomputed(room)
        each = token_cost(memory, GPU, fetched_layers(32, slots) * SIZES.layer_bytes / bytes_per_token)
        for budget in range(2048, min(each.full_tokens, recompute.most_tokens[-1], plan.token_budget * 2), 128):
            costs.append(cost_of(MicroBatches(budget, recompute), mix, each))
    assert costs and cost(plan) <= 1.03 * min(costs)


def test_a_slower_link_is_hidden_by_larger_micro_batches_that_recompute_more() -> None:
    """And by fewer layers on the device, where they are in the way of that. Without regard of the link a small one would do."""
    fast, slow = (streamed(12.0, rate)[1] for rate in (1e9, 25e9 / 5000))
    assert fast.recomputed_layers < slow.recomputed_layers and fast.token_budget < slow.token_budget
    careless = replace(fast, streaming=slow.streaming, link_tokens=slow.link_tokens)
    assert cost(slow) * 1.2 < cost(careless)


def test_of_equal_choices_that_is_taken_which_fetches_least() -> None:
    _, plan = streamed(40.0, 1e9)
    assert plan.streaming is not None and plan.streaming.slots == 31 and plan.recomputed_layers == 0


def test_micro_batches_over_a_slow_link_hold_what_all_jobs_offer() -> None:
    """Each fetches the layers once more, so that it need not be full."""
    wanted = [streamed(12.0, rate)[1].token_budget for rate in (1e9, 6e9 / 5000)]
    assert wanted[0] < 8192 < wanted[1]


def test_what_is_ordered_is_kept() -> None:
    _, plan = streamed(22.0, 25e9 / 5000, token_budget=2048, recompute="all")
    assert plan.token_budget == 2048 and plan.recomputed_layers == 32


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
    ],
)
def test_the_rate_of_a_gpu_by_its_drivers_name(name: str, row: str) -> None:
    found = gpu_called(name)
    assert found is not None and (found.capability, found.flops) == (find_gpu(row).capability, find_gpu(row).flops)
    with as_if_on(name, find_gpu(row).capability):
        assert rate_here(torch.device("cuda")).flops == find_gpu(row).flops
    assert gpu_called("GRID 9000") is None and rate_here(torch.device("cpu")).flops is None


def test_a_hopper_card_with_an_older_cards_kernels_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8B made 9,887 tokens/s on an H100 (bench/results/h100_2daf61c_sm80_r16_8b.json), four operations of each weight
    a token, and of what its 2.75e6 features count as.
    """
    monkeypatch.setenv("TLORA_CARD_CLASS", "sm_80")
    with as_if_on("NVIDIA H100 80GB HBM3", 90):
        flops = rate_here(torch.device("cuda")).flops
    assert flops == pytest.approx(9887 * 4 * (8.03e9 + FEATURE_WEIGHTS * 2.75e6), rel=0.05)
    with as_if_on("NVIDIA A100-SXM4-80GB", 80):
        assert rate_here(torch.device("cuda")).flops == find_gpu("a100").flops


def outlined(directory: Path, **shape: int) -> SuperModel:
    """A Llama in bf16 on the meta device."""
    LlamaConfig(vocab_size=128256, num_key_value_heads=8, tie_word_embeddings=False, **shape).save_pretrained(directory)
    return SuperModel(outline(str(directory), "bfloat16"))


def test_a_worker_streams_by_predicted_time_for_jobs_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run would with four jobs, whose micro-batches may have 8,192 tokens: an 8B of 15 GiB, and a base of 68 GiB on a GPU with 79, of
    which a share of the limit alone made a streamed one.
    """
    small = outlined(tmp_path / "8b", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    large = outlined(tmp_path / "35b", hidden_size=8192, intermediate_size=28672, num_hidden_layers=40, num_attention_heads=64)
    monkeypatch.setattr("tlora.planning.streaming.host_problem", lambda _: None)
    monkeypatch.setattr("tlora.planning.streaming.measure_link", lambda *_: 25e9)
    found = list[Streaming | None]()
    for model, limit in ((small, 14), (small, 17), (small, 80), (large, 79)):
        with as_if_on("NVIDIA H100", 90):
            plan = stream_for_jobs_to_come(Load("b", "o", "cuda", 0.0), model, torch.device("cuda"), limit * GIB)
        found.append(plan.streaming if plan is not None else None)
    assert found == [Streaming(2), Streaming(2), None, None] and must_share(large.base.num_bytes, 79 * GIB)
