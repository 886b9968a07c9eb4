"""Routers of a mixture of experts in deterministic passes on the kernels, where many samples are computed at once.

A router's own code stays in use. In a pass, the block that holds it runs within `RowsAlone`, where each product with a bare parameter and
each choice of the largest scores is ours (`kernels/row_operations.py`), by what is called and not by who calls it. There is no list of
families: a run of the base shows all that the code of its blocks computes, and what may round a row by its neighbours is refused; then
each sample is computed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tlora.errors import ConfigError
from tlora.kernels import row_operations
from tlora.supermodel.experts import Experts
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import Base
from tlora.supermodel.lora_linear import Context, LoraLinear
from tlora.supermodel.scaled_experts import why_left
from tlora.supermodel.structure import run_two_tokens

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # relative; of a library's product
_COMPANY = 130  # rows of a product, of which some are computed again by themselves
_ALONE = (slice(0, 1), slice(5, 24), slice(63, 130))
_MOVES = frozenset((
    "_to_copy", "_unsafe_view", "arange", "cat", "clone", "copy_", "detach", "embedding", "empty_like", "fill_", "full", "full_like",
    "gather", "index", "lift_fresh", "masked_fill_", "new_zeros", "ones", "ones_like", "scalar_tensor", "scatter", "scatter_", "zeros",
    "zeros_like",
))  # fmt: skip
"""Operations that move numbers and compute none."""
_OF_ROWS = frozenset(("_softmax", "amax", "mean", "sum"))
"""Operations along one dim, which must be the last: of a row by itself."""
_OURS = frozenset(("rows_linear", "largest"))


class RowsAlone(TorchFunctionMode):
    """Within it, products with a frozen weight and choices of the largest are those of `row_operations.py`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            return row_operations.linear(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            return row_operations.topk(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def routing_blocks(model: nn.Module) -> list[str]:
    """Names of the modules whose own code routes: what has experts, or a router that stands beside them in a layer."""
    return [name for name in expert_modules(model) if name.rpartition(".")[2] != "experts"]


def take_passes(model: nn.Module, context: Context) -> None:
    """From now on they compute within `RowsAlone` in passes that `context` knows by number."""
    for name in routing_blocks(model):
        module = model.get_submodule(name)
        module.forward = _alone(module.forward, context)


def _alone(forward: Callable[..., Any], context: Context) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if context.pass_number is None:
            return forward(*args, **kwargs)
        with RowsAlone():
            return forward(*args, **kwargs)

    return run


def why_not_alone(base: Base, experts: Experts, device: torch.device) -> str | None:
    """Why passes over many samples on `device` may give a row at a mixture of experts bits that depend on others, or None. All stages of a
    base say the same. Raises ConfigError for one that cannot do so.
    """
    if base.outlined is not None and experts.why_not != why_left(base.model):  # by its own weights, which other stages do not see
        raise ConfigError(f"a stage of a deterministic run cannot compute its experts as others may: {experts.why_not}. Set layout: whole")
    names = {name for name, _ in base.model.named_modules() if name.rpartition(".")[2] == "experts"}
    if experts.why_not is not None or names != {block.name for block in experts.blocks} or not experts.fit_kernels(device):
        return "its experts run in PyTorch's own operations"
    return routers_of(base, experts).why_not


def routers_of(base: Base, experts: Experts) -> RoutersSeen:
    """What they compute. It is looked at once: 48 layers on the meta device take a second or two. A stage goes by the whole base, which
    decides alike on all of them. Raises ConfigError where its own routers' products fail on its device.
    """
    if experts.routers is None:
        own = _watch(base)
        experts.routers = own if base.outlined is None else _watch(base.outlined)
        if own.why_not is not None and experts.routers.why_not is None:
            raise ConfigError(f"a stage of a deterministic run cannot compute routers as the others may: {own.why_not}. Set layout: whole")
    return experts.routers


def router_tiles(base: Base, experts: Experts) -> tuple[object, ...]:
    """Of the kernel that multiplies for them, forward and back."""
    products = routers_of(base, experts).products
    sizes = {(columns, dtype.itemsize) for inner, outer, _, dtype in products for columns in (inner, outer)}
    return tuple(row_operations.rows_tile(*size) for size in sorted(sizes))


def _watch(base: Base) -> RoutersSeen:
    """What the code of its blocks computes with two tokens."""
    seen, hooks, modules = RoutersSeen(), [], dict(base.model.named_modules())
    for name in routing_blocks(base.model):
        block = modules[name]
        hooks += [block.register_forward_pre_hook(seen.enter), block.register_forward_hook(seen.exit)]
        others = [m for m in block.modules() if isinstance(m, LoraLinear) or type(m) in (nn.Linear, HeldLinear)]
        for module in others:  # these have kernels of their own
            hooks += [module.register_forward_pre_hook(seen.leave), module.register_forward_hook(seen.come_back)]
    for name, module in modules.items():
        if name.rpartition(".")[2] == "experts":
            hooks += [module.register_forward_pre_hook(seen.route), module.register_forward_hook(seen.come_back)]
    try:
        with torch.no_grad(), _Functions(seen), _Operations(seen):
            run_two_tokens(base, (2,))
    except NotImplementedError as error:
        seen.refuse(f"computes {error}")
    finally:
        for hook in hooks:
            hook.remove()
    return seen


class RoutersSeen:
    """`why_not`: the first thing that is not understood. `products`: in and out features, whether with a bias, and dtype of each that a
    router has. As hooks, its methods say where the run is.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        self.products: dict[tuple[int, int, bool, torch.dtype], None] = {}
        self._open: list[str] = []  # blocks that run now, and "" for what is not their own code
        self._has_chosen = False

    @property
    def block(self) -> str:
        """The class whose own code runs now, or nothing."""
        return self._open[-1] if self._open else ""

    def enter(self, block: nn.Module, _args: object) -> None:
        self._open.append(type(block).__name__)

    def leave(self, _module: nn.Module, _args: object) -> None:
        self._open.append("")

    def route(self, module: nn.Module, args: object) -> None:
        """Experts are asked: a choice must have been made for them."""
        if not self._has_chosen:
            self.refuse(f"gives {type(module).__name__} experts that it did not choose by their scores")
        self._has_chosen = False
        self._open.append("")

    def exit(self, *_: object) -> None:
        self._open.pop()

    come_back = exit

    def refuse(self, why: str) -> None:
        self.why_not = self.why_not or f"{self.block or 'a router'} {why}"

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """An operation of a block's own code, with its arguments."""
        name = func._schema.name.partition("::")[2]
        if name == "largest":
            self._has_chosen = True
        elif name == "rows_linear":
            self._note_product(*args)
        elif not _is_of_rows(func, name, args):
            self.refuse(f"computes {name}")

    def _note_product(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        key = (weight_NK.shape[1], weight_NK.shape[0], bias_N is not None, x_TK.dtype)
        if x_TK.dtype not in _TOLERANCE or weight_NK.dtype != x_TK.dtype:
            self.refuse(f"computes in {str(x_TK.dtype).removeprefix('torch.')}")
        elif key not in self.products and not x_TK.is_meta and (difference := _difference(weight_NK, bias_N)) is not None:
            self.refuse(f"has another product here ({difference})")
        self.products[key] = None


def _is_of_rows(func: Any, name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation gives a row what depends on that row alone. That none reaches another sample's is proven at load (`load.py`)."""
    if name in _OURS or name in _MOVES or func.is_view or torch.Tag.pointwise in func.tags:
        return True
    if name not in _OF_ROWS or len(args) < 2 or not isinstance(args[0], Tensor) or args[0].ndim < 2:
        return False
    dims = [args[1]] if isinstance(args[1], int) else list(args[1] or ())
    return [dim % args[0].ndim for dim in dims] == [args[0].ndim - 1]


def _difference(weight_NK: Tensor, bias_N: Tensor | None) -> str | None:
    """How our product of random rows differs from a library's, or by the rows beside one, on this device; else None."""
    x_TK = torch.randn(_COMPANY, weight_NK.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_NK)
    found_TN, expected_TN = row_operations.linear(x_TK, weight_NK, bias_N), torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    norm = float(expected_TN.double().norm())
    if not float((found_TN.double() - expected_TN.double()).norm()) <= _TOLERANCE[weight_NK.dtype] * norm:
        return "another result than PyTorch's"
    alone = [row_operations.linear(x_TK[own], weight_NK, bias_N) for own in _ALONE]
    alike = all(torch.equal(rows, found_TN[own]) for rows, own in zip(alone, _ALONE, strict=True))
    return None if alike else "other bits in company"


class _Functions(RowsAlone):
    """`RowsAlone` where a block's own code runs."""

    def __init__(self, seen: RoutersSeen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._seen.block:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Notes what a block's own code computes."""

    def __init__(self, seen: RoutersSeen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._seen.block:
            self._seen.note(func, args)
        return func(*args, **(kwargs or {}))
