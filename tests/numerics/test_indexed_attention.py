"""Attention whose indexer chooses tokens (DeepSeek-V3.2, GLM-5, MiniMax-M3) in samples seen whole: together = alone = PEFT; bugs."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from tests.numerics import checks, poisons
from tests.numerics.both_paths import check_family, on_both_paths
from tests.numerics.test_chunked_attention import NAN_GRADIENT, in_attention
from tests.numerics.two_jobs import edges_and_late, samples
from tests.numerics.world import Job, super_model
from tests.planted import planted
from tests.tiny import INDEXED, make_batch, make_model
from tests.tolerances import LOGITS, assert_close
from tlora.errors import DataError, ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import attention, indexers
from tlora.supermodel.indexers import dense_tokens, find_indexers
from tlora.supermodel.load import hidden_states, make_base
from tlora.supermodel.supermodel import SuperModel

LIMIT = 64
WIDER = (("hidden_size", 256), ("intermediate_size", 320))
LENGTHS = (1, LIMIT - 1, LIMIT, 17, 2, 3)
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
TARGETS = {"deepseek-v3.2": LATENT, "glm-5": LATENT, "minimax-m3": ["v_proj", "o_proj", "self_attn.q_proj"]}
EVERY_RUN = "deepseek-v3.2"


def each(slow: bool = True) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if slow and name != EVERY_RUN else []) for name in INDEXED]


def jobs(family: str) -> list[Job]:
    return edges_and_late(TARGETS[family], LENGTHS)


@pytest.mark.parametrize("family", each())
def test_fp64_equals_peft_and_alone(family: str) -> None:
    checks.check_in_fp64(family, jobs(family), dtype=torch.float32 if family == "glm-5" else torch.float64)


@pytest.mark.parametrize("family", each())
def test_fp32_equals_alone_beside_nan(family: str) -> None:
    checks.check_in_fp32(super_model(family, torch.float32, WIDER), jobs(family), [in_attention(NAN_GRADIENT, TARGETS[family])])


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
def test_every_poison_of_a_neighbour(family: str) -> None:
    """One of them has samples of 256 tokens."""
    longer = ("index_topk_blocks", 16) if family == "minimax-m3" else ("index_topk", 256)
    model, found = super_model(family, torch.float32, (*WIDER, longer)), jobs(family)
    alone = checks.all_alone(model, found)
    for poison in poisons.POISONS:
        checks.check_l2(model, found, in_attention(poison, TARGETS[family]), alone)


@pytest.mark.parametrize("family", INDEXED)
def test_the_longest_samples_get_the_logits_that_transformers_gives_each_alone(family: str) -> None:
    """And one token more does not: there the indexer leaves some out."""
    base = make_base(make_model(family), family)
    assert dense_tokens(base.model) == LIMIT
    with torch.no_grad():
        for module in find_indexers(base.model).values():  # such as differ from token to token
            for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
                linear.weight.mul_(50)
        for length, alike in ((LIMIT, True), (4 * LIMIT, False)):
            base.model.set_attn_implementation(attention.NAME)
            ids = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)) for n in (length, 5, length)]
            positions = torch.cat([torch.arange(len(i)) for i in ids])
            packed = base.head.logits(hidden_states(base, torch.cat(ids), positions, tuple(map(len, ids))))
            base.model.set_attn_implementation("eager")
            alone = torch.cat([base.model(input_ids=i[None], use_cache=False).logits[0] for i in ids])
            if alike:
                assert_close(packed, alone.double(), LOGITS[torch.float32], "logits")
            else:
                assert float((packed - alone).norm() / alone.norm()) > 1e-3


@pytest.mark.parametrize("family", INDEXED)
def test_a_longer_sample_is_refused(family: str) -> None:
    shared = SuperModel(make_base(make_model(family), family))
    shared.join("a", LoraConfig(r=4, target_modules=TARGETS[family]), TrainConfig(lr_scheduler_type="constant"))
    shared.forward_backward(make_batch({"a": list(samples(1, (LIMIT, 3)))}))
    with pytest.raises(
        DataError, match=f"has {LIMIT + 1} tokens, and past {LIMIT} this base's attention is sparse.* Set max_length: {LIMIT}"
    ):
        shared.forward_backward(make_batch({"a": list(samples(1, (3, LIMIT + 1)))}))


@on_both_paths
@pytest.mark.parametrize("family", [EVERY_RUN, "minimax-m3"])
def test_on_the_kernels_as_on_the_plain_path(family: str) -> None:
    check_family(family, LENGTHS[:3], LoraConfig(r=4, target_modules=TARGETS[family]))


@pytest.mark.parametrize("family", INDEXED)
def test_a_layer_is_compiled_whole(family: str) -> None:
    """On a GPU layers are: nothing in them may break the graph."""
    base = make_base(make_model(family), family)
    for name, module in find_indexers(base.model).items():
        compiled = torch.compile(module.forward, backend="eager", fullgraph=True)
        assert compiled(torch.ones(1, 2, 64), None, None, None).numel() == 0, name


# -- indexers get no gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", INDEXED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of PEFT, which looks for experts too
def test_indexers_are_no_targets_and_pefts_adapters_there_stay_as_they_began(family: str) -> None:
    model = make_model(family)
    inside = [
        f"{name}.{child}"
        for name, m in find_indexers(model).items()
        for child, linear in m.named_modules()
        if isinstance(linear, nn.Linear)
    ]
    shared = SuperModel(make_base(make_model(family), family))
    adapted = {shape.module for shape in shared.layout(LoraConfig()).linears}
    assert inside and adapted and adapted.isdisjoint(inside)
    last = inside[0].removeprefix("model.")
    with pytest.raises(ModelError, match=f"{last}' is in an indexer, which chooses tokens without gradients"):
        shared.layout(LoraConfig(target_modules=["o_proj", last]))
    with pytest.raises(ModelError, match="in an indexer, which chooses tokens without gradients"):
        shared.layout(LoraConfig(target_modules=rf".*\.{last.rsplit('.', 1)[-1]}"))
    theirs: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    theirs(input_ids=torch.arange(3, 40)[None], use_cache=False).logits.sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    of_indexers = {n: grad for n, grad in gradients.items() if any(f".{name}." in n for name in inside)}
    assert len(of_indexers) == 2 * len(inside)
    assert all(grad is None or not grad.any() for grad in of_indexers.values())
    assert any(bool(grad.any()) for grad in gradients.values() if grad is not None)


def test_generation_asks_the_indexer() -> None:
    """An answer that grows beyond the limit is transformers' own: a base that was loaded for jobs gives it as one that was not."""
    plain, ids = make_model(EVERY_RUN, index_topk=8), torch.arange(40, 50)[None]
    mine = make_base(make_model(EVERY_RUN, index_topk=8), EVERY_RUN).model
    mine.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (
            m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None)
            for m in (mine, plain)
        )
    assert torch.equal(found, expected)


