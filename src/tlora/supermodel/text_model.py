"""The text model of a checkpoint with several modalities: its class, its decoder, and what of it is left out.

Rows are text, so towers for images and sound are never run. Modules keep their names, by which adapters are saved and PEFT finds them;
their weights are let go.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

_OF_CODE = (TypeError, ValueError, AttributeError, RuntimeError, LookupError, AssertionError, ImportError)
"""What a family's own code raises."""


def auto_class(config: Any) -> Any:
    """transformers' class that makes the model of `config`, under whose names its adapters are saved; None for a model without a causal
    head, and for one with several text models, none of which is the one (MusicGen). A checkpoint of several modalities is made whole. A
    model of text may be among those of images alone (Mistral4ForCausalLM).
    """
    classes: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    try:
        if has_other_modalities(config):
            classes.reverse()
    except ValueError:
        return None
    return next((each for each in classes if type(config) in each._model_mapping), None)


def model_class(config: Any) -> Any:
    """The class itself, of a config that has one."""
    return auto_class(config)._model_mapping[type(config)]


def text_class(config: Any) -> str:
    """Name of the class of a text model with a head, of a config that has other modalities."""
    kind: str = model_class(config.get_text_config()).__name__
    return kind


def has_other_modalities(config: Any) -> bool:
    """Whether the text model's config is a part of `config`."""
    return config.get_text_config() is not config


def decoder_of_text(model: Any) -> Any:
    """Of a model with other modalities: the part that ends at the last norm."""
    decoder = model.get_decoder()
    if decoder.get_output_embeddings() is None:
        return decoder
    return getattr(decoder, "model", decoder.base_model)  # Llama 4 wraps a model with a head, and names a prefix that it does not have


def output_embeddings(model: Any) -> Any:
    """The output head's module, of a wrapper that names none its text model's; None: there is none."""
    own = model.get_output_embeddings()
    return own if own is not None or not has_other_modalities(model.config) else model.get_decoder().get_output_embeddings()


def _other_modules(model: Any) -> list[nn.Module]:
    """Of a model with other modalities, all modules but those of the text's decoder and head."""
    if not has_other_modalities(model.config):
        return []
    kept = {*decoder_of_text(model).modules(), output_embeddings(model)}
    return [module for module in model.modules() if module not in kept]


def leave_out_other_modalities(model: Any) -> None:
    """Let go of all weights but those of the text's decoder and head, and of what else a pass over text runs."""
    for module, name in list(_beside_text(model)):
        (module._parameters if name in module._parameters else module._buffers)[name] = None


def other_parameters(model: Any) -> list[str]:
    """Names of the weights that `leave_out_other_modalities` lets go."""
    names = {module: name for name, module in model.named_modules()}
    return [f"{names[module]}.{name}".lstrip(".") for module, name in _beside_text(model) if name in module._parameters]


def runs_more(model: Any) -> bool:
    """Of a model without its other modalities: whether a pass over text runs modules with weights that are no decoder's and no head's."""
    return any(weight is not None for module in _other_modules(model) for weight in module._parameters.values())


def _beside_text(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """Each module that no pass over text runs, with the name of each tensor of its own."""
    if not has_other_modalities(model.config):
        return
    names = {module: name for name, module in model.named_modules()}
    run = _run_by_text(_Told(repr(model.config), model.config))
    for module in _other_modules(model):
        if names[module] not in run:
            tensors = {**module._parameters, **module._buffers}
            yield from ((module, name) for name, tensor in tensors.items() if tensor is not None)


@dataclass(frozen=True)
class _Told:
    """A config, told from others by its text."""

    text: str
    config: Any = field(compare=False)


@lru_cache(8)  # a run asks before it plans, as it compares files and as it loads
def _run_by_text(told: _Told) -> frozenset[str]:
    """Names of the modules with weights, but for decoder and head, that the own forward of a model runs over a text's tokens: Gemma 3n
    looks each token up in embeddings of images and sound too. Found without weights; where that does not run, none.
    """
    config, found = copy.deepcopy(told.config), set[str]()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"), suppress(*_OF_CODE), warnings.catch_warnings(action="ignore"), torch.no_grad():
        twin = auto_class(config).from_config(config, attn_implementation="eager").eval()
        names = {module: name for name, module in twin.named_modules()}
        for module in _other_modules(twin):
            if module._parameters:
                module.register_forward_pre_hook(lambda module, _args: found.add(names[module]))
        twin(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return frozenset(found)
