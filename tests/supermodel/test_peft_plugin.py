"""`accelerate_peft`: the same numbers as PEFT in every state a PEFT model can be in, what is left to PEFT and why, and the way back."""

from __future__ import annotations

import copy
import importlib.util
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.engine.conftest import save_base
from tests.engine.tiny_runs import sentence
from tests.kernels.interpreter import MARKS, interpret, interpreted
from tests.tiny import make_model
from tests.tolerances import KERNEL, LOGITS, assert_close, relative_error
from tlora.errors import ModelError
from tlora.kernels import single_lora
from tlora.supermodel import peft_plugin
from tlora.supermodel.peft_plugin import accelerate_peft

with interpreted():
    from tlora.kernels import fused_linear, triton_place  # noqa: F401  (their kernels are defined here)

pytestmark = [mark for mark in MARKS if mark.name != "gpu"]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.arange(3, 3 + 26).view(2, 13)


def adapted(dtype: torch.dtype = torch.float64, family: str = "llama", **changes: Any) -> Any:
    """A tiny PEFT model whose B is not zero; in training mode."""
    options = {"r": 5, "lora_alpha": 16, "target_modules": list(ALL), "task_type": "CAUSAL_LM", **changes}
    model = get_peft_model(make_model(family, dtype), LoraConfig(**options), autocast_adapter_dtype=False)
    return randomize(model).train()


def randomize(model: Any, seed: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name and p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64) * 0.1)
    return model


def step(model: Any) -> dict[str, Tensor]:
    """Logits, and the gradient of each trained parameter by name."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}


def assert_same(found: dict[str, Tensor], true: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == true.keys() and len(true) > 1
    for name, expected in true.items():
        assert_close(found[name], expected, bound, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call that took the operation."""
    seen: list[int] = []

    def counted(x_TK: Tensor, *rest: Any) -> Any:
        seen.append(len(x_TK))
        return single_lora.single_lora_linear(x_TK, *rest)

    monkeypatch.setattr(peft_plugin, "single_lora_linear", counted)
    return seen


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "phi3"])  # the second has biases
def test_outputs_and_gradients_are_pefts(family: str, calls: list[int]) -> None:
    model = adapted(family=family, target_modules="all-linear", use_rslora=True)
    true = step(model)
    done = accelerate_peft(model)
    assert_same(step(model), true, LOGITS[torch.float64] * 1e-3)
    assert len(calls) == len(done.accelerated) == len([name for name in true if "lora_A" in name]) and not done.left
    assert set(calls) == {26}


