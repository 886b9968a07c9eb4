"""Copies of one adapter's gradient between the bank and a flat vector, against plain torch: each bit of its own, and none of another's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, MARKS, interpreted

pytest.importorskip("triton")
with interpreted():
    from tlora.kernels import bank_chunks
    from tlora.kernels.bank_chunks import BankRun

pytestmark = MARKS
MARGIN = 32
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
COUNTS: dict[str, tuple[int, ...]] = {
    "aligned": (16 * 20, 3 * 4096 + 16, 4096),
    "odd": (7 * 5, 4096 + 1, 16 * 3),
    "one element": (1,),
    "nothing": (),
}


def any_bits(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all kinds: NaN with payloads, infinities, zeros of both signs, and numbers below the smallest normal one."""
    limits = torch.iinfo(INTEGER[dtype])
    drawn = torch.randint(limits.min, limits.max, (count,), dtype=INTEGER[dtype], generator=torch.Generator().manual_seed(seed))
    special = torch.tensor([float("nan"), float("inf"), -0.0, torch.finfo(dtype).tiny / 8], dtype=dtype).view(INTEGER[dtype])
    drawn[: len(special)] = special[: len(drawn)]
    return drawn.view(dtype).to(DEVICE)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(INTEGER[found.dtype]), expected.view(INTEGER[expected.dtype]))


class Bank:
    """Sums of some runs, each inside a larger tensor whose other elements are another adapter's, and the table of their chunks."""

    def __init__(self, counts: Sequence[int], dtype: torch.dtype) -> None:
        self.full = [any_bits(n + 2 * MARGIN, dtype, seed) for seed, n in enumerate(counts)]
        runs = [BankRun(0, sums.data_ptr(), len(sums)) for sums in self.sums]
        table, self.aligned = bank_chunks.chunk_table(runs, 2, dtype.itemsize)
        self.chunks_C4 = torch.from_numpy(table).to(DEVICE)

    @property
    def sums(self) -> list[Tensor]:
        return [full[MARGIN:-MARGIN] for full in self.full]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_gather_copies_each_run_to_its_place(name: str, dtype: torch.dtype) -> None:
    bank = Bank(COUNTS[name], dtype)
    before, numel = [full.clone() for full in bank.full], sum(COUNTS[name])
    whole = any_bits(numel + 2 * MARGIN, dtype, 77)
    expected = whole.clone()
    expected[MARGIN:-MARGIN] = torch.cat([*bank.sums, whole[:0]])
    bank_chunks.gather(bank.chunks_C4, bank.aligned, whole[MARGIN:-MARGIN])
    assert same(whole, expected)
    assert all(same(found, old) for found, old in zip(bank.full, before, strict=True))
    assert bank.aligned == (name in ("aligned", "nothing"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_scatter_writes_each_run_and_nothing_beside_it(name: str, dtype: torch.dtype) -> None:
    bank = Bank(COUNTS[name], dtype)
    flat = any_bits(sum(COUNTS[name]), dtype, 78)
    expected, before = [full.clone() for full in bank.full], flat.clone()
    for full, part in zip(expected, flat.split(list(COUNTS[name])), strict=True):
        full[MARGIN:-MARGIN] = part
    bank_chunks.scatter(bank.chunks_C4, bank.aligned, flat)
    assert all(same(found, true) for found, true in zip(bank.full, expected, strict=True))
    assert same(flat, before)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_write_rounds_each_run_and_writes_nothing_beside_it(name: str, weights: torch.dtype) -> None:
    counts, draw = COUNTS[name], torch.Generator().manual_seed(79)
    full = [torch.randn(n + 2 * MARGIN, generator=draw).to(DEVICE, weights) for n in counts]
    runs = [BankRun(rows[MARGIN:-MARGIN].data_ptr(), 0, n) for rows, n in zip(full, counts, strict=True)]
    table, aligned = bank_chunks.chunk_table(runs, weights.itemsize, 4)
    flat = torch.randn(sum(counts), generator=draw).to(DEVICE)
    if DEVICE.type == "cpu" and weights == torch.bfloat16:  # the interpreter cuts bf16 instead of rounding it
        flat = flat.to(weights).float()
    expected, before = [rows.clone() for rows in full], flat.clone()
    for rows, part in zip(expected, flat.split(list(counts)), strict=True):
        rows[MARGIN:-MARGIN] = part.to(weights)
    bank_chunks.write(torch.from_numpy(table).to(DEVICE), aligned, flat, torch.empty(0, dtype=weights, device=DEVICE))
    assert all(torch.equal(found, true) for found, true in zip(full, expected, strict=True)) and torch.equal(flat, before)


def test_a_flat_vector_that_starts_anywhere() -> None:
    """A view into a larger buffer need not start at a multiple of 16 bytes, though the rows do."""
    bank = Bank(COUNTS["aligned"], torch.float32)
    assert bank.aligned
    flat = torch.zeros(sum(COUNTS["aligned"]) + 1, device=DEVICE)[1:]
    bank_chunks.gather(bank.chunks_C4, bank.aligned, flat)
    assert same(flat, torch.cat(bank.sums))


def test_the_table_covers_every_element_once() -> None:
    runs = [BankRun(1 << 20, 1 << 30, 5000), BankRun(1 << 21, 1 << 31, 3), BankRun(1 << 22, 1 << 32, 8192)]
    table, aligned = bank_chunks.chunk_table(runs, 2, 4)
    assert not aligned and len(table) == bank_chunks.num_chunks([run.count for run in runs])
    covered = [at for start, *_, count in table.tolist() for at in range(start, start + count)]
    assert covered == list(range(5000 + 3 + 8192))
    flat = 0
    for run in runs:
        for start, weights, sums, count in table.tolist():
            if flat <= start < flat + run.count:
                assert (weights - run.weights, sums - run.sums) == (2 * (start - flat), 4 * (start - flat))
                assert start + count <= flat + run.count
        flat += run.count
