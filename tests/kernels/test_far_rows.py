"""Kernels whose rows lie more than 2^31 elements from where their tensor begins give the bits of the same rows near it.

The memory is mapped and never touched but at those rows; of each launch the programs that own them run. Before a tensor lies as much
mapped memory again, in which an offset of 32 bits would end.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.kernels.expert_cases import Case, Job, Layer, drawn, kernels
from tests.kernels.interpreter import INTERPRETED_ALONE, interpreted
from tlora.kernels.lora_tables import DA, A
from tlora.kernels.packed_weight import PackedWeight, dequantize_in_torch, table_on

pytest.importorskip("triton")

with interpreted():
    from triton.runtime import interpreter as tritons

    from tlora.kernels import triton_conv
    from tlora.kernels.packed import launch_dequantize
    from tlora.kernels.triton_cross_entropy import cross_entropy_kernel

pytestmark = INTERPRETED_ALONE
FAR = 1 << 31  # elements
FP16 = torch.float16
_UNCOUNTED = 0x4000  # MAP_NORESERVE of Linux, which Python has no name for


def far(near: Tensor) -> Tensor:
    """[rows, …] in which the last rows are those of `near`, and all before them, FAR elements, are zeros."""
    size, ahead = near.element_size(), FAR * near.element_size()
    memory = mmap.mmap(-1, 2 * ahead + near.numel() * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNCOUNTED)
    flat = torch.frombuffer(memory, dtype=near.dtype)[FAR:]
    flat[FAR:] = near.flatten()
    return flat.view(-1, *near.shape[1:])


@contextmanager
def programs_from(first: int) -> Iterator[None]:
    """A launch's programs are `first` and those behind it. What they wrote is not copied over itself, which would touch all memory."""
    builder: Any = tritons.interpreter_builder
    set_dim, set_place = builder.set_grid_dim, builder.set_grid_idx
    with (
        patch.object(builder, "set_grid_dim", lambda x, y, z: set_dim(first + x, y, z)),
        patch.object(builder, "set_grid_idx", lambda x, y, z: set_place(first + x, y, z)),
        patch.object(tritons.GridExecutor, "_restore_args_dev", lambda *_: None),
    ):
        yield


def test_experts_read_tokens_that_lie_far_away() -> None:
    """y, S and dA of rows that are gathered."""
    case = Case(Layer(experts=3, inner=16, columns=32, dtype=FP16), (Job((40,), 16, seed=1),))
    batch = kernels.make_batch([(40,)], 40, case.rows(), case.x_TK.device)
    routing, rows = kernels.route(case.chosen_TK, batch, 3, 64), batch.rows("w")
    assert rows is not None
    found = []
    for x_TK in (case.x_TK, far(case.x_TK)):
        ahead = (len(x_TK) - len(case.x_TK)) * routing.slots
        there = replace(routing, order_S=routing.order_S + ahead)
        with programs_from(0):
            y_SN, s = kernels.forward(x_TK, case.layer.weights, there, rows, gathers=True)
            assert s is not None
            case.banks[2].zero_()
            kernels.add_sums(x_TK, s, there, rows, DA, gathers=True)
        found.append((y_SN, s, case.banks[2].clone()))
    assert all(map(torch.equal, *found)) and all(bool(each.count_nonzero()) for each in found[0])


def test_experts_read_and_write_sorted_rows_that_lie_far_away() -> None:
    layer = Layer(experts=1, slots=1, inner=16, columns=16, dtype=FP16)
    case = Case(layer, (Job((64,), 16, seed=1),))
    batch = kernels.make_batch([(64,)], 64, case.rows(), case.x_TK.device)
    routing, rows = kernels.route(case.chosen_TK, batch, 1, 64), batch.rows("w")
    assert rows is not None
    s = kernels.shrink(case.x_TK, routing, rows, A, gathers=False)
    wanted = kernels.multiply(case.x_TK, layer.weights, routing, (s, rows), gathers=False)
    x_SK, ahead = far(case.x_TK), FAR // 16
    tiles, cells = routing.tiles.clone(), routing.cells.clone()
    tiles[:1, 1:3] += ahead
    cells += ahead
    y_SN = far(torch.zeros_like(wanted))
    there = replace(routing, tiles=tiles, cells=cells)
    with programs_from(0), patch.object(torch, "empty", lambda *_, **__: y_SN):
        kernels.multiply(x_SK, layer.weights, there, (far(s), rows), gathers=False)
    assert torch.equal(y_SN[ahead:], wanted)


