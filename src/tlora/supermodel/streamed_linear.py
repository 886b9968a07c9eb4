"""A frozen linear whose weight lies in a slot of a shared base (`sharing/layer_stream.py`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tlora.kernels.frozen import FrozenLinear, frozen_linear
from tlora.sharing.layer_stream import LayerStream
from tlora.sharing.layout import Piece


class StreamedLinear(nn.Module):
    """A frozen linear whose weight is looked up each time it is read. Bias and an fp8 weight's scales are held here.

    `weight` is on the meta device: shape and dtype alone.
    """

    def __init__(self, piece: Piece, bias: Tensor | None, stream: LayerStream) -> None:
        super().__init__()
        weight = torch.empty(piece.num_rows, piece.row_length, dtype=piece.dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.scale_N: Tensor | None
        scale_N = None if piece.scale_start is None else stream.scale(piece.name).clone()
        self.register_buffer("scale_N", scale_N, persistent=False)
        self.out_features, self.in_features = piece.num_rows, piece.row_length
        self._name, self._stream = piece.name, stream

    def look_up(self) -> FrozenLinear:
        """The linear as it lies now."""
        return FrozenLinear(self._stream.weight(self._name), self.bias, self.scale_N)

    def forward(self, x: Tensor) -> Tensor:
        return frozen_linear(x, self.look_up)
