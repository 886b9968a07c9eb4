"""What is seen of a family by running it."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import interpreted
from tests.tiny import FAMILIES, make_model
from tlora.kernels.frozen import FrozenLinear
from tlora.supermodel.inject import find_linears, inject
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.lora_linear import Context
from tlora.supermodel.structure import find_calls, find_unread

pytest.importorskip("triton")
with interpreted():
    from tlora.kernels import pass_operations  # noqa: F401  (found late by the function under test, when the variable is not set)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_adds_last_is_read_by_no_backward_unless_a_norm_lies_between(family: str) -> None:
    base = make_base(make_model(family), family)
    found = {name.rpartition(".")[2] for name in find_unread(base, find_linears(base.model))}
    assert found == (set() if family.startswith("gemma") else {"down_proj"})


def test_looking_holds_no_second_copy_of_an_fp8_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes a matrix in 16 bits of each linear as it is read, and would need more memory for all of them than for itself."""
    base = make_base(make_model("llama"), "llama")
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def dense(linear: FrozenLinear, _dtype: torch.dtype) -> Tensor:
        alive.append(sum(matrix() is not None for matrix in made))
        found = linear.weight.operand().detach().clone()
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(FrozenLinear, "dense", dense)
    found = find_unread(base, inject(base.model, find_linears(base.model), Context()))
    assert len(found) == 2 and len(alive) == 14 and max(alive) <= 1, alive


def test_what_a_layer_gives_twice_is_left_alone() -> None:
    """Its own output, and another one that is made of it: backward reads what was added."""
    base = make_base(make_model("llama"), "llama")

    def joined(hidden: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return hidden[0] * hidden[1] if isinstance(hidden, tuple) else hidden

    for layer in base.decoder.layers:
        forward = layer.forward
        layer.forward = lambda hidden, *args, forward=forward, **kwargs: (
            out := forward(joined(hidden), *args, **kwargs),
            torch.sigmoid(out),
        )
    norm = base.decoder.norm.forward
    base.decoder.norm.forward = lambda hidden: norm(joined(hidden))
    assert find_unread(base, find_linears(base.model)) == set()


@pytest.mark.parametrize(
    ("family", "windows", "capped"),
    [("llama", [0, 0], False), ("mistral", [7, 7], False), ("gemma2", [7, 0], True), ("phi3", [0, 0], False)],
)
def test_layers_tell_what_they_ask_of_attention(family: str, windows: list[int], capped: bool, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    found = find_calls(outline(str(tmp_path), "auto", None)).attentions
    assert [tuple(q.shape) for q, *_ in found] == [(2, 4, 16)] * 2 and [tuple(k.shape) for _, k, *_ in found] == [(2, 2, 16)] * 2
    assert [window for *_, window, _, _, _ in found] == windows and [softcap > 0 for *_, softcap, _, _ in found] == [capped] * 2
