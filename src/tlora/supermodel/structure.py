"""What is seen of a base by running it: which linears share an input, whose output no backward reads, what operations of passes get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tlora.supermodel.load import Base, hidden_states, layers_of
from tlora.supermodel.lora_linear import BaseLinear, LoraLinear

_SUMS = {"AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
_SCALES = {"MulBackward0", "DivBackward0"}  # by what needs no gradient


def run_two_tokens(base: Base, lengths: tuple[int, ...] | Tensor) -> Tensor:
    """Hidden states of two tokens."""
    device = base.head.weight_VH.device
    return hidden_states(base, torch.zeros(2, dtype=torch.long, device=device), torch.arange(2, device=device), lengths)


def find_groups(base: Base, linears: Mapping[str, BaseLinear | LoraLinear]) -> list[list[str]]:
    """Names of linears that read the very same tensor one after another, in the order in which the model calls them."""
    calls: list[tuple[str, Tensor]] = []  # holds the inputs: a freed one's identity would come again
    names = {linear: name for name, linear in linears.items()}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((names[module], args[0]))  # type: ignore[index]

    hooks = [linear.register_forward_pre_hook(note) for linear in linears.values()]
    try:
        with torch.no_grad():
            run_two_tokens(base, (2,))
    finally:
        for hook in hooks:
            hook.remove()
    from tlora.kernels.fused_linear import LARGEST_GROUP

    groups: list[list[str]] = []
    last: Tensor | None = None
    for name, x in calls:
        mine = linears[name]
        alike = groups and x is last and (linears[groups[-1][0]].bias is None) == (mine.bias is None)
        if alike and groups[-1][0].rpartition(".")[0] == name.rpartition(".")[0] and len(groups[-1]) < LARGEST_GROUP:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = x
    return groups


def find_unread(base: Base, linears: Mapping[str, BaseLinear | LoraLinear]) -> set[str]:
    """Names of linears whose output a decoder layer adds to something as its own output, and does no more with: no backward reads it."""
    graph = _trace(base, linears)
    added = set[object]()
    for nodes, _ in graph.layers:
        if len(nodes) == 1 and nodes[0].name() == "AddBackward0":
            added.update(before for before, _ in nodes[0].next_functions if before in graph.made)
    readers = _count_readers(graph.result)
    calls = Counter(graph.made.values())
    return {graph.made[node] for node in added if readers[node] == 1 and calls[graph.made[node]] == 1}


def count_kept_outputs(base: Base, linears: Mapping[str, LoraLinear]) -> int:
    """Elements of a token that decoder layers keep of their own outputs, beside what all their linears give. A layer's output is kept,
    but of it that is a sum with outputs of linears, multiplied by a number or not, backward needs the sum alone: of those with a norm or
    experts last it is one more, of those with attention beside their MLP one less.
    """
    graph = _trace(base, linears)
    readers, kept = _count_readers(graph.result), 0
    for outputs, inputs in graph.layers:
        kept += base.head.weight_VH.shape[1]
        open_nodes = list(outputs)
        while open_nodes:
            node = open_nodes.pop()
            if node not in outputs and readers[node] > 1:  # another reader needs it as it is
                continue
            if (name := graph.made.get(node)) is not None:
                kept -= linears[name].out_features
                continue
            before = [each for each, _ in node.next_functions if each is not None]
            if node not in inputs and (node.name() in _SUMS or (node.name() in _SCALES and len(before) == 1)):
                open_nodes += before
    return kept


@dataclass(frozen=True)
class _Graph:
    """Of two tokens through a base: nodes that linears `made`, by name; those of each layer's output and of what it gets; of the result."""

    made: Mapping[object, str]
    layers: list[tuple[list[Any], list[Any]]]
    result: Tensor


def _trace(base: Base, linears: Mapping[str, BaseLinear | LoraLinear]) -> _Graph:
    made: dict[object, str] = {}  # by its node in autograd's graph
    layers = list[tuple[list[Any], list[Any]]]()

    def note(name: str, _linear: nn.Module, _args: object, y: Tensor) -> None:
        made[y.grad_fn] = name

    def look(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | tuple[object, ...]) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        layers.append((_nodes(parts), _nodes((*args, *kwargs.values()))))

    hooks = [linear.register_forward_hook(partial(note, name)) for name, linear in linears.items()]
    hooks += [layer.register_forward_hook(look, with_kwargs=True) for layer in layers_of(base.decoder)]
    hooks.append(base.model.get_input_embeddings().register_forward_hook(lambda _module, _args, x: x.detach().requires_grad_() * 1))
    # Of the graph only its nodes are wanted: what they would save of an fp8 base are weights in 16 bits, more than the base itself.
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda _tensor: None, lambda _nothing: torch.empty(0))
    try:
        with torch.enable_grad(), nothing:
            return _Graph(made, layers, run_two_tokens(base, (2,)))
    finally:
        for hook in hooks:
            hook.remove()


