"""Bases whose samples cannot share a pass (Qwen4-Exp, DeepSeek-V4, Jamba, MPT, Falcon, ZAYA): together = alone = PEFT; what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, BigBirdConfig, ProphetNetConfig, ReformerConfig, XLNetConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer

from bench.families import tiny
from tests.engine.tiny_runs import CHATML, job, make_tokenizer, run_spec, same_bytes, train, train_killed, write_rows
from tests.numerics import checks, poisons
from tests.numerics.test_chunked_attention import NAN_GRADIENT, in_attention
from tests.numerics.two_jobs import edges_and_late
from tests.numerics.world import Job
from tests.planted import planted
from tests.tiny import ONE_BY_ONE, SHAPE, make_model, make_samples
from tests.tolerances import assert_close
from tlora.engine.check import check
from tlora.engine.generate import Sampling, generate
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.objectives import Dpo
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import Base, _run_two_tokens, make_any_base, make_base, outline
from tlora.supermodel.one_by_one import why_not_together
from tlora.supermodel.shared_base import load_shared_base
from tlora.supermodel.stage_base import why_no_stages
from tlora.supermodel.supermodel import SuperModel

FALCONS = ("falcon", "falcon-40b", "falcon-rw")
TARGETS = {
    "qwen4-exp": ["in_proj_qkv", "q_proj", "o_proj", "key_proj", "input_mix_weight_down"],
    "deepseek-v4": ["q_a_proj", "self_attn.q_b_proj", "self_attn.kv_proj", "o_b_proj"],
    "jamba": ["in_proj", "x_proj", "q_proj", "down_proj"],
    "mpt": ["Wqkv", "out_proj", "down_proj"],
    "inkling": ["q_proj", "r_proj", "o_proj", "mlp.down_proj"],
    **{name: ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"] for name in FALCONS},
    "gpt": ["c_attn", "c_fc", "mlp.c_proj"],
    "zaya": ["q_proj", "v_proj_current", "v_proj_delayed", "o_proj"],
}
DTYPES = dict.fromkeys(("qwen4-exp", "deepseek-v4", "inkling", "zaya"), torch.float32)  # products of experts take no fp64
WIDER = {"mpt": (("d_model", 256),), "gpt": (("n_embd", 256),), **dict.fromkeys(FALCONS, (("hidden_size", 256),))}
EVERY_RUN = ("jamba", "falcon-40b")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of PEFT, which looks for experts too


def each() -> list[Any]:
    return [pytest.param(name, marks=[] if name in EVERY_RUN else [pytest.mark.slow]) for name in ONE_BY_ONE]


@lru_cache
def shared(family: str, dtype: torch.dtype = torch.float32, changes: tuple[tuple[str, Any], ...] = ()) -> SuperModel:
    base = make_any_base(make_model(family, dtype, **dict(changes)), family)
    assert base.why_one_by_one
    return SuperModel(base)


def jobs(family: str) -> list[Job]:
    return edges_and_late(TARGETS[family], (1, 33, 5, 17))


@pytest.mark.parametrize("family", each())
def test_equals_peft_and_alone(family: str) -> None:
    """In fp64 where it can be."""
    checks.check_in_fp64(family, jobs(family), dtype=DTYPES.get(family, torch.float64), make=shared)


@pytest.mark.parametrize("family", each())
def test_fp32_equals_alone_beside_nan_in_any_mode(family: str) -> None:
    model = shared(family, torch.float32, WIDER.get(family, (("hidden_size", 256), ("intermediate_size", 320))))
    checks.check_in_fp32(model, jobs(family), [in_attention(NAN_GRADIENT, TARGETS[family])])


@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_every_poison_of_a_neighbour(family: str) -> None:
    model, found = shared(family), jobs(family)
    alone = checks.all_alone(model, found)
    for poison in poisons.POISONS:
        checks.check_l2(model, found, in_attention(poison, TARGETS[family]), alone)


def pairs(count: int) -> PackedBatch:
    """Units of two sequences each, unequal in length."""
    rows = []
    for i, sample in enumerate(make_samples(count, seed=5, low=9, high=20)):
        length = len(sample.input_ids)
        rows.append(BatchRow("a", sample.input_ids, np.ones(length, np.float32), 3.0, (1, 0, i), (length - 4, 4)))
    return collate(rows)


def gradient(model: SuperModel) -> Tensor:
    lora = LoraConfig(r=4, lora_dropout=0.1, trainable_token_indices=[5, 9, 77])
    model.join("a", lora, TrainConfig(lr_scheduler_type="constant", seed=1))
    state = model.state("a")
    state.params.add_(0.02 * torch.randn(state.params.shape, generator=torch.Generator().manual_seed(1), dtype=state.params.dtype))
    model.rewrite("a")
    model.forward_backward(pairs(3), {"a": Dpo(0.3)})
    return model.gradient("a")


def both_ways() -> tuple[Tensor, Tensor]:
    """Of one base: packed, and one by one."""
    packed, apart = (make_base(make_model("llama", torch.float64), "llama") for _ in range(2))
    apart.model.set_attn_implementation("sdpa")
    return gradient(SuperModel(packed)), gradient(SuperModel(replace(apart, why_one_by_one="this test says so")))


def test_pairs_with_trained_tokens_have_the_gradients_of_packed_ones() -> None:
    packed, apart = both_ways()
    assert_close(apart, packed, 1e-9)


def test_a_pair_that_runs_as_one_sequence_is_seen() -> None:
    with planted((PackedBatch, "sequences", lambda self: [self])), pytest.raises(RecursionError):
        both_ways()
    change = PackedBatch, "sequences", lambda self: [replace(self, lengths=(sum(self.lengths),))]
    with planted(change), pytest.raises(AssertionError):
        assert_close(*both_ways(), 1e-9)


@pytest.mark.parametrize("family", EVERY_RUN)
def test_a_run_over_files(family: str, tmp_path: Path) -> None:
    """`check` sees it, jobs have the bytes that each has alone, also when killed and resumed, and `generate` answers."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    make_model(family, vocab_size=len(tokenizer) + 3, max_position_embeddings=2048).save_pretrained(base)
    data = str(write_rows(tmp_path / "d.jsonl", 8))
    orders = [
        job("a", data, target_modules=TARGETS[family], lora_dropout=0.1, save_steps=1),
        job("b", data, r=9, save_steps=2, target_modules=TARGETS[family][2:]),
    ]
    found = check(run_spec(base, tmp_path / "out", orders), device="cpu")
    assert not found.problems and not any(each.problems for each in found.jobs)
    train_killed(base, tmp_path / "out", orders, deterministic=True)
    train(base, tmp_path / "out", orders, deterministic=True, resume=True)
    for order in orders:
        train(base, tmp_path / order["name"], [order], deterministic=True)
        same_bytes(tmp_path / "out", tmp_path / order["name"], (order["name"],))
    assert generate(tmp_path / "out" / "a", ["red"], base_model=str(base), sampling=Sampling(max_new_tokens=3))
    with pytest.raises(ModelError, match="Held whole, its samples may go one by one"):
        load_shared_base(str(base), "auto", torch.device("cpu"), None, Streaming())


