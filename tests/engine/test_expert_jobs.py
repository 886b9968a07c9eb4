"""Jobs over a mixture of experts with `target_parameters`: check, a run and its resume, an adapter continued, answers, PEFT's logits."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import job, run_spec, same_bytes, train, train_killed, write_rows
from tests.tiny import SHAPE
from tlora.adapters.targets import resolve, trained_parameters
from tlora.engine.check import check
from tlora.engine.generate import generate, open_adapter
from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.json_file import fields_of, value_of
from tlora.planning.base_outline import describe_base
from tlora.shape.base_shape import BaseShape

pytestmark = pytest.mark.usefixtures("forked")
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "expert_rank": "divide"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, tokenizer = tmp_path_factory.mktemp("base"), make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    shape = {
        **SHAPE,
        "vocab_size": len(tokenizer) + 3,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
    model.save_pretrained(directory)
    return directory


def test_a_run_of_jobs_with_experts(base: Path, tmp_path: Path) -> None:
    data = str(write_rows(tmp_path / "rows.jsonl", 16))
    jobs = [
        job("both", data, max_steps=4, batch_size=2, save_steps=1, **EXPERTS),
        job("attention", data, max_steps=4, batch_size=2, save_steps=1, lora_dropout=0.1, seed=3),
        job("experts", data, max_steps=4, batch_size=2, save_steps=1, target_modules=[], target_parameters=["down_proj"], r=3),
    ]
    report = check(run_spec(base, tmp_path / "out", jobs), device="cpu")
    assert not report.problems
    train_killed(base, tmp_path / "out", jobs, deterministic=True)
    results = train(base, tmp_path / "out", jobs, deterministic=True, resume=True)
    assert all(result.status == "done" for result in results.values())
    for name, order in zip(results, jobs, strict=True):
        train(base, tmp_path / f"{name} alone", [order], deterministic=True)
        same_bytes(tmp_path / "out", tmp_path / f"{name} alone", [name])
    shape = describe_base(str(base), "auto", None, "cpu")
    shape = value_of(BaseShape, fields_of(shape))
    lora = LoraConfig(r=4, **EXPERTS)  # type: ignore[arg-type]
    opened = open_adapter(tmp_path / "out" / "both")
    targets = resolve(shape.linears, shape.modules, shape.experts, lora, shape.parameters)
    assert trained_parameters(targets, lora, shape.embedding[2]) == opened.layout.numel
    ids = torch.arange(10, 40)[None]
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="_pattern keys did not match"):  # of modules; it applies them to parameters
        adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "out" / "both")
        theirs, plain = adapted(input_ids=ids).logits, opened.model(input_ids=ids).logits
        with opened.experts.adapted(opened.layout, opened.params):
            ours = opened.model(input_ids=ids).logits
    assert not torch.allclose(ours, plain, atol=1e-3), "experts change nothing"
    assert not torch.allclose(ours, theirs, atol=1e-3), "the attention changes nothing"
    words = generate(tmp_path / "out" / "both", ["red boat"])
    assert words == generate(tmp_path / "out" / "both", ["red boat"])
    again = [job("again", data, max_steps=2, adapter_path=str(tmp_path / "out" / "both"))]
    assert train(base, tmp_path / "again", again)["again"].status == "done"
    assert open_adapter(tmp_path / "again" / "again").layout == opened.layout


def test_the_plan_counts_the_rows_of_experts(base: Path, tmp_path: Path) -> None:
    data = str(write_rows(tmp_path / "rows.jsonl", 8))
    few, many = (check(run_spec(base, tmp_path / "out", [job("a", data, **more)]), device="cpu") for more in ({}, EXPERTS))
    assert not few.problems and not many.problems
    assert many.jobs[0].trainable_parameters == few.jobs[0].trainable_parameters + 2 * 4 * 2 * (64 + 64 + 32 + 64)


def test_a_base_in_parts_refuses_experts_by_name(base: Path) -> None:
    from tlora.sharing.host_memory import Streaming
    from tlora.supermodel.supermodel import SuperModel

    with pytest.raises(ModelError, match="is a mixture of experts that cannot be shared or streamed: its files have each expert by itself"):
        SuperModel.from_pretrained(str(base), shared=Streaming())


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_pefts_all_linear_adapts_routers_and_the_remedy_that_is_named_works(base: Path, tmp_path: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.get_peft_model(whole, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
    tuned.save_pretrained(tmp_path / "by_peft")
    data, ids = str(write_rows(tmp_path / "rows.jsonl", 8)), torch.arange(10, 30)[None]
    found = check(run_spec(base, tmp_path / "out", [job("a", data, adapter_path=str(tmp_path / "by_peft"))]), device="cpu")
    [problem] = found.jobs[0].problems
    assert "'gate.weight' is no parameter of experts" in problem and "gate is frozen here, as routers are" in problem
    assert "merge_and_unload, save_pretrained), set base_model to that, and take adapter_path out" in problem
    with torch.no_grad():
        logits = tuned(input_ids=ids).logits
        merged = tuned.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    make_tokenizer(CHATML).save_pretrained(tmp_path / "merged")
    results = train(tmp_path / "merged", tmp_path / "out", [job("a", data, max_steps=2, **EXPERTS)])
    assert results["a"].status == "done"
