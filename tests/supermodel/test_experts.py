"""Bases with experts, whose attention is adapted: together is alone bitwise in deterministic mode, on the CPU and on a GPU.

As transformers wrote them, routers and experts have products whose bits depend on how many rows there are: a CPU takes sample by sample.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.numerics.both_paths import check_both_paths
from tests.tiny import SHAPE, make_samples
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels.library_attention import attend_batch
from tlora.supermodel import attention
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.structure import find_calls
from tlora.supermodel.supermodel import SuperModel

if find_spec("triton") is not None:
    with interpreted():  # the path imports them late, when the variable may not be set any more
        from tlora.kernels import pass_operations  # noqa: F401

SIZE: dict[str, Any] = {**SHAPE, "hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4}
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZE, head_dim=64, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96),
    "deepseek-v3": transformers.DeepseekV3Config(**SIZE | LATENT, **GROUPED, num_experts_per_tok=3, moe_intermediate_size=96),
    "gpt-oss": transformers.GptOssConfig(**SIZE, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}
TARGETS = {"deepseek-v3": ["kv_b_proj", "o_proj"]}
RANKS, DROPOUT = {"a": 4, "b": 16, "c": 64}, {"b": 0.1}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]),
]


def make_shared(family: str, dtype: torch.dtype, device: str, deterministic: bool) -> SuperModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=dtype)
        for name, p in model.named_parameters():
            if name.endswith("sinks"):  # as strong as a score; at 0.02 a path that forgets them would nearly pass
                nn.init.normal_(p, std=2.0)
    return SuperModel(make_base(model.to(device), family), deterministic)


def batch_of(job_ids: str, step: int, device: str) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in job_ids:
        own = make_samples(3, seed=100 * step + ord(job_id), low=3, high=60)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, (7, step, i)) for i, s in enumerate(own)]
    return collate(rows, device, pad_to=1024 if device == "cuda" else 0)


def train(shared: SuperModel, job_ids: str, device: str, family: str, steps: int) -> dict[str, Tensor]:
    """Each job's adapter after `steps`: more than three on a GPU replay what was captured."""
    for job_id in job_ids:
        targets = TARGETS.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
        lora = LoraConfig(r=RANKS[job_id], lora_dropout=DROPOUT.get(job_id, 0.0), target_modules=targets)
        shared.join(job_id, lora, TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", seed=ord(job_id)))
    for step in range(steps):
        shared.forward_backward(batch_of(job_ids, step, device))
        assert all(stats.applied for stats in shared.optim_step(job_ids).values())
    return {job_id: shared.leave(job_id).params.cpu() for job_id in job_ids}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(pytest.param(family, torch.float32, marks=[] if family == "qwen3-moe" else pytest.mark.slow) for family in FAMILIES),
        *(pytest.param(family, torch.bfloat16, marks=pytest.mark.soak) for family in FAMILIES),  # slow on a CPU
    ],
    ids=str,
)
def test_together_is_alone_bitwise(family: str, dtype: torch.dtype, device: str) -> None:
    shared, steps = make_shared(family, dtype, device, deterministic=True), 3 if device == "cuda" else 2
    together = train(shared, "abc", device, family, steps)
    for job_id in "abc":
        assert torch.equal(train(shared, job_id, device, family, steps)[job_id], together[job_id]), job_id
    assert torch.equal(train(shared, "cab", device, family, steps)["a"], together["a"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [pytest.param(family, marks=[] if family == "mixtral" else pytest.mark.slow) for family in FAMILIES])
def test_without_deterministic_it_trains(family: str, device: str) -> None:
    """On a GPU: compiled layers, and passes captured as CUDA graphs, since a capture that fails is a warning. `-s` shows how near it is."""
    shared = make_shared(family, torch.bfloat16, device, deterministic=False)
    steps = 6 if device == "cuda" else 2
    together = train(shared, "abc", device, family, steps)
    assert all(bool(params.isfinite().all()) for params in together.values())
    for job_id in "abc" if device == "cuda" else "":
        alone = train(shared, job_id, device, family, steps)[job_id]
        difference = float((together[job_id] - alone).norm() / alone.norm())
        print(f"{family} {device} {job_id}: relative difference {difference:.1e}, same bytes: {torch.equal(together[job_id], alone)}")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@MARKS[0]
@pytest.mark.parametrize("of_v", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_latent_attention_whose_heads_of_v_are_smaller(of_v: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers of the family, on the kernels as on the plain path; and what is compiled ahead is known."""
    dense = transformers.DeepseekV3Config(**SIZE | LATENT | {"v_head_dim": of_v, "num_hidden_layers": 1, "first_k_dense_replace": 1})
    monkeypatch.setitem(FAMILIES, "dense", dense)
    make = partial(make_shared, "dense", torch.float32, DEVICE.type, deterministic=True)
    check_both_paths(make, LoraConfig(r=4), batch_of("a", 0, DEVICE.type), loss_bound=1e-4)
    dense.save_pretrained(tmp_path)
    [attention] = find_calls(outline(str(tmp_path))).attentions
    assert [tuple(t.shape) for t in attention[:3]] == [(2, 4, 64)] * 3


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@MARKS[0]
def test_sinks_on_the_kernels_as_on_the_plain_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a path that forgets them is refused at load. What is compiled ahead knows of them."""
    narrow = SIZE | {"hidden_size": 64, "intermediate_size": 64}
    config = transformers.GptOssConfig(**narrow, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    monkeypatch.setitem(FAMILIES, "gpt-oss", config)
    make = partial(make_shared, "gpt-oss", torch.float32, DEVICE.type, deterministic=False)
    check_both_paths(make, LoraConfig(r=4, target_modules=["q_proj", "o_proj"]), batch_of("a", 0, DEVICE.type))
    with monkeypatch.context() as patch, pytest.raises(ModelError, match="other logits than single ones"):
        patch.setattr(attention, "attend_batch", lambda q, k, v, *rule: attend_batch(q, k, v, *rule[:3]))
        make_shared("gpt-oss", torch.float32, "cpu", deterministic=True)
    FAMILIES["gpt-oss"].save_pretrained(tmp_path)
    assert [args[-1].shape for args in find_calls(outline(str(tmp_path))).attentions] == [(4,), (4,)]
