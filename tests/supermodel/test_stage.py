"""Stages of a base, one after another in one process: the bits of the whole base."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import INTERPRETED_ALONE, interpret
from tests.supermodel.padding import Padding
from tests.tiny import make_model, make_samples
from tlora.adapters.adamw import StepStats
from tlora.adapters.state import AdapterState, init_state
from tlora.errors import ConfigError, ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.objectives import Dpo
from tlora.shape.stages import LayerRange
from tlora.supermodel import supermodel
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import outline
from tlora.supermodel.optimizer_steps import REFUSED
from tlora.supermodel.stage import AdapterCut, Stage, StagePass
from tlora.supermodel.stage_base import check_stages
from tlora.supermodel.supermodel import SuperModel

pytestmark = INTERPRETED_ALONE
LORA = {"a": LoraConfig(r=4, lora_dropout=0.2), "b": LoraConfig(r=20, target_modules=["q_proj", "down_proj"])}
NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 1, "num_key_value_heads": 1}
FEW_LINEARS = LORA | {"a": LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "o_proj", "up_proj"])}
TRAIN = {name: TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=clip) for name, clip in (("a", 1.0), ("b", 0.0))}
Back = Callable[[Tensor], object]


class Before:
    """The stages before the last one, in this process: `Upstream` of each next one."""

    def __init__(self, stage: SuperModel) -> None:
        self.stage = stage
        self._passes: deque[StagePass] = deque()
        self._backs: deque[Back] = deque()

    def begin(self, batch: PackedBatch, compared: Sequence[str], train: bool) -> None:
        self._passes += self.stage.stage_passes(batch, compared, train)

    def receive(self, tokens: int) -> Tensor:
        each = self._passes.popleft()
        hidden_TH, back = each.run()
        assert len(hidden_TH) == tokens and each.goes_back == (back is not None)
        if back is not None:
            self._backs.append(back)
        return hidden_TH

    def send_back(self, gradient_TH: Tensor) -> None:
        self._backs.popleft()(gradient_TH)


def load(path: Path, fast: bool, layers: LayerRange | None, **options: str) -> SuperModel:
    with pytest.MonkeyPatch.context() as patch:
        if fast:
            interpret(patch)
        else:
            patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
        model = SuperModel.from_pretrained(str(path), "float32", deterministic=True, shared=layers, **options)  # type: ignore[arg-type]
    assert (model.fast_path is not None) == fast
    return model


def states_of(model: SuperModel, loras: dict[str, LoraConfig] = LORA) -> dict[str, AdapterState]:
    states: dict[str, AdapterState] = {}
    for job_id, lora in loras.items():
        state = init_state(model.layout(lora), ord(job_id), torch.float32)
        noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(job_id)))
        states[job_id] = replace(state, params=state.params + 0.05 * noise)
    return states


def batch_of(step: int | None, pairs: bool = False, count: int = 4) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in LORA:
        samples = make_samples(count, seed=ord(job_id), low=5, high=12)
        units = (
            [(2 * i, samples[2 * i : 2 * i + 2]) for i in range(count // 2)]
            if pairs and job_id == "a"
            else [(i, [s]) for i, s in enumerate(samples)]
        )
        for i, unit in units:
            ids, weights = torch.cat([torch.tensor(s.input_ids) for s in unit]), torch.cat([torch.tensor(s.loss_weights) for s in unit])
            key = None if step is None else (ord(job_id), step, i)
            lengths = tuple(len(s.input_ids) for s in unit)
            rows.append(BatchRow(job_id, ids.numpy(), weights.numpy(), 7.0, key, lengths))
    return collate(rows)


def cut_of(state: AdapterState, stages: Sequence[SuperModel]) -> AdapterCut:
    return AdapterCut(state.layout, [cast(Stage, stage.base.stage) for stage in stages])


def step_in_parts(job_id: str, cut: AdapterCut, stages: Sequence[SuperModel]) -> StepStats:
    """Of all stages, as the last one orders them; every part looks at its update first."""
    rule, steps = stages[-1].optimizer.part_rule, [stage.begin_step(job_id) for stage in stages]
    measured_RE = cut.put_together([step.measured_RE for step in steps], rule.columns)
    assert measured_RE.shape == (rule.rows, sum(map(rule.columns, cut.layout.shapes)))
    norm, clip, verdict = steps[-1].judge(measured_RE).tolist()
    checks = [bool(step.check(clip)) for step in steps]
    applied = verdict != REFUSED and not any(checks)
    stats = [step.apply(norm, clip, applied=applied) for step in steps]
    assert all(each == stats[0] for each in stats)
    return stats[0]


def check_steps(job_id: str, gradient_P: Tensor, whole: SuperModel, cut: AdapterCut, stages: Sequence[SuperModel]) -> None:
    """One that is clipped or not, one with NaN in it, and one whose update overflows where it is not clipped."""
    spoilt = gradient_P.clone()
    spoilt[len(spoilt) // 2] = math.nan
    for each, refused in ((gradient_P * 1e3, ""), (spoilt, "ab"), (gradient_P * 1e30, "b")):
        whole.set_gradient(job_id, each.clone())
        for rank, stage in enumerate(stages):
            stage.set_gradient(job_id, cut.take(rank, each))
        expected = whole.optim_step([job_id])[job_id]
        assert repr(step_in_parts(job_id, cut, stages)) == repr(expected) and expected.applied == (job_id not in refused)
        for name in ("params", "exp_avg", "exp_avg_sq"):
            parts = cut.put_together([getattr(stage.state(job_id), name) for stage in stages])
            assert torch.equal(parts, getattr(whole.state(job_id), name)), name
        assert not any(bool(stage.gradient(job_id).any()) for stage in stages)


def chain(stages: Sequence[SuperModel]) -> list[Before]:
    links = [Before(stage) for stage in stages[:-1]]
    for link, following in zip(links, stages[1:], strict=True):
        following.passes.upstream = link
    return links


@pytest.mark.parametrize(
    ("family", "layers", "fast"),
    [
        *(pytest.param(family, 3, False, marks=pytest.mark.slow) for family in ("llama", "gemma2")),
        ("llama-tied", 3, False),
        ("llama", 2, True),  # narrow, of one head and few linears, not compiled: interpreted kernels take a minute for three whole layers
        *(pytest.param(family, 3, True, marks=pytest.mark.slow) for family in ("llama", "llama-tied", "gemma2")),
    ],
)
def test_stages_compute_the_bits_of_the_whole_base(family: str, layers: int, fast: bool, tmp_path: Path) -> None:
    """Also where each stage pads a micro-batch to a size of its own, as for CUDA graphs."""
    with torch.compiler.set_stance("force_eager" if layers == 2 else "default"):
        check_bits(family, layers, fast, tmp_path)


def check_bits(family: str, layers: int, fast: bool, tmp_path: Path) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} if family == "gemma2" else {}
    small = layers == 2
    shape, loras = (NARROW, FEW_LINEARS) if small else ({}, LORA)
    make_model(family, num_hidden_layers=layers, **types, **shape).save_pretrained(tmp_path)
    whole = load(tmp_path, fast, None)
    stages = [load(tmp_path, fast, LayerRange(first, first + 1, layers)) for first in range(layers)]
    for rank, stage in enumerate(stages if fast else ()):
        assert stage.fast_path._launch_tokens == whole.fast_path._launch_tokens, "its layers alone, and their products"  # type: ignore[union-attr]
        stage.fast_path._graphs = [Padding(stage, 128 + 32 * rank)]  # type: ignore[union-attr, list-item]
    links = chain(stages)
    states = states_of(whole, loras)
    for job_id, lora in loras.items():
        whole.join(job_id, lora, TRAIN[job_id], state=states[job_id].clone())
        for rank, stage in enumerate(stages):
            stage.join(job_id, lora, TRAIN[job_id], state=cut_of(states[job_id], stages).state(rank, states[job_id]))

    for objectives in ({"a": Dpo()},) if small else ({}, {"a": Dpo()}):
        batch, evaluated = (batch_of(step, bool(objectives), 2 if small else 4) for step in (3, None))
        compared = list(objectives)
        for link in links:
            link.begin(batch, compared, True)
        expected, found = whole.forward_backward(batch, objectives), stages[-1].forward_backward(batch, objectives)
        assert {name: float(loss.loss_sum) for name, loss in found.items()} == {
            name: float(loss.loss_sum) for name, loss in expected.items()
        }
        for job_id in LORA:
            cut = cut_of(states[job_id], stages)
            gradient_P = cut.put_together([stage.gradient(job_id) for stage in stages])
            assert torch.equal(gradient_P, whole.gradient(job_id)) and float(gradient_P.norm()) > 0
            whole.zero_grad_of(job_id)
            check_steps(job_id, gradient_P, whole, cut, stages)
        for link in links:
            link.begin(evaluated, compared, False)
        alike = zip(whole.evaluate(evaluated, objectives).values(), stages[-1].evaluate(evaluated, objectives).values(), strict=True)
        assert all(torch.equal(a.loss_sum, b.loss_sum) for a, b in alike)


@pytest.mark.parametrize("precision", ["nf4"])
def test_a_stage_holds_its_own_weights_alone(precision: str, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4, "intermediate_size": 128}
    make_model("llama", **shape).save_pretrained(tmp_path)
    whole = load(tmp_path, False, None, base_precision=precision)
    stages = [load(tmp_path, False, LayerRange(first, first + 2, 4), base_precision=precision) for first in (0, 2)]
    held = [sum(p.untyped_storage().nbytes() for p in stage.model.parameters() if not p.is_meta) for stage in stages]
    total = sum(p.untyped_storage().nbytes() for p in whole.model.parameters())
    assert sum(held) <= total + 2 * 4 and max(held) < 0.75 * total
    links = chain(stages)
    links[0].begin(batch_of(None), [], False)
    for job_id, lora in LORA.items():
        state = states_of(whole)[job_id]
        whole.join(job_id, lora, TRAIN[job_id], state=state.clone())
        for rank, stage in enumerate(stages):
            stage.join(job_id, lora, TRAIN[job_id], state=cut_of(state, stages).state(rank, state))
    alike = zip(whole.evaluate(batch_of(None)).values(), stages[-1].evaluate(batch_of(None)).values(), strict=True)
    assert all(torch.equal(a.loss_sum, b.loss_sum) for a, b in alike)


def test_a_gpu_without_fused_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(supermodel, "groups_on", lambda *_: True)
    with pytest.raises(ConfigError, match="a base in stages needs the fused kernels on a GPU, and this test takes the plain path"):
        load(tmp_path, False, LayerRange(0, 1, 2))


def test_a_base_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be cut into stages: .*Load it whole, shared or streamed"):
        check_stages(outline(str(tmp_path)), torch.device("cpu"))
