from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tlora.job import DataConfig, JobSpec, RunSpec
from tlora.planning.base_placement import fixed_to


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
