"""Routers in deterministic passes on the kernels: many samples at once give each job the bytes of training alone, ties included; what a
family's router computes is seen at load, and one that is not understood keeps its samples apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.planted import Change, planted
from tests.supermodel import test_experts_on_kernels as small
from tests.supermodel.test_expert_targets import FAMILIES, make_model
from tests.tolerances import assert_close
from tlora.job import TrainConfig
from tlora.kernels import row_operations
from tlora.supermodel import routers
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

with interpreted():  # the path imports them late, when the variable may not be set any more
    from tlora.kernels import expert_operations, recurrent_operations, triton_rows  # noqa: F401
    from tlora.kernels.compile_request import CompileRequest, RowsRequest, read_order
    from tlora.kernels.expert_launches import rows_launches

pytestmark = MARKS
SLOW = pytest.mark.slow
NARROW: dict[str, Any] = {**small.SIZE, "intermediate_size": 32}
CONFIGS: dict[str, Any] = {
    **small.FAMILIES,
    "mixtral": transformers.MixtralConfig(**NARROW, num_local_experts=4, num_experts_per_tok=2),
    "glm4-moe": transformers.Glm4MoeConfig(
        **small.SIZE,
        n_routed_experts=32,  # as for LFM2's
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
    ),
    "lfm2-moe": transformers.Lfm2MoeConfig(
        **NARROW | {"num_hidden_layers": 2},
        layer_types=["conv", "full_attention"],
        num_experts=32,  # a CPU's own sigmoid has other code for the last numbers of a tensor, where they fill no 32
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=0,
    ),
}
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
LFM2_MOE = pytest.param(
    "lfm2-moe", marks=[SLOW, pytest.mark.skipif(OLD, reason="its convolution takes no keywords before transformers 5.23")]
)
LENGTHS = {"a": (9, 1), "b": (17,), "c": (5, 12)}


def make_shared(family: str) -> SuperModel:
    """Experts 0 and 1 have the same scores: each choice between them is a tie."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        interpret(patch)
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith((".gate.weight", "router.weight", "router.bias")):
                    nn.init.normal_(p, std=0.3)
                    p[1] = p[0]
        shared = SuperModel(make_base(model.eval().to(DEVICE), family), deterministic=True)
    assert shared.fast_path is not None, shared.kernels_on(DEVICE, deterministic=True)
    return shared


def batch_of(job_ids: str) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in job_ids:
        for i, length in enumerate(LENGTHS[job_id]):
            ids = np.random.default_rng(10 * ord(job_id) + i).integers(3, small.SIZE["vocab_size"], length).astype(np.int32)
            rows.append(BatchRow(job_id, ids, np.ones(length, np.float32), 20.0, (7, 0, i)))
    return collate(rows, DEVICE)


def gradients(shared: SuperModel, job_ids: str, stance: Any = "force_eager") -> dict[str, Tensor]:
    for job_id in job_ids:
        lora = small.JOBS[job_id]
        if lora.target_modules and shared.base.name == "lfm2-moe":  # of a short convolution and of attention
            lora = lora.model_copy(update={"target_modules": ["in_proj", "out_proj"]})
        shared.join(job_id, lora, TrainConfig(lr_scheduler_type="constant", seed=ord(job_id)))
        params = shared.state(job_id).params
        params += 0.05 * torch.randn(params.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)  # B is not zero
        shared.rewrite(job_id)
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance(stance):
        interpret(patch)  # a router's product looks where it runs
        shared.forward_backward(batch_of(job_ids))
    return {job_id: (shared.gradient(job_id), shared.leave(job_id))[0] for job_id in job_ids}


def check_together(family: str) -> None:
    """`c` adapts attention alone: experts are ours in its passes too, with other jobs at them and without."""
    shared = make_shared(family)
    together = gradients(shared, "abc")
    for job_ids in ("a", "c", "cb"):
        for job_id, gradient in gradients(shared, job_ids).items():
            assert float(gradient.norm()) > 0 and torch.equal(gradient, together[job_id]), job_id


@pytest.mark.parametrize(
    "family", ["qwen3-moe", *(pytest.param(family, marks=SLOW) for family in ("gpt-oss", "mixtral", "glm4-moe")), LFM2_MOE]
)
def test_many_samples_at_once_give_each_job_the_bytes_it_has_alone(family: str) -> None:
    check_together(family)


