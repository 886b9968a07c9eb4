"""Layers that hand their attention no keywords (StableLM, dense Nemotron): together = alone = PEFT, on the kernels too; planted bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from tests.numerics import checks, poisons
from tests.numerics.both_paths import check_family, on_both_paths
from tests.numerics.two_jobs import edges_and_late
from tests.numerics.world import Job, super_model
from tests.planted import planted
from tests.tiny import WITHOUT_KEYWORDS, make_model
from tlora.errors import ModelError
from tlora.supermodel import handed_keywords
from tlora.supermodel.handed_keywords import hand_on_keywords
from tlora.supermodel.load import layers_of, make_base

WIDER = (("hidden_size", 256), ("intermediate_size", 320))
EVERY_RUN = "stablelm"


def jobs() -> list[Job]:
    return edges_and_late("all-linear", (1, 33, 5, 2))


@pytest.mark.parametrize("family", WITHOUT_KEYWORDS)
def test_fp64_equals_peft_and_alone(family: str) -> None:
    checks.check_in_fp64(family, jobs())


@pytest.mark.slow
@pytest.mark.parametrize("family", WITHOUT_KEYWORDS)
def test_fp32_equals_alone_beside_every_poison(family: str) -> None:
    checks.check_in_fp32(super_model(family, torch.float32, WIDER), jobs(), poisons.POISONS)


@on_both_paths
@pytest.mark.parametrize("family", WITHOUT_KEYWORDS)
def test_on_the_kernels_as_on_the_plain_path(family: str) -> None:
    check_family(family)


@pytest.mark.parametrize("family", WITHOUT_KEYWORDS)
def test_a_layer_is_compiled_whole_with_what_is_for_its_attention(family: str) -> None:
    seen: list[Any] = []

    def note(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, pass_number: Any = None, **rest: Any
    ) -> tuple[Tensor, None]:
        return query.transpose(1, 2) + pass_number, None

    AttentionInterface.register("noted", note)
    base = make_base(make_model(family), family)
    layer: Any = layers_of(base.decoder)[0]
    base.model.set_attn_implementation("noted")
    x, angles = torch.randn(1, 5, 64), base.decoder.rotary_emb(torch.randn(1, 5, 64), torch.arange(5)[None])
    for run in (layer.forward, torch.compile(layer.forward, backend="eager", fullgraph=True)):
        seen.append(run(x, position_embeddings=angles, pass_number=torch.tensor(1000.0)))
    assert torch.equal(*seen) and float(seen[0].abs().max()) > 10


def test_other_layers_are_as_they_were() -> None:
    decoder = make_model("llama").model
    hand_on_keywords(decoder)
    assert not any("forward" in vars(module) for module in decoder.modules())


@pytest.mark.parametrize("family", WITHOUT_KEYWORDS)
@pytest.mark.parametrize("change", [("hand_on_keywords", lambda decoder: None), ("_FOR_ATTENTION", ())], ids=["not at all", "nothing"])
def test_planted_bugs_are_refused_at_load(family: str, change: tuple[str, object]) -> None:
    with planted((handed_keywords, *change)), pytest.raises(ModelError, match="does not hand keyword arguments to its attention"):
        make_base(make_model(family), family)
