"""Experts that jobs adapt, on the kernels: in compiled passes and on the plain path, equal to torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.tiny import SHAPE, make_samples
from tests.tolerances import assert_close
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import experts as blocks
from tlora.supermodel import supermodel
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports them late, when the variable may not be set any more
    from tlora.kernels import expert_operations  # noqa: F401

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]  # dynamo looks
CLOSE = 1e-4  # as in `test_fast_path.py`
SIZE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
FAMILIES: dict[str, Any] = {
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "llama4": transformers.Llama4TextConfig(
        **SIZE | {"intermediate_size": 32},
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=16,
        moe_layers=[0],
    ),
    "gpt-oss": transformers.GptOssConfig(**SIZE | {"intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}
BOTH, ATTENTION = ["experts.gate_up_proj", "experts.down_proj"], ["q_proj", "o_proj"]
JOBS = {
    "a": LoraConfig(r=4, target_parameters=BOTH, target_modules=[]),
    "b": LoraConfig(r=20, target_parameters=["experts.down_proj"], target_modules=ATTENTION),
    "c": LoraConfig(r=4, target_modules=ATTENTION),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_shared(family: str, kernels: bool, fast: bool = True, layers: int = 1) -> SuperModel:
    """Its experts on the kernels or not, in compiled passes or on the plain path."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        interpret(patch)
        if not fast:
            patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
        if not kernels:
            patch.setattr(blocks.Experts, "fit_kernels", lambda *_: False)
        torch.manual_seed(0)
        config = type(FAMILIES[family]).from_dict(FAMILIES[family].to_dict() | {"num_hidden_layers": layers, "layer_types": None})
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        shared = SuperModel(make_base(model.eval().to(DEVICE), family))
    assert shared.experts.on_kernels == kernels and (shared.fast_path is not None) == fast
    return shared


def batch_of(job_ids: str) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in job_ids:
        own = make_samples(2, seed=ord(job_id), low=5, high=20)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, (7, 0, i)) for i, s in enumerate(own)]
    return collate(rows, DEVICE)


def gradients(shared: SuperModel, job_ids: str) -> dict[str, Tensor]:
    for job_id in job_ids:
        shared.join(job_id, JOBS[job_id], TrainConfig(lr_scheduler_type="constant", seed=ord(job_id)))
        params = shared.state(job_id).params
        params += 0.05 * torch.randn(params.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)  # B is not zero
        shared.rewrite(job_id)
    shared.forward_backward(batch_of(job_ids))
    return {job_id: (shared.gradient(job_id), shared.leave(job_id))[0] for job_id in job_ids}


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["pass", "plain path"])
@pytest.mark.parametrize("family", ["qwen3-moe", "llama4", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_plain_experts(family: str, fast: bool) -> None:
    with torch.compiler.set_stance("force_eager"):
        found = gradients(make_shared(family, kernels=True, fast=fast), "abc")
    expected = gradients(make_shared(family, kernels=False, fast=False), "abc")
    for job_id, gradient in found.items():
        assert_close(gradient, expected[job_id], CLOSE, f"gradient of {job_id}")


@pytest.mark.parametrize("fast", [True, False], ids=["pass", "plain path"])
def test_the_digest_of_tiles_has_those_of_experts(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all else of a pass is on the plain path, as in a deterministic run."""
    from tlora.kernels import expert_kernels

    found, healthy = make_shared("qwen3-moe", kernels=True, fast=fast).tiles, expert_kernels.sum_tile
    assert found is not None and found != make_shared("qwen3-moe", kernels=False, fast=fast).tiles
    monkeypatch.setattr(expert_kernels, "sum_tile", lambda dtype: replace(healthy(dtype), tokens=64))
    assert make_shared("qwen3-moe", kernels=True, fast=fast).tiles not in (None, found)


@pytest.mark.slow
def test_compiled_layers_share_their_code_and_computed_again_they_give_the_same_bits() -> None:
    """Two layers are one compilation; jobs at experts come and go, and without any experts are the family's own."""
    shared = make_shared("qwen3-moe", kernels=True, layers=2)
    found = gradients(shared, "abc")
    assert counters["stats"]["unique_graphs"] == 1
    assert shared.model.config._experts_implementation != blocks.NAME, "experts are left to the family between passes"
    shared.recomputed_layers = 2
    again = gradients(shared, "abc")
    assert all(torch.equal(found[job_id], again[job_id]) for job_id in "abc")
    assert_close(gradients(shared, "c")["c"], found["c"], CLOSE, "gradient of c alone")
