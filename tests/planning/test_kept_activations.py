"""What a GPU's compiled layers keep of a token: the estimate beside what torch's partitioner leaves to backward, and no kernel runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from tests.kernels.interpreter import MARKS, interpret, interpreted
from tests.tiny import FAMILIES, HYBRIDS, make_model, make_samples
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels import delta_rule
from tlora.planning.memory import measure
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.structure import find_calls
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports it late, when the variable may not be set any more
    from tlora.kernels import pass_operations  # noqa: F401

pytestmark = MARKS
GPU, TOKENS = torch.device("cuda"), 48


class _Partitioned(Exception):  # noqa: N818  (no error: it ends a compilation)
    """Elements of a token that a layer keeps, but for its norms' statistics."""


def _size(value: torch.Tensor) -> int:
    """Elements, of which some dimension is symbolic."""
    return math.prod(size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape)


def _stop(forward: Any, _examples: object) -> NoReturn:
    """By a layer's partitioned forward: x, and what its operations give to backward, each storage once."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in output.args[0][1:] if getattr(node, "op", "") == "call_function"]
    wide = {value.untyped_storage()._cdata: value for value in values if isinstance(value, torch.Tensor) and value.shape[-1] != 1}
    raise _Partitioned((_size(output.args[0][0].meta["val"]) + sum(map(_size, wide.values()))) // TOKENS)


def kept_by(family: str, monkeypatch: pytest.MonkeyPatch, **shape: object) -> int:
    """Elements of a token in the first layer, log-sum-exp included."""
    interpret(monkeypatch)
    backend = aot_autograd(
        fw_compiler=_stop, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )  # as Inductor's
    compile_as_usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile_as_usual(forward, backend=backend))
    model = SuperModel(make_base(make_model(family, **shape), "tiny"))
    model.join("a", LoraConfig(r=4), TrainConfig(max_steps=1))
    rows = [BatchRow("a", each.input_ids, each.loss_weights, 7.0, (1, 0, i)) for i, each in enumerate(make_samples(2, low=24, high=24))]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        model.forward_backward(collate(rows, "cpu", TOKENS))
    torch._dynamo.reset()
    found = raised.value.inner_exception
    assert isinstance(found, _Partitioned), found
    return int(found.args[0])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_keeps_what_is_counted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of queries and keys keep what they read, beside what attention reads."""
    FAMILIES[family].save_pretrained(tmp_path)
    memory = measure(SuperModel(outline(str(tmp_path), "bfloat16")), 0, GPU)
    heads, shrunk = FAMILIES[family].num_attention_heads, 7 * 2 * 16  # of each linear x @ A of two blocks of rows, by the operations
    assert kept_by(family, monkeypatch) - heads + shrunk == memory.phases[-1].kept_per_layer / 2 - 2 * heads


def test_a_recurrent_layer_keeps_the_inverses_that_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In elements, all in fp32 here, as a plan's inverses are: with them it keeps at most what is counted, and more than without them."""
    monkeypatch.setattr(delta_rule, "WIDEST_ELEMENT", 4)  # the interpreter has no registers that fp32 could spill
    heads, shape = 16, {"layer_types": ["linear_attention"] * 2, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
    model = make_model("qwen3.5", num_hidden_layers=2, **shape)
    model.config.save_pretrained(tmp_path)
    planned = SuperModel(outline(str(tmp_path), "bfloat16"))
    inverses, shrunk = heads * delta_rule.CHUNK, 8 * 2 * 16
    counted = measure(planned, 0, GPU).phases[-1].kept_per_layer / 2 - 2 * inverses - shrunk
    assert counted < kept_by("qwen3.5", monkeypatch, num_hidden_layers=2, **shape) <= counted + inverses


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
