"""Candidates for `tlora tune`: each computes what the rule's tile does, and a wrong one is found out. In the interpreter in fp32."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, MARKS, interpreted, thinned
from tlora.kernels.tiles import AnyTile, Key, SkinnyTile, Tile, tile_by_rule

with interpreted():
    from tlora.kernels import fused_linear, tile_trials

pytestmark = MARKS
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
FORWARD = Key("forward", DTYPE, 48, 80, 1)
INPUT_GRADIENT = Key("input_gradient", DTYPE, 48, 80, 2)
SHRINK, SUM = Key("shrink", DTYPE, 0, 48, 3), Key("sum", DTYPE, 48, 0, 3)
WIDTHS = {INPUT_GRADIENT: (48, 32)}
SIZES = [(64, 256), (128, 128), (64, 32)] if DEVICE.type == "cpu" else [(64, 256)]  # a GPU compiles each, and others in `tests/gpu`


def fault(key: Key, tile: AnyTile) -> str | None:
    return tile_trials.find_fault(key, WIDTHS.get(key, ()), tile, DEVICE)


GEMM_TILES = [
    (key, *size, first, halves)
    for key, size, first, halves in product([FORWARD, INPUT_GRADIENT], SIZES, [False, True], [False, True])
    if key == FORWARD or not (halves or size == (128, 128))  # the input gradient's kernel is the forward's but for the order of the weight
]


def is_in_every_run(key: Key, rows: int, columns: int, first: bool, halves: bool) -> bool:
    """Each shape, and of the forward each pair of the two options."""
    if rows == 128:
        return first == halves
    return first == (columns == 256) and (key == INPUT_GRADIENT or halves == (columns == 32))


@pytest.mark.slow
@pytest.mark.parametrize(("key", "rows", "columns", "first", "halves"), thinned(GEMM_TILES, is_in_every_run))
def test_tiles_of_a_gemm_agree(key: Key, rows: int, columns: int, first: bool, halves: bool) -> None:
    assert fault(key, Tile(rows, columns, 32, 2, 4, halves=halves, first=first)) is None


SKINNY_TILES = [(SHRINK, SkinnyTile(64, 128, 2, 4)), (SHRINK, SkinnyTile(64, 32, 2, 4)), (SUM, SkinnyTile(64, 128, 2, 4))]
SKINNY_TILES += [(SUM, SkinnyTile(128, 32, 2, 4))]


@pytest.mark.parametrize(("key", "tile"), in_every_run(SKINNY_TILES, 2), ids=str)
def test_tiles_of_shrink_and_sum_agree(key: Key, tile: SkinnyTile) -> None:
    assert fault(key, tile) is None


def test_the_harder_batches_are_what_they_should_be() -> None:
    apart, plain, dropped = (tile_trials.make_problem(FORWARD, (), jobs, DEVICE).tables for jobs in tile_trials.HARD)
    assert not apart.many
    assert plain.runs_in_a_tile == 2 and plain.width == 64 and not plain.has_dropout
    assert plain.many and dropped.has_dropout
    firsts = plain.tiles_X2[:, 0].tolist()
    assert any(a != b for a, b in zip(firsts[::2], firsts[1::2], strict=True)), "no half of a tile begins with another run"


@pytest.mark.parametrize(("key", "name"), [(FORWARD, "multiply"), (SHRINK, "shrink")], ids=str)
def test_a_tile_with_wrong_results_is_found(key: Key, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch of the candidate, and of it alone, gives one element that is off, or one that it never wrote."""
    right, tile = getattr(fused_linear, name), replace(tile_by_rule(key), stages=2 if tile_by_rule(key).stages != 2 else 3)
    for wrong in (1e3, torch.nan):

        def spoilt(*args: object, wrong: float = wrong) -> object:
            given = right(*args)
            if any(isinstance(arg, fused_linear.LinearGroup) and tile in arg.tiles.entries.values() for arg in args):
                (given[0] if isinstance(given, list) else given)[3, 5] = wrong
            return given

        monkeypatch.setattr(fused_linear, name, spoilt)
        assert (fault(key, tile) or "").startswith("differs by")


def test_other_bits_among_more_runs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fused_linear.gemm_kernel

    class Rounded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*args: object, **shape: object) -> None:
                kernel[grid](*args, **shape)
                y = args[6][0] if isinstance(args[6], tuple) else args[6].base  # by pointer, or by descriptor
                if shape["MANY"]:
                    y.copy_(torch.nextafter(y, torch.full_like(y, torch.inf)))

            return launch

    monkeypatch.setattr(fused_linear, "gemm_kernel", Rounded())
    assert fault(FORWARD, tile_by_rule(FORWARD)) == "has other bits where more runs share its tokens"


@pytest.mark.parametrize("key", [FORWARD, INPUT_GRADIENT, SHRINK, SUM], ids=lambda key: key.kernel)
def test_candidates_begin_with_the_rule_and_come_once(key: Key) -> None:
    for columns in (64, 128, 4096):
        real = key._replace(dtype=torch.bfloat16, columns=columns if key.columns else 0)
        found = tile_trials.candidates(real)
        assert found[0] == tile_by_rule(real) and len(found) == len(set(found)) > 2
