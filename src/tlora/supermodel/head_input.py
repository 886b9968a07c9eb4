"""The output head, and what a family does between its decoder and its head, or before its decoder: nothing in most, a dense layer and a
norm in ModernBERT's decoder, a division in Inkling, more embeddings in Gemma 3n. Where there is anything, passes run it as far as the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tlora.errors import ModelError
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.head import Head
from tlora.supermodel.text_model import output_embeddings, runs_more


def find_head(model: Any, name: str) -> Head:
    """The output head with what its family does to logits, in the dtype of the layers: HY-V4 keeps it in float32. Raises ModelError when it
    is no linear layer.
    """
    embeddings = output_embeddings(model)
    if not isinstance(embeddings, nn.Linear):
        is_one = f"is {type(embeddings).__name__}, and must be a linear layer"
        raise ModelError(f"base_model {name}: its output head {is_one}. Use a causal language model")
    if embeddings.weight.dtype == torch.float32 and model.dtype in (torch.bfloat16, torch.float16):
        embeddings.to(model.dtype)
    config = model.config.get_text_config()
    scales = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier"))
    scale = next((scale for scale in scales if scale), 1.0 / (getattr(config, "logits_scaling", None) or 1.0))
    return Head(
        lambda: FrozenLinear(PlainWeight(embeddings.weight), embeddings.bias),
        scale,
        getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),  # the latter RecurrentGemma's
    )


@dataclass
class HeadObservation:
    """What passes of a whole model show. `whole_model`: it does more than its decoder and its head; `columns`: of the last logits, None
    where no head ran; `untouched`: these are what the head's layer gave.
    """

    whole_model: bool = False
    columns: int | None = None
    untouched: bool = False


@contextmanager
def look_at_head(model: Any, decoder: nn.Module) -> Iterator[HeadObservation]:
    """Watches the passes of `model` within it."""
    found, given, made = HeadObservation(runs_more(model)), list[Tensor](), list[Tensor]()

    def from_decoder(_decoder: nn.Module, _args: object, output: Any) -> None:
        given[:] = [output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]]

    def into_head(_head: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.whole_model |= bool(given) and _storage(args[0]) != _storage(given[0])

    def out_of_head(_head: nn.Module, _args: object, logits: Tensor) -> None:
        made[:] = [logits]

    def out_of_model(_model: nn.Module, _args: object, output: Any) -> None:
        found.columns = output.logits.shape[-1]
        found.untouched = bool(made) and _storage(output.logits) == _storage(made[0])

    hooks = [
        decoder.register_forward_hook(from_decoder),
        output_embeddings(model).register_forward_pre_hook(into_head),
        output_embeddings(model).register_forward_hook(out_of_head),
        model.register_forward_hook(out_of_model),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def as_seen(base: Any, look: HeadObservation) -> Any:
    """`base` with what passes have shown of its head: of one with more rows than the model gives logits, the first are its own (Inkling's
    vocabulary is padded). One that scales what its head gets, and not its logits (MiniCPM3), is decoder and head: ours scales these.
    """
    head, count = base.head, look.columns
    if count is not None and count < len(head.weight_VH):
        head = head.first(count)
    scales_before = look.untouched and head.scale != 1.0
    return replace(base, head=head, whole_model=look.whole_model and not scales_before)


def input_of_head(model: Any, **inputs: Any) -> Tensor:
    """Hidden states [1, T, H] that the head of `model` gets in a pass over `inputs`. The head itself is not run: what the model does with
    logits, it does with none.
    """
    head, got = output_embeddings(model), list[Tensor]()

    def take(hidden_1TH: Tensor) -> Tensor:
        got.append(hidden_1TH)
        return hidden_1TH[..., :0]

    assert "forward" not in vars(head), f"the head of {type(model).__name__} has a forward of its own"
    head.forward = take
    try:
        model(**inputs)
    finally:
        del head.forward
    return got[0]


def _storage(x: Tensor) -> object:
    """The same for a tensor and its views."""
    return x.untyped_storage()._cdata
