"""Attention in chunks and queries scaled by position (Llama 4): together = alone = PEFT, on the kernels too; planted bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.numerics import checks, poisons
from tests.numerics.both_paths import check_family, on_both_paths
from tests.numerics.poisons import Poison
from tests.numerics.two_jobs import edges_and_late
from tests.numerics.world import Job, super_model
from tests.planted import planted
from tests.tiny import make_model
from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.kernels import library_attention
from tlora.supermodel import attention, load, query_scales
from tlora.supermodel.load import make_base

WIDER = (("hidden_size", 256), ("intermediate_size", 320), ("intermediate_size_mlp", 320))
LENGTHS = (1, 15, 16, 17, 33, 65)  # chunks have 16 tokens
TARGETS = ["q_proj", "v_proj", "o_proj", "0.feed_forward.up_proj"]  # the last is a dense layer's


def jobs() -> list[Job]:
    return edges_and_late(TARGETS, LENGTHS)


def in_attention(poison: Poison, targets: Sequence[str] = TARGETS) -> Poison:
    """Its neighbour adapts what there is beside experts."""
    lora = {"lora": LoraConfig(r=6, lora_alpha=12, target_modules=list(targets))}
    return replace(poison, shape=lambda job: replace(poison.shape(job), **lora))


POISONS = [in_attention(poison) for poison in poisons.POISONS]
NAN_GRADIENT = next(poison for poison in POISONS if poison.name == "NaN gradient")


def test_fp64_equals_peft_and_alone() -> None:
    checks.check_in_fp64("llama4", jobs())


def test_fp32_equals_alone_beside_nan() -> None:
    checks.check_in_fp32(super_model("llama4", torch.float32, WIDER), jobs(), [NAN_GRADIENT])


@pytest.mark.slow
def test_every_poison_of_a_neighbour() -> None:
    model, found = super_model("llama4", torch.float32, WIDER), jobs()
    alone = checks.all_alone(model, found)
    for poison in POISONS:
        checks.check_l2(model, found, poison, alone)


@on_both_paths
def test_on_the_kernels_as_on_the_plain_path() -> None:
    """Samples of one job with chunks that end within, at and behind them; layers with chunks and without read their own tables."""
    check_family("llama4", LENGTHS[:5:2], LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_a_generated_answer_crosses_chunks_as_the_whole_sample_does() -> None:
    """transformers' own cache and masks: the likeliest tokens are those of one pass over all of them."""
    model = make_model("llama4")
    ids = torch.arange(40, 50)[None]
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None)
        likeliest = model(input_ids=out, use_cache=False).logits[0].argmax(-1)
    assert torch.equal(out[0, 10:], likeliest[9:-1])


# -- planted bugs --------------------------------------------------------------------------------------------------------


def from_the_batch(lengths: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Chunks on the pack's grid: a sample is cut where its neighbours put it."""
    pieces: list[int] = []
    start = 0
    for length in lengths:
        while length:
            piece = min(length, chunk - start % chunk) if chunk else length
            pieces.append(piece)
            start, length = start + piece, length - piece
    return tuple(pieces)


def by_the_batch(decoder: object) -> None:
    """Positions are counted from the batch's first token, as in the layer's own code, and the probe is blind to it."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((library_attention, "cut_chunks", from_the_batch), "other logits than single ones"),
        ((library_attention, "cut_chunks", lambda lengths, chunk: tuple(lengths)), "other logits than single ones"),
        ((attention, "chunk_of", lambda module: 0), "other logits than single ones"),
        ((query_scales, "count_in_samples", by_the_batch), "other logits than single ones"),
    ],
    ids=["chunks on the pack's grid", "chunks not cut", "a layer's chunks unknown", "positions of the batch"],
)
def test_planted_bugs_are_refused_at_load(change: tuple[object, str, object], words: str) -> None:
    with planted(change), pytest.raises(ModelError, match=words):  # type: ignore[arg-type]
        make_base(make_model("llama4"), "llama4")


def test_chunks_beyond_short_samples_are_compared_at_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of 100 tokens the samples of the proof show nothing."""
    make_base(make_model("llama4", attention_chunk_size=100), "llama4")
    with planted((attention, "chunk_of", lambda module: 0)), pytest.raises(ModelError, match="token 100 of a sample does not see token 0"):
        make_base(make_model("llama4", attention_chunk_size=100), "llama4")
    monkeypatch.setattr(load, "count_in_samples", by_the_batch)
    monkeypatch.setattr(query_scales, "_SHORT", 1 << 20)
    with pytest.raises(ModelError, match="scales queries by their place in the batch"):
        make_base(make_model("llama4", attention_chunk_size=100), "llama4")
