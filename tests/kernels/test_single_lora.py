"""One adapter over all tokens through the kernels, forward and every gradient, against the reference in fp64. Interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.tolerances import KERNEL, assert_close
from tlora.kernels import single_lora
from tlora.kernels.lora_tables import DA, DB, RANK, A
from tlora.kernels.single_lora import _num_runs, _place, _run_tokens, compiled_single_lora_linear, single_lora_linear, takes_kernels

with interpreted():
    from tlora.kernels import fused_linear, triton_place  # noqa: F401  (their kernels are defined here)

pytestmark = MARKS
NAMES = ("y", "dx", "da", "db")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    assert takes_kernels(DEVICE, torch.float32)


def operands(tokens: int, inner: int, columns: int, rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(tokens + rank)
    shapes = {
        "x": (tokens, inner),
        "w": (columns, inner),
        "bias": (columns,),
        "a": (rank, inner),
        "b": (columns, rank),
        "dy": (tokens, columns),
    }
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def leaf(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(DEVICE, dtype, copy=True).requires_grad_()


def run(given: dict[str, Tensor], dtype: torch.dtype, bias: bool = False, adapter: torch.dtype | None = None) -> list[Tensor]:
    """y, dx, da, db; fp64 takes the reference, which the kernels do not know."""
    x, a, b = leaf(given["x"], dtype), leaf(given["a"], adapter or dtype), leaf(given["b"], adapter or dtype)
    w, bias_N, dy = (given[name].to(DEVICE, dtype) for name in ("w", "bias", "dy"))
    y = single_lora_linear(x, w, bias_N if bias else None, a, b, 1.5)
    y.backward(dy)
    assert x.grad is not None and a.grad is not None and b.grad is not None
    return [y.detach(), x.grad, a.grad, b.grad]


def dense(given: dict[str, Tensor], bias: bool) -> list[Tensor]:
    """The formula, differentiated by autograd, in fp64."""
    x, a, b = (leaf(given[name], torch.float64) for name in ("x", "a", "b"))
    w, bias_N, dy = (given[name].to(DEVICE) for name in ("w", "bias", "dy"))
    y = x @ w.T + 1.5 * (x @ a.T) @ b.T + (bias_N if bias else 0)
    y.backward(dy)
    assert x.grad is not None and a.grad is not None and b.grad is not None
    return [y.detach(), x.grad, a.grad, b.grad]


@pytest.mark.parametrize(
    ("tokens", "inner", "columns", "rank", "bias"),
    [
        pytest.param(70, 64, 48, 5, True, marks=pytest.mark.slow),
        (1, 32, 32, 1, False),
        (600, 32, 48, 16, False),  # two runs, the second shorter than a row tile
        (130, 48, 32, 70, True),  # more rank rows than one block of the kernels
    ],
)
def test_the_kernels_and_the_reference_are_the_formula(tokens: int, inner: int, columns: int, rank: int, bias: bool) -> None:
    given = operands(tokens, inner, columns, rank)
    true = dense(given, bias)
    for dtype in (torch.float64, torch.float32):
        for name, found, expected in zip(NAMES, run(given, dtype, bias), true, strict=True):
            assert_close(found, expected, KERNEL[dtype], f"{name} in {dtype}")


def test_runs_cover_all_tokens_and_end_between_tiles() -> None:
    for tokens in (1, 128, 511, 512, 513, 2048, 4097, 8192, 100_000):
        runs, step = _num_runs(tokens), _run_tokens(tokens)
        assert 1 <= runs <= 8 and step % 128 == 0 and (runs - 1) * step < tokens <= runs * step, tokens


def test_each_run_has_sums_of_its_own() -> None:
    """Runs are summed at the same time: two that share an address lose gradients, on a GPU only."""
    tokens, inner, columns, rank = 1200, 32, 48, 3
    x, a, b = (torch.zeros(shape, device=DEVICE) for shape in ((tokens, inner), (rank, inner), (columns, rank)))
    sums = torch.zeros(_num_runs(tokens), rank * (inner + columns), device=DEVICE)
    rows_S5 = _place(x, a, b, 1.5, sums).rows_LS5[0].cpu()
    starts = torch.tensor([row.data_ptr() for row in sums])
    assert len(rows_S5) == 3 and rows_S5[:, DA].equal(starts) and rows_S5[:, DB].equal(starts + rank * inner * 4)
    assert rows_S5[:, A].unique().tolist() == [a.data_ptr()] and rows_S5[:, RANK].tolist() == [rank] * 3


def test_an_adapter_of_another_dtype_is_cast_and_keeps_its_dtype_in_its_gradient() -> None:
    given = operands(40, 32, 48, 4)
    for name, found, expected in zip(NAMES, run(given, torch.float32, adapter=torch.float64), dense(given, False), strict=True):
        assert_close(found, expected, KERNEL[torch.float32], name)
        assert found.dtype == (torch.float64 if name in ("da", "db") else torch.float32)


def test_parameters_that_are_views_at_odd_addresses() -> None:
    """As trainers that keep parameters in one flat buffer have them: neither aligned nor contiguous. Nothing else is read or changed."""
    given = operands(20, 32, 48, 3)
    true = dense(given, False)
    flat = torch.full((1 + 3 * 32 + 48 * 3,), float("nan"), device=DEVICE)
    a, b = flat[1:97].view(3, 32), flat[97:].view(3, 48).t()
    with torch.no_grad():
        a.copy_(given["a"]), b.copy_(given["b"])
    a, b, x = (t.detach().requires_grad_() for t in (a, b, given["x"].to(DEVICE, torch.float32)))
    wide = torch.full((48, 33), float("nan"), device=DEVICE)
    wide[:, 1:] = given["w"]
    y = single_lora_linear(x, wide[:, 1:], None, a, b, 1.5)
    y.backward(torch.full((), 1.0, device=DEVICE).expand_as(y))  # a gradient of strides 0, as of a sum
    ones = dense({**given, "dy": torch.ones(20, 48, dtype=torch.float64)}, False)
    assert_close(y, true[0], KERNEL[torch.float32])
    for t, expected in zip((x, a, b), ones[1:], strict=True):
        assert t.grad is not None
        assert_close(t.grad, expected, KERNEL[torch.float32])


def test_gradients_add_up_and_follow_parameters_that_move() -> None:
    """Two backwards before a step, as in gradient accumulation; then the adapter lies elsewhere, with other values."""
    first, second = operands(20, 32, 48, 3), operands(33, 32, 48, 3)
    w = first["w"].to(DEVICE, torch.float32)
    a, b = torch.nn.Parameter(first["a"].to(DEVICE, torch.float32)), torch.nn.Parameter(first["b"].to(DEVICE, torch.float32))
    for given in (first, second):
        y = single_lora_linear(given["x"].to(DEVICE, torch.float32), w, None, a, b, 1.5)
        y.backward(given["dy"].to(DEVICE, torch.float32))
    true = [dense({**given, "w": first["w"], "a": first["a"], "b": first["b"]}, False) for given in (first, second)]
    assert a.grad is not None and b.grad is not None
    assert_close(a.grad, true[0][2] + true[1][2], KERNEL[torch.float32])
    assert_close(b.grad, true[0][3] + true[1][3], KERNEL[torch.float32])
    a.data, b.data = second["a"].to(DEVICE, torch.float32), second["b"].to(DEVICE, torch.float32)
    y = single_lora_linear(second["x"].to(DEVICE, torch.float32), w, None, a, b, 1.5)
    assert_close(y, dense({**second, "w": first["w"]}, False)[0], KERNEL[torch.float32])


@pytest.mark.parametrize(("tokens", "rank"), in_every_run([(0, 3), (70, 5), (1100, 40)], 0, 1))
def test_the_adapter_reads_a_tensor_of_its_own(tokens: int, rank: int) -> None:
    """As x after dropout: its gradient is the adapter's alone, and that of x the base's alone."""
    given = operands(tokens, 64, 48, rank)
    other = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, read, a, b = (leaf(t, torch.float32) for t in (given["x"], other, given["a"], given["b"]))
    w, dy = (given[name].to(DEVICE, torch.float32) for name in ("w", "dy"))
    y = single_lora_linear(x, w, None, a, b, 1.5, read)
    y.backward(dy)
    true = [leaf(t, torch.float64) for t in (given["x"], other, given["a"], given["b"])]
    expected = true[0] @ given["w"].to(DEVICE).T + 1.5 * (true[1] @ true[2].T) @ true[3].T
    expected.backward(given["dy"].to(DEVICE))
    for name, found, exact in (("y", y, expected), *(("gradient", f.grad, t.grad) for f, t in zip((x, read, a, b), true, strict=True))):
        assert found is not None and exact is not None
        assert_close(found.detach(), exact.detach(), KERNEL[torch.float32], name)


def test_no_token_at_all() -> None:
    given = operands(0, 32, 48, 3)
    y, dx, da, db = run(given, torch.float32)
    assert y.shape == (0, 48) and dx.shape == (0, 32)
    assert da.shape == (3, 32) and not da.any() and db.shape == (48, 3) and not db.any()


@pytest.mark.filterwarnings("ignore")
def test_the_operation_keeps_the_rules_of_torch_library() -> None:
    """Schema, fake tensors against real ones, and autograd through them: what torch.compile relies on."""
    given = operands(20, 32, 48, 3)
    for dtype in (torch.float64, torch.float32):
        x, a, b = (leaf(given[name], dtype) for name in ("x", "a", "b"))
        for read in (None, leaf(given["x"] / 2, dtype)):
            torch.library.opcheck(compiled_single_lora_linear, (x, given["w"].to(DEVICE, dtype), None, a, b, 1.5, read))


def test_tables_that_a_graph_reads_are_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other numbers of tokens come: at every later call they are the very same, and those of no graph may go."""
    monkeypatch.setattr(single_lora, "_captured", {})
    before = single_lora._token_tables(1001, DEVICE), single_lora._token_tables(1002, DEVICE)
    with monkeypatch.context() as capturing:
        capturing.setattr(single_lora, "_is_capturing", lambda _: True)
        captured = single_lora._token_tables(1001, DEVICE)
    single_lora._recent_tables.cache_clear()  # as thousands of others would
    assert captured is before[0] is single_lora._token_tables(1001, DEVICE)
    assert single_lora._token_tables(1002, DEVICE) is not before[1]
