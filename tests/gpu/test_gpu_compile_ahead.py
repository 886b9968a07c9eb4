"""After a plan's kernels have been compiled ahead, training compiles none of linears and attention any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
