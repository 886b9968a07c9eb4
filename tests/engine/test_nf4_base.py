"""Jobs over a base in NF4: the bytes of those over the checkpoint that it stands for, also after a kill; check, generate, the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bitsandbytes_values import bitsandbytes_values
from tests.engine.tiny_runs import job, run_spec, same_bytes, save_base, sha256, train, write_rows
from tlora.engine.check import check
from tlora.errors import ConfigError
from tlora.supermodel.inject import find_linears

pytestmark = pytest.mark.usefixtures("forked")
JOBS = ("a", "b")


def orders(directory: Path) -> list[dict[str, Any]]:
    """With dropout and with a part of the linears; every step is kept."""
    data = str(write_rows(directory / "d.jsonl", 24))
    first = job("a", data, save_steps=1, lora_dropout=0.1)
    return [first, job("b", data, r=9, target_modules=["q_proj", "down_proj"], save_steps=1, seed=3)]


def save_both(directory: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """A base in `dtype`, and the plain one that its NF4 form stands for by bitsandbytes."""
    base, plain = save_base(directory / "base"), directory / "plain"
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(base)
    for linear in find_linears(model).values():
        nibbles, state = bnb.quantize_4bit(linear.weight.detach(), blocksize=64, quant_type="nf4")
        linear.weight.data = bitsandbytes_values(nibbles, state).to(dtype)
    save_base(plain)
    model.save_pretrained(plain)
    return base, plain


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_adapters_are_those_over_the_checkpoint_that_it_stands_for(dtype: torch.dtype, tmp_path: Path) -> None:
    base, plain = save_both(tmp_path, dtype)
    jobs = orders(tmp_path)
    train(base, tmp_path / "nf4", jobs, base_precision="nf4", deterministic=True)
    train(plain, tmp_path / "plain-out", jobs, deterministic=True)
    same_bytes(tmp_path / "nf4", tmp_path / "plain-out", JOBS)
    train(base, tmp_path / "bare", jobs, deterministic=True)
    assert all(sha256(tmp_path / "bare" / name) != sha256(tmp_path / "nf4" / name) for name in JOBS), "its weights were not packed"


def test_check_counts_half_a_byte_a_weight(tmp_path: Path) -> None:
    base, _ = save_both(tmp_path, torch.float32)
    runs = [run_spec(base, tmp_path / "out", orders(tmp_path), base_precision=each) for each in (None, "nf4")]
    plain, packed = (check(run, device="cpu") for run in runs)
    assert not packed.problems and packed.base_parameters == plain.base_parameters
    linears = find_linears(AutoModelForCausalLM.from_pretrained(base)).values()
    weights = sum(linear.weight.numel() for linear in linears)
    assert plain.base_bytes - packed.base_bytes == 4 * weights - (weights // 2 + weights // 16)


def test_a_base_in_64_bits_is_refused(tmp_path: Path) -> None:
    base, _ = save_both(tmp_path, torch.float32)
    run = run_spec(base, tmp_path / "out", orders(tmp_path), base_precision="nf4", dtype="float64")
    (problem,) = check(run, device="cpu").problems
    assert problem == "base_precision nf4 needs a base in 16 or 32 bits, and this one is float64. Set dtype: float32"
    with pytest.raises(ConfigError, match="needs a base in 16 or 32 bits"):
        train(base, tmp_path / "out", orders(tmp_path), base_precision="nf4", dtype="float64")
    assert not check(run.model_copy(update={"dtype": "float32"}), device="cpu").problems