def interpreted_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Linears run on the kernels from now on, under the interpreter; one entry for each forward and each backward of one."""
    interpret(monkeypatch)
    launched: list[str] = []
    whole = single_lora._place
    monkeypatch.setattr(single_lora, "_place", lambda *a: launched.append("") or whole(*a))
    return launched


def test_the_kernels_give_pefts_outputs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(torch.float32)
    true = step(copy.deepcopy(model).double())
    accelerate_peft(model)
    launched = interpreted_launches(monkeypatch)
    assert_same(step(model), true, LOGITS[torch.float32])
    assert len(launched) == 2 * 14  # forward and backward of each linear


def test_undo_leaves_pefts_own_layers(calls: list[int]) -> None:
    model = adapted()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    names = list(model.state_dict())
    true = step(model)
    done = accelerate_peft(model)
    assert list(model.state_dict()) == names
    done.undo()
    done.undo()
    assert {name: dict(module.__dict__).keys() for name, module in model.named_modules()} == {n: d.keys() for n, d in before.items()}
    again = step(model)
    assert not calls and all(torch.equal(again[name], value) for name, value in true.items())


def test_accelerating_twice_is_as_once(calls: list[int]) -> None:
    model = adapted()
    first, second = accelerate_peft(model), accelerate_peft(model)
    step(model)
    assert first.accelerated == second.accelerated and len(calls) == 14
    first.undo()
    step(model)
    assert len(calls) == 14


def test_disabled_merged_and_unmerged(calls: list[int]) -> None:
    model = adapted()
    bare = make_model("llama", torch.float64)(input_ids=IDS).logits
    adapter = step(model)["logits"]
    accelerate_peft(model)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, bare)
    model.merge_adapter()
    assert_close(model(input_ids=IDS).logits, adapter, LOGITS[torch.float64])
    assert not calls
    model.unmerge_adapter()
    assert_close(model(input_ids=IDS).logits, adapter, LOGITS[torch.float64])
    assert len(calls) == 14
    merged = model.merge_and_unload()
    assert_close(merged(input_ids=IDS).logits, adapter, LOGITS[torch.float64])
    assert len(calls) == 14 and not any(isinstance(m, peft_plugin.LoraLayer) for m in merged.modules())


def test_two_adapters_one_and_then_both(calls: list[int]) -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj"]))
    randomize(model, seed=2)
    plain = copy.deepcopy(model)
    accelerate_peft(model)
    for adapters, expected in ((["default"], 14), (["other"], 2), (["default", "other"], 12)):
        for m in (model, plain):
            m.base_model.set_adapter(adapters)
        calls.clear()
        assert_same(step(model), step(plain), LOGITS[torch.float64])
        assert len(calls) == expected, adapters
    rows = ["default", "other"]  # of one batch, each with an adapter of its own
    for m in (model, plain):
        m.eval()
    calls.clear()
    assert torch.equal(model(input_ids=IDS, adapter_names=rows).logits, plain(input_ids=IDS, adapter_names=rows).logits)
    assert not calls


def test_any_optimizer_accumulation_and_clipping() -> None:
    """Three steps of two micro-batches each: the weights are those of PEFT."""
    trained: list[dict[str, Tensor]] = []
    for accelerated in (False, True):
        model = adapted()
        if accelerated:
            accelerate_peft(model)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
        for _ in range(3):
            for row in IDS:
                (model(input_ids=row[None], labels=row[None]).loss / 2).backward()
            nn.utils.clip_grad_norm_(params.values(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: p.detach() for name, p in params.items()})
    assert_same(trained[1], trained[0], LOGITS[torch.float64])


def seeded_step(model: Any, seed: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return step(model)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_dropout_is_pefts_for_the_same_seed(family: str, calls: list[int]) -> None:
    model = adapted(family=family, target_modules="all-linear", lora_dropout=0.3)
    true = seeded_step(model)
    done = accelerate_peft(model)
    found, other = seeded_step(model), seeded_step(model, seed=7)
    assert_same(found, true, LOGITS[torch.float64] * 1e-3)
    assert len(calls) == 2 * len(done.accelerated) and not done.left
    assert relative_error(other["logits"], true["logits"]) > 1e-3, "another seed drops the same"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_dropout_drops_the_same_twice(reentrant: bool) -> None:
    model = adapted(lora_dropout=0.3)
    true = seeded_step(model)
    accelerate_peft(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(seeded_step(model), true, LOGITS[torch.float64])


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("base", "adapter"), [(BF16, FP32), (FP32, FP32), (BF16, BF16)])
def test_autocast(base: torch.dtype, adapter: torch.dtype, dropout: float, calls: list[int]) -> None:
    """One layer under autocast in bf16: as near the truth as bf16 is, in PEFT's dtypes throughout."""
    model = adapted(base, lora_dropout=dropout)
    layer: Any = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A.to(adapter), layer.lora_B.to(adapter)
    plain, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
    accelerate_peft(model)
    if dropout:  # the truth drops what PEFT drops: the numbers that are drawn hang on the dtype
        exact.lora_dropout["default"].forward = lambda x: nn.functional.dropout(x.to(adapter), dropout).double()
    x, dy = (torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(seed)).to(base) for seed in (3, 4))
    results = []
    for which in (plain, layer, exact):
        torch.manual_seed(6)
        own = x.to(which.base_layer.weight.dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=which.base_layer.weight.dtype != torch.float64):
            y = which(own)
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), own.grad, which.lora_A["default"].weight.grad, which.lora_B["default"].weight.grad])
    peft, found, true = results
    assert calls == [80]
    for f, p, t in zip(found, peft, true, strict=True):
        assert f.dtype == p.dtype
        assert_close(f, t, KERNEL[torch.bfloat16])


def test_an_adapter_of_another_dtype_waits_for_autocast(calls: list[int]) -> None:
    """PEFT's default over a 16-bit base keeps the adapter in fp32, and computes it so: bits must not change unasked."""
    model = get_peft_model(make_model("llama", torch.bfloat16), LoraConfig(r=4, target_modules=list(ALL)))
    plain = copy.deepcopy(randomize(model))
    done = accelerate_peft(model)
    assert done.under_autocast == done.accelerated and "torch.autocast only" in str(done)
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits) and not calls
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS)
    assert len(calls) == 14


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_dropout_passes_back_what_it_kept() -> None:
    """Compiled, other random numbers are drawn: the gradient is held against differences of outputs with the same seed."""
    model = adapted(lora_dropout=0.5)
    mlp = model.base_model.model.model.layers[0].mlp
    accelerate_peft(model)
    compiled = torch.compile(mlp.down_proj.forward, backend="aot_eager", fullgraph=True)
    draw = torch.Generator().manual_seed(3)
    x, along = (torch.randn(7, 96, dtype=torch.float64, generator=draw) for _ in range(2))
    dy = torch.randn(7, 64, dtype=torch.float64, generator=draw)

    def output(of: Tensor) -> Tensor:
        torch.manual_seed(6)
        return compiled(of)

    (dx,) = torch.autograd.grad(output(x.requires_grad_()), x, dy)
    change = output((x + along).detach().requires_grad_()) - output((x - along).detach().requires_grad_())  # linear, once the mask is drawn
    assert_close((dx * along).sum(), (change * dy).sum() / 2, LOGITS[torch.float64])
    model.eval()
    torch.compiler.reset()
    assert relative_error(mlp.down_proj(x), output(x)) < 1e-12
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look, which it hides elsewhere
def test_compiled_without_a_break() -> None:
    model = adapted()
    true = step(model)
    accelerate_peft(model)
    compiled: list[Callable[..., Any]] = []
    for layer in model.base_model.model.model.layers:
        compiled.append(torch.compile(layer.mlp.forward, backend="aot_eager", fullgraph=True))
        layer.mlp.forward = compiled[-1]
    assert_same(step(model), true, LOGITS[torch.float64])
    torch.compiler.reset()


