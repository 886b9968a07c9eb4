"""All resident adapters at every linear: ragged rank rows in one tensor per linear. A slot is one adapter's rows in it.

The bank holds what the kernels read (weights in the compute dtype) and write (gradient sums); optimizer and files are elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlora.adapter_shape import ROW_ALIGNMENT
from tlora.adapters.layout import AdapterLayout, AdapterShape


@dataclass(frozen=True, slots=True)
class SlotAddress:
    """Where a job lies at one linear: `rank` contiguous rows each of A [r, K], B transposed [r, N] and the sums of their gradients.

    `a`, `b`, `da`, `db` are addresses of the first row in device memory, in bytes; they hold until a job joins (a tensor may grow).
    """

    rank: int
    scale: float
    a: int
    b: int
    da: int
    db: int


def _aligned(rank: int) -> int:
    return -(-rank // ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass
class LinearRows:
    """The rows of all slots at one linear: `a_RK`, `b_RN` (B transposed) and the sums of their gradients."""

    a_RK: Tensor
    b_RN: Tensor
    da_RK: Tensor
    db_RN: Tensor
    used: dict[str, range] = field(default_factory=dict)

    def reserve(self, job_id: str, rank: int) -> range:
        """The first gap that holds `rank` rows; grows the tensors, by no row more than it takes, when there is none."""
        size, start = _aligned(rank), 0
        for rows in sorted(self.used.values(), key=lambda r: r.start):
            if rows.start - start >= size:
                break
            start = rows.stop
        self.make_room(start + size)
        self.used[job_id] = range(start, start + size)
        return self.used[job_id]

    def make_room(self, rows: int) -> None:
        """Tensors of at least so many rows."""
        if rows > self.a_RK.shape[0]:
            self._grow(rows)

    def _grow(self, rows: int) -> None:
        grown: list[Tensor] = []
        for old in (self.a_RK, self.b_RN, self.da_RK, self.db_RN):  # all or none: memory may run out at any of the four
            new = old.new_zeros(rows, old.shape[1])
            new[: old.shape[0]] = old
            grown.append(new)
        self.a_RK, self.b_RN, self.da_RK, self.db_RN = grown

    def clear(self, job_id: str) -> None:
        """Give the rows back, zeroed: the next owner must find no trace, not even in the padding."""
        rows = self.used.pop(job_id)
        for t in (self.a_RK, self.b_RN, self.da_RK, self.db_RN):
            t[rows.start : rows.stop].zero_()


class AdapterBank:
    """Rows for any number of adapters over `targets` (module name -> (in features, out features)). Those of a `frozen` bank have no
    gradients, and no room for any.
    """

    def __init__(self, targets: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device, *, frozen: bool = False) -> None:
        self.dtype, self.device, self._frozen = dtype, device, frozen
        self.sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._targets = dict(targets)
        self._linears: dict[str, LinearRows] = {}
        self._layouts: dict[str, AdapterLayout] = {}
        self._shapes: dict[str, dict[str, AdapterShape]] = {}
        self._addresses: dict[str, dict[str, SlotAddress]] = {}
        self._sum_scales: dict[str, float] = {}  # of jobs whose sums are not the gradient, but so many times that; 0: they are zero
        self.version = 0  # changes when a linear's tensors may have moved

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._layouts

    def jobs(self) -> list[str]:
        return list(self._layouts)

    @property
    def largest_rank(self) -> int:
        """Of all jobs at all linears; 0 where there is none."""
        return max((layout.largest_rank for layout in self._layouts.values()), default=0)

    def linear(self, module: str) -> LinearRows:
        return self._linears[module]

    def weights(self, module: str) -> tuple[Tensor, Tensor] | None:
        """A [R, K] and B transposed [R, N] of all slots at `module`; None where no job ever had one."""
        linear = self._linears.get(module)
        return None if linear is None else (linear.a_RK, linear.b_RN)

    def slot(self, job_id: str, module: str) -> tuple[range, float] | None:
        """The job's true rank rows (of experts all of theirs) and scale at `module`; None where it has no adapter, there or at all."""
        shape = self.shape_at(job_id, module)
        if shape is None:
            return None
        start = self._linears[module].used[job_id].start
        return range(start, start + shape.rows), shape.scale

    def shape_at(self, job_id: str, module: str) -> AdapterShape | None:
        """The part of the job's layout at `module`; None where it has none, there or at all."""
        return self._shapes.get(job_id, {}).get(module)

    def addresses(self, job_id: str) -> Mapping[str, SlotAddress]:
        """Module name -> where the job lies there, in layout order: the same object until a tensor may have moved, so that `is` tells
        whether a table made of it still holds.
        """
        by_module = self._addresses.get(job_id)
        if by_module is None:
            by_module = {s.module: self._address(job_id, s) for s in self._layouts[job_id].shapes}
            self._addresses[job_id] = by_module
        return by_module

    def _address(self, job_id: str, shape: AdapterShape) -> SlotAddress:
        linear = self._linears[shape.module]
        start = linear.used[job_id].start
        a, b, da, db = (
            t.data_ptr() + start * t.stride(0) * t.element_size() for t in (linear.a_RK, linear.b_RN, linear.da_RK, linear.db_RN)
        )
        return SlotAddress(shape.rank, shape.scale, a, b, da, db)

    def add(self, job_id: str, layout: AdapterLayout) -> None:
        """Reserve zeroed rows for every module of `layout`. Where that raises (out of memory), the job holds no row anywhere."""
        assert job_id not in self._layouts, f"{job_id} has a slot already"
        self._addresses.clear()  # even where it raises: the linears before that one may have grown
        rows_before = self._total_rows()
        try:
            for s in layout.shapes:
                self._linear_at(s.module).reserve(job_id, s.rows)
        except BaseException:
            for linear in self._linears.values():
                if job_id in linear.used:
                    linear.clear(job_id)
            raise
        finally:
            self.version += self._total_rows() != rows_before
        self._layouts[job_id] = layout
        self._shapes[job_id] = {s.module: s for s in layout.shapes}

    def make_room(self, layouts: Iterable[AdapterLayout]) -> None:
        """For adapters of all `layouts` at once, that will be added: one after another, each would move those before it."""
        rows = Counter[str]()
        for layout in layouts:
            rows.update({shape.module: _aligned(shape.rows) for shape in layout.shapes})
        for module, count in rows.items():
            self._linear_at(module).make_room(count)
        self._addresses.clear()
        self.version += 1

    def _total_rows(self) -> int:
        return sum(linear.a_RK.shape[0] for linear in self._linears.values())

    def _linear_at(self, module: str) -> LinearRows:
        if module not in self._linears:
            k, n = self._targets[module]
            a_RK, b_RN = (torch.zeros(0, width, dtype=self.dtype, device=self.device) for width in (k, n))
            da_RK, db_RN = (  # never the same tensor twice
                torch.zeros(0, 0 if self._frozen else width, dtype=self.sum_dtype, device=self.device) for width in (k, n)
            )
            self._linears[module] = LinearRows(a_RK, b_RN, da_RK, db_RN)
        return self._linears[module]

    def remove(self, job_id: str) -> None:
        for s in self._layouts.pop(job_id).shapes:
            self._linears[s.module].clear(job_id)
        del self._shapes[job_id]
        self._addresses.pop(job_id, None)
        self._sum_scales.pop(job_id, None)

    def _rows(self, job_id: str, *names: str) -> list[Tensor]:
        """Views of the slot in layout order, A then B of each module."""
        rows: list[Tensor] = []
        for s in self._layouts[job_id].shapes:
            linear = self._linears[s.module]
            start = linear.used[job_id].start
            rows += [getattr(linear, name)[start : start + s.rows] for name in names]
        return rows

    @torch.no_grad()
    def write(self, job_id: str, params: Tensor) -> None:
        """Copy full-precision `params` (flat) into the slot's weights."""
        flat = [view for _, a, b in self._layouts[job_id].views(params) for view in (a, b)]
        if flat:
            torch._foreach_copy_(self._rows(job_id, "a_RK", "b_RN"), flat)

    @torch.no_grad()
    def gradient(self, job_id: str) -> Tensor:
        """A copy of the slot's summed gradient [P], flat in the order of its layout and in `sum_dtype`."""
        self.scale_sums(job_id, 1.0)
        rows = [row.reshape(-1) for row in self._rows(job_id, "da_RK", "db_RN")]
        return torch.cat(rows or [torch.empty(0, dtype=self.sum_dtype, device=self.device)])

    @torch.no_grad()
    def set_gradient(self, job_id: str, gradient_P: Tensor) -> None:
        """Replace the slot's sums by a flat gradient, as `gradient` gives it."""
        flat = [view for _, da, db in self._layouts[job_id].views(gradient_P) for view in (da, db)]
        if flat:
            torch._foreach_copy_(self._rows(job_id, "da_RK", "db_RN"), flat)
        self._sum_scales[job_id] = 1.0

    @torch.no_grad()
    def scale_sums(self, job_id: str, scale: float) -> None:
        """Let the slot's sums be `scale` times its gradient, a power of two: what is added from now on is scaled so too."""
        before = self._sum_scales.get(job_id, 1.0)
        if before not in (0.0, scale) and (rows := self._rows(job_id, "da_RK", "db_RN")):
            torch._foreach_mul_(rows, scale / before)
        self._sum_scales[job_id] = scale

    def sums_are_zero(self, job_id: str) -> None:
        """Note that the caller has zeroed the slot's sums."""
        self._sum_scales[job_id] = 0.0

    def take_grad(self, job_id: str) -> Tensor:
        """`gradient`; the sums are zero afterwards."""
        grad = self.gradient(job_id)
        self.zero_grad(job_id)
        return grad

    @torch.no_grad()
    def zero_grad(self, job_id: str) -> None:
        if rows := self._rows(job_id, "da_RK", "db_RN"):
            torch._foreach_zero_(rows)
        self.sums_are_zero(job_id)
