"""Candidates of tiles for `tlora tune`, and whether one is right: operands for one launch, and what it must give.

Only 16-bit dtypes have candidates: they are what a GPU trains in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tlora.kernels import fused_linear
from tlora.kernels.cards import HOPPER, CardClass
from tlora.kernels.device import launched_as
from tlora.kernels.fused_linear import LinearGroup
from tlora.kernels.lora_tables import DA, A, B, LoraTables, Run, Slots, build_tables
from tlora.kernels.tiles import AnyTile, Key, SkinnyTile, Tile, TileTable, tile_by_rule

DTYPES = (torch.bfloat16, torch.float16)
MOST_DIFFERENCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative, in norm: roundings of two orders of sums
_NARROW = 32  # width of linears whose output a shrink or sum never sees
_GEMM = (
    Tile(128, 256, 64, 3, 8, halves=True),
    Tile(128, 128, 64, 4, 8),
    Tile(128, 128, 64, 4, 4),
    Tile(64, 256, 64, 4, 4),
)
_POINTER_GEMM = (
    Tile(128, 256, 64, 3, 8),
    Tile(128, 128, 32, 4, 4),
    Tile(128, 128, 32, 3, 8),
    Tile(128, 128, 64, 3, 8),
    Tile(64, 128, 64, 3, 4),
    Tile(128, 64, 64, 3, 4),
)
_SHRINK = (SkinnyTile(64, 128, 4, 8), SkinnyTile(64, 128, 3, 4), SkinnyTile(64, 64, 4, 8))
_SUM = (SkinnyTile(64, 128, 3, 4), SkinnyTile(64, 128, 3, 8), SkinnyTile(128, 128, 3, 8), SkinnyTile(64, 64, 4, 4))


def candidates(key: Key, card: CardClass = HOPPER) -> list[AnyTile]:
    """The rule's tile first, then what else may be faster on GPUs of a class."""
    by_rule = tile_by_rule(key, card)
    gemms = _GEMM if card.loads == "descriptor" else _POINTER_GEMM
    if key.kernel in ("shrink", "sum"):
        others: Sequence[AnyTile] = _SHRINK if key.kernel == "shrink" else _SUM
    else:
        assert isinstance(by_rule, Tile)
        tiles = [tile for tile in (replace(by_rule, first=False), *gemms) if tile.columns <= max(by_rule.columns, 128)]
        others = [replace(tile, first=first) for tile in tiles for first in (False, True)]
    return list(dict.fromkeys([by_rule, *others]))


@dataclass(frozen=True)
class Jobs:
    """The jobs of a batch: runs of samples of these lengths, one run after another, all of one rank."""

    lengths: tuple[tuple[int, ...], ...]
    rank: int
    dropout: float = 0.0


@dataclass(frozen=True)
class Problem:
    """The operands of a key's launch: M linears from `in_features` to `widths`."""

    key: Key
    group: LinearGroup
    tables: LoraTables
    x_TK: Tensor
    dys: list[Tensor]
    weights: list[Tensor]
    sums: list[Tensor]  # of A, fp32
    addressed: list[Tensor]  # what the tables hold the addresses of, besides


def make_problem(key: Key, widths: tuple[int, ...], jobs: Jobs, device: torch.device) -> Problem:
    """`widths` are those of an input gradient's linears; for the other kernels the key says all."""
    inner, widths = _shape(key, widths)
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw, device=device) * size).to(key.dtype)

    count, rank, num_tokens = len(jobs.lengths), jobs.rank, sum(map(sum, jobs.lengths))
    a = [normal(count * rank, inner, size=inner**-0.5) for _ in widths]
    b = [normal(count * rank, width, size=0.1) for width in widths]
    da, db = ([torch.zeros(rows.shape, device=device) for rows in both] for both in (a, b))
    members, each = range(len(widths)), range(count)
    slots = Slots(
        rows_LS5=np.array([[(*(t[m][rank * j :].data_ptr() for t in (a, b, da, db)), rank) for j in each] for m in members], np.int64),
        starts_LS=np.array([[rank * j for j in each] for _ in members], np.int32),
        scales_LS=np.full((len(widths), count), 0.5, np.float32),
        module_keys_L=np.arange(len(widths)),
        weights=list(zip(a, b, strict=True)),
    )
    ends = np.cumsum([sum(own) for own in jobs.lengths]).tolist()
    runs = [Run(end - sum(own), end, own, jobs.dropout) for own, end in zip(jobs.lengths, ends, strict=True)]
    keys_T = torch.arange(num_tokens, dtype=torch.int32, device=device) if jobs.dropout else None
    tables = build_tables(runs, slots, num_tokens, keys_T, device)
    by_rule = TileTable(card=launched_as(device))  # ignores measured tables
    group = LinearGroup(0, widths, inner, fused_linear.programs_of(device), tiles=by_rule)
    x, dys = normal(num_tokens, inner), [normal(num_tokens, width) for width in widths]
    weights = [normal(width, inner, size=inner**-0.5) for width in widths]
    return Problem(key, group, tables, x, dys, weights, da, db)


