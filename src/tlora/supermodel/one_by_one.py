"""Bases of which samples cannot share a pass (positions counted in the batch, attention with a mask of its own, layers that carry something
along the tokens): each sample goes by itself, through transformers' own attention. Slower than packed samples, and right for any decoder.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tlora.errors import ModelError, first_line
from tlora.supermodel import attention
from tlora.supermodel.failed_proof import relative_difference, why_not_finite
from tlora.supermodel.head_input import as_seen, look_at_head
from tlora.supermodel.inject import expert_modules, find_linears

OF_FAMILIES = (TypeError, ValueError, AttributeError, RuntimeError, LookupError, AssertionError)
"""What a family's own code raises."""
_BEHIND = 1e-3
"""Relative difference that other tokens behind some may make in these, in any dtype: the same kernels compute both, and no family that is
trained shows any on a CPU in bf16. There XLM, an encoder, shows 8e-3, which is less than rounding between kernels.
"""
_IMPLEMENTATIONS = ("sdpa", "eager")  # the first that gives the eager one's logits: eager attention keeps the square of a sample


@torch.no_grad()
def prove_one_by_one(base: Any, ids: Sequence[Tensor], tolerance: float) -> Any:
    """Let `base.model` run each of the samples `ids` [L] by itself: with an attention that gives its eager one's logits through our head,
    the same bits whatever ran before, and tokens that see none behind them. The base, with what it shows of its head.

    Raises ModelError, and what the family's code raises.
    """
    kind = type(base.model).__name__
    base.model.set_attn_implementation("eager")
    with look_at_head(base.model, base.decoder) as look:
        expected = [base.model(input_ids=i[None], use_cache=False).logits[0].float() for i in ids]
    base = as_seen(base, look)
    if not all(bool(logits.isfinite().all()) for logits in expected):
        raise ModelError(why_not_finite(base))
    difference, found = float("inf"), list[Tensor]()
    for name in _IMPLEMENTATIONS:
        if not takes(base.model, name):
            continue
        found = [hidden_of(base, i) for i in (*ids, *ids)]
        logits = [base.head.logits(hidden_TH).float() for hidden_TH in found[: len(ids)]]
        difference = max(relative_difference(mine, own) for mine, own in zip(logits, expected, strict=True))
        if difference <= tolerance:
            break
    else:
        raise ModelError(
            f"{kind} gives other logits than its decoder and head (relative difference {difference:.1e}), so its loss is another. "
            "Use another base"
        )
    if not all(torch.equal(first, again) for first, again in zip(found[: len(ids)], found[len(ids) :], strict=True)):
        raise ModelError(f"{kind} gives a sample other hidden states the second time. Use another base")
    whole, half = ids[0], len(ids[0]) // 2
    changed = torch.cat([whole[:half], (whole[half:] + 1) % base.vocab_size])
    seen = hidden_of(base, changed)[:half]
    if relative_difference(found[0][:half], seen) > min(tolerance, _BEHIND):
        told = (
            ""
            if getattr(base.model.config, "is_decoder", True)
            else ", or, if it was trained as one, set is_decoder: true in its config.json"
        )
        raise ModelError(f"{kind} lets tokens see those behind them, so it is no decoder. Use a causal language model{told}")
    _check_linears(base, whole)
    return base


def _check_linears(base: Any, ids_T: Tensor) -> None:
    """Raise ModelError for a linear that sees other rows than the tokens: whose they are is not known to its adapter. Rows of zeros are
    nobody's (ZAYA's, in the place of the token before the first), and any adapter gives zeros for them. And for code through
    which no gradient comes to linears, as Reformer's reversible layers, which compute without autograd where what they get needs none: an
    adapter there would stay as it was.
    """
    blocks = tuple(f"{block}." for block in expert_modules(base.model))
    strange, zero = list[str](), torch.zeros((), device=ids_T.device, requires_grad=True)

    def adapt(name: str, _linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = args[0].shape[:-1].numel()
        if rows != len(ids_T) and not name.startswith(blocks) and bool(args[0].any()):
            strange.append(f"{name} sees {rows} rows of a sample of {len(ids_T)} tokens, and so has no adapter. Use another base")
        return output + zero

    hooks = [linear.register_forward_hook(partial(adapt, name)) for name, linear in find_linears(base.model).items()]
    try:
        with torch.enable_grad():
            reached = hidden_of(base, ids_T).requires_grad
    finally:
        for hook in hooks:
            hook.remove()
    if strange:
        raise ModelError(strange[0])
    if not reached:
        raise ModelError(f"{type(base.model).__name__} lets no gradient through to its linear layers. Use another base")


def why_not_together(base: Any, run: Callable[[Any], object], prove: Callable[[Any], str] = lambda _: "") -> str:
    """Of a base on the meta device: why `run`, a pass over it, fails where it does not with samples one by one, or `prove` says that what
    runs is wrong; "": neither. The model then has an attention with which single samples run. A pass that never comes to packed attention
    fails, but for one through recurrent layers alone: nothing would keep its samples apart.
    """
    before = base.model.config._attn_implementation
    try:
        with attention.noticed(base.model) as calls:
            run(base)
        if not calls and not base.recurrent:
            raise ModelError("its attention is not called through transformers' AttentionInterface")
        why = prove(base)
    except OF_FAMILIES as error:
        why = f"{type(base.model).__name__} cannot run packed samples: {first_line(error)}"
    for name in _IMPLEMENTATIONS if why else ():
        with suppress(*OF_FAMILIES):
            if takes(base.model, name):
                run(replace(base, why_one_by_one=why))
                return why
    takes(base.model, before)
    return ""


def hidden_of(base: Any, ids_T: Tensor) -> Tensor:
    """Hidden states [T, H] of one sample, as the family's own code has them."""
    hidden_TH: Tensor = base.hidden(input_ids=ids_T[None], use_cache=False)
    return hidden_TH


def takes(model: Any, implementation: str) -> bool:
    """Whether `model` has that attention, which it then takes."""
    with warnings.catch_warnings(action="ignore"):
        try:
            model.set_attn_implementation(implementation)
        except (ValueError, ImportError):
            return False
    return True
