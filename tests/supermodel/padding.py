"""Padding as CUDA graphs ask for it, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.cuda_graphs import Backward, Shape
from tlora.supermodel.supermodel import SuperModel

if TYPE_CHECKING:
    from tlora.kernels.pass_operations import PassState  # brings triton


class Padding:
    """In place of CUDA graphs: each pass with as many tokens, as it is."""

    busy, num_launched = False, 0

    def __init__(self, shared: SuperModel, tokens: int) -> None:
        assert shared.fast_path is not None
        self.fast, self.bank, self.tokens = shared.fast_path, shared.bank, tokens
        self.asked: list[tuple[Shape, int, int]] = []

    def size_for(self, own: Shape, most: int, launch: int, shape_of: Callable[[int], Shape], bank_version: int) -> int:
        assert shape_of(own.tokens) == own and bank_version == self.bank.version
        self.asked.append((own, most, launch))
        self.expected = shape_of(self.tokens)
        return self.tokens

    def run(self, batch: PackedBatch, state: PassState, bank_version: int, recomputed_layers: int) -> tuple[Tensor, Backward]:
        assert Shape(len(batch.input_ids_T), recomputed_layers, state.shape) == self.expected, "not the shape that it was chosen by"
        return self.fast.run(batch, state)
