"""What bitsandbytes makes of its four bits."""

from __future__ import annotations

import copy
import math

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor


def bitsandbytes_values(nibbles: Tensor, state: QuantState) -> Tensor:
    """In fp32, as one long row. Asked for 16 bits, its CPU kernel rounds the table to them first; and with AVX-512 it takes a wrong scale
    where a group goes on in the next row (0.50.2), which on a GPU and on other CPUs it does not.
    """
    flat, shape = copy.copy(state), state.shape
    assert shape is not None
    flat.dtype, flat.shape = torch.float32, torch.Size([1, math.prod(shape)])
    return bnb.dequantize_4bit(nibbles, flat).reshape(shape)