@SLOW
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
def test_compiled_layers_are_one_graph_with_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, jobs that come and go: torch.compile traces the routers' operations without a break. On a GPU it rounds otherwise."""
    config = CONFIGS["qwen3-moe"]
    monkeypatch.setitem(CONFIGS, "qwen3-moe", type(config).from_dict(config.to_dict() | {"num_hidden_layers": 2, "layer_types": None}))
    shared, expected = make_shared("qwen3-moe"), dict[str, Tensor]()
    torch._dynamo.reset()
    counters.clear()
    for stance in ("force_eager", "default") if DEVICE.type == "cpu" else ("default",):
        for job_ids in ("abc", "c"):
            for job_id, gradient in gradients(shared, job_ids, stance).items():
                assert torch.equal(gradient, expected.setdefault(job_id, gradient)), (stance, job_id)
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert DEVICE.type == "cuda" or counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_the_digest_of_tiles_has_those_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, healthy = make_shared("qwen3-moe").tiles, row_operations.rows_tile
    monkeypatch.setattr(row_operations, "rows_tile", lambda *size: healthy(*size)._replace(inner=16))
    assert make_shared("qwen3-moe").tiles not in (None, found)


# -- planted bugs --------------------------------------------------------------------------------------------------------


def by_rows(values: Tensor, count: int) -> Tensor:
    """Of equal values the last one, where there are many rows: what `torch.topk` may do."""
    if values.reshape(-1, values.shape[-1]).shape[0] < 20:
        return healthy_largest(values, count)
    return values.shape[-1] - 1 - healthy_largest(values.flip(-1), count)


def split_by_rows(x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, transposed: bool) -> Tensor:
    """A sum in two parts where there are many rows, as libraries do where there are few."""
    if len(x_TK) < 20:
        return healthy_product(x_TK, weight, bias_N, transposed)
    sizes, inner = [x_TK.shape[1] // 3, x_TK.shape[1] - x_TK.shape[1] // 3], 1 if transposed else 0  # within a block
    parts = zip(x_TK.split(sizes, 1), weight.split(sizes, inner), (bias_N, None), strict=True)
    first, second = (healthy_product(x.contiguous(), w.contiguous(), bias, transposed) for x, w, bias in parts)
    return first + second


healthy_largest, healthy_product = row_operations.find_largest, row_operations.multiply_rows
BUGS: dict[str, Change] = {
    "ties fall by the number of rows": (row_operations, "find_largest", by_rows),
    "the sum is cut by the number of rows": (row_operations, "multiply_rows", split_by_rows),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(bug: Change) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "_difference", lambda *_: None)  # the proof at load finds one of them
        with planted(bug), pytest.raises(AssertionError, match="^[abc]"):
            check_together("qwen3-moe")


# -- the operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else [])], ids=str)
@pytest.mark.parametrize(("inner", "columns", "bias"), [(80, 4, True), (256, 72, False)])
def test_rows_of_a_product_are_right_and_know_no_others(inner: int, columns: int, bias: bool, dtype: torch.dtype) -> None:
    """Forward and gradient; NaN beside a row does not reach it. The interpreter multiplies no bf16."""
    generator = torch.Generator().manual_seed(0)
    x_TK, weight_NK, dy_TN, bias_N = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((150, inner), (columns, inner), (150, columns), (columns,))
    )
    x_TK[3], dy_TN[3] = torch.nan, torch.nan
    sound = torch.arange(150, device=DEVICE) != 3
    for rows, matrix, added, back in ((x_TK, weight_NK, bias_N if bias else None, False), (dy_TN, weight_NK, None, True)):
        found = row_operations.launch_rows(rows, matrix, added, not back)
        expected = rows.double() @ (matrix.double() if back else matrix.double().t()) + (0 if added is None else added.double())
        assert_close(found[sound].double(), expected[sound], 1e-6 if dtype == torch.float32 else 4e-3)
        for own in (slice(4, 5), slice(60, 70), slice(5, 150)):
            assert torch.equal(row_operations.launch_rows(rows[own].contiguous(), matrix, added, not back), found[own])


def test_a_product_without_kernels_takes_each_row_by_itself() -> None:
    """The specification, for CPUs; the gradient is the product's."""
    x_TK, weight_NK = torch.randn(5, 16, dtype=torch.float64, requires_grad=True), torch.randn(3, 16, dtype=torch.float64)
    bias_N = torch.randn(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: row_operations.linear(x[None], weight_NK, bias_N), x_TK)
    assert torch.equal(row_operations.linear(x_TK[2:3], weight_NK, bias_N), row_operations.linear(x_TK, weight_NK, bias_N)[2:3])
    assert row_operations.linear(x_TK[:0], weight_NK).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_scores_the_lower_index_is_chosen(dtype: torch.dtype) -> None:
    """Logits in bf16 are equal often: here 64 of them are of 20 values."""
    scores = torch.randint(-10, 10, (50, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype).requires_grad_()
    values, indices = row_operations.topk(scores, 6, dim=1)
    for row, chosen in zip(scores.tolist(), indices.tolist(), strict=True):
        assert chosen == sorted(range(64), key=lambda i: (-row[i], i))[:6]
    assert torch.equal(values, torch.topk(scores, 6).values)
    values.sum().backward()
    assert scores.grad is not None and torch.equal(scores.grad.nonzero(), torch.zeros_like(scores).scatter(1, indices, 1).nonzero())
    for dim, largest in ((0, True), (1, False)):
        with pytest.raises(NotImplementedError, match=f"topk along dim {dim} of 2, largest={largest}"):
            row_operations.topk(scores, 2, dim, largest)


# -- what is seen of a family --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ("deepseek-v3", "gemma4") else SLOW) for f in FAMILIES if f != "llama4"]
)
def test_routers_of_the_families_that_train_are_understood(family: str) -> None:
    shared = SuperModel(make_base(make_model(family, torch.float32), family))
    seen = routers.routers_of(shared.base, shared.experts)
    assert seen.why_not is None
    assert bool(seen.products) == (family != "gemma4"), "Gemma 4's is a linear layer"


