"""Bases with more between decoder and head than nothing (ModernBERT's decoder, BERT, Inkling), or before the decoder (Gemma 3n): together =
alone = PEFT, on the kernels too; files; planted bugs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.families import families, tiny
from tests.engine.tiny_runs import CHATML, job, make_tokenizer, same_bytes, train, train_killed, write_rows
from tests.numerics import checks, poisons
from tests.numerics.both_paths import check_family, on_both_paths
from tests.numerics.test_chunked_attention import in_attention
from tests.numerics.two_jobs import edges_and_late
from tests.numerics.world import Job, super_model
from tests.planted import planted
from tests.tiny import BEFORE_HEAD, make_model
from tlora.errors import ModelError
from tlora.kernels.head import Head
from tlora.supermodel import head_input
from tlora.supermodel.head_input import HeadObservation
from tlora.supermodel.load import make_any_base, make_base, outline
from tlora.supermodel.stage_base import why_no_stages

WIDER = (("hidden_size", 256), ("intermediate_size", 320))
TARGETS = {"modernbert-decoder": ["q_proj", "Wo", "lm_head.dense"], "bert": ["query", "output.dense", "transform.dense"]}
EVERY_RUN = "modernbert-decoder"


def each() -> list[Any]:
    return [pytest.param(name, marks=[] if name == EVERY_RUN else [pytest.mark.slow]) for name in BEFORE_HEAD]


def jobs(family: str) -> list[Job]:
    return edges_and_late(TARGETS[family], (1, 33, 5, 2))


@pytest.mark.parametrize("family", each())
def test_fp64_equals_peft_and_alone(family: str) -> None:
    checks.check_in_fp64(family, jobs(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", BEFORE_HEAD)
def test_fp32_equals_alone_beside_every_poison(family: str) -> None:
    model = super_model(family, torch.float32, WIDER)
    assert model.base.whole_model and not model.base.why_one_by_one
    checks.check_in_fp32(model, jobs(family), [in_attention(poison, TARGETS[family]) for poison in poisons.POISONS])


@on_both_paths
@pytest.mark.parametrize("family", BEFORE_HEAD)
def test_on_the_kernels_as_on_the_plain_path(family: str) -> None:
    check_family(family)


@pytest.mark.parametrize("family", each())
def test_a_run_over_files_is_killed_and_resumed_and_loads_in_peft(family: str, tmp_path: Path) -> None:
    tokenizer, base = make_tokenizer(CHATML), tmp_path / "base"
    tokenizer.save_pretrained(base)
    make_model(family, vocab_size=len(tokenizer) + 3, max_position_embeddings=2048).save_pretrained(base)
    data = str(write_rows(tmp_path / "d.jsonl", 8))
    orders = [job("a", data, target_modules=TARGETS[family], lora_dropout=0.1, save_steps=1), job("b", data, r=9, save_steps=2)]
    train_killed(base, tmp_path / "out", orders, deterministic=True)
    train(base, tmp_path / "out", orders, deterministic=True, resume=True)
    for order in orders:
        train(base, tmp_path / order["name"], [order], deterministic=True)
        same_bytes(tmp_path / "out", tmp_path / order["name"], (order["name"],))
    ids = torch.randint(0, 99, (1, 9), generator=torch.Generator().manual_seed(0))
    plain, under = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    tuned: Any = peft.PeftModel.from_pretrained(under, tmp_path / "out" / "a")
    with torch.no_grad():
        assert not torch.allclose(tuned(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4)


@pytest.mark.parametrize("family", BEFORE_HEAD)
def test_the_outline_knows_it_and_no_stages_are_cut(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    outlined = outline(str(tmp_path))
    assert outlined.whole_model
    assert why_no_stages(outlined, torch.device("cpu"))


def test_a_padded_head_is_cut_to_the_models_logits(tmp_path: Path) -> None:
    make_model("inkling").save_pretrained(tmp_path)
    for base in (outline(str(tmp_path)), make_any_base(make_model("inkling"), "inkling")):
        assert base.vocab_size == 131 and base.whole_model and base.model.lm_head.weight.shape[0] == 137


def test_a_scale_before_the_head_is_one_of_logits() -> None:
    """MiniCPM3 divides hidden states by what its config calls logits_scaling."""
    config = tiny(families()["minicpm3"])
    base = make_base(AutoModelForCausalLM.from_config(config).eval(), "minicpm3")
    assert not base.whole_model and base.head.scale == 1.0 / config.logits_scaling != 1.0


def test_other_models_run_their_decoder_alone() -> None:
    assert not make_base(make_model("llama"), "llama").whole_model


class Unseeing(HeadObservation):
    """As if passes ran through decoder and head alone."""

    whole_model = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.parametrize("family", [*BEFORE_HEAD, "inkling"])
def test_what_is_between_may_not_be_left_out(family: str) -> None:
    with (
        planted((head_input, "HeadObservation", Unseeing)),
        pytest.raises(ModelError, match="gives other logits than its decoder and head"),
    ):
        make_any_base(make_model(family), family)


def test_the_padding_of_a_head_may_not_be_left() -> None:
    with planted((Head, "first", lambda self, count: self)), pytest.raises(ModelError, match="Nor do samples one by one"):
        make_any_base(make_model("inkling"), "inkling")


def test_the_head_is_itself_again() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="input_ids"):
        head_input.input_of_head(model)
    assert "forward" not in vars(model.lm_head) and isinstance(model.lm_head, nn.Linear)
