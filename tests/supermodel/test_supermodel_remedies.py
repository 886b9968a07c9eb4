"""What a caller of a super-model does wrong is said with a remedy, and the remedy helps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import make_model, make_samples
from tlora.errors import ConfigError, ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.objectives import Dpo
from tlora.planning.plan import pick_device
from tlora.supermodel.base_config import unreadable
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import check_path, make_base
from tlora.supermodel.supermodel import SuperModel

TRAIN = TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant")


@pytest.fixture
def shared() -> SuperModel:
    found = SuperModel(make_base(make_model("llama", num_hidden_layers=1), "tiny"))
    found.join("a", LoraConfig(r=4), TRAIN)
    return found


def batch_of(job_id: str) -> PackedBatch:
    rows = [BatchRow(job_id, s.input_ids, s.loss_weights, 7.0, (1, 0, i)) for i, s in enumerate(make_samples(2, low=8, high=8))]
    return collate(rows, "cpu")


def test_samples_of_a_job_that_has_not_joined(shared: SuperModel) -> None:
    with pytest.raises(ConfigError, match="samples of 'b', which has not joined. Call join first"):
        shared.forward_backward(batch_of("b"))
    shared.join("b", LoraConfig(r=2), TRAIN)
    assert torch.isfinite(shared.forward_backward(batch_of("b"))["b"].loss_sum)


def test_units_of_another_objective(shared: SuperModel) -> None:
    with pytest.raises(ConfigError, match="a unit of 'a' has 1 sequences, and its objective takes 2"):
        shared.evaluate(batch_of("a"), {"a": Dpo()})
    assert torch.isfinite(shared.evaluate(batch_of("a"))["a"].loss_sum)


def test_a_reference_of_another_shape(shared: SuperModel) -> None:
    with pytest.raises(ConfigError, match=r"Give the params of an adapter of the shape of state\('a'\)"):
        shared.set_reference("a", shared.state("a").params[1:])
    assert "a" not in shared.references
    shared.set_reference("a", shared.state("a").params)
    assert "a" in shared.references


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="Use cpu, or cuda where there is a GPU"):
        pick_device("cuda:99")
    with pytest.raises(ModelError, match=r"^device 'gpu' is not known\. Use cpu"):
        pick_device("gpu")
    assert pick_device("cpu") == torch.device("cpu")


def test_a_base_that_is_a_file_or_out_of_reach(tmp_path: Path) -> None:
    """What would help differs: a directory may be incomplete, a hub id may be wrong or the hub not there."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json: is a file\. Give a directory"):
        check_path(str(tmp_path / "config.json"))
    assert str(unreadable("org/name@main", OSError("no\nanswer."))) == (
        "base_model org/name@main: there is no such directory here, and as a hub id it cannot be read: OSError: no answer. "
        "Correct the path, or check the id and the connection (private ones need HF_TOKEN)"
    )
    assert str(unreadable(str(tmp_path), OSError("x"))).endswith("Is it a whole model directory?")
