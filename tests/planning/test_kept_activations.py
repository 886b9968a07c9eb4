"""What a GPU's compiled layers keep of a token: the estimate beside what torch's partitioner leaves to backward, and no kernel runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import MARKS, interpreted
from tests.planning.partitioned import TOKENS, hint, kept_by
from tests.tiny import FAMILIES, HYBRIDS, make_model
from tlora.kernels import delta_rule
from tlora.planning.memory import measure
from tlora.supermodel.load import outline
from tlora.supermodel.structure import find_calls
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports it late, when the variable may not be set any more
    from tlora.kernels import pass_operations  # noqa: F401

pytestmark = MARKS
GPU = torch.device("cuda")


def _size(value: torch.Tensor) -> int:
    """Elements, of which some dimension is symbolic."""
    return math.prod(hint(size) for size in value.shape)


def _count(outputs: list[Any]) -> int:
    """Elements of a token, but for statistics of norms: x, and what the layer's operations give, log-sum-exp included, each once."""
    values = [node.meta["val"] for node in outputs[1:] if getattr(node, "op", "") == "call_function"]
    wide = {value.untyped_storage()._cdata: value for value in values if isinstance(value, torch.Tensor) and value.shape[-1] != 1}
    return (_size(outputs[0].meta["val"]) + sum(map(_size, wide.values()))) // TOKENS


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_keeps_what_is_counted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of queries and keys keep what they read, beside what attention reads."""
    FAMILIES[family].save_pretrained(tmp_path)
    memory = measure(SuperModel(outline(str(tmp_path), "bfloat16")), 0, GPU)
    heads, shrunk = FAMILIES[family].num_attention_heads, 7 * 2 * 16  # of each linear x @ A of two blocks of rows, by the operations
    assert kept_by(make_model(family), _count, monkeypatch) - heads + shrunk == memory.phases[-1].kept_per_layer / 2 - 2 * heads


def test_a_recurrent_layer_keeps_the_inverses_that_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In elements, all in fp32 here, as a plan's inverses are: with them it keeps at most what is counted, and more than without them."""
    monkeypatch.setattr(delta_rule, "WIDEST_ELEMENT", 4)  # the interpreter has no registers that fp32 could spill
    heads, shape = 16, {"layer_types": ["linear_attention"] * 2, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
    model = make_model("qwen3.5", num_hidden_layers=2, **shape)
    model.config.save_pretrained(tmp_path)
    planned = SuperModel(outline(str(tmp_path), "bfloat16"))
    inverses, shrunk = heads * delta_rule.CHUNK, 8 * 2 * 16
    counted = measure(planned, 0, GPU).phases[-1].kept_per_layer / 2 - 2 * inverses - shrunk
    assert counted < kept_by(model, _count, monkeypatch) <= counted + inverses


def test_norms_between_linears_and_attention_are_found(tmp_path: Path) -> None:
    """Those that a linear reads are made again, as are those of recurrences."""
    found = dict[str, int]()
    for family in ("llama", "qwen3", "gemma2", "gemma3"):
        FAMILIES[family].save_pretrained(tmp_path / family)
    for family in ("qwen3.5", "qwen3-next"):
        HYBRIDS[family].save_pretrained(tmp_path / family)
    for directory in sorted(tmp_path.iterdir()):
        found[directory.name] = find_calls(SuperModel(outline(str(directory), "bfloat16")).base).beside_linears
    heads = 4 + 2
    assert found == {
        "llama": 0,
        "gemma2": 0,
        "qwen3": 2 * 24 * heads,
        "gemma3": 2 * 16 * heads,
        "qwen3.5": 16 * heads,
        "qwen3-next": 16 * heads,
    }
