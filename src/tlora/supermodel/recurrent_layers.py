"""Layers that carry something along a sample (gated delta rule, state space, short convolution), cut at the samples of a packed batch.

A layer's own code stays in use: its forward is bound to other globals, in which the operations that look back along the tokens run on each
sample by itself. Nothing else of these layers sees more than one token. Which names are such operations is listed; a family with
others is refused at load, where samples that reach each other are found (`load.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tlora.kernels import delta_rule
from tlora.kernels.chunk_layout import lay_out_tables
from tlora.kernels.delta_rule import CHUNK, LARGEST_KEY, fits_kernels, gated_delta_rule, shifted_convolution
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


_uncut: ContextVar[set[str] | None] = ContextVar("operations without the lengths of samples", default=None)
_IN_PASSES = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_SILU = ("silu", "swish")


def cut_at_samples(model: nn.Module) -> list[str]:
    """Let the recurrent layers of `model` start anew at each sample; their dotted names. Layers of one class have one forward, so that
    torch.compile takes them for the same.
    """
    found: list[str] = []
    bound_by_class: dict[type, FunctionType] = {}
    for name, module in model.named_modules():
        if _recurrences_of(type(module)):
            if type(module) not in bound_by_class:
                bound_by_class[type(module)] = _bound(type(module))
            module.forward = MethodType(bound_by_class[type(module)], module)
            found.append(name)
    return found


@contextmanager
def all_cut() -> Iterator[None]:
    """Raises ValueError at its end for a recurrence that ran meanwhile without the lengths of samples: the family's code hands it none."""
    token = _uncut.set(found := set())
    try:
        yield
    finally:
        _uncut.reset(token)
    if found:
        raise ValueError(
            f"in transformers {transformers.__version__} its code hands {min(found)} no lengths of samples, so it mixes them. Install a "
            "newer transformers, if its code there does (LFM2's from 5.23 on), or use another base"
        )


