"""KTO against TRL's own trainer, on a batch of its own making: loss, KL, rewards, and the gradient of every adapter weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.cases import in_every_run
from tests.engine.test_generate import save_base
from tests.objectives.trl_trainers import LORA, TRAIN, check_gradients, learned_state, trl_trainer
from tlora.adapters.state import AdapterState
from tlora.objectives import Kto, Unit
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.supermodel import SuperModel

KTO = Kto(0.3, desirable_weight=1.5, undesirable_weight=0.75)
ANSWERS = [
    {"prompt": "How many players?", "completion": " There are eleven.", "label": True},
    {"prompt": "How many players?", "completion": " Ask somebody who knows about games.", "label": False},
    {"prompt": "Name a colour.", "completion": " A colour that I like is green.", "label": True},
    {"prompt": "Is it late?", "completion": " It is late, it is late, it is late.", "label": False},
    {"prompt": "Name a colour, any colour that you know.", "completion": " No.", "label": False},
]


def _trl(
    base: Path, state: AdapterState, directory: Path, answers: list[dict[str, Any]], start: AdapterState | None = None
) -> tuple[Any, dict[str, Tensor]]:
    weights = {"desirable_weight": KTO.desirable_weight, "undesirable_weight": KTO.undesirable_weight}
    return trl_trainer("KTO", base, state, directory, answers, start, beta=KTO.beta, **weights)


def _units(batch: dict[str, Tensor]) -> list[Unit]:
    """Our units of TRL's padded batch."""
    found = zip(batch["input_ids"], batch["attention_mask"], batch["completion_mask"], batch["label"], strict=True)
    return [
        Unit(ids[mask.bool()].numpy(), (trained[mask.bool()] * (1 if wanted else -1)).numpy().astype(np.float32))
        for ids, mask, trained, wanted in found
    ]


def _rows(units: list[Unit]) -> list[BatchRow]:
    return [BatchRow("a", unit.input_ids, unit.loss_weights, len(units)) for unit in units]


def _given(model: SuperModel, units: list[Unit]) -> Kto:
    """The objective of a batch of `units`, as a run measures it."""
    statistic = KTO.statistic
    longest = max(len(unit.input_ids) for unit in units) + 99
    measured = [statistic.unit(own, before, longest) for own, before in zip(units, [units[-1], *units[:-1]], strict=True)]
    found = model.evaluate(collate(_rows(measured)), {"a": statistic})["a"]
    return statistic.objective(found.loss_sum / found.weight_sum)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("kept", [(0, 1, 2, 3, 4), (0, 2), (1, 3, 4)], ids=["both kinds", "wanted alone", "unwanted alone"])
@pytest.mark.parametrize(("seed", "continued"), in_every_run([(1, False), (10, False), (1, True)], 2))
def test_it_is_what_trl_computes(base: Path, kept: tuple[int, ...], seed: int, continued: bool, tmp_path: Path) -> None:
    """Of a job that began with an adapter, the reference is that adapter."""
    model = SuperModel.from_pretrained(str(base))
    state = learned_state(model, LORA, seed)
    start = learned_state(model, LORA, 2) if continued else None
    trainer, batch = _trl(base, state, tmp_path, [ANSWERS[i] for i in kept], start)
    model.join("a", LORA, TRAIN, state=state)
    if start is not None:
        model.set_reference("a", start.params)
    units = _units(batch)
    objective = _given(model, units)
    found = model.forward_backward(collate(_rows(units)), {"a": objective})["a"]

    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert found.mean == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = {name: float(np.mean(values)) for name, values in trainer._metrics["train"].items()}
    ours = objective.summarise({name: float(value) / len(units) for name, value in found.metrics.items()})
    assert set(ours) == {name for name in theirs if name == "kl" or name.startswith("rewards/")}
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), name
    check_gradients(trainer, state, model.bank.take_grad("a"))


def test_a_kl_above_zero_is_among_the_cases(base: Path, tmp_path: Path) -> None:
    """Where it is below zero it counts as zero: the comparison above must have seen both."""
    found: list[bool] = []
    for seed in (1, 10):
        model = SuperModel.from_pretrained(str(base))
        state = learned_state(model, LORA, seed)
        model.join("a", LORA, TRAIN, state=state)
        for kept in ((0, 1, 2, 3, 4), (0, 2), (1, 3, 4)):
            _, batch = _trl(base, state, tmp_path, [ANSWERS[i] for i in kept])
            kl = _given(model, _units(batch)).kl
            assert kl is not None
            found.append(float(kl) > 0)
    assert any(found) and not all(found)


def test_a_measured_unit_is_a_prompt_with_the_answer_before_cut_at_the_end() -> None:
    own = Unit(np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1], np.float32))
    before = Unit(np.array([5, 6, 7, 8, 9]), np.array([0, -1, -1, 0, -1], np.float32))
    found = KTO.statistic.unit(own, before, 5)
    assert found.input_ids.tolist() == [1, 2, 6, 7, 8] and found.loss_weights.tolist() == [0, 0, 1, 1, 0]
