"""What a base's layers ask of their attention, against what packed attention gives them; asked once, at load.

A few packed tokens show too little: sparse and chunked attention are dense as long as a sample is shorter than their limits. So this
compares rules. transformers describes each layer's mask as a function of two positions, which can be evaluated at any distance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from tlora.errors import ModelError
from tlora.supermodel import attention
from tlora.supermodel.attention import chunk_of, packed_attention
from tlora.supermodel.base_config import values_in_layers
from tlora.supermodel.query_scales import scales_queries

NAME = "tlora_probe"
PACKED = (attention.NAME, attention.NOTICED, NAME)
_MOST_POSITIONS = 1 << 18
# What layers hand to their attention in addition to tensors, scale, window and cap. None of it changes the attention mask.
_WITHOUT_EFFECT = {"dropout", "position_ids", "sample_positions", "use_cache", "output_attentions", "is_causal"}
_OTHERWISE = (
    "Samples longer than a limit would be trained with another attention than the model's. "
    "Use a base with full, sliding-window or chunked attention"
)

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | bool]
"""(batch, head, query position, key position) -> whether the query sees the key, as transformers writes a mask."""


def register() -> None:
    """Make both names known to transformers."""
    attention.register()
    AttentionInterface.register(NAME, probe_attention)
    AttentionMaskInterface.register(NAME, _mask_with_rule)


def _mask_with_rule(*, q_length: int, kv_length: int, mask_function: Rule, device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """A mask that carries its rule."""
    mask = torch.ones(1, 1, q_length, kv_length, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


def _rule_of(mask: Tensor | None) -> Rule | None:
    """None where a layer has made a mask of its own out of the one that it was given. A slice of all of it is no other mask."""
    whole = mask if mask is None or mask._base is None else mask._base
    return getattr(whole, "rule", None) if whole is not None and mask is not None and whole.shape == mask.shape else None


def _has_no_effect(given: object) -> bool:
    """An empty tensor is the choice of an indexer that leaves all tokens seen (`indexers.py`)."""
    return given is None or (isinstance(given, Tensor) and not given.numel())


def probe_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`packed_attention`, which raises ModelError if this layer asks for anything else at any distance up to its longest context."""
    kind = type(module).__name__
    known = {"scaling", "softcap", "sequence_lengths", "s_aux", "query_scales", *_WITHOUT_EFFECT}
    unknown = sorted(name for name, given in keywords.items() if name not in known and not _has_no_effect(given))
    if unknown or keywords.get("is_causal") is False:
        what = f"hands {', '.join(unknown)} to its attention" if unknown else "is not causal"
        raise ModelError(f"{kind} {what}, which packed attention does not do. {_OTHERWISE}")
    if scales_queries(module):
        raise ModelError(
            f"{kind} scales queries by their place in the batch, not in their sample. Use a base without attn_temperature_tuning"
        )
    rule = _rule_of(attention_mask)
    if rule is None:
        raise ModelError(f"{kind} makes an attention mask of its own, which packed attention does not use. {_OTHERWISE}")
    config: Any = getattr(module, "config", None)
    longest = max(values_in_layers(config, "max_position_embeddings"), default=0) or _MOST_POSITIONS
    wrong = _first_difference(rule, sliding_window, chunk_of(module), min(longest, _MOST_POSITIONS), query.device)
    if wrong is not None:
        raise ModelError(f"{kind} {wrong}, and packed attention does otherwise. {_OTHERWISE}")
    return packed_attention(module, query, key, value, None, sliding_window=sliding_window, **keywords)


def _first_difference(rule: Rule, window: int | None, chunk: int, positions: int, device: torch.device) -> str | None:
    """Where `rule` is not causal attention within `window` and within chunks of `chunk` tokens (0: the whole). Checked for each query
    position: itself, the next token, the farthest that it sees, the one before that, and the first of the sample.
    """
    query = torch.arange(positions, device=device)
    reach, size = window or positions, chunk or positions
    first = query // size * size
    zero = torch.zeros((), dtype=torch.long, device=device)
    for key in (query, query + 1, (query - reach + 1).clamp(min=0), query - reach, first, first - 1, torch.zeros_like(query)):
        inside = key >= 0
        q, k = query[inside], key[inside]
        asked = torch.as_tensor(rule(zero, zero, q, k), device=device).bool().expand(len(q))
        differs = asked != ((k <= q) & (q - k < reach) & (q // size == k // size))
        if bool(differs.any()):
            place = int(differs.nonzero()[0])
            seen = "sees" if bool(asked[place]) else "does not see"
            return f"asks that token {int(q[place])} of a sample {seen} token {int(k[place])}"
    return None
