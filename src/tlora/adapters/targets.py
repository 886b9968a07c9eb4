"""Which linears of a base an adapter is put at: by names and sizes alone, so that a process without torch can tell too."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from tlora.errors import ModelError
from tlora.job import LoraShape

Sizes = Mapping[str, tuple[int, int]]


def resolve(linears: Sizes, modules: Collection[str], experts: Sequence[str], lora: LoraShape) -> dict[str, tuple[int, int]]:
    """Module name -> (in, out features) of those of `linears` that `lora` adapts. `modules` are all names of the base, `experts` its
    mixture-of-experts blocks.

    A literal target matches a whole dotted name or its end, as in PEFT. Raises ModelError for a target that matches nothing
    (naming those that exist), and for experts of mixture-of-experts layers.
    """
    wanted = lora.target_modules
    names = list(linears) if wanted == "all-linear" else [n for n in linears if any(n == t or n.endswith("." + t) for t in wanted)]
    exist = sorted({name.rsplit(".", 1)[-1] for name in linears})
    for target in [] if wanted == "all-linear" else wanted:
        if not any(n == target or n.endswith("." + target) for n in linears):
            if any(n == target or n.endswith("." + target) for n in modules):
                raise ModelError(
                    f"target module {target!r} is no inner linear layer, and cannot be adapted. Choose from: {', '.join(exist)}"
                )
            close = difflib.get_close_matches(target, exist, 1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ModelError(f"target module {target!r} is not in this base model. {hint}It has: {', '.join(exist)} (or write all-linear)")
    for block in experts:
        inside = [n for n in names if n.startswith(block + ".")]
        if inside or wanted == "all-linear":
            raise ModelError(
                f"{block} is a mixture of experts, whose layers cannot be adapted yet. "
                f"Name the attention's linears in target_modules instead: {', '.join(exist)}"
            )
    for key in (*lora.rank_pattern, *lora.alpha_pattern):
        if not any(n == key or n.endswith("." + key) for n in names):
            raise ModelError(f"{key!r} in rank_pattern or alpha_pattern matches none of the adapted layers: {', '.join(exist)}")
    return {name: linears[name] for name in names}


def trained_parameters(targets: Sizes, lora: LoraShape) -> int:
    """Of an adapter at `targets`."""
    return sum(lora.rank_of(name) * (inputs + outputs) for name, (inputs, outputs) in targets.items())
