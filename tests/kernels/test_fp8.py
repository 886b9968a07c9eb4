"""fp8: quantisation by row, the transposed weight, and a group of linears over an fp8 weight against fp64.

On a CPU the kernels are interpreted, and rows are quantised by torch, because the interpreter loses carries when it rounds to e4m3.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, MARKS, interpreted, thinned
from tests.kernels.linear_cases import Bank, Base, Batch, Job, bits_of, fused_linear, make_batch, reference, run_kernels
from tests.tolerances import KERNEL, assert_close

with interpreted():
    from tlora.kernels.fp8_weight import Fp8Weight
from tlora.kernels import fp8
from tlora.kernels.device import capability_of, class_of

pytestmark = MARKS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY = 2.0**-115
BASE_DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter knows fp32 alone
QKV = (48, 32, 32)


@pytest.fixture(autouse=True)
def class_with_fp8() -> None:
    """Skips where the kernels of this GPU's class, or of the class that is forced, have no fp8: sm_80's do not compile."""
    if DEVICE.type == "cuda" and ((card := class_of(capability_of(DEVICE))) is None or not card.fp8):
        pytest.skip("the kernels of this class have no fp8")


def rows_of(widths: tuple[int, ...], num_rows: int = 9, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows of very different sizes, one of zeros; the tensors are views into wider ones, whose other columns are NaN."""
    draw = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for width in widths:
        x = torch.randn(num_rows, width, generator=draw) * torch.logspace(-4, 3, num_rows)[:, None]
        x[2] = 0
        whole = torch.full((num_rows, width + 16), math.nan, dtype=dtype, device=DEVICE)
        whole[:, :width] = x.to(DEVICE, dtype)
        found.append(whole[:, :width])
    return found


def column_scale(width: int) -> Tensor:
    return (torch.rand(width, generator=torch.Generator().manual_seed(1)) * 0.01).to(DEVICE)


def by_kernel(xs: list[Tensor], scale_K: Tensor | None) -> tuple[Tensor, Tensor]:
    """(q as fp32 before it is rounded to e4m3, scale), from the kernel; both tensors held NaN before."""
    q = torch.full((len(xs[0]), sum(x.shape[1] for x in xs)), math.nan, device=DEVICE)
    scale = torch.full((len(xs[0]),), math.nan, device=DEVICE)
    fp8.launch_quantize(xs, scale_K, q, scale)
    return q, scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("widths", in_every_run([((16,),), ((48,),), ((144,),), ((32, 16),), ((48, 16, 16),)], 2, 4), ids=str)
def test_the_kernel_scales_rows_bit_for_bit_as_torch_does(widths: tuple[int, ...], scaled: bool, dtype: torch.dtype) -> None:
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("numpy has no bf16")
    xs, scale_K = rows_of(widths, dtype=dtype), column_scale(sum(widths)) if scaled else None
    q, scale = by_kernel(xs, scale_K)
    expected_q, expected_scale = fp8.quantize_rows_in_torch(xs, scale_K)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q.to(fp8.DTYPE).view(torch.uint8), expected_q.view(torch.uint8))
    x = torch.cat([x.double() for x in xs], 1) * (1 if scale_K is None else scale_K.double())
    assert_close(q * scale[:, None], x, 1e-6)
    assert float(q.abs().amax(1)[3]) == pytest.approx(448)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(4096,), (14336,), (28672,), (65536,), (4096, 1024, 1024), (14336, 14336)], ids=str)
def test_a_gpu_rounds_to_e4m3_as_torch_does(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    xs, scale_K = rows_of(widths, 33, dtype), column_scale(sum(widths))
    for given in (None, scale_K):
        (q, scale), (expected_q, expected_scale) = fp8.quantize_rows(xs, given), fp8.quantize_rows_in_torch(xs, given)
        assert torch.equal(scale, expected_scale) and torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))


