"""A base in NF4 on a GPU: bitsandbytes' own bits, and adapters with the bytes of those over the checkpoint that it stands for, after a kill
too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tlora
from tests.engine.tiny_runs import die_with_checkpoints, job, run_spec, same_bytes, save_base, sha256, write_rows
from tlora.kernels import nf4
from tlora.kernels.packed_weight import dequantize_in_torch
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import load_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
JOBS = ("a", "b")
REPOSITORY = Path(__file__).parents[2]


def save_wide_base(directory: Path) -> Path:
    base = save_base(directory, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    return base


def save_unpacked(base: Path, directory: Path) -> Path:
    """The plain checkpoint that the base's NF4 form stands for, by the formula in torch, on a CPU."""
    save_base(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for linear in find_linears(model).values():
        linear.weight.data = dequantize_in_torch(nf4.quantize(linear.weight.detach(), torch.bfloat16), torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def train(base: Path, out: Path, data: Path, resume: bool = False, **settings: Any) -> None:
    jobs = [job("a", str(data), save_steps=1, lora_dropout=0.1)]
    jobs.append(job("b", str(data), r=24, target_modules=["q_proj", "down_proj"], save_steps=1, seed=3))
    run = run_spec(base, out, jobs, deterministic=True, **settings)
    assert all(result.status == "done" for result in tlora.train(run, device="cuda", resume=resume).values())


def train_until_killed(base: Path, out: Path, data: Path) -> None:
    die_with_checkpoints(out)
    train(base, out, data, base_precision="nf4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_bits_are_bitsandbytes_own(dtype: torch.dtype) -> None:
    """Also of weights that a CPU has packed: nibbles, and the values in the base's dtype."""
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    here, there = nf4.quantize(weight, dtype), nf4.quantize(weight.cuda(), dtype)
    assert torch.equal(here.weight, there.weight.cpu()) and torch.equal(here.scale, there.scale.cpu())
    state = bnb.QuantState(
        absmax=there.scale, shape=weight.shape, dtype=dtype, blocksize=64, quant_type="nf4", code=bnb.get_4bit_type("nf4", "cuda")
    )
    theirs = bnb.dequantize_4bit(there.weight[:, None], state)
    assert torch.equal(there.operand(), theirs) and torch.equal(there.operand().cpu(), here.operand())


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_adapters_are_those_over_the_checkpoint_that_it_stands_for(recompute: str, tmp_path: Path) -> None:
    base, data = save_wide_base(tmp_path / "base"), write_rows(tmp_path / "d.jsonl", 24)
    plain = save_unpacked(base, tmp_path / "plain")
    train(base, tmp_path / "nf4", data, base_precision="nf4", recompute=recompute)
    train(plain, tmp_path / "unpacked", data, recompute=recompute)
    same_bytes(tmp_path / "nf4", tmp_path / "unpacked", JOBS)
    train(base, tmp_path / "bare", data, recompute=recompute)
    assert all(sha256(tmp_path / "bare" / name) != sha256(tmp_path / "nf4" / name) for name in JOBS), "its weights were not packed"


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    base, data = save_wide_base(tmp_path / "base"), write_rows(tmp_path / "d.jsonl", 24)
    train(base, tmp_path / "whole", data, base_precision="nf4")
    program = "import sys, pathlib; from tests.gpu import test_gpu_nf4 as t; t.train_until_killed(*map(pathlib.Path, sys.argv[1:]))"
    paths = [str(path) for path in (base, tmp_path / "out", data)]
    assert subprocess.run([sys.executable, "-c", program, *paths], cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    train(base, tmp_path / "out", data, resume=True, base_precision="nf4")
    same_bytes(tmp_path / "out", tmp_path / "whole", JOBS)


def test_the_base_takes_the_bytes_that_are_counted(tmp_path: Path) -> None:
    base = save_wide_base(tmp_path / "base")
    model = SuperModel(load_base(str(base), "auto", "cuda", "nf4"))
    assert model.num_layers == 2, "not on the fused kernels"
    weights = sum(k * n for k, n in model.targets().values())
    packed = [linear.form for linear in model._linears.values()]
    held = sum(tensor.nbytes for form in packed for tensor in form.tensors.values())
    assert held == weights // 2 + weights // 16 and all(t.is_cuda for form in packed for t in form.tensors.values())
