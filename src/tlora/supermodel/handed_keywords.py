"""Decoder layers that take keywords and hand their attention none of them (StableLM, the dense Nemotron): there the lengths of samples
travel with the rotary embedding, which such a layer hands on as it is.
"""

from __future__ import annotations

import dis
import inspect
from types import MethodType
from typing import Any

from torch import nn

_EMBEDDING = "position_embeddings"
_FOR_ATTENTION = ("sequence_lengths", "pass_number")


def hand_on_keywords(decoder: nn.Module) -> None:
    """Let the attention of such layers of `decoder` have what is for it. Layers of one class have one forward, so that torch.compile takes
    them for the same. Those of other stages, which hand hidden states on, stay as they are.
    """
    for layer in [module for module in decoder.modules() if "forward" not in vars(module)]:
        attentions = [child for child in layer.children() if _EMBEDDING in inspect.signature(type(child).forward).parameters]
        if len(attentions) == 1 and _EMBEDDING in inspect.signature(type(layer).forward).parameters and _drops_keywords(type(layer)):
            layer.forward = MethodType(_layer, layer)
            attentions[0].forward = MethodType(_attention, attentions[0])


def _drops_keywords(kind: type[nn.Module]) -> bool:
    """Whether the forward of `kind` takes any keywords and never reads them."""
    code = inspect.unwrap(kind.forward).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return all(step.argval != code.co_varnames[place] for step in dis.get_instructions(code))


def _layer(self: Any, *args: Any, position_embeddings: Any = None, **keywords: Any) -> Any:
    handed = {name: keywords[name] for name in _FOR_ATTENTION if name in keywords}
    if position_embeddings is not None and handed:
        position_embeddings = (*position_embeddings, handed)
    return type(self).forward(self, *args, position_embeddings=position_embeddings, **keywords)


def _attention(self: Any, *args: Any, position_embeddings: Any = None, **keywords: Any) -> Any:
    if position_embeddings is not None and isinstance(position_embeddings[-1], dict):
        *embeddings, handed = position_embeddings
        return type(self).forward(self, *args, position_embeddings=tuple(embeddings), **keywords, **handed)
    return type(self).forward(self, *args, position_embeddings=position_embeddings, **keywords)
