"""Stages of a base with experts as targets: the bits of the whole base; and no plan picks a layout that a load would refuse."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.engine.tiny_runs import save_base
from tests.supermodel.mxfp4_bases import pack
from tests.supermodel.test_expert_targets import FAMILIES as TARGETS
from tests.supermodel.test_experts import FAMILIES
from tests.supermodel.test_stage import TRAIN, batch_of, chain, check_steps, cut_of, load
from tlora.adapters.state import init_state
from tlora.errors import ConfigError, ModelError
from tlora.job import DataConfig, JobSpec, LoraConfig, RunSpec
from tlora.planning.base_placement import choose_form
from tlora.planning.memory import bytes_by_gpus, can_be_cut
from tlora.planning.planned_job import PlannedJob
from tlora.shape.stages import LayerRange
from tlora.supermodel import routers
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.load import outline
from tlora.supermodel.routers import why_not_alone
from tlora.supermodel.stage_base import why_no_stages
from tlora.supermodel.supermodel import SuperModel

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
LORA = {
    "a": LoraConfig(r=4, target_parameters=BOTH, target_modules=[]),
    "b": LoraConfig(r=6, target_parameters=["down_proj"], target_modules=["q_proj", "o_proj"], expert_rank="divide"),
}
CPU, LLAMA4 = torch.device("cpu"), TARGETS["llama4"]


def save(family: str, directory: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "mxfp4"])
def test_stages_compute_the_bits_of_the_whole_base(packed: bool, tmp_path: Path) -> None:
    base = save("gpt-oss", tmp_path / "plain")
    if packed:
        base = tmp_path / "packed"
        pack(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), tmp_path / "plain", base)
    whole = load(base, False, None)
    with patch("tlora.supermodel.plain_path.groups_on", return_value=True):  # as on a GPU, where kernels compute the other jobs
        stages = [load(base, False, LayerRange(first, first + 1, 2)) for first in range(2)]
    if packed:
        for number, stage in enumerate(stages):
            held = [name for name, module in stage.model.named_modules() if isinstance(module, HeldExperts)]
            assert held == [f"model.layers.{number}.mlp.experts.{end}" for end in ("gate_up_proj", "down_proj")]
    links, states = chain(stages), {}
    for job_id, lora in LORA.items():
        state = states[job_id] = init_state(whole.layout(lora), ord(job_id), torch.float32)
        state.params.add_(torch.randn(state.params.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
        whole.join(job_id, lora, TRAIN[job_id], state=state.clone())
        for rank, stage in enumerate(stages):
            stage.join(job_id, lora, TRAIN[job_id], state=cut_of(state, stages).state(rank, state))
    batch = batch_of(3)
    for link in links:
        link.begin(batch, [], True)
    expected, found = whole.forward_backward(batch), stages[-1].forward_backward(batch)
    for job_id in LORA:
        assert float(found[job_id].loss_sum) == float(expected[job_id].loss_sum)
        cut = cut_of(states[job_id], stages)
        gradient_P = cut.put_together([stage.gradient(job_id) for stage in stages])
        assert torch.equal(gradient_P, whole.gradient(job_id)) and float(gradient_P.norm()) > 0
        whole.zero_grad_of(job_id)
        check_steps(job_id, gradient_P, whole, cut, stages)


def test_all_stages_of_a_deterministic_run_take_one_path(tmp_path: Path) -> None:
    """That of the whole base: the first layer of this one has no experts, and the second has a router that is not understood."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(LLAMA4, dtype=torch.float32).save_pretrained(tmp_path)
    models = [load(tmp_path, False, cut) for cut in (None, LayerRange(0, 1, 2), LayerRange(1, 2, 2))]
    whole, *stages = (why_not_alone(model.base, model.experts, torch.device("cuda")) for model in models)
    assert whole == "Llama4TextMoe computes repeat" and stages == [whole, whole]


def test_a_stage_that_would_take_another_path_than_the_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven with a stage's own weights, on its own device, the other stages do not know."""
    base, device = save("gpt-oss", tmp_path), torch.device("cuda")
    stage = load(base, False, LayerRange(1, 2, 2))
    assert why_not_alone(stage.base, stage.experts, device) is None
    stage.experts.routers = None
    monkeypatch.setattr(routers, "_difference", lambda *_: "other bits in company")
    with pytest.raises(ConfigError, match=r"routers as the others may: GptOss.* has another product here .*Set layout: whole"):
        why_not_alone(stage.base, stage.experts, device)
    stage.experts.why_not = "GptOssExperts computes something else"
    with pytest.raises(ConfigError, match="cannot compute its experts as others may: GptOssExperts"):
        why_not_alone(stage.base, stage.experts, device)


def formed(base: Path, lora: LoraConfig, limit: int, reads_peers: bool = True, layout: str = "auto") -> str:
    spec = JobSpec(name="a", data=DataConfig(path="-"), **lora.model_dump(exclude_unset=True))
    run = RunSpec(base_model=str(base), output_dir="-", jobs=[spec], layout=layout, token_budget=16)  # type: ignore[arg-type]
    model = SuperModel(outline(str(base), "float32"))
    jobs = (PlannedJob(spec, longest=16, layout=model.layout(spec)),)
    placement = choose_form(run, jobs, model, model.base.num_bytes, CPU, (limit, limit), reads_peers)
    return "shared" if placement.shared else "stages" if placement.stages else "whole"


def test_a_mixture_is_shared_by_order_alone_and_cut_where_its_files_allow(tmp_path: Path) -> None:
    fused, apart = save("gpt-oss", tmp_path / "fused"), save("mixtral", tmp_path / "apart")
    for base in (fused, apart):
        model = SuperModel(outline(str(base), "float32"))
        assert not can_be_cut(model) and set(bytes_by_gpus(model, CPU)) == {model.base.num_bytes}
        assert formed(base, LORA["a"], 1 << 40) == "whole"
    assert formed(fused, LORA["a"], 1 << 40, layout="shared") == "shared"
    with pytest.raises(ModelError, match="cannot be shared or streamed: its files have each expert by itself. Load it whole"):
        formed(apart, LORA["a"], 1 << 40, layout="shared")
    assert (
        why_no_stages(outline(str(fused)), CPU) == "" and why_no_stages(outline(str(apart)), CPU) == "its files have each expert by itself"
    )
    small = SuperModel(outline(str(fused), "float32")).base.num_bytes * 7 // 8
    assert formed(fused, LORA["a"], small) == "stages", "one layer of two fits with its adapter"
    with pytest.raises(ModelError, match="cannot be cut into stages: its files have each expert by itself"):
        formed(apart, LORA["a"], small)


def test_rows_of_the_embedding_are_trained_in_no_stages(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", num_hidden_layers=6)
    rows = LoraConfig(r=4, trainable_token_indices=[3, 9])
    whole = SuperModel(outline(str(base), "float32")).base.num_bytes
    assert formed(base, LoraConfig(r=4), whole - 1, reads_peers=False) == "stages"
    assert formed(base, rows, whole - 1) == "shared"
    assert formed(base, rows, whole + 1, reads_peers=False) == "whole", "the job does not fit, and is told so"
    with pytest.raises(ConfigError, match="a has trainable_token_indices, which needs embedding and head in one place"):
        formed(base, rows, whole - 1, reads_peers=False)
