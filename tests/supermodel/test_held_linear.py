"""A base held in fp8: what is quantised and what is not, who is refused, and training over it (interpreted kernels, fp32)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tlora
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import write_rows
from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.tiny import make_model, make_samples
from tests.tolerances import relative_error
from tlora.adapters.state import init_state
from tlora.engine.check import check
from tlora.errors import ConfigError, ModelError
from tlora.job import BasePrecision, LoraConfig, RunSpec, TrainConfig
from tlora.kernels.fp8_weight import DTYPE
from tlora.planning.memory import bytes_in, measure
from tlora.store.run_directory import check_run_directory
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.held_linear import HeldLinear, check_precision, hold, quantized
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.supermodel import SuperModel

with interpreted():
    import tlora.kernels.pass_operations

pytestmark = MARKS
RANKS = {"a": 4, "b": 20}
COMPUTE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
H200 = torch.device("cuda")


def fp8_model(**changes: Any) -> Any:
    model = make_model("llama-tied", COMPUTE, **changes).to(DEVICE)  # with biases
    hold(model, list(find_linears(model)), DEVICE, "fp8")
    return model


def dequantized_model(**changes: Any) -> Any:
    """The same model with ordinary linears that hold what the fp8 ones stand for."""
    model, held = make_model("llama-tied", COMPUTE, **changes).to(DEVICE), fp8_model(**changes)
    for name, linear in find_linears(model).items():
        fp8 = held.get_submodule(name)
        linear.weight.data = fp8.look_up().dense(COMPUTE)
    return model


def logits(model: Any) -> Tensor:
    ids = torch.arange(3, 60, device=DEVICE)[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def test_every_linear_but_the_head_is_held_in_8_bits_and_nothing_else_changes() -> None:
    before, model = make_model("llama-tied", COMPUTE).to(DEVICE), fp8_model()
    names = set(find_linears(before))
    assert names == {name for name, m in model.named_modules() if isinstance(m, HeldLinear)} == set(find_linears(model))
    for name in names:
        held, was = model.get_submodule(name), before.get_submodule(name)
        assert held.weight.dtype == DTYPE and held.weight.shape == was.weight.shape and not held.weight.requires_grad
        assert held.scale_N.shape == (len(was.weight),) and torch.equal(held.bias, was.bias)
        error = (held.look_up().dense(torch.float32) - was.weight.float()).abs().amax(1)
        assert bool((error <= was.weight.float().abs().amax(1) * (1 + 1e-5) / 28).all()), "half a step at the row's largest is 1/28 of it"
    others = {key: t for key, t in before.state_dict().items() if key.rpartition(".")[0] not in names}
    assert others and all(torch.equal(t, model.state_dict()[key]) for key, t in others.items())


def test_by_itself_the_model_computes_with_what_its_weights_stand_for() -> None:
    assert torch.equal(logits(fp8_model()), logits(dequantized_model()))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "message"),
    [
        (
            torch.device("cpu"),
            None,
            torch.bfloat16,
            "needs a GPU of compute capability 8.9 or above that the kernels are made for, and this run's device is cpu",
        ),
        (H200, (8, 6), torch.bfloat16, "needs a GPU of compute capability 8.9 or above that the kernels are made for, and RTX has 8.6"),
        (H200, (8, 9), torch.bfloat16, None),
        (H200, (9, 0), torch.float32, "needs a base in 16 bits, and this one is float32. Set dtype: bfloat16"),
        (H200, (9, 0), torch.float16, None),
        (H200, (10, 0), torch.bfloat16, "needs a GPU of compute capability 8.9 or above that the kernels are made for, and RTX has 10.0"),
        (H200, (12, 0), torch.bfloat16, "RTX has 12.0"),
    ],
)
def test_who_cannot_is_refused(
    device: torch.device, capability: tuple[int, int] | None, dtype: torch.dtype, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX")
    if message is None:
        check_precision("fp8", device, dtype)
        return
    with pytest.raises(ConfigError, match=message):
        check_precision("fp8", device, dtype)


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ModelError, match="model.layers.0.mlp.gate_proj has 64 to 100"):
        fp8_model(intermediate_size=100)


def test_on_a_cpu_check_tells_and_train_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base = save_base(tmp_path / "base")
    write_rows(tmp_path / "d.jsonl", 8)
    run = RunSpec.model_validate(
        {
            "base_model": str(base),
            "base_precision": "fp8",
            "output_dir": str(tmp_path / "out"),
            "jobs": [{"name": "a", "data": str(tmp_path / "d.jsonl")}],
        }
    )
    found = check(run, device="cpu")
    assert len(found.problems) == 1 and "compute capability 8.9" in found.problems[0]
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        tlora.train(run, device="cpu")
    assert not (tmp_path / "out").exists()


def test_the_outline_counts_the_bytes_of_each_form(tmp_path: Path) -> None:
    """In fp8 a byte for each weight and a scale for each row; in NF4 half a byte, and a scale for 64."""
    base = save_base(tmp_path / "base")
    plain, fp8, nf4 = (outline(str(base), "bfloat16", precision) for precision in (None, "fp8", "nf4"))
    linears = find_linears(plain.model).values()
    weights, rows = sum(linear.weight.numel() for linear in linears), sum(linear.out_features for linear in linears)
    assert plain.num_parameters == fp8.num_parameters == nf4.num_parameters
    assert plain.num_bytes - fp8.num_bytes == weights - 4 * rows
    assert plain.num_bytes - nf4.num_bytes == weights * 3 // 2 - 4 * (weights // 64)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp8", 1), ("nf4", 2)])
def test_memory_holds_what_a_group_is_multiplied_as_beside_the_weights(precision: BasePrecision, bytes_each: int, tmp_path: Path) -> None:
    """In fp8 the transposed weights, in NF4 the matrices in 16 bits."""
    base, cpu = save_base(tmp_path / "base"), torch.device("cpu")
    outlined, as_held = (SuperModel(outline(str(base), "bfloat16", each)) for each in (None, precision))
    plain, held = (measure(model, 0, cpu) for model in (outlined, as_held))
    widest = max(m.weight.numel() for m in find_linears(outline(str(base)).model).values())
    assert held.phases[0].fixed_bytes - plain.phases[0].fixed_bytes == 2 * bytes_each * widest
    assert bytes_in(precision, outlined, outlined.base.num_bytes) == as_held.base.num_bytes + 2 * bytes_each * widest
    assert held.phases[0].bytes_per_token == plain.phases[0].bytes_per_token, "weights are not saved anew for each token"


@pytest.mark.parametrize(("before", "refused"), [({}, True), ({"base_precision": None}, True), ({"base_precision": "fp8"}, False)], ids=str)
def test_a_run_goes_on_in_its_own_precision_alone(before: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    """`{}` is the run.json of a version that knew of no fp8."""
    run = RunSpec.model_validate(
        {"base_model": "b", "base_precision": "fp8", "output_dir": str(tmp_path), "jobs": [{"name": "a", "data": "d"}]}
    )
    earlier = {key: value for key, value in run.model_dump(mode="json").items() if key != "base_precision"} | before
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    with pytest.raises(ConfigError, match="base_precision was None and is 'fp8'") if refused else nullcontext():
        check_run_directory(run, resume=True, overwrite=False)


def gradients(job_ids: str, model: Any) -> dict[str, tuple[float, Tensor]]:
    """Loss and gradient of each job's adapter, whose A and B are both random."""
    shared, rows = SuperModel(make_base(model, "llama")), []
    for job_id in job_ids:
        lora, config = LoraConfig(r=RANKS[job_id], lora_alpha=RANKS[job_id]), TrainConfig(max_steps=1)
        state = init_state(shared.layout(lora), ord(job_id), shared.bank.sum_dtype, DEVICE)
        state.params.add_(torch.randn(state.params.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE) * 0.1)
        shared.join(job_id, lora, config, state=state)
        (own,) = make_samples(1, seed=ord(job_id), low=9, high=15)
        rows.append(BatchRow(job_id, own.input_ids, own.loss_weights, float(own.loss_weights[1:].sum())))
    held = shared.model.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == DTYPE
    assert (shared.fast_path is not None) == (held or DEVICE.type == "cuda")
    losses = shared.forward_backward(collate(rows, DEVICE.type))
    return {job_id: (losses[job_id].mean, shared.bank.take_grad(job_id)) for job_id in job_ids}


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_gradients_over_fp8_are_near_to_those_over_its_weights_and_alone_as_together(
    compiled_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference to the plain path is the quantisation of activations and gradients alone: a few per cent of each."""
    plain = gradients("ab", dequantized_model(**SMALL))
    interpret(monkeypatch)
    found = gradients("ab", fp8_model(**SMALL))
    for job_id, (loss, gradient) in found.items():
        true_loss, true = plain[job_id]
        assert loss == pytest.approx(true_loss, rel=0.02)
        assert 1e-3 < relative_error(gradient, true) < 0.15, relative_error(gradient, true)
    alone_loss, alone = gradients("b", fp8_model(**SMALL))["b"]
    assert alone_loss == found["b"][0] and torch.equal(alone, found["b"][1])


@pytest.mark.parametrize("checkpoint", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_are_those_of_the_checkpoint_as_products_take_it(checkpoint: torch.dtype, products: torch.dtype) -> None:
    """Also from float16 to bfloat16 and back, which rounds twice: as a plain checkpoint is read."""
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(products)
    exact = quantized(weight.float(), "nf4", torch.float32).dense(torch.float32)
    assert torch.equal(quantized(weight, "nf4", checkpoint).dense(products), exact.to(checkpoint).to(products))
