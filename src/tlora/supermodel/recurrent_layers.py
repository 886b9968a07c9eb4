"""Layers that carry something along a sample (gated delta rule, state space, short convolution), cut at the samples of a packed batch.

A layer's own code stays in use: its forward is bound to other globals, in which the operations that look back along the tokens run on each
sample by itself. Nothing else of these layers sees more than one token. Which names are such operations is listed; a family with
others is refused at load, where samples that reach each other are found (`load.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tlora.kernels.chunk_layout import lay_out_chunks
from tlora.kernels.delta_rule import CHUNK, gated_delta_rule, shifted_convolution
from tlora.kernels.device import runs_kernels
from tlora.kernels.library_attention import SampleLayout


@dataclass(frozen=True)
class Recurrence:
    """An operation of transformers: `inputs` have an entry for each token in dim `time`, and so has the (first) result."""

    time: int
    inputs: frozenset[str]


_DELTA_RULE = Recurrence(1, frozenset(("query", "key", "value", "g", "beta")))
_SCANNED = frozenset(("hidden_states", "dt", "B", "C", "z"))
RECURRENCES: Mapping[str, Recurrence] = {
    "causal_conv1d_fn": Recurrence(2, frozenset(("hidden_states",))),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Recurrence(1, _SCANNED),
    "mamba_selective_scan": Recurrence(2, _SCANNED),
}
"""By the names that modeling files call them by."""


def cut_at_samples(model: nn.Module) -> list[str]:
    """Let the recurrent layers of `model` start anew at each sample; their dotted names."""
    found: list[str] = []
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        used = _recurrences_of(forward)
        if used:
            cut = {key: by_sample(key, inspect.unwrap(operation)) for key, operation in used.items()}
            bound = FunctionType(
                forward.__code__, {**forward.__globals__, **cut}, forward.__name__, forward.__defaults__, forward.__closure__
            )
            bound.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(bound, module)
            found.append(name)
    return found


def _recurrences_of(forward: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Those that a forward's code names, as they stand in its globals."""
    code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return {name: known[name] for name in (code.co_names if code is not None else ()) if name in RECURRENCES and name in known}


def by_sample(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation`, known as `name`, on each sample by itself, whose lengths come as the keyword `sequence_lengths` of a model's forward.
    Without it, as for generation, it is as it was. On a GPU the gated delta rule and the convolution take all samples in one call.
    """
    signature, recurrence = inspect.signature(operation), RECURRENCES[name]

    def cut(*args: Any, sequence_lengths: tuple[int, ...] | SampleLayout | None = None, **kwargs: Any) -> Any:
        if sequence_lengths is None:
            return operation(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        rest = given.pop("kwargs", {})  # what is for attention
        lengths = sequence_lengths.lengths if isinstance(sequence_lengths, SampleLayout) else sequence_lengths
        if (result := _on_gpu(name, given, sequence_lengths)) is not None:
            return result
        tokens = {name: value for name, value in given.items() if name in recurrence.inputs and value is not None}
        # contiguous, or how a sample lies in the batch would choose between loops that round differently
        parts = {name: [part.contiguous() for part in value.split(lengths, recurrence.time)] for name, value in tokens.items()}
        results: list[Any] = [
            operation(**{**given, **{name: part[i] for name, part in parts.items()}}, **rest) for i in range(len(lengths))
        ]
        if isinstance(results[0], Tensor):
            return torch.cat(results, recurrence.time)
        return torch.cat([result[0] for result in results], recurrence.time), *results[0][1:]

    return cut


def takes_all_at_once(device: torch.device) -> bool:
    """Whether all samples of a batch are computed in one call where there is one for that."""
    return device.type == "cuda"


def _on_gpu(name: str, given: Mapping[str, Any], lengths: tuple[int, ...] | SampleLayout) -> Any:
    """What `name` gives for all samples at once; None on a CPU, and for what is not computed so."""
    first = next(iter(given.values()))
    device, tables_on = (lengths.device, lengths.tables_on) if isinstance(lengths, SampleLayout) else (first.device, first.device)
    if not takes_all_at_once(device) or len(first) != 1:
        return None
    each = lengths.lengths if isinstance(lengths, SampleLayout) else lengths
    if name == "causal_conv1d_fn" and given.get("activation") in (None, "silu", "swish"):
        x_TC = first[0].t()
        positions_T = lay_out_chunks(each, CHUNK, tables_on).positions
        convolve = _convolution(x_TC)
        y_TC = convolve(x_TC, given["weight"], given.get("bias"), positions_T, given.get("activation") is not None)
        return y_TC.t()[None]
    begins = given.get("initial_state") is None and not given.get("output_final_state") and given.get("chunk_size", CHUNK) == CHUNK
    if name == "torch_chunk_gated_delta_rule" and begins:
        q, k, v, g, beta = (given[key][0] for key in ("query", "key", "value", "g", "beta"))
        return gated_delta_rule(q, k, v, g, beta, each, given.get("use_qk_l2norm_in_kernel", False), tables_on)[None], None
    return None


def _convolution(x_TC: Tensor) -> Callable[..., Tensor]:
    if x_TC.device.type == "cuda" and x_TC.dtype != torch.float64 and runs_kernels(x_TC.device):
        from tlora.kernels.triton_conv import causal_convolution  # a CPU needs no triton

        return causal_convolution
    return shifted_convolution