def test_quantised_rows_are_within_half_a_step_of_the_row() -> None:
    """e4m3 keeps 3 bits of the mantissa: a relative error of 2^-4 at most, below 2^-6 of its range an absolute one."""
    (x,) = rows_of((64,))
    q, scale = fp8.quantize_rows([x])
    error = (Fp8Weight(q, scale).dense(torch.float32) - x).abs()
    assert bool((error <= x.abs() * (2**-4 + 1e-6) + scale[:, None] * 2**-10).all())
    assert float((error / scale[:, None]).max()) > 4, "the test's rows hold nothing that is rounded"


@pytest.mark.parametrize(("place", "bad"), in_every_run(product([0, 1, 2], [math.nan, math.inf, -math.inf]), 0, 4, 8))
def test_a_row_that_is_not_finite_has_no_scale_and_the_others_keep_their_bits(place: int, bad: float) -> None:
    xs = rows_of((48, 32, 16))
    healthy_q, healthy_scale = by_kernel(xs, None)
    xs[place][5, 7] = bad
    others = [i for i in range(9) if i != 5]
    for q, scale in (by_kernel(xs, None), fp8.quantize_rows(xs)):
        assert scale.isnan().tolist() == [i == 5 for i in range(9)]
        assert torch.equal(scale[others], healthy_scale[others])
        assert torch.equal(q[others].to(fp8.DTYPE).view(torch.uint8), healthy_q[others].to(fp8.DTYPE).view(torch.uint8))


def test_an_overflow_by_the_columns_scale_is_no_finite_row() -> None:
    x, scale_K = torch.full((1, 16), 1e38, device=DEVICE), torch.full((16,), 10.0, device=DEVICE)
    for _, scale in (by_kernel([x], scale_K), fp8.quantize_rows([x], scale_K)):
        assert bool(scale.isnan().all())


@pytest.mark.parametrize("size", [0.0, 1e-45, TINY / 2, TINY, 1e-30, 3.3e38])
def test_rows_of_any_size_stay_finite(size: float) -> None:
    x = torch.full((2, 16), size, device=DEVICE)
    for q, scale in (by_kernel([x], None), fp8.quantize_rows([x])):
        assert bool(q.float().isfinite().all()) and bool(scale.isfinite().all())
        if size == 0 or size >= TINY:
            assert_close(q.float() * scale[:, None], x, 1e-6)


@pytest.mark.parametrize("shape", [(16, 16), (128, 128), (144, 272), (16, 400)], ids=str)
def test_the_transposed_weight_has_the_same_bytes(shape: tuple[int, int]) -> None:
    draw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    turned = fp8.transpose(draw.view(fp8.DTYPE))
    assert turned.is_contiguous() and torch.equal(turned.view(torch.uint8), draw.t())


