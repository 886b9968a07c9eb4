"""A frozen linear whose weight lies in a slot of a shared base (`sharing/layer_stream.py`)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from tlora.kernels.frozen import FrozenLinear, FrozenWeight, frozen_linear
from tlora.sharing.layer_stream import LayerStream


class StreamedLinear(nn.Module):
    """The frozen linear `name`, whose weight is looked up each time it is read. The bias is held here.

    `form` is the weight on the meta device, and so are the parameters: shapes and dtypes alone.
    """

    def __init__(self, name: str, form: FrozenWeight, bias: Tensor | None, stream: LayerStream) -> None:
        super().__init__()
        for key, tensor in form.tensors.items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = form.shape
        self.form, self._name, self._stream = form, name, stream

    def look_up(self) -> FrozenLinear:
        """The linear as it lies now."""
        shapes = self.form.tensors
        tensors = {key: tensor.view(shapes[key].shape) for key, tensor in self._stream.tensors(self._name).items()}
        return FrozenLinear(replace(self.form, **tensors), self.bias)  # type: ignore[type-var]

    def forward(self, x: Tensor) -> Tensor:
        return frozen_linear(x, self.look_up)
