"""Measuring on the GPU path (interpreted where there is no GPU) with counters whose truth is known, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.tiny import SHAPE as TINY
from tests.tiny import make_model
from tlora.adapters.layout import AdapterLayout
from tlora.job import JobSpec, LoraConfig, TrainConfig
from tlora.json_file import fields_of, value_of
from tlora.kernels.head import gpu_chunk_rows
from tlora.planning import memory_probe
from tlora.planning.memory_probe import Probe, probe, probe_key, recall, remember
from tlora.shape.memory import MemoryModel, Phase
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

with interpreted():
    from tlora.kernels import packed_attention, pass_operations  # noqa: F401  (imported late otherwise, when the variable may not be set)

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]
LAYERS, SMALL = 2, ((8, 16), (4, 8))
SHAPE = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1}
COUNTED = MemoryModel(0, (Phase(0, 0),), 0, 4, 4, step_copies=0)
WORKSPACES, HEAD_FIXED, KEPT, BACKWARD, SAVED, MORE = 1 << 20, 5000, 900, 700, 200, 300
"""Bytes that the fake counters tell: at the head's peak HEAD_FIXED + T * kept, in the layers' backward T * (kept + BACKWARD)."""
SPECS = [JobSpec.model_validate({"name": f"j{r}", "data": "d", "r": r, "target_modules": ["q_proj"]}) for r in (4, 20, 8)]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers run as they are, over a few tokens, and attention over no empty samples: minutes in the interpreter otherwise."""
    monkeypatch.setattr(memory_probe, "PROBE_TOKENS", SMALL)
    monkeypatch.setattr(packed_attention, "_SAMPLES", 2)
    with torch.compiler.set_stance("force_eager"):
        yield
    torch._dynamo.reset()


def make_shared(seed: int = 0) -> SuperModel:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        model = SuperModel(make_base(make_model(seed=seed, **SHAPE).to(DEVICE), "llama"), deterministic=True)
    assert model.num_layers == LAYERS
    return model


class Counters:
    """What an allocator would tell of a device on which the lines above are true: forward is stage 1, then each reset begins another."""

    def __init__(self, model: SuperModel) -> None:
        self._model, self._tokens, self._stage = model, 0, 0
        model.base.decoder.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, _module: object, _args: object, kwargs: dict[str, Any]) -> None:
        self._tokens, self._stage = kwargs["input_ids"].shape[1], 1

    def allocated(self) -> int:
        return WORKSPACES if self._tokens else 0

    def reset_peak(self) -> None:
        self._stage += 1

    def peak(self) -> int:
        kept = self._tokens * (KEPT - SAVED * self._model.recomputed_layers)
        rows, width = gpu_chunk_rows(self._model.base.head), 4 * self._model.base.head.weight_VH.shape[1]
        padding = (-self._tokens % rows + rows) * width
        return self.allocated() + [kept, kept + HEAD_FIXED + padding, kept + self._tokens * BACKWARD + padding][self._stage - 1]


def measured(model: SuperModel, specs: list[JobSpec] = SPECS) -> Probe:
    found = probe(model, specs, COUNTED, Counters(model))
    assert found is not None
    return found


@pytest.mark.slow
def test_each_stage_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines come out exactly, and far outside what was measured the higher of them is the prediction. The base counts once, with
    what libraries allocate for good; the largest two adapters are tried.
    """
    model, joined = make_shared(), list[int]()
    join = model.join
    monkeypatch.setattr(model, "join", lambda name, lora, *rest: (joined.append(lora.r), join(name, lora, *rest)))
    found = measured(model)
    assert found.error_share < 1e-9 and found.memory.measured and found.memory.num_layers == LAYERS and joined == [20, 8]
    padding = found.memory.phases[0].fixed_bytes - HEAD_FIXED
    assert padding == pytest.approx(found.memory.phases[1].fixed_bytes) == pytest.approx(2 * gpu_chunk_rows(model.base.head) * 64 * 4)
    for tokens, depth in ((6, 0), (10_000, 0), (10_000, 1)):
        kept = tokens * (KEPT - SAVED * depth)
        higher = max(kept + HEAD_FIXED, kept + tokens * BACKWARD)
        assert found.memory.activation_bytes(tokens, depth) == pytest.approx(higher + padding, abs=2)
    assert {(p.num_tokens, p.recomputed_layers) for p in found.peaks} == {(8, 0), (16, 0), (8, 1), (16, 1)}
    weights = sum(p.nbytes for p in model.model.parameters()) + sum(b.nbytes for b in model.model.buffers())
    assert found.memory.base_bytes == weights + WORKSPACES


def make_llama_4() -> SuperModel:
    """Every token goes through all experts in a pass without a job at experts."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0]}
        config = Llama4TextConfig(**TINY | SHAPE, head_dim=32, intermediate_size_mlp=64, attention_chunk_size=16, **experts)
        model: Any = Llama4ForCausalLM(config)
        return SuperModel(make_base(model.eval().to(DEVICE), "llama4"))