# -- planted bugs --------------------------------------------------------------------------------------------------------

healthy_choice, healthy_blocks = DeepseekV32Indexer.forward, MiniMaxM3VLIndexer.forward


def half_of_the_tokens(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A family whose limit is another than its `index_topk`: no short sample shows it."""
    return healthy_choice(self, *args, **kwargs)[..., : max(1, self.index_topk // 2)]


def one_block_less(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    blocks = healthy_blocks(self, *args, **kwargs)
    return blocks[..., : max(1, self.topk_blocks - 1)]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("deepseek-v3.2", (DeepseekV32Indexer, "forward", half_of_the_tokens)),
        ("minimax-m3", (MiniMaxM3VLIndexer, "forward", one_block_less)),
    ],
    ids=["half of the tokens", "one block less"],
)
def test_an_indexer_with_another_limit_is_refused_at_load(family: str, change: tuple[type, str, object]) -> None:
    with planted(change), pytest.raises(ModelError, match="other logits than single ones"):
        make_base(make_model(family), family)


@pytest.mark.parametrize("family", INDEXED)
def test_an_indexer_that_is_not_known_is_refused_at_load(family: str) -> None:
    with planted((indexers, "_COUNTS", ())), pytest.raises(ModelError, match=r"packed: \w+ hands (block_)?indices to its attention"):
        make_base(make_model(family), family)


def test_an_indexer_that_leaves_its_choice_to_packed_attention_is_refused_at_load() -> None:
    """Packed attention sees all tokens, whatever is chosen: the probe has to look at what is handed on."""
    change = indexers, "choose_all", lambda decoder, packed: None
    with planted(change), pytest.raises(ModelError, match="hands indices to its attention"):
        make_base(make_model(EVERY_RUN), EVERY_RUN)