@pytest.mark.parametrize("family", ["qwen4-exp", "deepseek-v4", "jamba", "mpt", "gpt", "falcon"])
def test_what_is_counted_of_it_before_it_is_loaded(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    counted = outline(str(tmp_path))
    assert "cannot run packed samples" in counted.why_one_by_one
    assert why_no_stages(counted, torch.device("cpu")).startswith("its samples go one by one: ")
    assert SuperModel(counted).kernels_on(torch.device("cuda"), False).startswith("plain: samples go one by one: ")


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "deepseek-v3.2", "stablelm"])
def test_others_are_packed(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    assert not make_any_base(make_model(family), family).why_one_by_one and not outline(str(tmp_path)).why_one_by_one


# -- what is refused ------------------------------------------------------------------------------------------------------

REFUSED = {
    "later tokens": (XLNetConfig(vocab_size=131, d_model=64, n_layer=2, n_head=4, d_inner=96), "lets tokens see those behind them"),
    "an encoder": (BertConfig(**SHAPE), "is no decoder. Use .* or, if it was trained as one, set is_decoder: true in its config.json"),
    "another head": (ProphetNetConfig(vocab_size=131, hidden_size=64), "gives other logits than its decoder and head"),
    "no gradients": (tiny(ReformerConfig), "ReformerModelWithLMHead lets no gradient through to its linear layers"),
    "other rows": (BigBirdConfig(**SHAPE, is_decoder=True), r"pooler sees 1 rows of a sample of 19 tokens, and so has no adapter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_samples_one_by_one_do_not_mend_is_refused_with_both_reasons(case: str) -> None:
    config, why = REFUSED[case]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=rf"(packed samples|packed).*Nor do samples one by one: .*{why}"):
        make_any_base(model, case)


def test_rows_beside_those_of_tokens_are_zeros_or_refused() -> None:
    """ZAYA's delayed values are of the token before, and of zeros in the place of that before the first."""
    assert make_any_base(make_model("zaya"), "zaya").why_one_by_one
    model = make_model("zaya")
    projection = model.model.layers[0].self_attn.qkv_proj.v_proj_delayed
    projection.register_forward_pre_hook(lambda _linear, args: args[0] + (args[0].shape[1] == 1))
    with pytest.raises(ModelError, match="v_proj_delayed sees 1 rows of a sample of 19 tokens, and so has no adapter. Use another base"):
        make_any_base(model, "zaya")


def remembers(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    self.seen = getattr(self, "seen", 0) + 1
    return mamba(self, *args, **kwargs) * (1 + self.seen / 1000)


mamba = JambaMambaMixer.forward


def test_a_layer_that_remembers_other_samples_is_refused_at_load() -> None:
    with (
        planted((JambaMambaMixer, "forward", remembers)),
        pytest.raises(ModelError, match="other hidden states the second time|other logits"),
    ):
        make_any_base(make_model("jamba"), "jamba")


def test_one_that_overflows_is_refused_for_that() -> None:
    model = make_model("jamba")
    model.model.embed_tokens.weight.data[:] = torch.nan
    with pytest.raises(ModelError, match="hold NaN or Inf"):
        make_any_base(model, "jamba")


def test_two_bases_may_be_looked_at_at_once(tmp_path: Path) -> None:
    """As ranks in threads do: one that ends its look first takes nothing from the other."""
    make_model("llama").save_pretrained(tmp_path)
    bases, begun, ended, found = [outline(str(tmp_path)) for _ in range(2)], Event(), Event(), list[str]()

    def late(base: Base) -> None:
        begun.set()
        assert ended.wait(600)
        _run_two_tokens(base)

    other = Thread(target=lambda: found.append(why_not_together(bases[0], late)))
    other.start()
    assert begun.wait(600) and why_not_together(bases[1], _run_two_tokens) == ""
    ended.set()
    other.join()
    assert found == [""]


def test_a_model_that_gives_logits_of_other_tokens_is_refused_for_that() -> None:
    """As Florence-2, an encoder-decoder whose decoder begins with a token of its own."""
    model = make_model("llama")
    whole = model.forward
    model.forward = lambda **given: whole(**given, logits_to_keep=1)
    with pytest.raises(ModelError, match="LlamaForCausalLM gives logits of 3 tokens for 43, so it is no decoder of these. Use a causal"):
        make_any_base(model, "llama")
