"""The host's memory while a base in bf16 is loaded as NF4: no more than two of its tensors above what stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

LARGEST_MIB = 32  # of a linear
LOAD = """
import gc, re, sys, threading, time
from pathlib import Path
from tlora.supermodel.load import load_base

def anonymous_mib():  # without the pages of mapped files, which the system may drop
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def watch(ended, seen):
    while not ended.is_set():
        seen.append(anonymous_mib())
        time.sleep(0.001)

load_base(sys.argv[1], "auto", "cpu", "nf4")  # what is imported and kept by libraries
gc.collect()
def above():
    ended, seen = threading.Event(), [anonymous_mib()]
    watcher = threading.Thread(target=watch, args=(ended, seen))
    watcher.start()
    base = load_base(sys.argv[2], "auto", "cpu", "nf4")
    ended.set()
    watcher.join()
    gc.collect()
    return max(seen) - anonymous_mib(), len(seen)

# The least of three: on a busy machine the allocator gives freed memory back late, which only adds.
print(*min(above() for _ in range(3)))
"""


def save_base(directory: Path, hidden: int, intermediate: int) -> Path:
    shape: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=4, vocab_size=256)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_tensors_above_what_stays(tmp_path: Path) -> None:
    bases = save_base(tmp_path / "tiny", 64, 128), save_base(tmp_path / "base", 4096, 4096)
    ended = subprocess.run([sys.executable, "-c", LOAD, *map(str, bases)], capture_output=True, text=True, check=True)
    above, looks = ended.stdout.split()
    assert float(above) <= 2 * LARGEST_MIB and int(looks) > 10, ended.stdout