def test_slots_are_added_up_far_away() -> None:
    y_SH, inverse_S = drawn(1, (8, 16), FP16), torch.arange(8)
    case = Case(Layer(experts=5), (Job((4,), 0, seed=1),))
    routing = kernels.route(case.chosen_TK, kernels.make_batch([(4,)], 4, {}, y_SH.device), 5, 64)
    wanted = kernels.add_slots(y_SH, None, replace(routing, inverse_S=inverse_S))
    ahead = FAR // 16
    with programs_from(0):
        found = kernels.add_slots(far(y_SH)[: len(y_SH)], None, replace(routing, inverse_S=inverse_S + ahead))
    assert torch.equal(found, wanted)


def test_a_convolution_of_tokens_that_lie_far_away() -> None:
    """Forward, and the gradient: each kernel of two programs."""
    count = 2 * triton_conv._TOKENS
    x_TC, dy_TC, weight_CW = drawn(1, (count, 16), FP16), drawn(3, (count, 16), FP16), drawn(2, (16, 4), FP16)
    positions_T = torch.arange(count, dtype=torch.int32)
    constants = triton_conv._constants(weight_CW, None, True)
    ahead = FAR // 16
    far_x, far_dy, far_positions = far(x_TC), far(dy_TC), far(positions_T[:, None])[FAR - ahead :]
    kernels: list[Any] = [triton_conv.convolve_kernel, triton_conv.convolve_back_kernel]
    for launch, near, distant in zip(kernels, ((x_TC,), (dy_TC, x_TC)), ((far_x,), (far_dy, far_x)), strict=True):
        wanted_TC, found_TC = torch.zeros_like(x_TC), far(torch.zeros_like(x_TC))
        launch[2, 1](*near, weight_CW, None, positions_T, wanted_TC, count, 16, *constants)
        with programs_from(ahead // triton_conv._TOKENS):
            launch[2, 1](*distant, weight_CW, None, far_positions, found_TC, len(far_x), 16, *constants)
        assert wanted_TC.abs().min(1).values.max() > 0 and torch.equal(found_TC[ahead:], wanted_TC)


def test_a_loss_of_logits_that_lie_far_away() -> None:
    logits_TV, labels = drawn(1, (1, 512), FP16), torch.tensor([7])
    far_TV, losses = far(logits_TV), [torch.zeros(1), far(torch.zeros(1))]
    launch, ahead = cast(Any, cross_entropy_kernel)[1,], len(far_TV) - 1
    for rows, first in ((logits_TV, 0), (far_TV, ahead)):
        loss = losses[first > 0]
        with programs_from(first):
            launch(
                rows, far(labels)[FAR - first :] if first else labels, loss[FAR - first :] if first else loss, loss, 1.0, 1.0, 512, 512,
                HAS_CAP=False, GRADIENT=False, BLOCK_V=512,
            )  # fmt: skip
    assert float(losses[0]) == float(losses[1][-1]) != 0


def test_four_bits_are_unpacked_far_away() -> None:
    """Of a matrix of more than 2^31 numbers, as experts of 4 bits are at once."""
    table = tuple(torch.randn(16, generator=torch.Generator().manual_seed(1)).tolist())
    nibbles = torch.randint(0, 256, (1024,), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    scale, group = drawn(3, (32,), torch.float32), 64
    small = PackedWeight(nibbles, scale, table, (32, 64), group, FP16, FP16)
    ahead = FAR // 2
    whole = replace(small, weight=far(nibbles)[FAR - ahead :][:1024], scale=far(scale)[FAR - FAR // group :], shape=(FAR // 64 + 32, 64))
    out = far(torch.zeros(32, 64, dtype=FP16))
    with programs_from(ahead // 1024):
        launch_dequantize(whole, table_on(table, torch.device("cpu")), out)
    assert torch.equal(out[-32:], dequantize_in_torch(small, FP16))