def test_copies_and_pickles() -> None:
    model = adapted()
    accelerate_peft(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not torch.equal(twin(input_ids=IDS).logits, model(input_ids=IDS).logits), "the copy reads the original's weights"
    layer = twin.base_model.model.model.layers[0].self_attn.q_proj
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    x = torch.randn(3, 64, dtype=torch.float64)
    assert_close(loaded(x), layer(x), KERNEL[torch.float64])


def hooked(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.base_layer.weight)


def trained_base(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_()


def own_class(model: Any) -> None:
    class Mine(nn.Linear):
        pass

    model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.__class__ = Mine


def quantised(model: Any) -> None:
    class Packed(nn.Parameter):
        pass

    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    base.weight = Packed(base.weight.detach(), requires_grad=False)


def tensor_scaling(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = torch.tensor(2.0)


def offloaded(model: Any) -> None:
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    base.forward = lambda x: nn.Linear.forward(base, x)


def dropping_otherwise(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"] = nn.AlphaDropout(0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dropping_otherwise, "its dropout is a AlphaDropout"),
        (hooked, "hooks are on the linears"),
        (replaced, "its forward was replaced by someone else"),
        (trained_base, "its base weight or bias is trained too"),
        (own_class, "its base layer is a Mine"),
        (quantised, "its base weight is a Packed of torch.float64"),
        (tensor_scaling, "its scaling is a tensor"),
        (offloaded, "a linear inside it had its forward replaced"),
    ],
)
def test_a_layer_that_stays_pefts(change: Callable[[Any], None], reason: str, calls: list[int]) -> None:
    model = adapted()
    change(model)
    true = step(model)
    done = accelerate_peft(model)
    (name,) = done.left
    assert name.endswith("layers.0.self_attn.q_proj") and reason in done.left[name] and reason in str(done)
    assert_same(step(model), true, LOGITS[torch.float64])
    assert len(calls) == len(done.accelerated) == 13
    change_later = adapted()
    accelerate_peft(change_later)  # what changes afterwards is seen by the call
    change(change_later)
    calls.clear()
    assert_same(step(change_later), true, LOGITS[torch.float64])
    assert len(calls) == 13


@pytest.mark.parametrize(
    ("options", "family", "left", "reason"),
    [
        ({"lora_dropout": 0.1}, "llama", 0, ""),
        ({"use_dora": True}, "llama", 14, "its adapter is a variant of LoRA: DoraLinearVariant"),
        ({"lora_bias": True}, "llama-tied", 14, "its adapter has a bias"),
        ({"bias": "all"}, "llama-tied", 14, "its base weight or bias is trained too"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "llama", 1, "it is a lora.layer.Embedding"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "llama", 0, ""),
        ({"target_modules": ["q_proj", "lm_head"]}, "llama", 1, "its features, 64 to 131, are not multiples of 16"),
    ],
)
def test_kinds_of_adapters(options: dict[str, Any], family: str, left: int, reason: str) -> None:
    torch.manual_seed(5)
    model = adapted(family=family, **options)
    torch.manual_seed(6)  # of dropout
    true = step(model)
    done = accelerate_peft(model)
    torch.manual_seed(6)
    assert_same(step(model), true, LOGITS[torch.float64])
    assert len(done.left) == left and all(reason in text for text in done.left.values()), done


def test_a_layer_that_no_longer_fits_is_given_back_by_the_next_call() -> None:
    model = adapted()
    accelerate_peft(model)
    trained_base(model)
    done = accelerate_peft(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert len(done.left) == 1 and "forward" not in layer.__dict__


def test_a_model_without_lora_is_refused() -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM has no LoRA layer"):
        accelerate_peft(make_model())


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parents[2] / "examples" / "peft_plugin.py"
    found = importlib.util.spec_from_file_location("peft_plugin_example", source)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    base = save_base(tmp_path / "base")
    rng = random.Random(1)
    (tmp_path / "text.txt").write_text("".join(sentence(rng) + "\n" for _ in range(9)))
    first, last = module.main(str(base), str(tmp_path / "out"), str(tmp_path / "text.txt"), steps=8)
    assert last < first and "LoRA linears accelerated, 0 left to PEFT" in capsys.readouterr().out
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    assert any(bool(p.any()) for name, p in loaded.named_parameters() if "lora_B" in name)
