"""A layer of a model as torch's partitioner leaves it to backward, without a kernel that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from tests.kernels.interpreter import interpret
from tests.tiny import make_samples
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

TOKENS = 48


class _PartitionedError(Exception):
    """It ends a compilation, with what was counted."""


def hint(size: int | torch.SymInt) -> int:
    """Of a dimension or a number of bytes, of which some are symbolic."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def kept_by(model: Any, count: Callable[[list[Any]], int], monkeypatch: pytest.MonkeyPatch) -> int:
    """What `count` finds in the outputs of the first layer's partitioned forward: x, then what backward gets, as nodes of its graph."""

    def stop(forward: Any, _examples: object) -> NoReturn:
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        raise _PartitionedError(count(list(output.args[0])))

    interpret(monkeypatch)
    decompositions: Any = select_decomp_table()  # as Inductor's
    backend = aot_autograd(fw_compiler=stop, partition_fn=min_cut_rematerialization_partition, decompositions=decompositions)
    compile_as_usual: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile_as_usual(forward, backend=backend))
    shared = SuperModel(make_base(model, "tiny"))
    shared.join("a", LoraConfig(r=4), TrainConfig(max_steps=1))
    rows = [BatchRow("a", each.input_ids, each.loss_weights, 7.0, (1, 0, i)) for i, each in enumerate(make_samples(2, low=24, high=24))]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        shared.forward_backward(collate(rows, "cpu", TOKENS))
    torch._dynamo.reset()
    found = raised.value.inner_exception
    assert isinstance(found, _PartitionedError), found
    return int(found.args[0])
