"""DPO against TRL's own trainer, pair by pair: loss, rewards, and the gradient of every adapter weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import in_every_run
from tests.engine.test_generate import save_base
from tests.objectives.trl_trainers import LORA, TRAIN, check_gradients, learned_state, trl_trainer
from tests.tiny import make_samples
from tlora.adapters.state import AdapterState
from tlora.errors import ConfigError
from tlora.objectives import Dpo
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.supermodel import SuperModel

BETA = 0.3
LOGPROBS = 1e-4  # absolute, of a sequence's sum in fp32: some 20 tokens of -6 each
PAIRS = [
    {"prompt": "How many players?", "chosen": " There are eleven.", "rejected": " Ask somebody who knows about games."},
    {"prompt": "Name a colour.", "chosen": " A colour that I like is green.", "rejected": " No."},
    {"prompt": "Is it late?", "chosen": " Yes.", "rejected": " It is late, it is late, it is late."},
]


def _trl(base: Path, state: AdapterState, directory: Path, start: AdapterState | None = None) -> tuple[Any, dict[str, Tensor]]:
    return trl_trainer("DPO", base, state, directory, PAIRS, start, beta=BETA)


def _rows(batch: dict[str, Tensor], job_id: str = "a", normalizer: float = len(PAIRS)) -> list[BatchRow]:
    """Our units of TRL's padded batch, in which all chosen answers come before all rejected ones."""
    sequences = [
        (ids[mask.bool()].numpy(), trained[mask.bool()].numpy().astype(np.float32))
        for ids, mask, trained in zip(batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True)
    ]
    half = len(sequences) // 2
    rows: list[BatchRow] = []
    for chosen, rejected in zip(sequences[:half], sequences[half:], strict=True):
        ids, weights = (np.concatenate(parts) for parts in zip(chosen, rejected, strict=True))
        rows.append(BatchRow(job_id, ids, weights, normalizer, None, (len(chosen[0]), len(rejected[0]))))
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("continued", [False, True], ids=["new adapter", "continued adapter"])
@pytest.mark.parametrize("deterministic", in_every_run([False, True], 1), ids=["default", "deterministic"])
def test_it_is_what_trl_computes(base: Path, deterministic: bool, continued: bool, tmp_path: Path) -> None:
    """Of a job that began with an adapter, the reference is that adapter."""
    model = SuperModel.from_pretrained(str(base), deterministic=deterministic)
    state = learned_state(model, LORA, 1)
    start = learned_state(model, LORA, 2) if continued else None
    trainer, batch = _trl(base, state, tmp_path, start)
    model.join("a", LORA, TRAIN, state=state)
    if start is not None:
        model.set_reference("a", start.params)
    found = model.forward_backward(collate(_rows(batch)), {"a": Dpo(BETA)})["a"]

    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert found.mean == pytest.approx(float(loss.detach()), rel=1e-5) and float(found.weight_sum) == len(PAIRS)
    theirs = {name: float(np.mean(values)) for name, values in trainer._metrics["train"].items()}
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert float(found.metrics[name]) / len(PAIRS) == pytest.approx(theirs[name], rel=1e-4, abs=BETA * LOGPROBS), name
    check_gradients(trainer, state, model.bank.take_grad("a"))


def test_a_fresh_adapter_is_its_own_reference(base: Path) -> None:
    model = SuperModel.from_pretrained(str(base))
    model.join("a", LORA, TRAIN)
    found = model.evaluate(collate([_unit("a", 0), _unit("a", 1)]), {"a": Dpo(BETA)})["a"]
    assert found.mean == pytest.approx(np.log(2), rel=1e-6) and float(found.metrics["rewards/margins"]) == pytest.approx(0, abs=1e-5)


