"""What is seen of a base by running it: which linears share an input, whose output no backward reads, what operations of passes get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tlora.supermodel.load import Base, hidden_states, layers_of
from tlora.supermodel.lora_linear import BaseLinear, LoraLinear


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
    made: dict[object, str] = {}  # by its node in autograd's graph
    added: set[object] = set()

    def note(name: str, _linear: nn.Module, _args: object, y: Tensor) -> None:
        made[y.grad_fn] = name

    def look(_layer: nn.Module, _args: object, output: Tensor | tuple[object, ...]) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        nodes = [part.grad_fn for part in parts if isinstance(part, Tensor) and part.grad_fn is not None]
        if len(nodes) == 1 and nodes[0].name() == "AddBackward0":
            added.update(before for before, _ in nodes[0].next_functions if before in made)

    hooks = [linear.register_forward_hook(partial(note, name)) for name, linear in linears.items()]
    hooks += [layer.register_forward_hook(look) for layer in layers_of(base.decoder)]
    hooks.append(base.model.get_input_embeddings().register_forward_hook(lambda _module, _args, x: x.detach().requires_grad_() * 1))
    # Of the graph only its nodes are wanted: what they would save of an fp8 base are weights in 16 bits, more than the base itself.
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda _tensor: None, lambda _nothing: torch.empty(0))
    try:
        with torch.enable_grad(), nothing:
            readers = _count_readers(run_two_tokens(base, (2,)))
    finally:
        for hook in hooks:
            hook.remove()
    calls = Counter(made.values())
    return {made[node] for node in added if readers[node] == 1 and calls[made[node]] == 1}


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
    """The arguments of each call of `packed_attention`, `packed_delta_rule` and `packed_convolution`, layer by layer. `normed`: elements of
    a token that norms read on the way from linears to attention, of all layers: those of queries and keys.
    """

    attentions: list[tuple[Any, ...]] = field(default_factory=list)
    delta_rules: list[tuple[Any, ...]] = field(default_factory=list)
    convolutions: list[tuple[Any, ...]] = field(default_factory=list)
    normed: int = 0


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

    read = dict[object, int]()  # by what a norm gave, elements of what it read

    def note(_norm: nn.Module, args: tuple[Any, ...], y: object) -> None:
        if isinstance(y, Tensor) and y.shape == args[0].shape:
            read[y.untyped_storage()._cdata] = y.numel() // 2
            kept_alive.append(y)

    def leave_out(_linear: nn.Module, args: tuple[Any, ...]) -> None:
        """A norm whose output a linear reads is made again in backward."""
        read.pop(args[0].untyped_storage()._cdata, None)

    kept_alive = list[Tensor]()  # or a freed one's storage would come again
    hooks = [norm.register_forward_hook(note) for norm in _norms_beside_linears(base)]
    hooks += [module.register_forward_pre_hook(leave_out) for module in base.model.modules() if isinstance(module, LoraLinear)]
    try:
        with torch.no_grad(), Watch():
            run_two_tokens(base, torch.tensor(0))
    finally:
        for hook in hooks:
            hook.remove()
    return replace(calls, normed=sum(read.values()))


def _norms_beside_linears(base: Base) -> list[nn.Module]:
    """Modules with weights in the same blocks as linears, but in those of recurrences."""
    linears = {name.rpartition(".")[0] for name, module in base.model.named_modules() if isinstance(module, LoraLinear)}
    recurrences = tuple(f"{layer}." for layer in base.recurrent)
    return [
        module
        for name, module in base.model.named_modules()
        if name.rpartition(".")[0] in linears and not name.startswith(recurrences)
        if not isinstance(module, LoraLinear | BaseLinear) and "weight" in dict(module.named_parameters(recurse=False))
    ]