class CountersOfTwoKinds(Counters):
    """As before with a job at experts; without one a token keeps `MORE` as well."""

    def _begin(self, _module: object, _args: object, kwargs: dict[str, Any]) -> None:
        super()._begin(_module, _args, kwargs)
        shapes = [shape for job_id in self._model.bank.jobs() for shape in self._model.state(job_id).layout.shapes]
        self._more = 0 if any(shape.experts > 1 for shape in shapes) else MORE

    def peak(self) -> int:
        return super().peak() + self._tokens * self._more


@pytest.mark.slow
def test_passes_without_jobs_at_experts_are_measured_too_where_tokens_go_to_more_of_them() -> None:
    """The peak is that of the larger kind; a run of one kind has no other, and what was measured of one is not taken for both."""
    at_experts = JobSpec.model_validate({"name": "e", "data": "d", "r": 4, "target_modules": [], "target_parameters": ["down_proj"]})
    model, cpu = make_llama_4(), torch.device("cpu")
    for specs, more in ((SPECS, MORE), ([at_experts], 0), ([*SPECS, at_experts], MORE)):
        found = probe(model, specs, COUNTED, CountersOfTwoKinds(model))
        assert found is not None and found.error_share < 1e-9 and model.bank.jobs() == []
        padding = 2 * gpu_chunk_rows(model.base.head) * 64 * 4
        assert found.memory.activation_bytes(10_000, 1) == pytest.approx(10_000 * (KEPT - SAVED + BACKWARD + more) + padding, abs=2)
        assert value_of(MemoryModel, json.loads(json.dumps(fields_of(found.memory)))) == found.memory
        assert sum(phase.at_head for phase in found.memory.phases) == (2 if len(specs) == 4 else 1)
    keys = {probe_key(model, [*jobs, at_experts], False, cpu) for jobs in (SPECS, SPECS[:1], SPECS[:2], SPECS[2:])}
    assert len(keys) == 4


@pytest.mark.slow
def test_nothing_stays_behind() -> None:
    """No job, no gradient, no depth; and who joins afterwards trains to the same bits as without the probe."""

    def trained(probed: bool) -> torch.Tensor:
        model = make_shared()
        model.recomputed_layers = 1
        if probed:
            measured(model)
            assert model.recomputed_layers == 1 and model.bank.jobs() == []
        lora = LoraConfig(r=4, target_modules=["q_proj"])
        model.join("a", lora, TrainConfig(learning_rate=1e-2, max_steps=1, lr_scheduler_type="constant"))
        model.forward_backward(memory_probe.probe_batch(["a"], 12, model))
        model.optim_step(["a"])
        return model.state("a").params.clone()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


@pytest.mark.parametrize(("times", "sizes"), [(1, {4, 8}), (99, None)])
def test_out_of_memory(times: int, sizes: set[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller batches are tried, then none; nothing stays joined either way."""
    model, failures = make_shared(), [times]
    forward_backward = model.forward_backward

    def fail(batch: Any) -> Any:
        failures[0] -= 1
        if failures[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward_backward(batch)

    monkeypatch.setattr(model, "forward_backward", fail)
    found = probe(model, SPECS, COUNTED, Counters(model))
    assert (found and {p.num_tokens for p in found.peaks}) == sizes and model.bank.jobs() == [] and model.recomputed_layers == 0


def test_what_was_measured_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    model = make_shared()
    key = probe_key(model, SPECS, False, torch.device("cpu"))
    assert recall(key) is None
    memory = replace(COUNTED, phases=(Phase(1.5, 2.5, 0.5), Phase(3.0, 4.0)), num_layers=7, measured=True)
    remember(key, replace(memory, spanning=frozenset([AdapterLayout(())])))  # of the jobs of that run
    assert recall(key) == memory
    (file,) = (tmp_path / "memory").iterdir()
    for broken in ("", "{}", "[]", '{"phases": [{"wide": 1}]}'):
        file.write_text(broken)
        assert recall(key) is None, broken


def test_another_base_rank_mode_or_format_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cpu = make_shared(), torch.device("cpu")
    key = probe_key(model, SPECS, False, cpu)
    assert key == probe_key(make_shared(seed=1), SPECS[::-1], False, cpu), "weights and order do not matter"
    wider = SuperModel(make_base(make_model(intermediate_size=112), "llama"))
    others = {probe_key(model, SPECS[:1], False, cpu), probe_key(model, SPECS, True, cpu), probe_key(wider, SPECS, False, cpu)}
    monkeypatch.setattr(memory_probe, "_FORMAT", 0)
    assert len(others | {key, probe_key(model, SPECS, False, cpu)}) == 5
