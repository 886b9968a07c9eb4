"""Before a base is loaded it is known whether its samples can share a pass: the load's proof is made with drawn weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3NextConfig

from bench.families import families, tiny
from tlora.errors import ModelError
from tlora.planning.memory import measure
from tlora.supermodel import drawn_weights
from tlora.supermodel.drawn_weights import draw, why_not_packed_drawn
from tlora.supermodel.failed_proof import UnpackedError
from tlora.supermodel.load import layers_of, make_any_base, outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.text_model import auto_class, leave_out_other_modalities

ONE_BY_ONE = ("bart", "roberta", "roformer", "xlm-roberta-xl", "kosmos-2.5", "minimax", "recurrent_gemma", "glm5_next", "doge")
PACKED = ("llama", "llama4_text", "qwen3_moe", "qwen3_next", "gpt_oss", "gemma3n_text", "paligemma", "longcat_flash", "jetmoe")


@pytest.mark.parametrize("family", [*ONE_BY_ONE, *PACKED])
@pytest.mark.filterwarnings("ignore")  # of transformers, about configs as tiny as these
def test_an_outline_says_what_the_load_finds(family: str, tmp_path: Path) -> None:
    if family not in families():
        pytest.skip("not in this transformers")
    torch.manual_seed(0)
    config = tiny(families()[family])
    config.save_pretrained(tmp_path)
    model: Any = auto_class(config).from_config(config, dtype=torch.float32)
    leave_out_other_modalities(model.eval())
    counted, loaded = outline(str(tmp_path), "float32"), make_any_base(model, family)
    assert bool(counted.why_one_by_one) == bool(loaded.why_one_by_one) == (family in ONE_BY_ONE)
    if counted.why_one_by_one:
        assert counted.model.config._attn_implementation == loaded.model.config._attn_implementation
    assert measure(SuperModel(counted), 0, torch.device("cpu")).activation_bytes(64) > 0, "a pass of it runs"


def test_packed_linears_do_not_hide_it(tmp_path: Path) -> None:
    tiny(families()["roberta"]).save_pretrained(tmp_path)
    assert "other logits than single ones" in outline(str(tmp_path), "float32", "nf4").why_one_by_one


LARGE: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (lambda: LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128_256), 2),
    "deepseek": (DeepseekV3Config, 4),  # three dense layers are first
    "hybrid": (Qwen3NextConfig, 4),  # each fourth has attention
}


@pytest.mark.parametrize("case", LARGE)
def test_a_large_base_takes_little_memory(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, layers = LARGE[case]
    make().save_pretrained(tmp_path)
    monkeypatch.setattr("tlora.supermodel.load.why_not_packed_drawn", lambda *_: "")
    base = outline(str(tmp_path), "bfloat16")
    before = len(layers_of(base.decoder))
    drawn = draw(base.model, base.decoder)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*drawn.parameters(), *drawn.buffers())}
    assert sum(storages.values()) < 0.25e9 < base.num_bytes / 100
    assert len(layers_of(drawn.model)) == layers and len(layers_of(base.decoder)) == before
    assert all(parameter.is_meta for parameter in base.model.parameters())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (UnpackedError("base_model b: X gives packed samples other logits"), "X gives packed samples other logits"),
        (ModelError("base_model b: its logits are not finite"), ""),
        (ZeroDivisionError("in code of a family"), ""),
        (RuntimeError("no room"), ""),  # as it has raised in a pass without numbers, if it always does
    ],
)
def test_what_a_failed_proof_tells(error: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(_model: Any, _name: str) -> None:
        if isinstance(error, RuntimeError):
            raise UnpackedError("base_model b: X cannot run packed samples: no room") from error
        raise error

    monkeypatch.setattr(drawn_weights, "draw", lambda *_: None)
    assert why_not_packed_drawn(SimpleNamespace(model=None, decoder=None, name="b"), prove) == why