class Fp8Base(Base):
    """Linears whose weights are fp8. `weight` is zero: `reference` then gives the bias' and the adapters' part alone."""

    def __init__(self, in_features: int, widths: tuple[int, ...], bias: bool = False) -> None:
        super().__init__(in_features, widths, BASE_DTYPE, bias)
        q_NK, self.scale_N = fp8.quantize_rows([self.weight])
        self.true_weight = q_NK.double()
        self.weights, self.weight = list(q_NK.split(widths)), torch.zeros_like(self.weight)
        self.group = fused_linear.make_group(0, widths, in_features, DEVICE, self.scale_N)

    def products(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The base's part of y and dx in fp64, of the same quantised operands."""
        q_TK, scale_T = fp8.quantize_rows_in_torch([batch.x])
        y = (q_TK.double() @ self.true_weight.t()) * scale_T.double()[:, None] * self.scale_N.double()
        q_TN, scale_T = fp8.quantize_rows_in_torch([batch.dy], self.scale_N)
        return y, (q_TN.double() @ self.true_weight) * scale_T.double()[:, None]


GROUPS = [(64, (48,)), (144, (16,)), (272, (144, 16)), (64, QKV), (32, (96, 32, 64))]
RANKS = [(8, 20), (3, 100), (0, 0)]


@pytest.mark.parametrize(
    ("group", "ranks", "bias"),  # of each group and each two ranks one with a bias or one without
    thinned(
        product(GROUPS, RANKS, [False, True]),
        lambda group, ranks, bias: bias == (GROUPS.index(group) + RANKS.index(ranks)) % 2,
        *(1, 5, 6, 9),  # ranks of each kind, with a bias and without, of one linear, two and three
    ),
)
def test_a_group_over_an_fp8_weight_equals_fp64(group: tuple[int, tuple[int, ...]], ranks: tuple[int, int], bias: bool) -> None:
    in_features, widths = group
    m = len(widths)
    base, jobs = Fp8Base(in_features, widths, bias), [Job((30, 20), ranks[:1] * m, seed=1, gap=3), Job((90, 7), ranks[1:] * m, 0.0, 2)]
    bank = Bank(base, jobs)
    batch = make_batch(base, jobs, bank.slots, tail=13)
    adapters_y, adapters_dx, true_sums = reference(base, jobs, bank.slots, batch)
    base_y, base_dx = base.products(batch)
    y, dx = run_kernels(base, batch)
    bound = KERNEL[BASE_DTYPE]
    assert_close(y, base_y + adapters_y, bound, "y")
    assert_close(dx, base_dx + adapters_dx, bound, "dx")
    for slot, true in zip(bank.slots, true_sums, strict=True):
        found = [sums for pair in zip(slot.rows("da"), slot.rows("db"), strict=True) for sums in pair]
        for mine, theirs in zip(found, true, strict=True):
            assert_close(mine, theirs, bound, "a gradient sum")  # of x and dy as they are, not quantised
    assert not bank.changed_elsewhere()


@pytest.mark.slow
def test_fp8_is_as_near_to_the_weight_as_its_bits_allow() -> None:
    """Both operands off by 2^-4 at most, evenly: sqrt(2 / 3) * 2^-4 = 5 %, and less where rows are not at the edge of a step."""
    exact, base = Base(256, (64,), BASE_DTYPE), Fp8Base(256, (64,))
    batch = make_batch(base, [], [], tail=64)
    y, dx = run_kernels(base, batch)
    for found, true in ((y, batch.x.double() @ exact.weight.double().t()), (dx, batch.dy.double() @ exact.weight.double())):
        error = float((found.double() - true).norm() / true.norm())
        assert 0.01 < error < 0.05, error


@pytest.mark.parametrize("bad", in_every_run([math.nan, math.inf], 1))
def test_a_bad_element_spoils_its_row_whole_and_no_other_bit(bad: float) -> None:
    base, jobs = Fp8Base(64, QKV), [Job((70,), (8, 8, 8), seed=1)]
    bank = Bank(base, jobs)  # which the batch's tables point into
    batch = make_batch(base, jobs, bank.slots, tail=3)
    healthy_y, healthy_dx = run_kernels(base, batch)
    batch.x[33, 5] = batch.dy[33, 77] = bad
    others = [t for t in range(73) if t != 33]
    for found, healthy in zip(run_kernels(base, batch), (healthy_y, healthy_dx), strict=True):
        assert bool(found[33].isnan().all())
        assert torch.equal(found[others], healthy[others])


def test_rows_of_zeros_give_zeros() -> None:
    base = Fp8Base(64, QKV)
    batch = make_batch(base, [], [], tail=70)
    batch.x[:] = 0
    batch.dy[:] = 0
    for found in run_kernels(base, batch):
        assert not bool(found.any())


@pytest.mark.parametrize("spoilt", in_every_run([None, math.nan, math.inf, 3e38], 1, 3))
def test_a_job_has_the_same_bits_alone_and_beside_others(spoilt: float | None) -> None:
    base, mine = Fp8Base(64, QKV), Job((30, 7), (8, 8, 8), seed=1)
    others = [Job((13,), (4, 20, 4), seed=2, gap=2, spoilt=spoilt), Job((50,), (3, 3, 3), seed=3, spoilt=spoilt)]
    alone, beside = bits_of(base, [mine], 0), bits_of(base, [others[0], mine, others[1]], 1)
    assert not alone.differences(beside), alone.differences(beside)
