"""After a plan's kernels have been compiled ahead, training compiles none any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_runs import save_base

pytestmark = pytest.mark.gpu

TRAIN = """
import os, sys
from pathlib import Path
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel

base = sys.argv[1]
config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                     head_dim=128, vocab_size=512, max_position_embeddings=1024)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
loras = [LoraConfig(r=r, target_modules="all-linear", lora_dropout=p) for r, p in ((8, 0.0), (16, 0.1), (40, 0.0))]
compiling = SuperModel(outline(base, "auto", None)).compile_ahead(torch.device("cuda"), loras)
assert compiling.wait() == 0
cache = Path(os.environ["TRITON_CACHE_DIR"])
names = ("gemm_kernel", "shrink_kernel", "sum_kernel", "add_dropped_kernel", "forward_kernel", "dq_kernel", "dkv_kernel")
ours = lambda: sorted(p for p in cache.rglob("*.cubin") if p.stem in names)
before = ours()
assert {p.stem for p in before} == set(names)
model = SuperModel.from_pretrained(base, "auto", "cuda")
model.expect(loras)
ids = np.arange(300, dtype=np.int32)
for i, lora in enumerate(loras):
    model.join(str(i), lora, TrainConfig(max_steps=9))
    for members in ([i], list(range(i + 1))):
        for length in (300, 40):
            rows = [BatchRow(str(m), ids[:length], np.ones(length, np.float32), float(length), (m, 0, 0)) for m in members]
            model.forward_backward(collate(rows, model.device))
            model.evaluate(collate(rows, model.device))
assert ours() == before, [p.stem for p in ours() if p not in before]
print("compiled ahead:", len(before))
"""


def test_training_finds_all_its_kernels_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "base")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled ahead" in done.stdout


# As a user has it: the program itself, in an environment without any variable of a cache.
LAUNCH = """
import sys, threading
from pathlib import Path
from triton import knobs

cache, missed = Path(sys.argv[1]), []

def launchers():
    return sorted(cache.rglob("__triton_launcher*"))

def listener(*, src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        missed.append(str(metadata["name"]))

knobs.compilation.listener = listener
from tlora.libraries import leave_unused_out
leave_unused_out()
from tlora.engine.run_monitor import RunMonitor
stage = RunMonitor.stage

def on_stage(self, text):
    if text == "measuring memory":
        before.extend(launchers())
    stage(self, text)

before = []
RunMonitor.stage = on_stage
from tlora.cli import main
sys.argv = ["tlora", *sys.argv[2:]]
try:
    main()
finally:
    print("compiled:", sorted(name for name in missed if not name.startswith("triton_")))  # Inductor names its own so
    print("launchers:", len(launchers()) - len(before), "of", len(before))
"""


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_launch_in_a_users_environment_compiles_nothing_after_the_process_that_compiles_ahead(tmp_path: Path, dropout: float) -> None:
    variables = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TLORA_CACHE", "XDG_CACHE_HOME", "TRITON_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in variables} | {"HOME": str(tmp_path)}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} " + "word " * (i % 40)}) + "\n" for i in range(40)))
    jobs = [{"name": f"r{r}", "data": "rows.jsonl", "r": r, "lora_dropout": dropout, "eval_size": 4} for r in (8, 40)]
    defaults = {"target_modules": "all-linear", "max_steps": 4, "batch_size": 4}
    spec = {"base_model": "base", "dtype": "bfloat16", "output_dir": "out", "defaults": defaults, "jobs": jobs}
    save_base(tmp_path / "base", hidden_size=256, intermediate_size=512)
    (tmp_path / "jobs.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-c", LAUNCH, str(tmp_path / ".cache" / "tlora" / "triton"), "train", "jobs.yaml"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "compiled: []" in done.stdout and "launchers: 0 of" in done.stdout, done.stdout[-1500:]
    assert "launchers: 0 of 0" not in done.stdout, "launchers are compiled ahead"
