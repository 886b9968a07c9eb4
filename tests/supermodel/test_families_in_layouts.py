"""What a plan promises of a base in stages, shared or streamed is what a load does, with the bits of the whole, for every family."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bench.families import VOCABULARY, families, tiny
from bench.timm_towers import small_towers
from tests.supermodel.test_stage import chain, cut_of
from tests.tolerances import LOGITS, assert_close
from tlora.adapters.state import AdapterState, init_state
from tlora.errors import ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.planning.memory import may_be_cut
from tlora.shape.stages import LayerRange
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import layers_of, load_config, outline
from tlora.supermodel.stage_base import why_no_stages
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.text_model import auto_class
from tlora.supermodel.weight_files import check_weights

(FOUND,) = (Path(__file__).parents[2] / "bench/results").glob("cpu_*_families.json")
TRAINED = [row["family"] for row in json.loads(FOUND.read_text())["rows"] if row["state"] == "trained"]
IN_EVERY_RUN = ("llama4_text", "apertus", "olmo_hybrid", "opt", "zamba2", "molmo2", "roberta")
"""An embedding that is asked for its device, weights of no dims and buffers in files, a weight in parts, layers in no list, layers that
read the embedding too, linears that are one tensor in files, and positions that are counted in the batch.
"""
LORA, TRAIN = LoraConfig(r=4), TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant")
CPU = torch.device("cpu")


def batch_of(vocabulary: int) -> PackedBatch:
    rng = np.random.default_rng(0)
    rows: list[BatchRow] = []
    for number, length in enumerate((5, 19)):
        ids = rng.integers(3, min(VOCABULARY, vocabulary), length).astype(np.int32)
        rows.append(BatchRow("a", ids, np.ones(length, np.float32), 24.0, (1, 0, number)))
    return collate(rows)


def loaded(load: Callable[[], list[SuperModel]]) -> list[SuperModel] | str:
    try:
        return load()
    except ModelError as error:
        return str(error)


def gradient_of(model: SuperModel, state: AdapterState) -> torch.Tensor:
    model.join("a", LORA, TRAIN, state=state.clone())
    model.forward_backward(batch_of(model.base.vocab_size))
    return model.gradient("a")


def check_gradient(found_P: torch.Tensor, expected_P: torch.Tensor, rounds: bool = False) -> None:
    """`rounds`: experts that are held in parts are computed sorted, also for a job that leaves them alone (docs/adr/058)."""
    if rounds:
        assert_close(found_P, expected_P, LOGITS[torch.float32])
    else:
        assert torch.equal(found_P, expected_P)


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in TRAINED])
@pytest.mark.filterwarnings("ignore")  # of transformers, about configs as tiny as these
def test_a_load_does_what_the_plan_says(family: str, passing_path: Path) -> None:
    torch.manual_seed(0)
    if family not in families():
        pytest.skip("not in this transformers")
    config = tiny(families()[family])
    auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(passing_path)

    def load(shared: Streaming | LayerRange | None = None) -> SuperModel:
        return SuperModel.from_pretrained(str(passing_path), "float32", deterministic=True, shared=shared)

    try:
        check_weights(str(passing_path), load_config(str(passing_path)))
    except ModelError:  # transformers writes other names than it reads (ShieldGemma 2)
        assert isinstance(loaded(lambda: [load()]), str)
        return
    base = outline(str(passing_path), "float32")
    count, why, cut = len(layers_of(base.decoder)), why_no_stages(base, CPU), may_be_cut(SuperModel(base))
    whole = load()
    state = init_state(whole.layout(LORA), 0, torch.float32)
    state.params.add_(torch.randn(state.params.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    expected_P = gradient_of(whole, state)
    assert float(expected_P.norm()) > 0

    streamed = loaded(lambda: [load(Streaming())])
    assert bool(whole.base.why_one_by_one) == bool(base.why_one_by_one), (whole.base.why_one_by_one, base.why_one_by_one)
    assert isinstance(streamed, str) != cut, streamed
    if not isinstance(streamed, str):
        check_gradient(gradient_of(streamed[0], state), expected_P, rounds=bool(whole.experts.sizes))

    cuts = [LayerRange(0, 1, count), LayerRange(1, count, count)] if count > 1 else []
    stages = loaded(lambda: [load(each) for each in cuts])
    assert isinstance(stages, str) == bool(why) or not cuts, (why, stages)
    if why or isinstance(stages, str):
        assert isinstance(stages, str) or not cuts
        return
    links, part = chain(stages), cut_of(state, stages)
    for rank, stage in enumerate(stages):
        stage.join("a", LORA, TRAIN, state=part.state(rank, state))
    links[0].begin(batch_of(whole.base.vocab_size), [], True)
    stages[-1].forward_backward(batch_of(whole.base.vocab_size))
    check_gradient(part.put_together([stage.gradient("a") for stage in stages]), expected_P)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with small_towers():
        yield