def _bound(kind: type[nn.Module]) -> FunctionType:
    """The forward of `kind`, whose recurrences are cut. Its globals name no module: torch.compile would take a module's own for them."""
    forward = inspect.unwrap(kind.forward)
    cut = {key: by_sample(key, inspect.unwrap(operation)) for key, operation in _recurrences_of(kind).items()}
    names = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
    bound = FunctionType(forward.__code__, names | cut, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def why_not_in_passes(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Why the recurrences of `model` in `dtype` are no operations of a pass (`kernels/recurrent_operations.py`); None where they are."""
    for name, module in model.named_modules():
        used = _recurrences_of(type(module))
        if other := [key for key in used if key not in _IN_PASSES]:
            return f"{name} has {other[0]}, which runs in PyTorch's own operations"
        if used and getattr(module, "activation", None) not in (None, *_SILU):
            return f"the kernel of a short convolution takes SiLU alone, and {name} has {module.activation}"
        if "torch_chunk_gated_delta_rule" not in used:
            continue
        if dtype.itemsize > delta_rule.WIDEST_ELEMENT:
            return f"the kernels of the gated delta rule take 16 bits, and the base is in {str(dtype).removeprefix('torch.')}"
        if (size := getattr(module, "head_k_dim", 0)) > LARGEST_KEY:
            return f"the kernels of the gated delta rule take keys of up to {LARGEST_KEY}, and those of {name} have {size}"
    return None


def recurrent_tiles(model: nn.Module, dtype: torch.dtype) -> tuple[object, ...]:
    """Of the kernels that compute the recurrences of `model` in `dtype`; nothing where none do."""
    used = {key for module in model.modules() for key in _recurrences_of(type(module))} if dtype != torch.float64 else set()
    found: list[object] = []
    if "causal_conv1d_fn" in used:
        from tlora.kernels.triton_conv import all_tiles as tiles_of_convolution

        found.append(tiles_of_convolution())
    if "torch_chunk_gated_delta_rule" in used and dtype.itemsize <= delta_rule.WIDEST_ELEMENT:
        from tlora.kernels.delta_kernels import all_tiles as tiles_of_rule

        found.append(tiles_of_rule(dtype))
    return tuple(found)


def _recurrences_of(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Those that the code of its forward names, as they stand in its globals."""
    forward = inspect.unwrap(kind.forward)
    code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return {name: known[name] for name in (code.co_names if code is not None else ()) if name in RECURRENCES and name in known}


def by_sample(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation`, known as `name`, on each sample by itself, whose lengths come as the keyword `sequence_lengths` of a model's forward.
    Without it, as for generation, it is as it was. On a GPU the gated delta rule and the convolution take all samples in one call; the pass
    behind `pass_number` knows its own.
    """
    signature, recurrence = inspect.signature(operation), RECURRENCES[name]
    names = list(signature.parameters)

    def cut(
        *args: Any, sequence_lengths: tuple[int, ...] | SampleLayout | None = None, pass_number: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if pass_number is not None:
            return _in_pass(name, {**dict(zip(names, args, strict=False)), **kwargs}, pass_number)
        if sequence_lengths is None:
            if (uncut := _uncut.get()) is not None:
                uncut.add(name)
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


def _in_pass(name: str, given: Mapping[str, Any], pass_number: Tensor) -> Any:
    """What `name` gives for the samples of a pass. Traced by torch.compile.

    The batch of one is squeezed: the gradient of an index is a tensor of its own, here with its channels outermost, which the next product
    would have to copy.
    """
    if name == "causal_conv1d_fn":
        activation, weight_CW = given.get("activation"), given["weight"]
        assert activation is None or activation in _SILU, f"a convolution with {activation} is no operation of a pass"
        x_TC = given["hidden_states"].squeeze(0).t()
        y_TC = torch.ops.tlora.packed_convolution(x_TC, weight_CW, given.get("bias"), activation is not None, pass_number)
        return y_TC.t()[None]
    assert name == "torch_chunk_gated_delta_rule" and _begins(given), f"{name} is no operation of a pass as it is called"
    q, k, v, g, beta = (given[key].squeeze(0) for key in ("query", "key", "value", "g", "beta"))
    out, _ = torch.ops.tlora.packed_delta_rule(q, k, v, g, beta, bool(given.get("use_qk_l2norm_in_kernel")), pass_number)
    return out[None], None


def _begins(given: Mapping[str, Any]) -> bool:
    """Whether samples begin with an empty state, and that of their end is not asked for."""
    return given.get("initial_state") is None and not given.get("output_final_state") and given.get("chunk_size", CHUNK) == CHUNK


def _on_gpu(name: str, given: Mapping[str, Any], lengths: tuple[int, ...] | SampleLayout) -> Any:
    """What `name` gives for all samples at once; None on a CPU, and for what is not computed so."""
    first = next(iter(given.values()))
    device, tables_on = (lengths.device, lengths.tables_on) if isinstance(lengths, SampleLayout) else (first.device, first.device)
    if not takes_all_at_once(device) or len(first) != 1:
        return None
    each = lengths.lengths if isinstance(lengths, SampleLayout) else lengths
    kernels = first.device.type == "cuda" and first.dtype != torch.float64 and runs_kernels(first.device)
    if name == "causal_conv1d_fn" and given.get("activation") in (None, *_SILU):
        x_TC, silu = first[0].t(), given.get("activation") is not None
        convolve = shifted_convolution
        if kernels:
            from tlora.kernels.triton_conv import causal_convolution as convolve  # a CPU needs no triton
        return convolve(x_TC, given["weight"], given.get("bias"), lay_out_tables(each, CHUNK, tables_on).positions, silu).t()[None]
    if name == "torch_chunk_gated_delta_rule" and _begins(given):
        q, k, v, g, beta = (given[key][0] for key in ("query", "key", "value", "g", "beta"))
        normalize = bool(given.get("use_qk_l2norm_in_kernel"))
        if kernels and fits_kernels(q, v):
            from tlora.kernels.delta_kernels import delta_rule_by_kernels

            return delta_rule_by_kernels(q, k, v, g, beta, lay_out_tables(each, CHUNK, tables_on), normalize)[None], None
        return gated_delta_rule(q, k, v, g, beta, each, normalize, tables_on)[None], None
    return None
