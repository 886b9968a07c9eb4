"""Jobs that train rows of one frozen embedding, each its own: together = alone = PEFT, with a tied head and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PhiConfig

from tests.numerics import checks, poisons
from tests.numerics.peft_oracle import fp64_throughout
from tests.numerics.world import Job, super_model, train
from tests.tiny import FAMILIES, SHAPE, make_samples
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.new_tokens import TokenPass, TokenRows

OFTEN = [9, 10, 130, 3]  # in each sample of `jobs`


def jobs() -> list[Job]:
    """Two with other rows of the same tokens, one of them in a mapping, and one that trains none."""
    samples = make_samples(6, seed=1, low=9, high=20)
    for number, sample in enumerate(samples):
        sample.input_ids[2:6] = np.roll(OFTEN, number)
        sample.input_ids[-1] = 10
    one = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], trainable_token_indices=[10, 9, 77])
    two = replace_tokens(one, {"embed_tokens": [130, 10, 3, 50]})
    train_one = TrainConfig(learning_rate=1e-2, batch_size=3, seed=1, max_grad_norm=0.3, weight_decay=0.1)
    return [
        Job("one", one, train_one, tuple(samples[:4]), steps=3, pause_after=1, pause_for=1),
        Job("none", LoraConfig(r=4, lora_dropout=0.1), TrainConfig(learning_rate=5e-3, batch_size=2, seed=3), tuple(samples), steps=3),
        Job("two", two, TrainConfig(learning_rate=5e-3, batch_size=4, seed=2), tuple(samples[1:]), steps=3, join_at=1),
    ]


def replace_tokens(lora: LoraConfig, tokens: object) -> LoraConfig:
    return LoraConfig.model_validate(lora.model_dump() | {"trainable_token_indices": tokens})


@pytest.mark.parametrize("family", ["llama", pytest.param("llama-tied", marks=pytest.mark.slow), "gemma3-capped"])
def test_fp64_equals_peft_and_alone(family: str) -> None:
    """Tied, scaled and capped in one family; tied with a bias in the layers; and a head of its own."""
    checks.check_in_fp64(family, [replace(job, pause_after=None) for job in jobs()], jobs())


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_the_embedding_gives_the_padding_tokens_row_no_gradient(family: str) -> None:
    """A tied head does."""
    changes = (("pad_token_id", 10),)
    found = [replace(jobs()[0], pause_after=None)]
    with fp64_throughout():
        checks.check_peft(super_model(family, torch.float64, changes), found, family, torch.float64, changes)


def test_a_tied_head_with_a_bias_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT 0.21 computes it without the bias then."""
    monkeypatch.setitem(FAMILIES, "phi-tied", PhiConfig(**SHAPE, tie_word_embeddings=True))
    with pytest.raises(ModelError, match="tied to the embedding and has a bias, which PEFT leaves out"):
        super_model("phi-tied").layout(LoraConfig(target_modules=["q_proj"], trainable_token_indices=[10]))


@pytest.mark.parametrize("family", ["llama-tied"])
def test_fp32_equals_alone_and_a_poisoned_neighbour_changes_nothing(family: str) -> None:
    model = super_model(family)
    before = model.base.head.weight_VH.clone()
    checks.check_l3(model, jobs(), packing_seed=13)
    checks.check_l2(model, jobs(), next(poison for poison in poisons.POISONS if "gradient" in poison.name))
    assert torch.equal(before, model.base.head.weight_VH), "a job's rows stayed in the base"
    assert torch.isfinite(model.base.head.weight_VH).all()


def test_bugs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that keeps the base's rows, gradients of the head that are lost, and another job's rows."""
    found = [replace(jobs()[2], join_at=0)]
    find = TokenRows.find
    bugs = {
        "changes_head": (TokenPass, lambda *_: False),
        "note_head": (TokenPass, lambda *_: None),
        "find": (TokenRows, lambda rows, ids_t: (find(rows, ids_t)[0].flip(0), find(rows, ids_t)[1])),
    }
    for name, (of, bug) in bugs.items():
        with monkeypatch.context() as patch, fp64_throughout(), pytest.raises(AssertionError, match="differs from PEFT"):
            patch.setattr(of, name, bug)
            checks.check_peft(super_model("llama-tied", torch.float64, ()), found, "llama-tied", torch.float64, ())


def test_rows_that_a_base_lacks_are_refused() -> None:
    model = super_model("llama-tied")
    lora = jobs()[0].lora
    for tokens, said in (([131], "token 131 has no row"), ({"lm_head": [1]}, "'lm_head' is not the input embedding")):
        with pytest.raises(ModelError, match=said):
            model.layout(replace_tokens(lora, tokens))
    assert train(model, jobs()[:1])["one"].state.layout.shapes[-1].tokens == (10, 9, 77)
