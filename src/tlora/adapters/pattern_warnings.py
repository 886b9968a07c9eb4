"""What is said of `rank_pattern` and `alpha_pattern`: keys without effect, and readers that know no patterns."""

from __future__ import annotations

from collections.abc import Iterable

from tlora.adapter_shape import LoraShape, matching_keys
from tlora.adapters.layout import AdapterLayout


def pattern_warnings(lora: LoraShape, layout: AdapterLayout) -> list[str]:
    """In lines, for `check`, the log of `train` and the model card."""
    return [*_without_effect(lora, layout), *other_readers(lora, [shape.module for shape in layout.linears])]


def _without_effect(lora: LoraShape, layout: AdapterLayout) -> list[str]:
    """Keys that come too late for each module that they mean."""
    warnings: list[str] = []
    for name, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        matched = [keys for shape in layout.linears if (keys := matching_keys(pattern, shape.module))]
        counting = {keys[0] for keys in matched}
        for key in pattern:
            if key not in counting:
                earlier = next(keys[0] for keys in matched if key in keys)
                warnings.append(
                    f"{name}: {key!r} has no effect, as {earlier!r} stands before it and matches the same modules: the first counts. "
                    f"Write {key!r} above {earlier!r}"
                )
    return warnings


def other_readers(lora: LoraShape, modules: Iterable[str]) -> list[str]:
    """vLLM's reader of adapter_config.json knows r, lora_alpha and use_rslora (vllm/lora/peft_helper.py): one scale for all modules."""
    alike = lora.model_copy(update={"rank_pattern": {}, "alpha_pattern": {}}).scale_of("")
    names = list(modules)
    wrong = next((name for name in names if lora.scale_of(name) != alike), None)
    if wrong is not None:
        return [
            f"vLLM reads no rank_pattern and no alpha_pattern: it would scale {wrong} by {alike:g} in place of {lora.scale_of(wrong):g}. "
            "Serve this adapter with PEFT, or merge it into its base (PEFT's merge_and_unload)"
        ]
    largest = max((lora.rank_of(name) for name in names), default=0)
    if largest > lora.r:
        return [f"vLLM reads no rank_pattern: serve this adapter there with max_lora_rank {largest} or more"]
    return []
