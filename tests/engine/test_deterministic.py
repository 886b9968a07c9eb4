"""`deterministic: true`: an adapter's bytes do not depend on whom it was trained with, nor how. Without it: on ΔW to 1e-3 in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.tiny_runs import job, run_spec, sha256, train, write_rows
from tests.tolerances import TRAINED, relative_error
from tlora.engine.check import check
from tlora.engine.train import Results
from tlora.engine.watcher import RunProgress, Watcher

Jobs = list[dict[str, Any]]


def four_jobs(data: Path) -> Jobs:
    """Of different rank, batch, length of sample, schedule; with dropout, evaluation, a larger weight."""
    return [
        job("a", {"path": str(data / "a.jsonl"), "eval_size": 0.2}, lora_dropout=0.1, eval_steps=3, max_steps=8),
        job("b", str(data / "b.jsonl"), r=17, batch_size=1, max_steps=20, lr_scheduler_type="cosine", seed=1),
        job("c", {"path": str(data / "c.jsonl"), "eval_path": str(data / "b.jsonl")}, r=3, batch_size=32, max_steps=3, weight=5),
        job("d", str(data / "d.jsonl"), target_modules=["o_proj", "up_proj"], use_rslora=True, max_grad_norm=0.05, weight_decay=0.1),
    ]


@pytest.fixture(scope="module")
def alone(wide_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """sha256 of each job's adapter, trained with nobody else."""
    out = tmp_path_factory.mktemp("alone")
    return {
        fields["name"]: shas(train(wide_base, out / fields["name"], [fields], deterministic=True))[fields["name"]]
        for fields in four_jobs(data)
    }


def shas(results: Results) -> dict[str, str]:
    assert {r.status for r in results.values()} == {"done"}, results
    return {name: sha256(Path(result.path)) for name, result in results.items()}


ARRANGEMENTS: dict[str, tuple[Callable[[Jobs], Jobs], dict[str, Any]]] = {
    "together": (lambda jobs: jobs, {}),
    "in reverse": (lambda jobs: jobs[::-1], {}),
    "small micro-batches": (lambda jobs: jobs, {"token_budget": 70}),
    "large micro-batches": (lambda jobs: [jobs[2], jobs[0], jobs[3], jobs[1]], {"token_budget": 4096}),
    "other weights": (lambda jobs: [{**fields, "weight": 1 + 7 * i} for i, fields in enumerate(jobs)], {"token_budget": 200}),
}


# `numerics/engine` has whole runs together and alone in every run
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow if n == "small micro-batches" else pytest.mark.soak]) for n in ARRANGEMENTS]
)
def test_bytes_do_not_depend_on_the_company(wide_base: Path, data: Path, tmp_path: Path, alone: dict[str, str], name: str) -> None:
    arrange, settings = ARRANGEMENTS[name]
    together = shas(train(wide_base, tmp_path / "out", arrange(four_jobs(data)), deterministic=True, **settings))
    assert together == alone


@pytest.mark.slow
def test_bytes_do_not_depend_on_a_queue(wide_base: Path, data: Path, tmp_path: Path, alone: dict[str, str]) -> None:
    jobs = [*four_jobs(data), job("last", str(data / "a.jsonl"), r=2)]
    limit = check(run_spec(wide_base, tmp_path, [jobs[1]], token_budget=512)).predicted_bytes + 4096
    seen: list[RunProgress] = []
    results = train(
        wide_base, tmp_path / "out", jobs, deterministic=True, memory_limit=limit, token_budget=512, watcher=Watcher(seen.append)
    )
    assert {name: sha for name, sha in shas(results).items() if name != "last"} == alone
    queued = [{j.name for j in state.jobs if j.status == "queued"} for state in seen if not state.stage]
    assert any({"c", "d", "last"} <= names for names in queued), "nobody had to wait"
    assert check(run_spec(wide_base, tmp_path, jobs, memory_limit=limit, token_budget=512)).resident_jobs < len(jobs)


def deltas(directory: Path) -> Tensor:
    """All modules' B @ A, in fp64 (scales are equal on both sides)."""
    tensors = load_file(directory / "adapter_model.safetensors")
    pairs: Iterator[str] = (key for key in tensors if "lora_A" in key)
    found = [tensors[key.replace("lora_A", "lora_B")].double() @ tensors[key].double() for key in sorted(pairs)]
    return torch.cat([d.flatten() for d in found])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [16, pytest.param(50, marks=pytest.mark.soak)])
def test_by_default_adapters_agree_after_many_steps(steps: int, wide_base: Path, tmp_path: Path) -> None:
    for number, count in enumerate((60, 30, 90)):
        write_rows(tmp_path / f"{number}.jsonl", count, seed=number)
    orders = {"max_steps": steps, "learning_rate": 2e-3}
    jobs = [
        job("p", str(tmp_path / "0.jsonl"), r=16, **orders),
        job("q", str(tmp_path / "1.jsonl"), r=5, lora_dropout=0.1, batch_size=2, **orders),
        job("r", str(tmp_path / "2.jsonl"), r=40, batch_size=8, **orders),
    ]
    together = train(wide_base, tmp_path / "together", jobs)
    for fields in jobs:
        single = train(wide_base, tmp_path / fields["name"], [fields])
        pair = [deltas(Path(found[fields["name"]].path)) for found in (together, single)]
        assert float(pair[1].norm()) > 0
        error = relative_error(pair[0], pair[1])
        print(f"{fields['name']}: relative difference of the weight change after {steps} steps: {error:.1e}")
        assert error <= TRAINED[torch.float32]


def test_the_default_mode_is_not_the_deterministic_one(wide_base: Path, data: Path, tmp_path: Path, alone: dict[str, str]) -> None:
    """Else the tests above would prove nothing: packed without care, bits do differ."""
    results = train(wide_base, tmp_path / "out", four_jobs(data))
    assert shas(results) != alone
    assert json.loads((tmp_path / "out" / "run.json").read_text())["deterministic"] is False
