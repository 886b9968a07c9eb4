"""README's tables say what the files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.results_table import format_tables, read_results


def _result(kind: str, commit: str, **fields: Any) -> dict[str, Any]:
    versions = {"torch": "2.11", "triton": "3.6"}
    return {"benchmark": kind, "device": "H200", "commit": commit, "versions": versions, "command": f"python -m bench.{kind}", **fields}


def _setup(**changes: Any) -> dict[str, Any]:
    jobs = [{"rank": 8}, {"rank": 64}]
    return {"shape": "llama-3-8b", "batch_size": 4, "lengths": 2048, "token_budget": 8192, "deterministic": False, "jobs": jobs} | changes


def test_speeds_ratios_and_what_was_not_measured(tmp_path: Path):
    ours = {"system": "together", "tokens_per_second": 17500.0, "useful_tflops": 525.3, "activations_gib": 33.26}
    rows = [
        ours,
        {"system": "peft", "setting": "compiled", "tokens_per_second": 15000.0},
        {"system": "peft", "setting": "liger", "tokens_per_second": 15600.0, "best": True},
    ]
    (tmp_path / "a.json").write_text(json.dumps(_result("throughput", "abc", setup=_setup(), rows=rows)))
    (tmp_path / "b.json").write_text(
        json.dumps(_result("throughput", "def", setup=_setup(lengths="real", deterministic=True, dtype="torch.float32"), rows=[ours]))
    )
    (tmp_path / "cpu.json").write_text(json.dumps({"commit": "abc", "tokens_per_second": {}}))
    text = format_tables(read_results(sorted(tmp_path.glob("*.json"))))
    lines = [line for line in text.splitlines() if line.startswith("| llama")]
    assert "17,500 | — | 15,600 (liger) | 1.12 | 525 | 33.3 |" in lines[0] and "2,048 tokens" in lines[0] and "r 8-64" in lines[0]
    assert "17,500 | — | — | — | 525 | 33.3 |" in lines[1] and "real lengths" in lines[1] and "deterministic, fp32" in lines[1]
    assert text.count("commit abc") == text.count("commit def") == 1, "results of two commits stand in one table"
    assert "a.json" in text and "cpu.json" not in text and "`python -m bench.throughput`" in text


def test_kernels(tmp_path: Path):
    groups = {name: {"ratio": ratio} for name, ratio in (("q/k/v", 1.14), ("o", 1.0505), ("gate/up", 1.06), ("down", 1.03))}
    row = {"adapters": "16 of rank 64", "tokens": 16384, "ratio": 1.0719, "groups": groups}
    (tmp_path / "k.json").write_text(json.dumps(_result("kernels", "abc", rows=[row])))
    text = format_tables(read_results([tmp_path / "k.json"]))
    assert "| 16 of rank 64 | 16,384 | 1.072 | 1.140 | 1.050 | 1.060 | 1.030 |" in text
