"""A frozen output head, and how many rows of its logits a GPU holds at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.gemm import linear

GPU_CHUNK_BYTES = 1 << 28  # of logits: 1,024 rows of Llama-3's vocabulary in bf16, 128 output tiles of the gradient's GEMM for 132 SMs
_ROW_STEP, _MAX_ROWS = 128, 4096  # rows fill a GEMM's tile of 128; past 4,096 a small vocabulary would only pad


@dataclass(frozen=True)
class Head:
    """logits = softcap * tanh(scale * (h @ weight.T + bias) / softcap); softcap None means no cap.

    Weight [V, H] and bias [V] are those of `base`, looked up each time that they are read.
    """

    base: Callable[[], FrozenLinear]
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight_VH(self) -> Tensor:  # noqa: N802
        return self.base().weight.operand()

    @property
    def bias_V(self) -> Tensor | None:  # noqa: N802
        return self.base().bias_N

    def first(self, count: int) -> Head:
        """The head of the first `count` rows, without copies."""

        def rows() -> FrozenLinear:
            return FrozenLinear(PlainWeight(self.weight_VH[:count]), None if self.bias_V is None else self.bias_V[:count])

        return replace(self, base=rows)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[T, V] in at least fp32."""
        z_TV = linear(hidden_TH, self.weight_VH, self.bias_V)
        z_TV = z_TV.float() if z_TV.dtype in (torch.bfloat16, torch.float16) else z_TV
        z_TV = z_TV.mul_(self.scale) if self.scale != 1.0 else z_TV
        return torch.tanh(z_TV.div_(self.softcap)).mul_(self.softcap) if self.softcap else z_TV


def gpu_chunk_rows(head: Head) -> int:
    """Rows of one chunk on a GPU: a function of the head alone, never of how many rows there are."""
    vocab, element_bytes = head.weight_VH.shape[0], head.weight_VH.element_size()
    return max(_ROW_STEP, min(_MAX_ROWS, GPU_CHUNK_BYTES // (vocab * element_bytes) // _ROW_STEP * _ROW_STEP))
