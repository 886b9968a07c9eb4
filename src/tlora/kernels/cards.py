"""What each class of GPU gets of the fused kernels: one table, by compute capability and shared memory. Does not import torch or triton.

A class is listed once all kernels of the rule compile for it within its limits (`tests/kernels/test_card_classes.py`). A GPU of no class
takes the plain path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Loads = Literal["descriptor", "pointers"]
"""How a GEMM, a shrink and a gradient's sum load their tiles: bulk copies by tensor descriptor, or asynchronous copies by pointer."""


@dataclass(frozen=True)
class CardClass:
    """GPUs that run the same kernels with the same tiles.

    `shared_memory` is what a block may take, in bytes. With `sized`, GEMMs of few tokens take smaller tiles, and micro-batches are padded
    to sizes that have a CUDA graph: both were measured, and bits compared, on Hopper cards alone.
    """

    capability: int  # 80 for 8.0
    shared_memory: int
    loads: Loads
    fp8: bool
    sized: bool = False

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"

    @property
    def smallest_rows(self) -> int:
        """Rows of the smallest tile that a GEMM in 16 bits takes, however few tokens there are (`tiles.py`)."""
        return 64 if self.sized else 128

    @property
    def shared_kib(self) -> int:
        return self.shared_memory // 1024


KIB = 1024
HOPPER = CardClass(90, 227 * KIB, "descriptor", fp8=True, sized=True)
# sm_100 is no class yet. By descriptor Triton 3.6 compiles no GEMM of one linear for it, and of two or more it makes, without a word, a
# kernel that ends at once; by pointer the gradient of keys and values spills.
CLASSES = (
    CardClass(80, 163 * KIB, "pointers", fp8=False),
    CardClass(86, 99 * KIB, "pointers", fp8=False),
    CardClass(89, 99 * KIB, "pointers", fp8=True),
    HOPPER,
    CardClass(120, 99 * KIB, "pointers", fp8=False),  # its fp8 GEMMs spill: 304 bytes of stack
)


def class_of_capability(capability: int) -> CardClass | None:
    """The class of GPUs of `capability` (80 for 8.0): the newest of its own generation that is not newer than it."""
    fitting = [card for card in CLASSES if card.capability // 10 == capability // 10 and card.capability <= capability]
    return fitting[-1] if fitting else None


def class_named(name: str) -> CardClass:
    """`sm_80` -> its class. Raises KeyError."""
    return {card.name: card for card in CLASSES}[name]