def _shape(key: Key, widths: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """In features and widths of linears that launch `key`."""
    if key.kernel == "forward":
        return key.inner, (key.columns,)
    if key.kernel == "input_gradient":
        assert sum(widths) == key.inner and len(widths) == key.together, f"{widths} are not the widths of {key}"
        return key.columns, widths
    return key.columns or key.inner, (_NARROW,) * key.together


@dataclass(frozen=True)
class Launch:
    """A problem's kernel with one tile, ready to be called again and again."""

    problem: Problem
    group: LinearGroup
    shrunk: Tensor  # of x for a forward, of dy for the other two that read S

    def __call__(self) -> list[Tensor]:
        """What the kernel gave; a sum has grown by one more."""
        p = self.problem
        match p.key.kernel:
            case "forward":
                return fused_linear.multiply(p.x_TK, p.weights, [], self.shrunk, self.group, p.tables)
            case "input_gradient":
                return [fused_linear.multiply_back(p.dys, p.weights, self.shrunk, self.group, p.tables)]
            case "shrink":
                return [fused_linear.shrink([p.x_TK], self.group, p.tables, A)]
            case "sum":
                fused_linear.add_sums([p.x_TK], self.shrunk, self.group, p.tables, DA)
                return p.sums


def prepare(problem: Problem, tile: AnyTile) -> Launch:
    """The launch with `tile`. The S that it reads is made with the rule's tiles for every `tile`."""
    p = problem
    reads_x = p.key.kernel in ("forward", "shrink")
    shrunk = fused_linear.shrink([p.x_TK] if reads_x else p.dys, p.group, p.tables, A if reads_x else B)
    return Launch(p, replace(p.group, tiles=replace(p.group.tiles, entries={p.key: tile})), shrunk)


def results(problem: Problem, tile: AnyTile) -> list[Tensor]:
    """What the launch gives in fresh tensors; where it writes nothing there is NaN."""
    launch = prepare(problem, tile)
    for sums in problem.sums:
        sums.zero_()
    first = launch()  # tells the shapes, and compiles
    copies = [torch.full_like(t, torch.nan) for t in first]
    del first, copies  # the allocator gives what was freed last to the next of that size
    for sums in problem.sums:
        sums.zero_()
    return [t.clone() for t in launch()]


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative difference in norm; NaN for NaN."""
    pairs = list(zip(found, wanted, strict=True))
    return float(torch.stack([(f.float() - w.float()).norm() / w.float().norm().clamp_min(1e-30) for f, w in pairs]).max())


HARD = (
    Jobs(((128,), (100, 28), (250, 6)), rank=64),  # a run of its own in each 128 tokens
    Jobs(((40,), (100, 50), (109, 1), (130, 20), (62,)), rank=64),  # two runs in each 128 tokens, in the first 64 another first one
    Jobs(((200, 56), (1,), (127, 130)), rank=16, dropout=0.3),
)


def find_fault(key: Key, widths: tuple[int, ...], tile: AnyTile, device: torch.device) -> str | None:
    """What is wrong with `tile` in batches as they come, or None: another result than the rule's tile, or other bits among more runs.

    A tile that needs more shared memory or registers than the GPU has raises the error of triton.
    """
    for jobs in HARD:
        problem = make_problem(key, widths, jobs, device)
        outputs = results(problem, tile)
        apart = difference(outputs, results(problem, problem.group.tiles.find(key)))
        if not apart <= MOST_DIFFERENCE[key.dtype]:
            return f"differs by {apart:.1e} from the rule's tile"
        if key.kernel in ("forward", "input_gradient") and not problem.tables.many:
            crowded = replace(problem, tables=replace(problem.tables, runs_in_a_tile=2))  # the kernel for any number of runs
            if not all(map(torch.equal, outputs, results(crowded, tile))):
                return "has other bits where more runs share its tokens"
    return None
