"""Which linears an order means: PEFT's own matching is the oracle, and PEFT loads what is saved at the same ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from tests.tiny import SHAPE, make_model
from tlora.adapters.peft import adapter_config, read_config, save_adapter
from tlora.adapters.state import init_state
from tlora.adapters.targets import find_matches
from tlora.errors import ModelError
from tlora.job import JobSpec, LoraConfig
from tlora.planning.start import adopt_adapter_config
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
DENSE_AND_EXPERTS = transformers.DeepseekV3Config(
    **{**SHAPE, **LATENT, "num_hidden_layers": 12, "num_key_value_heads": 4}, moe_intermediate_size=32, n_group=1, topk_group=1,
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=11,
)  # fmt: skip


def build(family: str) -> Any:
    if family == "llama":
        return make_model(num_hidden_layers=12)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(DENSE_AND_EXPERTS)


@cache
def shared(family: str) -> SuperModel:
    return SuperModel(make_base(build(family), family))


def linears_of(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]


ORDERS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "layers.1.mlp.down_proj"]},
    {"target_modules": r".*layers\.[02]\.self_attn\.[qv]_proj"},
    {"target_modules": r"model\.layers\.(1|10|11)\..*_proj"},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "mlp.up_proj"], "exclude_modules": r".*\.1\d?\..*"},
    {"target_modules": r".*[qkvo]_proj", "exclude_modules": ["v_proj", "o_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1]},
    {"target_modules": ["down_proj"], "layers_to_transform": [1, 11], "layers_pattern": "layers"},
    {"target_modules": ["down_proj"], "layers_to_transform": [3], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj", "model.layers.5.self_attn.v_proj"], "layers_to_transform": [2]},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [2, 3], "exclude_modules": ["layers.3.mlp.down_proj"]},
    {"target_modules": ["v_proj"], "layers_to_transform": []},
    {"target_modules": ["v_proj"], "exclude_modules": []},
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_it_is_what_peft_adapts_and_peft_loads_it_there(order: dict[str, Any], tmp_path: Path) -> None:
    lora, theirs = LoraConfig(r=2, **order), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **order)
    layout = shared("llama").layout(lora)
    modules = [shape.module for shape in layout.shapes]
    assert modules == [name for name in linears_of(build("llama")) if check_target_module_exists(theirs, name)]
    save_adapter(tmp_path, layout, init_state(layout, 0, torch.float32).params, lora, "base")
    saved = read_config(tmp_path)
    assert isinstance(saved["target_modules"], list) and not any(saved.get(key) for key in ("exclude_modules", "layers_to_transform"))
    loaded = peft.PeftModel.from_pretrained(build("llama"), str(tmp_path))
    assert [n.removeprefix("base_model.model.") for n, m in loaded.named_modules() if hasattr(m, "lora_A")] == modules


@pytest.mark.parametrize("order", ORDERS[1:12], ids=str)
def test_an_adapter_that_peft_made_so_is_continued(order: dict[str, Any], tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", base_model_name_or_path="base", **order)
    config.save_pretrained(str(tmp_path))
    spec, warnings = adopt_adapter_config(JobSpec.model_validate({"name": "a", "data": "-", "exclude_modules": ["q_proj"]}), tmp_path)
    assert shared("llama").layout(spec).shapes == shared("llama").layout(LoraConfig(r=2, lora_alpha=8, **order)).shapes and not warnings


def test_a_name_that_other_modules_have_too_is_saved_whole() -> None:
    lora = LoraConfig(r=2, target_modules=r".*layers\.\d\.self_attn\.q_proj|.*v_proj")
    names = adapter_config(shared("llama").layout(lora), lora, "base")["target_modules"]
    assert names == [*(f"model.layers.{i}.self_attn.q_proj" for i in range(10)), "v_proj"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"target_modules": r"layers\.0\..*"}, r"matches no layer of this base: it must match whole names, such as model\.layers\.0"),
        ({"target_modules": ".*"}, r"matches , which is no inner linear|matches model, which is no inner linear layer.*Let it end with"),
        ({"target_modules": r".*(q_proj|lm_head)"}, r"matches lm_head, which is no inner linear layer.*\.\*\\\.\(down_proj\|"),
        ({"exclude_modules": ["q_prj"]}, "exclude_modules: 'q_prj' matches no module of this base"),
        ({"exclude_modules": r"q_pro.\b"}, "exclude_modules: .* matches no module of this base"),
        ({"exclude_modules": r".*_proj"}, "together leave no layer to adapt"),
        ({"layers_to_transform": [0, 12]}, "no adapted module is in layer 12: they are from 0 to 11"),
        ({"layers_to_transform": 1, "layers_pattern": "h"}, "no adapted module is in layer 1: they are in no list of layers"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, r": mlp\.up_proj is a linear layer, which target_modules adapts\."),
        ({"target_parameters": ["norm.weight"]}, r": norm is frozen here, as routers are\."),
        ({"target_modules": r"(.*.*)*x(.*.*)*y"}, "takes more than 2 s|matches no layer"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(order: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        shared("llama").layout(LoraConfig(r=2, **order))


@pytest.mark.slow
def test_a_pattern_that_takes_for_ever_is_stopped() -> None:
    with pytest.raises(ModelError, match=r"takes more than 2 s to match.*without repetitions inside repetitions"):
        find_matches(r"(?:a|aa)+[^\w]", ["a" * 60], "target_modules")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"target_modules": "("}, r"target_modules: '\(' is no regular expression"),
        ({"target_modules": "all"}, "write `target_modules: all-linear`"),
        ({"target_modules": "q_proj"}, r"write `target_modules: \[q_proj\]`"),
        ({"exclude_modules": "q_proj"}, r"write `exclude_modules: \[q_proj\]`"),
        ({"layers_pattern": "layers"}, "layers_to_transform is not set"),
        ({"target_modules": ".*q_proj", "layers_to_transform": 1}, "layers_to_transform has no meaning with a target_modules that is"),
        ({"layers_pattern": "[", "layers_to_transform": 1}, "layers_pattern: .* is no regular expression"),
    ],
    ids=str,
)
def test_what_is_refused_before_the_base_is_known(order: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoraConfig(r=2, **order)


class Doubled(FalconLinear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Grouped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.unflatten(-1, (self.groups, -1)))


def test_a_linear_layer_is_known_by_what_it_computes() -> None:
    kinds = (FalconLinear, Doubled, Grouped, nn.Linear)
    assert list(find_linears(nn.ModuleList(kind(4, 4) for kind in kinds))) == ["0", "3"]
