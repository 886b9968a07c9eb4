"""The examples of an objective and of a form of frozen weights that are files of their own, trained with as built-in ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.engine.test_preference_jobs import pairs as pairs
from tests.engine.tiny_runs import job, rows, run_spec, same_bytes, save_base, sha256, train, write_rows
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import prepare_requests
from tlora.engine.check import check
from tlora.registry import BASE_PRECISIONS, OBJECTIVES, load_plugins
from tlora.supermodel.inject import find_linears

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads an example as a process does for which `TLORA_PLUGINS` names it; its entry goes with the test."""

    def load(module: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setenv("TLORA_PLUGINS", module)
        monkeypatch.delitem(sys.modules, module, raising=False)
        for table, name in ((OBJECTIVES, "ipo"), (BASE_PRECISIONS, "int8")):
            monkeypatch.setitem(table, name, None)
            del table[name]
        load_plugins()
        return sys.modules[module]

    return load


def log_ratio(model: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over the trained tokens of log p under the adapter less log p under the base."""
    with_adapter = model(ids[None]).logits[0].double().log_softmax(-1)
    with model.disable_adapter():
        without = model(ids[None]).logits[0].double().log_softmax(-1)
    return ((with_adapter - without)[:-1].gather(1, ids[1:, None])[:, 0] * weights[1:]).sum()


def test_an_objective_of_ones_own_has_the_loss_of_plain_torch_and_trains_together_as_alone(
    base: Path, pairs: Path, tmp_path: Path, plug_in: Callable[[str], Any]
) -> None:
    plug_in("own_objective")
    order = job("own", {"path": str(pairs), "eval_path": str(pairs)}, objective="ipo", beta=0.3)
    together = [order, job("beside", str(pairs), objective="dpo", r=16)]
    results = train(base, tmp_path / "together", together, deterministic=True)
    train(base, tmp_path / "alone", [order], deterministic=True)
    same_bytes(tmp_path / "together", tmp_path / "alone", ["own"])
    prepared = prepare(prepare_requests(run_spec(base, tmp_path, [order]), 500))["own"]
    assert isinstance(prepared, Prepared) and prepared.eval is not None
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "alone/own")
    losses = []
    with torch.no_grad():
        for pair in prepared.eval:
            ids, weights = torch.tensor(pair.input_ids).long(), torch.tensor(pair.loss_weights)
            ratios = [log_ratio(model, *ends) for ends in zip(ids.split(pair.lengths), weights.split(pair.lengths), strict=True)]
            losses.append(float((ratios[0] - ratios[1] - 1 / (2 * 0.3)) ** 2))
    expected, loss = sum(losses) / len(losses), results["own"].eval_loss
    assert loss == pytest.approx(expected, rel=1e-4) and expected < 0.9 * (1 / 0.6) ** 2, "the loss at the start is 1 / (2 beta) squared"
    assert all("rewards/margins" in row for row in rows(tmp_path / "alone/own/metrics.jsonl") if "loss" in row)


def test_the_objective_as_a_program(base: Path, pairs: Path, tmp_path: Path, plug_in: Callable[[str], Any]) -> None:
    losses = plug_in("own_objective").main(str(base), str(tmp_path / "out"), str(pairs), steps=2)
    assert losses["ipo"] == pytest.approx((1 / 0.2) ** 2, rel=0.2) and losses["dpo"] == pytest.approx(0.69, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_form_of_weights_of_ones_own_trains_as_over_the_checkpoint_that_it_stands_for(
    dtype: torch.dtype, tmp_path: Path, plug_in: Callable[[str], Any]
) -> None:
    form = plug_in("own_weight_form")
    base, plain = save_base(tmp_path / "base"), save_base(tmp_path / "plain")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(base)
    for linear in find_linears(model).values():
        scale = linear.weight.detach().float().abs().amax(1, keepdim=True) / 127
        linear.weight.data = (torch.round(linear.weight.float() / scale) * scale).to(dtype)
    model.save_pretrained(plain)
    jobs = [job("a", str(write_rows(tmp_path / "d.jsonl", 24)), lora_dropout=0.1), job("b", str(tmp_path / "d.jsonl"), r=9, seed=3)]
    train(base, tmp_path / "int8", jobs, base_precision="int8", deterministic=True)
    train(plain, tmp_path / "plain-out", jobs, deterministic=True)
    same_bytes(tmp_path / "int8", tmp_path / "plain-out", ["a", "b"])
    train(base, tmp_path / "bare", jobs, deterministic=True)
    assert sha256(tmp_path / "bare/a") != sha256(tmp_path / "int8/a"), "its weights were not held in 8 bits"
    assert f"in {form.CARD}" in (tmp_path / "int8/a/README.md").read_text()
    checks = [
        check(run_spec(base, tmp_path / "out", jobs, base_precision=each, dtype=str(dtype)[6:]), device="cpu") for each in (None, "int8")
    ]
    linears = list(find_linears(model).values())
    held = sum(linear.weight.numel() for linear in linears) + sum(4 * linear.out_features for linear in linears)
    whole = sum(linear.weight.numel() for linear in linears) * dtype.itemsize
    assert checks[0].base_bytes - checks[1].base_bytes == whole - held and checks[0].base_parameters == checks[1].base_parameters