def _unit(job_id: str, seed: int, normalizer: float = 2.0, step: int | None = None) -> BatchRow:
    chosen, rejected = make_samples(2, seed=seed, low=6)
    ids = np.concatenate([chosen.input_ids, rejected.input_ids])
    weights = np.concatenate([chosen.loss_weights, rejected.loss_weights])
    lengths = (len(chosen.input_ids), len(rejected.input_ids))
    return BatchRow(job_id, ids, weights, normalizer, None if step is None else (7, step, seed), lengths)


@pytest.mark.parametrize("continued", in_every_run(["", "a", "b", "ab"], 1))
def test_together_is_alone_bitwise_whoever_the_neighbours_are_and_however_pairs_are_packed(base: Path, continued: str) -> None:
    """`continued`: the jobs whose reference is an adapter."""
    dropout = LORA.model_copy(update={"lora_dropout": 0.2})
    samples = [BatchRow("sft", s.input_ids, s.loss_weights, 5.0, (3, 0, i)) for i, s in enumerate(make_samples(2))]
    packings = [
        [[_unit("a", 0, step=0), _unit("a", 1, step=0)]],
        [[_unit("a", 0, step=0), *samples], [_unit("a", 1, step=0), _unit("b", 5, step=0)]],
        [[*samples, _unit("b", 5, step=0), _unit("a", 0, step=0), _unit("a", 1, step=0)]],
    ]
    found: list[tuple[Tensor, float]] = []
    for packing in packings:
        model = SuperModel.from_pretrained(str(base), deterministic=True)
        for seed, name in enumerate(("a", "b", "sft")):
            model.join(name, dropout, TRAIN, state=learned_state(model, dropout, seed))
        for seed, name in enumerate(continued):
            model.set_reference(name, learned_state(model, dropout, 5 + seed).params)
        losses = [model.forward_backward(collate(rows), {"a": Dpo(BETA), "b": Dpo(0.1)})["a"].loss_sum for rows in packing]
        found.append((model.bank.take_grad("a"), float(torch.stack(losses).sum())))
    assert float(found[0][0].norm()) > 0
    for grad, loss in found[1:]:
        assert torch.equal(grad, found[0][0]) and loss == found[0][1]


def test_neighbours_of_a_pair_train_as_without_it(base: Path) -> None:
    model = SuperModel.from_pretrained(str(base), deterministic=True)
    samples = [BatchRow("sft", s.input_ids, s.loss_weights, 5.0) for s in make_samples(2)]
    grads: list[Tensor] = []
    for rows, objectives in ((samples, {}), ([_unit("a", 0), *samples], {"a": Dpo(BETA)})):
        for name in ("a", "sft"):
            model.join(name, LORA, TRAIN)
        model.forward_backward(collate(rows), objectives)
        grads.append(model.bank.take_grad("sft"))
        for name in ("a", "sft"):
            model.leave(name)
    assert torch.equal(*grads)


def test_what_training_returns_of_log_probabilities(base: Path) -> None:
    model = SuperModel.from_pretrained(str(base))
    model.join("a", LORA, TRAIN)
    unit = _unit("a", 0)
    logprobs = model.evaluate(collate([unit]), {"a": Dpo(BETA)})["a"].logprobs_N
    assert logprobs is not None
    plain = BatchRow("a", unit.input_ids[: unit.lengths[0]], unit.loss_weights[: unit.lengths[0]])
    chosen = int(plain.loss_weights[1:].sum())
    assert -float(logprobs[:chosen].mean()) == pytest.approx(model.evaluate(collate([plain]))["a"].mean, rel=1e-5)


@pytest.mark.parametrize("case", ["a pair without its objective", "a sample with an objective of pairs"])
def test_units_that_the_objective_does_not_take(base: Path, case: str) -> None:
    sample = BatchRow("a", np.array([4, 5]), np.ones(2, np.float32))
    row, objectives = (_unit("a", 0), {}) if case.startswith("a pair") else (sample, {"a": Dpo()})
    model = SuperModel.from_pretrained(str(base))
    model.join("a", LORA, TRAIN)
    with pytest.raises(ConfigError, match=r"'a' has \d sequences.*takes \d"):
        model.forward_backward(collate([row]), objectives)
