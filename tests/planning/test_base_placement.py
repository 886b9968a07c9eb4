from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.tiny_runs import save_base
from tlora.job import DataConfig, JobSpec, RunSpec
from tlora.planning.base_placement import BasePlacement, choose_form, fixed_to
from tlora.planning.plan import plan_memory
from tlora.planning.planned_job import PlannedJob
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel


@pytest.mark.parametrize(("ordered", "reads_peers", "links"), [("auto", True, "auto"), ("auto", False, "host"), ("host", True, "host")])
def test_stages_of_gpus_that_read_no_peer_go_through_the_host(ordered: Any, reads_peers: bool, links: str) -> None:
    job = JobSpec(name="a", data=DataConfig(path="a.jsonl"))
    run = RunSpec(base_model="base", output_dir="out", jobs=[job], links=ordered)
    plan: Any = SimpleNamespace(token_budget=64, recomputed_layers=3)
    found = fixed_to(run, plan, reads_peers)
    assert (found.links, found.token_budget, found.recompute) == (links, 64, 3)
    assert fixed_to(run.model_copy(update={"token_budget": 32}), plan, reads_peers).token_budget == 32
    plan.recomputed_layers = 0  # there is room for all activations, however many layers could be recomputed
    assert fixed_to(run, plan, reads_peers).recompute == "none"


def test_a_job_lies_where_there_is_memory_for_it(tmp_path: Path) -> None:
    """On GPUs of unequal memory each job is refused only where it does not fit, and not at all if it fits on one."""
    base = save_base(tmp_path / "base")
    specs = [JobSpec(name=name, data=DataConfig(path="-"), r=rank) for name, rank in (("small", 4), ("large", 256))]
    run = RunSpec(base_model=str(base), output_dir=str(tmp_path), jobs=specs, token_budget=16)
    model, device = SuperModel(outline(str(base), "float32")), torch.device("cpu")

    def formed(*limits: int) -> tuple[BasePlacement, tuple[PlannedJob, ...]]:
        jobs = tuple(PlannedJob(spec, longest=16, layout=model.layout(spec)) for spec in specs)
        return choose_form(run, jobs, model, model.base.num_bytes, device, limits), jobs

    plenty, _ = formed(1 << 40, 1 << 40)
    needed = {job.spec.name: plenty.plan.total_bytes([job.layout]) for job in plenty.plan.jobs if job.layout is not None}
    small, between = needed["small"], needed["large"] - 1
    found, jobs = formed(between, needed["large"], small)
    assert found.holders.whole == {"large": (1,)} and not found.shared and not found.refused
    assert found.why.endswith("; large fits on CPU process 1 alone") and not any(job.problems for job in jobs)
    assert formed(needed["large"], 1 << 40)[0].holders.whole == {}, "both fit on the smaller one"
    nowhere, jobs = formed(between, between)
    assert nowhere.holders.whole == {} and nowhere.refused == ["large"]


def test_a_long_sample_keeps_no_other_job_from_a_small_gpu(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", max_position_embeddings=4096)
    specs = [JobSpec(name=name, data=DataConfig(path="-")) for name in ("short", "long")]
    run = RunSpec(base_model=str(base), output_dir=str(tmp_path), jobs=specs)
    model, device = SuperModel(outline(str(base), "float32")), torch.device("cpu")

    def planned() -> tuple[PlannedJob, ...]:
        return tuple(PlannedJob(spec, longest=n, layout=model.layout(spec)) for spec, n in zip(specs, (16, 2048), strict=True))

    alone = plan_memory(run, planned()[:1], model, model.base.num_bytes, device, 1 << 40)
    small = alone.total_bytes([job.layout for job in alone.jobs if job.layout is not None])
    jobs = planned()
    found = choose_form(run, jobs, model, model.base.num_bytes, device, (small, 1 << 40))
    assert found.holders.whole == {"long": (1,)} and not found.holders.part and not found.refused
    for job in jobs:
        job.kept_out = job.spec.name in found.holders.whole
    on_small = plan_memory(run, jobs, model, model.base.num_bytes, device, small)
    assert on_small.longest == 16 and [job.spec.name for job in jobs if job.too_large] == ["long"]