def multiplied(gate: Any, x: Tensor) -> Any:
    return choose(x @ gate.weight.t(), gate)


def sorted_scores(gate: Any, x: Tensor) -> Any:
    values, indices = F.linear(x, gate.weight).softmax(-1).sort(descending=True)
    return None, values[:, : gate.top_k], indices[:, : gate.top_k]


def balanced(gate: Any, x: Tensor) -> Any:
    logits = F.linear(x, gate.weight)
    return choose(logits - logits.mean(0), gate)


def of_tokens(gate: Any, x: Tensor) -> Any:
    return choose(F.linear(x, gate.weight).topk(2, dim=0)[0][:1].expand(len(x), -1), gate)


def in_turn(gate: Any, x: Tensor) -> Any:
    indices = torch.arange(len(x) * gate.top_k, device=x.device).view(len(x), -1) % gate.num_experts
    return None, torch.ones_like(indices, dtype=x.dtype), indices


def in_fp64(gate: Any, x: Tensor) -> Any:
    return choose(F.linear(x.double(), gate.weight.double()).to(x.dtype), gate)


def choose(logits: Tensor, gate: Any) -> Any:
    values, indices = torch.topk(logits.softmax(-1), gate.top_k, dim=-1)
    return None, values, indices


@pytest.mark.parametrize(
    ("route", "why"),
    [
        (multiplied, "Qwen3MoeSparseMoeBlock computes mm"),
        (sorted_scores, "Qwen3MoeSparseMoeBlock computes sort"),
        (balanced, "Qwen3MoeSparseMoeBlock computes mean"),
        (of_tokens, "Qwen3MoeSparseMoeBlock computes topk along dim 0 of 2, largest=True"),
        (in_turn, "Qwen3MoeSparseMoeBlock gives Qwen3MoeExperts experts that it did not choose by their scores"),
        (in_fp64, "Qwen3MoeSparseMoeBlock computes in float64"),
    ],
)
def test_a_router_that_is_not_understood_keeps_samples_apart(route: Callable[[Any, Tensor], Any], why: str) -> None:
    """As most families' code could be written. A base says it with its kernels, and takes the plain path in deterministic runs alone."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3-moe"], dtype=torch.float32)
        base = make_base(model.eval().to(DEVICE), "strange")  # before: what mixes samples is refused there
        patch.setattr(type(model.model.layers[0].mlp.gate), "forward", route)
        shared = SuperModel(base, deterministic=True)
        assert shared.kernels_on(DEVICE, deterministic=True) == f"plain: a deterministic run computes each sample by itself where {why}"
        assert shared.kernels_on(DEVICE, deterministic=False).startswith("fused")
    assert shared.fast_path is None


def test_a_product_that_is_another_on_this_device_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_shared("qwen3-moe")
    with monkeypatch.context() as patch:
        interpret(patch)
        for change, words in ((split_by_rows, "other bits in company"), (lambda *given: 1.01 * healthy_product(*given), "another result")):
            with planted((row_operations, "multiply_rows", change)):
                shared.experts.routers = None
                assert words in shared.kernels_on(DEVICE, deterministic=True)


def test_a_base_whose_experts_are_not_ours_keeps_samples_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_shared("qwen3-moe")
    shared.experts.why_not = "planted"
    interpret(monkeypatch)
    assert shared.kernels_on(DEVICE, deterministic=True).endswith("where its experts run in PyTorch's own operations")
    assert shared.kernels_on(DEVICE, deterministic=False).startswith("fused")


def test_its_kernels_are_compiled_ahead() -> None:
    """A router's product is in the order of a deterministic run, which survives the way to another process."""
    request = RowsRequest(64, 4, True, "float32")
    order = CompileRequest("NVIDIA H100", 90, 132, "float32", 16, False, (), routers=(request,))
    assert read_order(json.dumps(asdict(order))) == order
    assert len(rows_launches(request)) == 2
