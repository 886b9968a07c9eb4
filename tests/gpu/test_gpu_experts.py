"""Experts as targets on a GPU: together is alone byte for byte with `deterministic` and in captured passes of one size; gradients and
steps are PEFT's.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tlora
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import die_with_checkpoints, job, run_spec, same_bytes, write_rows
from tests.supermodel.mxfp4_bases import pack
from tests.supermodel.test_expert_targets import (
    BOTH,
    FAMILIES,
    TRAIN,
    UP_DOWN,
    batch_of,
    check_against_peft,
    check_together,
    make_model,
    make_shared,
    train,
)
from tlora.job import LoraConfig
from tlora.supermodel import supermodel
from tlora.supermodel.experts import Experts
from tlora.supermodel.fast_path import FastPath
from tlora.supermodel.load import Base, load_base, make_base
from tlora.supermodel.lora_linear import Context
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
ON_KERNELS = ("qwen3-moe", "gpt-oss", "mixtral", "deepseek-v3", "glm4-moe", "minimax-m2")
"""Families whose deterministic passes take many samples at once. Qwen3.5's and Nemotron's layers carry something along a sample, and
Gemma 4's router is a linear layer of eight columns here: the kernels take neither.
"""
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_together_is_alone_bitwise(family: str, dtype: torch.dtype) -> None:
    on_kernels = make_shared(family, dtype, device=DEVICE).fast_path is not None
    assert on_kernels == (family in ON_KERNELS)
    check_together(family, dtype, DEVICE)


def save_base(directory: Path, family: str) -> None:
    """In bf16, with two experts of equal scores."""
    tokenizer, config = make_tokenizer(CHATML), copy.deepcopy(FAMILIES[family])
    tokenizer.save_pretrained(directory)
    config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id = len(tokenizer) + 3, 1, 2, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, config)
        make_model(family, torch.bfloat16).save_pretrained(directory)


def train_runs(base: Path, out: Path, data: Path, only: str = "", resume: bool = False) -> None:
    """Three jobs, or one of them: at experts, at both, and beside them with dropout."""
    jobs: list[dict[str, Any]] = [
        job("a", str(data), save_steps=1, max_steps=4, target_modules=[], target_parameters=BOTH),
        job("b", str(data), save_steps=1, max_steps=4, r=8, target_modules=["o_proj"], target_parameters=["down_proj"], seed=3),
        job("c", str(data), save_steps=1, max_steps=4, r=16, target_modules=["o_proj"], lora_dropout=0.1, seed=5),
    ]
    run = run_spec(base, out, [order for order in jobs if only in ("", order["name"])], deterministic=True, dtype="bfloat16")
    assert all(result.status == "done" for result in tlora.train(run, device=DEVICE, resume=resume).values())


def train_until_killed(base: Path, out: Path, data: Path) -> None:
    die_with_checkpoints(out)
    train_runs(base, out, data)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "qwen3.5-moe"])
def test_a_deterministic_run_has_the_bytes_of_its_jobs_alone_and_of_one_that_was_killed(family: str, tmp_path: Path) -> None:
    base, data = tmp_path / "base", write_rows(tmp_path / "d.jsonl", 24)
    save_base(base, family)
    program = "import sys, pathlib; from tests.gpu import test_gpu_experts as t; t.train_until_killed(*map(pathlib.Path, sys.argv[1:]))"
    paths = [str(path) for path in (base, tmp_path / "killed", data)]
    assert subprocess.run([sys.executable, "-c", program, *paths], cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    train_runs(base, tmp_path / "whole", data)
    train_runs(base, tmp_path / "killed", data, resume=True)
    same_bytes(tmp_path / "killed", tmp_path / "whole", "abc")
    for name in "ac":
        train_runs(base, tmp_path / name, data, only=name)
        same_bytes(tmp_path / name, tmp_path / "whole", [name])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_steps_are_pefts(family: str, tmp_path: Path) -> None:
    parameters = UP_DOWN if "nemotron" in family else BOTH
    lora = LoraConfig(r=4, target_parameters=parameters, target_modules=["o_proj"])
    check_against_peft(family, lora, tmp_path, device=DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_widened_to_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """By the kernel that dequantises linears; adapters of experts have the bytes of training over the widened checkpoint."""
    widened = pack(make_model("gpt-oss", torch.float32), tmp_path / "plain", tmp_path / "packed")
    packed, plain = (SuperModel(load_base(str(tmp_path / name), dtype, DEVICE), deterministic=True) for name in ("packed", "plain"))
    for name, value in widened.items():
        held = packed.model.get_submodule(name)
        assert all(torch.equal(held[expert].cpu(), value[expert].to(held.dtype)) for expert in range(len(value))), name
    together, expected = train(packed, "abc"), train(plain, "abc")
    assert torch.equal(together["a"], expected["a"]) and torch.equal(together["b"], expected["b"])
    for job_id in "abc":
        assert torch.equal(train(packed, job_id)[job_id], together[job_id]), job_id


# -- captured passes -----------------------------------------------------------------------------------------------------

AT_EXPERTS = {
    "a": LoraConfig(r=4, target_parameters=BOTH, target_modules=[]),
    "b": LoraConfig(r=20, target_parameters=["gate_up_proj"], target_modules=["o_proj"]),
    "c": LoraConfig(r=16, target_parameters=BOTH, target_modules=["q_proj"]),
}
STAYS = {"a": range(12), "b": range(8), "c": range(4, 12)}
"""In which steps each job is there: the last joins beside two others, and then one of these leaves."""


def make_captured(monkeypatch: pytest.MonkeyPatch) -> SuperModel:
    """In bf16 on compiled layers, in the form of them whose bits do not depend on where a row lies. No two experts tie."""

    def in_one_form(base: Base, linears: Any, context: Context, _: bool, experts: Experts) -> FastPath:
        return FastPath(base, linears, context, True, experts)

    monkeypatch.setattr(supermodel, "FastPath", in_one_form)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen3-moe"]), dtype=torch.bfloat16)
    return SuperModel(make_base(model.eval().to(DEVICE), "qwen3-moe"))


def stay(shared: SuperModel, stays: Mapping[str, range]) -> tuple[dict[str, Tensor], list[int]]:
    """What each job has when it leaves, and after each step how many shapes have a graph."""
    assert shared.fast_path is not None and shared.fast_path.runs_experts and shared.fast_path._graphs is not None
    found, captured = dict[str, Tensor](), list[int]()
    for step in range(12):
        for job_id in (job_id for job_id, steps in stays.items() if step == steps.start):
            shared.join(job_id, AT_EXPERTS[job_id], TRAIN.model_copy(update={"seed": ord(job_id)}))
        present = [job_id for job_id, steps in stays.items() if step in steps]
        if not present:
            continue
        shared.forward_backward(batch_of("".join(present), step, device=DEVICE).padded(512))
        assert all(stats.applied for stats in shared.optim_step(present).values())
        captured.append(shared.fast_path._graphs.num_captured)
        for job_id in (job_id for job_id, steps in stays.items() if step == steps[-1]):
            found[job_id] = shared.leave(job_id).params.cpu()
    return found, captured


def test_captured_passes_with_jobs_at_experts_that_come_and_go_are_those_of_a_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last byte: all batches have as many tokens, since a library's product of a router has other bits for another number."""
    torch._dynamo.reset()
    shared = make_captured(monkeypatch)
    together, captured = stay(shared, STAYS)
    assert all(captured[step] > 0 for step in (3, 7, 11)), f"graphs after each step: {captured}"
    for job_id, steps in STAYS.items():
        alone, graphs = stay(shared, {job_id: steps})
        assert graphs[-1] > 0 and torch.equal(alone[job_id], together[job_id]), job_id
    hook = shared.base.decoder.register_forward_hook(lambda *_: None)  # a pass with hooks is launched as it is
    uncaptured, _ = stay(shared, {"c": STAYS["c"]})
    hook.remove()
    assert torch.equal(uncaptured["c"], together["c"])
    begun = stay(shared, {"c": range(11, 12)})[0]["c"]
    assert not torch.equal(begun, together["c"]), "steps change nothing, so nothing was compared"
