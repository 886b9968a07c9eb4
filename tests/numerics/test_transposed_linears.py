"""GPT-2, whose linears are `Conv1D`s: together = alone = PEFT, on the kernels too; from files, shared, in 4 bits; to PEFT and back."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.test_train import our_logits
from tests.engine.tiny_runs import job, train, write_rows
from tests.numerics import checks, poisons
from tests.numerics.both_paths import check_family, on_both_paths
from tests.numerics.peft_oracle import fp64_throughout
from tests.numerics.test_chunked_attention import in_attention
from tests.numerics.two_jobs import edges_and_late, samples
from tests.numerics.world import Job, super_model
from tests.planted import planted
from tests.tiny import make_batch, make_model
from tests.tolerances import assert_close
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.sharing.host_memory import Streaming
from tlora.supermodel import transposed_linears
from tlora.supermodel.load import load_base
from tlora.supermodel.shared_base import load_shared_base
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.transposed_linears import stand_up, transposed_in_files

TARGETS = ["c_attn", "attn.c_proj", "c_fc"]
IDS = torch.arange(10, 40)


def jobs() -> list[Job]:
    return edges_and_late(TARGETS, (1, 33, 5, 2))


def write_base(directory: Path) -> Path:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    make_model("gpt2", vocab_size=len(tokenizer)).save_pretrained(directory)
    return directory


def test_fp64_equals_peft_and_alone() -> None:
    checks.check_in_fp64("gpt2", jobs())


@pytest.mark.slow
def test_fp32_equals_alone_beside_every_poison() -> None:
    model = super_model("gpt2", torch.float32, (("n_embd", 256),))
    checks.check_in_fp32(model, jobs(), [in_attention(poison, TARGETS) for poison in poisons.POISONS])


@on_both_paths
def test_on_the_kernels_as_on_the_plain_path() -> None:
    check_family("gpt2")


def test_a_model_with_linears_gives_the_same_logits() -> None:
    theirs, ours = make_model("gpt2", torch.float64), make_model("gpt2", torch.float64)
    stand_up(ours)
    stand_up(ours)  # nothing is left to do
    assert not any(type(module) is Conv1D for module in ours.modules())
    names = [name for name, module in theirs.named_modules() if type(module) is Conv1D]
    assert transposed_in_files(ours) == frozenset(names) and len(names) == 8
    for name in names:
        linear: nn.Linear = ours.get_submodule(name)
        assert (linear.in_features, linear.out_features) == tuple(theirs.get_submodule(name).weight.shape)
        assert linear.weight.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=IDS[None]).logits, theirs(input_ids=IDS[None]).logits)


def test_files_hold_the_weights_transposed_also_of_a_base_that_is_read_by_rows(tmp_path: Path) -> None:
    """Attention's last product is square, so that no shape tells how it lies."""
    base = str(write_base(tmp_path))
    whole = load_base(base)
    streamed = load_shared_base(base, "float32", torch.device("cpu"), None, Streaming())
    lora, batch = LoraConfig(r=4), make_batch({"a": list(samples(3, (1, 33, 17)))})
    found: list[torch.Tensor] = []
    for shared in (SuperModel(whole), SuperModel(streamed)):
        shared.join("a", lora, TrainConfig(lr_scheduler_type="constant"))
        shared.forward_backward(batch)
        found.append(shared.bank.take_grad("a"))
    assert float(found[0].norm()) > 0
    assert_close(found[1], found[0], 1e-6)


def test_adapters_go_to_peft_and_come_back(tmp_path: Path) -> None:
    """PEFT writes `fan_in_fan_out` true over `Conv1D`s."""
    base, rows = write_base(tmp_path / "base"), str(write_rows(tmp_path / "rows.jsonl", 8))
    first = job("first", rows, max_steps=3, target_modules="all-linear", learning_rate=0.01)
    assert train(base, tmp_path / "out", [first])["first"].status == "done"
    adapter = tmp_path / "out" / "first"
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        theirs = adapted(input_ids=IDS[None]).logits[0]
    ours = our_logits(base, adapter, IDS)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    adapted.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["fan_in_fan_out"]
    still = {"name": "still", "data": rows, "adapter_path": str(tmp_path / "saved"), "learning_rate": 0, "max_steps": 1}
    assert train(base, tmp_path / "more", [still])["still"].status == "done"
    torch.testing.assert_close(our_logits(base, tmp_path / "more" / "still", IDS), ours, rtol=0, atol=0)


@pytest.mark.parametrize("bug", [lambda w: w.view(w.shape[::-1]), lambda w: w.flip(0).t().contiguous()], ids=["viewed", "rows turned"])
def test_planted_bugs_are_seen(bug: object) -> None:
    """By PEFT: what a load proves is that packed samples are as single ones."""
    with planted((transposed_linears, "_transposed", bug)), fp64_throughout(), pytest.raises((AssertionError, ModelError)):
        checks.check_peft(super_model.__wrapped__("gpt2", torch.float64, ()), jobs(), "gpt2", torch.float64, ())
