"""What is seen of a family by running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreter import interpreted
from tests.tiny import FAMILIES, make_model
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.structure import find_attentions, find_unread

pytest.importorskip("triton")
with interpreted():
    from tlora.kernels import pass_operations  # noqa: F401  (found late by the function under test, when the variable is not set)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_adds_last_is_read_by_no_backward_unless_a_norm_lies_between(family: str) -> None:
    base = make_base(make_model(family), family)
    found = {name.rpartition(".")[2] for name in find_unread(base, find_linears(base.model))}
    assert found == (set() if family.startswith("gemma") else {"down_proj"})


@pytest.mark.parametrize(
    ("family", "windows", "capped"),
    [("llama", [0, 0], False), ("mistral", [7, 7], False), ("gemma2", [7, 0], True), ("phi3", [0, 0], False)],
)
def test_layers_tell_what_they_ask_of_attention(family: str, windows: list[int], capped: bool, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    found = find_attentions(outline(str(tmp_path), "auto", None))
    assert [tuple(q.shape) for q, *_ in found] == [(2, 4, 16)] * 2 and [tuple(k.shape) for _, k, *_ in found] == [(2, 2, 16)] * 2
    assert [window for *_, window, _ in found] == windows and [softcap > 0 for *_, softcap in found] == [capped] * 2
