"""NF4 (Dettmers et al., QLoRA, section 3): 16 quantiles of a normal distribution, scaled by each group's largest magnitude.

Nibbles and scales are those of `bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")`, which is not needed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlora.errors import ConfigError, ModelError
from tlora.kernels.packed_weight import PackedWeight, pack, table_on

GROUP = 64
CARD = (
    "4 bits: bitsandbytes' NF4, groups of 64, scales in fp32. To use it as it was trained, load the base with "
    '`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`; merge it into the base that this is dequantised to.'
)
_AT_ONCE = 1 << 14  # groups that are quantised at a time: 4 MiB of fp32, 20 MiB with what is made of them
TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def check(device: torch.device, dtype: torch.dtype) -> None:
    """As `frozen.WeightForm.check`."""
    if dtype == torch.float64:
        raise ConfigError("base_precision nf4 needs a base in 16 or 32 bits, and this one is float64. Set dtype: float32")


def check_widths(name: str, in_features: int, out_features: int, by_rows: bool) -> None:
    """As `frozen.WeightForm.check_widths`: any, but in a base that is cut by rows."""
    if by_rows and in_features % GROUP:
        raise ModelError(
            f"a base in parts with base_precision nf4 needs input widths that are multiples of {GROUP}, and {name} has "
            f"{in_features}. Take it out, or use GPUs that hold the whole base"
        )


def quantize(weight_NK: Tensor, value_dtype: torch.dtype) -> PackedWeight:
    """`weight_NK` in NF4, on its device; of the meta device shapes alone. Its values are rounded to `value_dtype`."""
    count, device = weight_NK.numel(), weight_NK.device
    table = table_on(TABLE, device)
    nibbles = torch.empty(-(-count // 2), dtype=torch.uint8, device=device)
    scale = torch.empty(-(-count // GROUP), dtype=torch.float32, device=device)
    if not weight_NK.is_meta:
        flat = weight_NK.reshape(-1)
        for first in range(0, len(scale), _AT_ONCE):
            groups = slice(first, min(first + _AT_ONCE, len(scale)))
            codes, scale[groups] = _quantize_groups(flat[groups.start * GROUP : groups.stop * GROUP].float(), table)
            nibbles[groups.start * GROUP // 2 :][: -(-len(codes) // 2)] = pack(codes)
    return PackedWeight(nibbles, scale, TABLE, (weight_NK.shape[0], weight_NK.shape[1]), GROUP, value_dtype, weight_NK.dtype)


def _quantize_groups(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n] and scales of fp32 numbers [n]: the nearest of the table, by its midpoints; a number on a midpoint takes the lower one."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % GROUP)).view(-1, GROUP)
    scale = padded.abs().amax(1)
    scaled = (padded * (1.0 / scale.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    return torch.bucketize(scaled.view(-1)[: len(x)], (table[:-1] + table[1:]) / 2), scale