def _nodes(values: Iterable[object]) -> list[Any]:
    return [value.grad_fn for value in values if isinstance(value, Tensor) and value.grad_fn is not None]


def _count_readers(result: Tensor) -> Counter[object]:
    """How often each node of the graph behind `result` is read by another."""
    readers: Counter[object] = Counter()
    open_nodes: list[Any] = [result.grad_fn]
    while open_nodes:
        before = [node for node, _ in open_nodes.pop().next_functions if node is not None]
        open_nodes += [node for node in dict.fromkeys(before) if node not in readers]
        readers.update(before)
    return readers


@dataclass(frozen=True)
class PassCalls:
    """The arguments of each call of `packed_attention`, `packed_delta_rule` and `packed_convolution`, layer by layer. `beside_linears`:
    elements of a token that are kept on the way from linears to attention beside what these give, of all layers: what norms of queries and
    keys read; and the queries and keys of a linear that gives the values too, whose whole output is kept for these.
    """

    attentions: list[tuple[Any, ...]] = field(default_factory=list)
    delta_rules: list[tuple[Any, ...]] = field(default_factory=list)
    convolutions: list[tuple[Any, ...]] = field(default_factory=list)
    beside_linears: int = 0


def find_calls(base: Base) -> PassCalls:
    """What the layers of a base on the meta device hand to operations of a pass (`kernels.pass_operations`, `recurrent_operations`)."""
    import tlora.kernels.pass_operations
    import tlora.kernels.recurrent_operations  # noqa: F401  (the operations are known from then on)

    calls, known = PassCalls(), torch.ops.tlora
    kept = {
        known.packed_attention: calls.attentions,
        known.packed_delta_rule: calls.delta_rules,
        known.packed_convolution: calls.convolutions,
    }

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (of_kind := kept.get(func.overloadpacket)) is not None:
                of_kind.append(args)
            return func(*args, **(kwargs or {}))

    read = dict[object, tuple[int, object]]()  # by what a norm gave, elements of what it read, and where these lie
    given = dict[object, Tensor]()  # by linears; holds the outputs, or a freed one's storage would come again
    kept_alive = list[Tensor]()

    def note(_norm: nn.Module, args: tuple[Any, ...], y: object) -> None:
        if isinstance(y, Tensor) and y.shape == args[0].shape:
            read[_place(y)] = y.numel() // 2, _place(args[0])
            kept_alive.append(y)

    def leave_out(_linear: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        """A norm whose output a linear reads is made again in backward."""
        read.pop(_place(args[0]), None)
        given[_place(y)] = y

    hooks = [norm.register_forward_hook(note) for norm in _norms_beside_linears(base)]
    hooks += [module.register_forward_hook(leave_out) for module in base.model.modules() if isinstance(module, LoraLinear)]
    try:
        with torch.no_grad(), Watch():
            run_two_tokens(base, torch.tensor(0))
    finally:
        for hook in hooks:
            hook.remove()
    for q, k, *_ in calls.attentions:  # without positions on the way, what the norm gives is made again
        read.pop(_place(q), None)
        read.pop(_place(k), None)
    parts = [args[:3] for args in calls.attentions if (wider := given.get(_place(args[2]))) is not None and wider.numel() > args[2].numel()]
    beside = sum(x.numel() // 2 for *of_scores, v in parts for x in of_scores if _place(x) != _place(v))
    beside += sum(v.numel() // 2 for v in _further_values(calls.attentions))
    whole = {_place(v) for *_, v in parts}
    return replace(calls, beside_linears=beside + sum(elements for elements, place in read.values() if place not in whole))


def _further_values(attentions: list[tuple[Any, ...]]) -> list[Tensor]:
    """Those of attentions whose queries are another's before, with values of its own (differential attention)."""
    first = dict[object, object]()
    return [v for q, _, v, *_ in attentions if first.setdefault(_place(q), _place(v)) != _place(v)]


def _place(x: Tensor) -> object:
    """The same for views of one tensor."""
    return x.untyped_storage()._cdata


def _norms_beside_linears(base: Base) -> list[nn.Module]:
    """Modules with weights in the same blocks as linears, and PyTorch's norms without, but in those of recurrences."""
    linears = {name.rpartition(".")[0] for name, module in base.model.named_modules() if isinstance(module, LoraLinear)}
    recurrences = tuple(f"{layer}." for layer in base.recurrent)
    return [
        module
        for name, module in base.model.named_modules()
        if name.rpartition(".")[0] in linears and not name.startswith(recurrences)
        if isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.GroupNorm)
        or (not isinstance(module, LoraLinear | BaseLinear) and "weight" in dict(module.named_parameters(recurse=False)))
    ]
