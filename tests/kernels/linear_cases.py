"""One group of linears and the jobs of one micro-batch: run by the fused kernels, and by `reference.py` in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, interpreted
from tests.tolerances import KERNEL, assert_close
from tlora.kernels.dropout import token_keys
from tlora.kernels.reference import Segment, lora_backward_, lora_forward_

with interpreted():
    from tlora.kernels import fused_linear
    from tlora.kernels.lora_tables import ADDRESS_FIELDS, LoraTables, Run, Slots, build_tables

FRAME = 16  # rows of nobody before and after each slot
ROW = ("a", "b", "da", "db")  # in the order of A, B, DA, DB of `lora_tables`


@dataclass(frozen=True)
class Job:
    """One run: its samples' lengths, its rank at each linear of the group, and a seed for all that is its own.

    `gap` tokens of no run come before it. `spoilt` stands in every element of its x and dy.
    """

    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    dropout: float = 0.0
    seed: int = 0
    gap: int = 0
    scale: float = 1.5
    spoilt: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def draw(seed: Sequence[int], *shape: int, size: float = 1.0) -> Tensor:
    """fp64, the same for the same seed."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * size)


class Base:
    """The frozen weights of linears that read the same x, [K] to `widths`."""

    def __init__(self, in_features: int, widths: tuple[int, ...], dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        self.in_features, self.widths, self.dtype = in_features, widths, dtype
        num = sum(widths)
        self.weight = draw([1], num, in_features, size=in_features**-0.5).to(DEVICE, dtype)
        self.bias = draw([2], num).to(DEVICE, dtype) if bias else None
        self.weights = list(self.weight.split(widths))
        self.biases = [] if self.bias is None else list(self.bias.split(widths))
        self.module_keys = np.array([12345 + 7919 * m for m in range(len(widths))], np.int64)
        self.group = fused_linear.make_group(0, widths, in_features, DEVICE)


@dataclass(frozen=True)
class Slot:
    """A job's rows: those from `starts[m]` on, `ranks[m]` of them, in the bank's tensors of linear m."""

    bank: Bank
    starts: tuple[int, ...]
    ranks: tuple[int, ...]

    def rows(self, name: str) -> list[Tensor]:
        tensors = self.bank.tensors[name]
        return [t[start : start + rank] for t, start, rank in zip(tensors, self.starts, self.ranks, strict=True)]

    def address(self, linear: int) -> tuple[int, ...]:
        rank = self.ranks[linear]
        return (*(self.rows(name)[linear].data_ptr() for name in ROW), rank) if rank else (0, 0, 0, 0, 0)


class Bank:
    """Slots of `jobs` in one tensor for each linear. Gradient sums do not start at zero.

    Rows of nobody lie around each slot: the largest finite number in the weights, which must be finite, and NaN in the sums.
    """

    def __init__(self, base: Base, jobs: Sequence[Job]) -> None:
        self.tensors: dict[str, list[Tensor]] = {name: [] for name in ROW}
        starts: list[list[int]] = []
        for m, width in enumerate(base.widths):
            sizes = [FRAME + -(-job.ranks[m] // 16) * 16 for job in jobs]
            starts.append([FRAME + end - size for size, end in zip(sizes, accumulate(sizes), strict=True)])
            for name in ROW:
                columns = base.in_features if name.endswith("a") else width
                grad = name.startswith("d")
                shape = (sum(sizes) + FRAME, columns)
                dtype = torch.float32 if grad else base.dtype
                self.tensors[name].append(torch.full(shape, math.nan if grad else torch.finfo(dtype).max, dtype=dtype, device=DEVICE))
        self.slots = [Slot(self, tuple(own), job.ranks) for job, own in zip(jobs, zip(*starts, strict=True), strict=True)]
        for job, slot in zip(jobs, self.slots, strict=True):
            for i, name in enumerate(ROW):
                for m, rows in enumerate(slot.rows(name)):
                    rows.copy_(draw([3, job.seed, m, i], *rows.shape, size=rows.shape[1] ** -0.5))
        self.banks = [(a, b) if any(job.ranks[m] for job in jobs) else None for m, (a, b) in enumerate(zip(*self._weights(), strict=True))]
        self._before = [t.clone() for t in self._all()]

    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.tensors["a"], self.tensors["b"]

    def _all(self) -> list[Tensor]:
        return [t for name in ROW for t in self.tensors[name]]

    def changed_elsewhere(self) -> bool:
        """Whether anything but the slots' sums is not what it was, to the bit."""
        for slot in self.slots:
            for name in ("da", "db"):
                for rows, start, before in zip(slot.rows(name), slot.starts, self._before_of(name), strict=True):
                    before[start : start + len(rows)] = rows
        return not all(
            torch.equal(now.view(torch.uint8), was.view(torch.uint8)) for now, was in zip(self._all(), self._before, strict=True)
        )

    def _before_of(self, name: str) -> list[Tensor]:
        count = len(self.tensors[name])
        return self._before[ROW.index(name) * count : (ROW.index(name) + 1) * count]


@dataclass(frozen=True)
class Batch:
    """The operands of one micro-batch."""

    x: Tensor
    dy: Tensor
    spans: tuple[tuple[int, int], ...]  # of the jobs
    keys: Tensor
    tables: LoraTables


def make_batch(base: Base, jobs: Sequence[Job], slots: Sequence[Slot], tail: int = 0, first: Sequence[int] = ()) -> Batch:
    """`jobs` one after another, then `tail` tokens of no run. `first[i]` of job i's samples went before, in another micro-batch."""
    first = first or [0] * len(jobs)
    ends = list(accumulate(job.gap + job.num_tokens for job in jobs))
    num_tokens = (ends[-1] if ends else 0) + tail
    x, dy = draw([4], num_tokens, base.in_features), draw([5], num_tokens, sum(base.widths))
    keys = np.full(num_tokens, 77, np.int32)
    spans: list[tuple[int, int]] = []
    for job, end, before in zip(jobs, ends, first, strict=True):
        start = end - job.num_tokens
        spans.append((start, end))
        for i, length in enumerate(job.lengths, before):
            cut = slice(start, start + length)
            x[cut], dy[cut] = draw([6, job.seed, i], length, x.shape[1]), draw([7, job.seed, i], length, dy.shape[1])
            keys[cut] = token_keys(job.seed, 0, i, length)
            start = cut.stop
        if job.spoilt is not None:
            x[spans[-1][0] : end] = dy[spans[-1][0] : end] = job.spoilt
    keys_t = torch.from_numpy(keys).to(DEVICE)
    tables = make_tables(base, jobs, slots, spans, num_tokens, keys_t)
    return Batch(x.to(DEVICE, base.dtype), dy.to(DEVICE, base.dtype), tuple(spans), keys_t, tables)


def make_tables(
    base: Base, jobs: Sequence[Job], slots: Sequence[Slot], spans: Sequence[tuple[int, int]], num_tokens: int, keys: Tensor
) -> LoraTables:
    members = range(len(base.widths))
    shape = (len(members), len(jobs))
    where = Slots(
        rows_LS5=np.array([[slot.address(m) for slot in slots] for m in members], np.int64).reshape(*shape, ADDRESS_FIELDS),
        starts_LS=np.array([[slot.starts[m] if slot.ranks[m] else 0 for slot in slots] for m in members], np.int32).reshape(shape),
        scales_LS=np.array([[job.scale + m for job in jobs] for m in members], np.float32).reshape(shape),
        module_keys_L=base.module_keys,
        weights=slots[0].bank.banks if slots else [None] * len(members),
    )
    runs = [Run(t0, t1, job.lengths, job.dropout) for job, (t0, t1) in zip(jobs, spans, strict=True)]
    return build_tables(runs, where, num_tokens, keys, DEVICE)


def run_kernels(base: Base, batch: Batch) -> tuple[Tensor, Tensor]:
    """y of all linears side by side, and dx; the slots' sums grow. What the kernels allocate is NaN before they write it."""
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    dys = [part.contiguous() for part in batch.dy.split(base.widths, 1)]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives
    try:
        ys, shrunk = fused_linear.forward(batch.x, base.weights, base.biases, base.group, batch.tables)
        dx = fused_linear.backward(dys, batch.x, shrunk, base.weights, base.group, batch.tables)
    finally:
        torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
    return torch.cat(ys, 1), dx


def reference(base: Base, jobs: Sequence[Job], slots: Sequence[Slot], batch: Batch) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """The same in fp64 by `reference.py`, and each job's new sums: dA and dB of each linear. Changes nothing."""
    x, dy, weight = batch.x.double(), batch.dy.double(), base.weight.double()
    y, dx = x @ weight.t(), dy @ weight
    if base.bias is not None:
        y += base.bias.double()
    sums: list[list[Tensor]] = [[] for _ in jobs]
    for i, (job, slot, (t0, t1)) in enumerate(zip(jobs, slots, batch.spans, strict=True)):
        for m, columns in enumerate(torch.arange(y.shape[1]).split(base.widths)):
            cut, key = slice(int(columns[0]), int(columns[-1]) + 1), int(base.module_keys[m])
            segment = (Segment(t0, t1, 0, job.ranks[m], job.scale + m, job.dropout),)
            a, b, da, db = (slot.rows(name)[m].double() for name in ROW)
            shrunk = lora_forward_(y[:, cut], x, a, b, segment, batch.keys, key)
            lora_backward_(dx, dy[:, cut].contiguous(), x, shrunk, a, b, da, db, segment, batch.keys, key)
            sums[i] += [da, db]
    return y, dx, sums


def check_case(base: Base, jobs: Sequence[Job], tail: int = 0) -> None:
    """y, dx and every gradient sum against fp64; nothing else is written."""
    bank = Bank(base, jobs)
    batch = make_batch(base, jobs, bank.slots, tail)
    true_y, true_dx, true_sums = reference(base, jobs, bank.slots, batch)
    y, dx = run_kernels(base, batch)
    terms = max(base.weight.shape)  # of the longest sum: in fp32 one after another on a GPU, 4e-6 for 28,672 of them
    bound = max(KERNEL[base.dtype], 2.0**-24 * terms**0.5 / 2)
    assert_close(y, true_y, bound, "y")
    assert_close(dx, true_dx, bound, "dx")
    for i, (slot, true) in enumerate(zip(bank.slots, true_sums, strict=True)):
        found = [sums for pair in zip(slot.rows("da"), slot.rows("db"), strict=True) for sums in pair]
        for k, (mine, theirs) in enumerate(zip(found, true, strict=True)):
            if mine.numel():
                assert_close(mine, theirs, bound, f"{'dA' if k % 2 == 0 else 'dB'} of job {i} at linear {k // 2}")
    assert not bank.changed_elsewhere(), "weights, or rows of nobody, were written"


@dataclass(frozen=True)
class Bits:
    """All that the kernels gave one job."""

    y: Tensor
    dx: Tensor
    sums: tuple[Tensor, ...]

    def differences(self, other: Bits) -> list[str]:
        """Which parts differ in a bit, and in how many elements. NaN differs from all."""
        pairs = {"y": (self.y, other.y), "dx": (self.dx, other.dx)}
        pairs |= {f"sum {i}": pair for i, pair in enumerate(zip(self.sums, other.sums, strict=True))}
        return [f"{name}: {int((a != b).sum())} of {a.numel()}" for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def bits_of(base: Base, jobs: Sequence[Job], mine: int, tail: int = 0) -> Bits:
    """What job number `mine` gets among `jobs`."""
    slots = Bank(base, jobs).slots
    batch = make_batch(base, jobs, slots, tail)
    y, dx = run_kernels(base, batch)
    t0, t1 = batch.spans[mine]
    found = Bits(y[t0:t1], dx[t0:t1], tuple(slots[mine].rows("da") + slots[mine].rows("db")))
    assert all(bool(t.isfinite().all()) for t in (found.y, found.dx, *found.sums)), "NaN where there was none"
    return found
