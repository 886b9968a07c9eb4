"""What is said of the kernels that a run takes: on the way to a GPU that need not be there."""

from __future__ import annotations

import io
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from tests.tiny import SHAPE, make_model
from tlora.cli.check_view import print_check
from tlora.engine.check import RunCheck
from tlora.engine.launch_facts import launch_facts
from tlora.kernels.device import launched_as
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def rtx_4090(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_as.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(shared_memory_per_block_optin=101_376))


def super_model(family: str = "llama-tied", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> SuperModel:
    return SuperModel(make_base(make_model(family, dtype, **changes), "tiny"))


def test_a_base_that_the_kernels_take_is_fused() -> None:
    assert super_model().kernels_on(CUDA, deterministic=False) == "fused, sm_89, 99 KB"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": torch.float64}, "the base is in float64"),
        ({"intermediate_size": 40}, "the kernels take widths that are multiples of 16, and model.layers.0.mlp.gate_proj has 64 to 40"),
        ({"head_dim": 512}, "the kernels take attention heads of up to 256, and this base has larger ones"),
    ],
)
def test_one_that_they_do_not_take_is_plain_and_why(changes: dict[str, Any], why: str) -> None:
    assert super_model(**changes).kernels_on(CUDA, deterministic=False) == f"plain: {why}"


def test_experts_that_wait_for_the_host_are_plain() -> None:
    config = transformers.JetMoeConfig(**SHAPE, kv_channels=16, num_local_experts=16, num_experts_per_tok=2)
    model = SuperModel(make_base(transformers.JetMoeForCausalLM(config).to(torch.bfloat16), "tiny"))
    why = "model.layers.0.mlp.input_linear reads on the host how many tokens each expert has"
    assert model.kernels_on(CUDA, deterministic=False) == f"plain: {why}"


def test_a_gpu_without_bf16_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert super_model().kernels_on(CUDA, deterministic=False) == "plain: compute capability 7.5 has no bf16"


def test_run_json_has_it_of_a_gpu_alone() -> None:
    plan = SimpleNamespace(token_budget=2048, recomputed_layers=0, recomputed_by_tokens={}, streaming=None)
    loaded: Any = SimpleNamespace(threads=None, model=super_model(), plan=plan, base_parameters=1)
    assert launch_facts(loaded, CUDA)["kernels"] == "fused, sm_89, 99 KB"
    loaded.threads = 2
    assert "kernels" not in launch_facts(loaded, torch.device("cpu"))


@pytest.mark.parametrize("kernels", ["fused, sm_89, 99 KB", ""])
def test_check_prints_it(kernels: str) -> None:
    given = {"device": "cuda", "kernels": kernels, "problems": (), "warnings": (), "jobs": (), "gpus": (), "recompute_choices": ()}
    check = RunCheck(**dict.fromkeys((field.name for field in fields(RunCheck)), 0) | given)
    out = io.StringIO()
    print_check(Console(file=out, width=200), check)
    assert (f"kernels: {kernels}\n" in out.getvalue()) is bool(kernels)
