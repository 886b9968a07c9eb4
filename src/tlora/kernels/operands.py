"""A matrix as the kernels take it: a tensor descriptor or, for cards without bulk copies, a pointer and the distance of its rows."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tlora.kernels.cards import Loads

Operand = TensorDescriptor | tuple[Tensor, int] | tuple[Tensor, int, int]


def operand(matrix: Tensor, block: list[int], loads: Loads) -> Operand:
    """`matrix` [rows, columns] with adjacent elements in a row, of which a program takes `block` at a time."""
    if loads == "descriptor":
        return TensorDescriptor.from_tensor(matrix, block)
    assert matrix.stride(1) == 1, f"strides {matrix.stride()}"
    return matrix, matrix.stride(0)


def bank_operand(rows: Tensor, block: list[int], loads: Loads) -> Operand:
    """The same of a bank's rows, with their number: a block may reach beyond the last."""
    return operand(rows, block, loads) if loads == "descriptor" else (rows, rows.stride(0), rows.shape[0])
