"""`accelerate_peft` on a GPU: as near the truth as PEFT itself, in eager, compiled, captured and under autocast; same bits every time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.tiny import make_model
from tests.tolerances import KERNEL, assert_close, relative_error
from tlora.kernels import single_lora
from tlora.supermodel import peft_plugin
from tlora.supermodel.peft_plugin import accelerate_peft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORTH_IT = peft_plugin.FEWEST_PRODUCTS


def adapted(dtype: torch.dtype, device: str = "cuda", rank: int = 16, dropout: float = 0.0) -> Any:
    config = LoraConfig(r=rank, lora_alpha=32, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    base = make_model("llama-tied", dtype, hidden_size=256, intermediate_size=768)  # with biases
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.05)
    return model.to(device).train()


def layer_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].mlp.gate_proj


def run(layer: Any, tokens: int, seed: int = 2, autocast: bool = False) -> list[Tensor]:
    """y, dx, dA, dB of one LoRA linear for 2 rows of tokens."""
    weight = layer.base_layer.weight
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens // 2, 256, generator=draw).to(weight).requires_grad_()
    layer.zero_grad()
    with torch.autocast("cuda", BF16, enabled=autocast):
        y = layer(x)
    y.backward(torch.randn(y.shape, generator=draw).to(y))
    assert x.grad is not None
    return [y.detach(), x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny."""
    monkeypatch.setattr(peft_plugin, "FEWEST_PRODUCTS", 0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each forward and backward on the kernels, with its number of tokens."""
    seen: list[int] = []
    whole = single_lora._place
    monkeypatch.setattr(single_lora, "_place", lambda x, *rest: seen.append(len(x)) or whole(x, *rest))
    return seen


@pytest.mark.parametrize("rank", [1, 16, 40, 64, 96])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_one_linear_is_pefts(dtype: torch.dtype, rank: int, launches: list[int]) -> None:
    model = adapted(dtype, rank=rank)
    truth = copy.deepcopy(layer_of(model)).double()
    peft = copy.deepcopy(layer_of(model))
    accelerate_peft(model)
    for tokens in (128, 1300, 4608):
        true, plain, found = run(truth, tokens), run(peft, tokens), run(layer_of(model), tokens)
        for f, p, t in zip(found, plain, true, strict=True):
            assert f.dtype == p.dtype and f.stride() == p.stride()
            assert_close(f, t, KERNEL[FP32] if dtype == FP32 else KERNEL[BF16])
    assert launches == [128, 128, 1300, 1300, 4608, 4608]


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_is_pefts_for_the_same_seed(autocast: bool, launches: list[int]) -> None:
    """In bf16, and under autocast with fp32 adapters: ours and PEFT's drop the same, and are as near each other as bf16 is to the truth."""
    model = adapted(BF16, dropout=0.3)
    layer = layer_of(model)
    if autocast:
        layer.lora_A.float(), layer.lora_B.float()
    peft = copy.deepcopy(layer)
    accelerate_peft(model)
    results = []
    for which in (peft, layer):
        torch.manual_seed(6)
        results.append(run(which, 1300, autocast=autocast))
    for p, f in zip(*results, strict=True):
        assert f.dtype == p.dtype
        assert_close(f, p, 2 * KERNEL[BF16])
    assert launches == [1300, 1300]


def test_the_same_bits_every_time() -> None:
    model = adapted(BF16)
    accelerate_peft(model)
    first, again = run(layer_of(model), 3000), run(layer_of(model), 3000)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_few_tokens_go_pefts_own_way(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_plugin, "FEWEST_PRODUCTS", WORTH_IT)
    model = adapted(BF16)
    peft = copy.deepcopy(layer_of(model))
    accelerate_peft(model)
    found, plain = run(layer_of(model), 2), run(peft, 2)
    assert not launches and all(torch.equal(f, p) for f, p in zip(found, plain, strict=True))


@pytest.mark.parametrize("base", [BF16, FP32])
def test_autocast_with_fp32_adapters(base: torch.dtype, launches: list[int]) -> None:
    model = adapted(base)
    layer = layer_of(model)
    layer.lora_A.float(), layer.lora_B.float()
    truth, peft = copy.deepcopy(layer).double(), copy.deepcopy(layer)
    accelerate_peft(model)
    for f, p, t in zip(run(layer, 1024, autocast=True), run(peft, 1024, autocast=True), run(truth, 1024), strict=True):
        assert f.dtype == p.dtype
        assert_close(f, t, KERNEL[BF16])
    assert launches == [1024, 1024]


def losses_and_grads(model: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 131, (4, 160), generator=torch.Generator().manual_seed(5)).to(model.device)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_a_whole_model_is_as_near_the_truth_as_peft(compiled: bool, launches: list[int]) -> None:
    """In bf16, where each gradient's error is that of the whole model: ours at most a half larger than PEFT's, over all of them."""
    model = adapted(BF16)
    true, plain = losses_and_grads(copy.deepcopy(model).double()), losses_and_grads(model)
    accelerate_peft(model)
    if compiled:
        for layer in model.base_model.model.model.layers:
            layer.compile()
    found = losses_and_grads(model)
    assert len(launches) == 2 * 14
    errors = [sum(relative_error(given[name], value) for name, value in true.items()) for given in (found, plain)]
    assert found.keys() == true.keys() and errors[0] <= 1.5 * errors[1], errors
    torch.compiler.reset()


def test_a_cuda_graph_reads_the_weights_of_its_replay() -> None:
    """Captured once; the adapter is then changed in place, as an optimizer does."""
    model = adapted(BF16)
    accelerate_peft(model)
    layer = layer_of(model)
    x, dy = torch.randn(512, 256, device="cuda", dtype=BF16), torch.randn(512, 768, device="cuda", dtype=BF16)
    params = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(layer(x), params, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(layer(x), params, dy)
    with torch.no_grad():
        for p in params:
            p.mul_(-1.5)
    single_lora._recent_tables.cache_clear()  # as thousands of other numbers of tokens would
    overwritten = [torch.full((64,), -1, dtype=torch.int32, device="cuda") for _ in range(1000)]
    graph.replay()
    assert overwritten
    for found, expected in zip(captured, torch.autograd.grad(layer(x), params, dy), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_on_another_than_the_current_device() -> None:
    model = adapted(BF16, "cuda:1")
    truth = copy.deepcopy(layer_of(model)).double()
    accelerate_peft(model)
    assert torch.cuda.current_device() == 0
    for f, t in zip(run(layer_of(model), 600), run(truth, 600), strict=True):
        assert f.device == torch.device("cuda:1")
        assert_close(f, t, KERNEL[BF16])
