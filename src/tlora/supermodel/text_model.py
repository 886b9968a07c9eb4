"""The text model of a checkpoint with several modalities: its class, its decoder, and what of it is left out.

Rows are text, so towers for images and sound are never run. Modules keep their names, by which adapters are saved and PEFT finds them;
their weights are let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


def auto_class(config: Any) -> Any:
    """transformers' class that makes the model of `config`, under whose names its adapters are saved; None for a model without a causal
    head. A checkpoint of several modalities is made whole.
    """
    if has_other_modalities(config) and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else None


def model_class(config: Any) -> Any:
    """The class itself, of a config that has one."""
    return auto_class(config)._model_mapping[type(config)]


def text_class(config: Any) -> str:
    """Name of the class of a text model with a head, of a config that has other modalities."""
    kind: Any = AutoModelForCausalLM._model_mapping[type(config.get_text_config())]
    return kind.__name__


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


def leave_out_other_modalities(model: Any) -> None:
    """Let go of all weights but those of the text's decoder and head."""
    for module, name in list(_beside_text(model)):
        (module._parameters if name in module._parameters else module._buffers)[name] = None


def other_parameters(model: Any) -> list[str]:
    """Names of the weights that `leave_out_other_modalities` lets go."""
    names = {module: name for name, module in model.named_modules()}
    return [f"{names[module]}.{name}".lstrip(".") for module, name in _beside_text(model) if name in module._parameters]


def _beside_text(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """Each module that is no part of decoder or head, with the name of each tensor of its own."""
    if not has_other_modalities(model.config):
        return
    kept = {*decoder_of_text(model).modules(), output_embeddings(model)}
    for module in model.modules():
        if module not in kept:
            tensors = {**module._parameters, **module._buffers}
            yield from ((module, name) for name, tensor in tensors.items() if tensor is not None)
