"""The fused linear on a GPU at the sizes of an 8B model: against fp64, and the bits of one job whoever is beside it."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.kernels.linear_cases import Base, Job, bits_of, check_case
from tlora.kernels.device import launched_as
from tlora.kernels.tile_trials import DTYPES as DTYPES_16
from tlora.kernels.tile_trials import HARD, Jobs, make_problem, results
from tlora.kernels.tiles import MOST_SIZES, Kernel, Key, Tile, sizes_of, tile_by_rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DTYPES = [torch.bfloat16, torch.float32]
QKV = (4096, 1024, 1024)
SHAPES = [(4096, QKV), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)), (2048, (2048, 512, 512)), (4096, (16,)), (48, (80, 112))]
"""Llama-3-8B's four groups, the smallest of a 1B model, and widths that no tile fits."""
SIZED = [
    ("forward", 4096, (4096,)),
    ("forward", 14336, (4096,)),
    ("input_gradient", 4096, QKV),
    ("input_gradient", 4096, (14336, 14336)),
    ("input_gradient", 14336, (4096,)),
]
"""GEMMs that start from the adapters' product and that end with it, forward and back, of one linear to three."""


@functools.lru_cache(maxsize=1)  # drawing 14336 x 4096 twice takes seconds
def base_of(in_features: int, widths: tuple[int, ...], dtype: torch.dtype) -> Base:
    return Base(in_features, widths, dtype)


def mixed(members: int, rank: int, dropout: float = 0.0) -> list[Job]:
    """Long and short samples, a single token, several runs in a tile."""
    small = tuple(min(rank, r) for r in (8, 0, 16))[:members]
    return [
        Job((700, 130, 1), (rank,) * members, dropout, seed=1, gap=5),
        Job((1,), (8,) * members, seed=2),
        Job((40,), small, seed=3),
        Job((300,), (min(rank, 64),) * members, seed=4, gap=64),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "widths"), SHAPES, ids=str)
def test_equals_the_reference_in_fp64(in_features: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    check_case(Base(in_features, widths, dtype, bias=True), mixed(len(widths), 16), tail=100)


@pytest.mark.parametrize(
    ("dtype", "rank", "dropout"),
    [
        *((torch.bfloat16, rank, 0.0) for rank in (8, 16, 32, 64, 96, 128, 256)),
        *((torch.bfloat16, rank, 0.1) for rank in (16, 128)),
        (torch.float32, 16, 0.1),
        (torch.float32, 96, 0.0),
    ],
    ids=str,
)
def test_ranks(rank: int, dropout: float, dtype: torch.dtype) -> None:
    """Each width of S in bf16, dropout on either side of 64, and one of each kind in fp32: each is compiled anew."""
    check_case(base_of(4096, QKV, dtype), mixed(3, rank, dropout), tail=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_one_run_in_each_tile(members: int, dtype: torch.dtype) -> None:
    """The GEMM without a loop over runs, and two of them in one tile."""
    for gap in (128, 0):
        jobs = [Job((512,), (16,) * members, seed=1), Job((200, 440), (64,) * members, seed=2, gap=gap)]
        check_case(Base(4096, QKV[:members], dtype), jobs, tail=128)


def beside(members: int) -> dict[str, tuple[list[Job], int, list[Job]]]:
    """Neighbours before, tokens of nobody before, neighbours behind; each changes another choice of the launches."""
    ranks = {r: (r,) * members for r in (8, 16, 64, 256)}
    return {
        "another place in the tile": ([], 37, []),
        "another tile": ([], 1029, []),
        "one neighbour": ([Job((300,), ranks[16], seed=7)], 0, []),
        "a larger rank": ([Job((300,), ranks[64], seed=7)], 0, []),
        "a rank above 64": ([Job((300,), ranks[256], seed=7)], 0, []),
        "dropout": ([Job((300,), ranks[8], 0.5, seed=7)], 0, []),
        "many in a tile": ([Job((7,), ranks[8], seed=20 + i) for i in range(9)], 0, [Job((9,), ranks[8], seed=40)]),
        "NaN": ([Job((61,), ranks[8], seed=7, spoilt=math.nan)], 0, [Job((5,), ranks[8], seed=8, spoilt=math.nan)]),
        "NaN, rank and dropout": ([Job((3,), ranks[256], 0.3, seed=7, spoilt=math.inf)], 0, [Job((5,), ranks[8], seed=8, spoilt=math.nan)]),
    }


BITS = [
    *((torch.bfloat16, widths, *job) for widths in ((4096,), QKV, (14336, 14336)) for job in ((8, 0.1), (64, 0.0), (128, 0.1))),
    *((torch.bfloat16, QKV, rank, 0.0) for rank in (8, 20, 128)),
    (torch.float32, QKV, 20, 0.0),
    (torch.float32, QKV, 128, 0.1),
]


@pytest.mark.parametrize(("dtype", "widths", "rank", "dropout"), BITS, ids=str)
def test_bits_are_the_same_whoever_is_beside(rank: int, dropout: float, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    base, members = base_of(4096, widths, dtype), len(widths)
    job = Job((333, 1, 130), (rank,) * members, dropout, seed=1)
    alone = bits_of(base, [job], 0)
    assert not bits_of(base, [job], 0).differences(alone), "another run gave other bits"
    for name, (before, gap, behind) in beside(members).items():
        mine = Job(**{**vars(job), "gap": gap})
        found = bits_of(base, [*before, mine, *behind], len(before), tail=300)
        assert not found.differences(alone), f"{name}: {found.differences(alone)} elements differ"


@pytest.mark.parametrize("jobs", [Jobs(((1000,),), 16), *HARD], ids=str)
@pytest.mark.parametrize("dtype", DTYPES_16, ids=str)
@pytest.mark.parametrize(("kernel", "columns", "widths"), SIZED, ids=str)
def test_smaller_tiles_have_the_bits_of_the_largest(
    kernel: Kernel, columns: int, widths: tuple[int, ...], dtype: torch.dtype, jobs: Jobs
) -> None:
    """What a GEMM of few tokens takes (`tiles.for_tokens`)."""
    if not launched_as(torch.device("cuda")).sized:
        pytest.skip("on GPUs of this class all GEMMs have tiles of one size")
    key = Key(kernel, dtype, columns, sum(widths), len(widths))
    problem, tile = make_problem(key, widths, jobs, torch.device("cuda")), tile_by_rule(key)
    assert isinstance(tile, Tile) and len(sizes_of(tile, dtype)) == MOST_SIZES
    wanted = results(problem, tile)
    for size in sizes_of(tile, dtype)[1:]:
        assert all(map(torch.equal, results(problem, size), wanted)), size
