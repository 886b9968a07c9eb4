"""Outputs that layers keep beside those of their linears, in bf16 and by whole storages: the estimate beside torch's partitioner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import AutoModelForCausalLM, GraniteConfig, Olmo2Config, Qwen3MoeConfig

from tests.kernels.interpreter import MARKS, interpret, interpreted
from tests.tiny import FAMILIES, SHAPE, make_samples
from tlora.job import LoraConfig, TrainConfig
from tlora.planning.memory import measure
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports it late, when the variable may not be set any more
    from tlora.kernels import pass_operations  # noqa: F401

pytestmark = MARKS
GPU, TOKENS = torch.device("cuda"), 48
_NARROWEST = 17  # elements; routers give less
KEPT: dict[str, Any] = {family: FAMILIES[family] for family in ("llama", "qwen3", "gemma2", "gemma3", "phi3")} | {
    "olmo2": Olmo2Config(**SHAPE),
    "granite": GraniteConfig(**SHAPE, residual_multiplier=0.5),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}


class _Partitioned(Exception):  # noqa: N818  (no error: it ends a compilation)
    """Elements of a token that a layer keeps, but for statistics of norms and attention, and what routers choose."""


def _hint(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _stop(forward: Any, _examples: object) -> NoReturn:
    """By a layer's partitioned forward: its output, and what its operations give to backward, each storage once and whole."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in output.args[0] if getattr(node, "op", "") == "call_function"]
    storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in values if isinstance(value, torch.Tensor)}
    sizes = [_hint(storage.nbytes()) // torch.bfloat16.itemsize // TOKENS for storage in storages.values()]
    raise _Partitioned(sum(size for size in sizes if size >= _NARROWEST))


def kept_by(model: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a token in the first layer."""
    interpret(monkeypatch)
    backend = aot_autograd(
        fw_compiler=_stop, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )  # as Inductor's
    compile_as_usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile_as_usual(forward, backend=backend))
    shared = SuperModel(make_base(model, "tiny"))
    shared.join("a", LoraConfig(r=4), TrainConfig(max_steps=1))
    rows = [BatchRow("a", each.input_ids, each.loss_weights, 7.0, (1, 0, i)) for i, each in enumerate(make_samples(2, low=24, high=24))]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        shared.forward_backward(collate(rows, "cpu", TOKENS))
    torch._dynamo.reset()
    found = raised.value.inner_exception
    assert isinstance(found, _Partitioned), found
    return int(found.args[0])


@pytest.mark.parametrize("family", [each if each in ("qwen3", "gemma2") else pytest.param(each, marks=pytest.mark.slow) for each in KEPT])
def test_a_layer_keeps_what_is_counted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of queries and keys keep what they read, beside what attention reads. Where a norm reads a block's output, or experts give it,
    the layer's output is kept as well. Of queries, keys and values of one linear its whole output is kept, for the values.
    """
    KEPT[family].save_pretrained(tmp_path)
    meta = SuperModel(outline(str(tmp_path), "bfloat16"))
    memory = measure(meta, 0, GPU)
    heads, shrunk = KEPT[family].num_attention_heads, len(meta.targets()) // 2 * 2 * 16  # of each linear x @ A of two blocks of rows
    model = AutoModelForCausalLM.from_config(KEPT[family], dtype=torch.bfloat16).eval()
    assert kept_by(model, monkeypatch) == memory.phases[-1].kept_per_layer / 2 - 2 * heads - shrunk
