"""The head and loss of a GPU against autograd in fp64: interpreted in fp32 on a CPU, and in every compute dtype on a GPU."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases import in_every_run
from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.kernels.test_linear_cross_entropy import HEADS, make, oracle
from tests.tolerances import KERNEL, assert_close
from tlora.kernels import linear_cross_entropy as reference
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.head import GPU_CHUNK_BYTES, Head, gpu_chunk_rows
from tlora.kernels.linear_cross_entropy import chunk_bytes

with interpreted():
    from tlora.kernels import triton_cross_entropy as module
    from tlora.kernels.triton_cross_entropy import fused_linear_cross_entropy

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]  # numpy, for the maximum of a NaN row
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]  # the interpreter cuts bf16 instead of rounding it
ROWS = 8
"""Of a chunk in these tests."""

Case = tuple[Tensor, Head, Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_chunks_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 rows and blocks of 32 logits; memory handed out is NaN, so that what nobody writes shows."""
    monkeypatch.setattr(module, "gpu_chunk_rows", lambda head: ROWS)
    monkeypatch.setattr(module, "_BLOCK_V", 32)
    monkeypatch.setattr(module, "_WARPS", 4)
    new_empty = Tensor.new_empty

    def filled(like: Tensor, *size: object, **kind: object) -> Tensor:
        made = new_empty(like, *size, **kind)  # type: ignore[call-overload]
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", filled)


def case(tokens: int, dtype: torch.dtype = torch.float32, **options: object) -> Case:
    hidden, head, labels, weights = make(tokens, dtype, **options)  # type: ignore[arg-type]
    bias = None if head.bias_V is None else head.bias_V.to(DEVICE)
    return (
        hidden.to(DEVICE),
        Head(partial(FrozenLinear, PlainWeight(head.weight_VH.to(DEVICE)), bias), head.scale, head.softcap),
        labels.to(DEVICE),
        weights.to(DEVICE),
    )


def run(given: Case) -> tuple[Tensor, Tensor]:
    losses, dh = fused_linear_cross_entropy(*given)
    assert dh is not None and dh.dtype == given[0].dtype and losses.dtype == torch.float32
    return losses, dh


def check(given: Case) -> None:
    (losses, dh), (true_losses, true_dh) = run(given), oracle(*given)
    assert_close(losses, true_losses, KERNEL[given[0].dtype], "losses")
    assert_close(dh, true_dh, KERNEL[given[0].dtype], "dh")


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradient(dtype: torch.dtype, options: dict[str, object]) -> None:
    """97 logits: three blocks and one logit. 19 rows: two chunks and three rows."""
    check(case(19, dtype, **options))


@pytest.mark.parametrize("vocab", in_every_run([1, 31, 32, 33, 64], 0, 2, 3))
def test_edges_of_a_block(vocab: int) -> None:
    check(case(3, vocab=vocab))


@pytest.mark.parametrize("tokens", in_every_run([1, 7, 8, 9, 16, 17], 0, 2, 3))
def test_edges_of_a_chunk(tokens: int) -> None:
    check(case(tokens, bias=True))


def test_each_edge_of_the_vocabulary_as_the_label() -> None:
    hidden, head, labels, weights = case(6)
    labels.copy_(torch.tensor([0, 31, 32, 63, 64, 96]))
    check((hidden, head, labels, weights))


def test_no_tokens() -> None:
    hidden, head, labels, weights = case(3)
    losses, dh = fused_linear_cross_entropy(hidden[:0], head, labels[:0], weights[:0])
    assert dh is not None and losses.shape == (0,) and dh.shape == (0, hidden.shape[1])


def test_without_weights_the_same_losses_and_no_gradient() -> None:
    given = case(19, softcap=3.0)
    losses, dh = fused_linear_cross_entropy(*given[:3], None)
    assert dh is None and torch.equal(losses, run(given)[0])


def test_what_is_given_is_left_as_it_was() -> None:
    hidden, head, labels, weights = case(19)
    before = [t.clone() for t in (hidden, head.weight_VH, labels, weights)]
    run((hidden, head, labels, weights))
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, head.weight_VH, labels, weights), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", in_every_run([{}, {"softcap": 3.0}], 1), ids=["plain", "softcap"])
@pytest.mark.parametrize("bad", in_every_run([math.nan, math.inf, 3e38], 0, 2))
def test_a_bad_row_stays_in_its_row(bad: float, options: dict[str, object], dtype: torch.dtype) -> None:
    hidden, head, labels, weights = case(19, dtype, **options)
    poisoned = hidden.clone()
    poisoned[5] = bad
    rest = torch.arange(19, device=DEVICE) != 5
    found, healthy = run((poisoned, head, labels, weights)), run((hidden, head, labels, weights))
    for ours, theirs in zip(found, healthy, strict=True):
        assert torch.equal(ours[rest], theirs[rest])
    if math.isnan(bad):
        assert bool(found[0][5].isnan()) and bool(found[1][5].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", in_every_run([[0], [3], [8, 2], [18, 17, 16, 1, 0, 9, 10, 11, 12]], 1, 3), ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_place(kept: list[int], dtype: torch.dtype) -> None:
    hidden, head, labels, weights = case(19, dtype, scale=1.7, softcap=5.0)
    losses, dh = run((hidden, head, labels, weights))
    index = torch.tensor(kept, device=DEVICE)
    some_losses, some_dh = run((hidden[index], head, labels[index], weights[index]))
    assert torch.equal(some_losses, losses[index]) and torch.equal(some_dh, dh[index])


@pytest.mark.parametrize("label", in_every_run([-100, -1, 97, 1 << 40], 1, 2))
def test_a_label_outside_the_vocabulary_makes_its_own_row_nan(label: int) -> None:
    """It is never read: the labels of some jobs must not crash the others, and beside the vocabulary lies someone's memory."""
    hidden, head, labels, weights = case(9)
    healthy = run((hidden, head, labels, weights))
    labels[4] = label
    rest = torch.arange(9, device=DEVICE) != 4
    for ours, theirs in zip(run((hidden, head, labels, weights)), healthy, strict=True):
        assert bool(ours[4].isnan().all()) and torch.equal(ours[rest], theirs[rest])


def test_a_block_of_logits_at_minus_infinity_has_no_share() -> None:
    """A bias of -inf masks 32 words: the whole first block. Losses and gradient are those of the other 65."""
    hidden, head, labels, weights = case(5, bias=True)
    assert head.bias_V is not None
    head.bias_V[:32] = -math.inf
    labels.clamp_(min=32)
    rest = Head(partial(FrozenLinear, PlainWeight(head.weight_VH[32:]), head.bias_V[32:]))
    true_losses, true_dh = oracle(hidden, rest, labels - 32, weights)
    losses, dh = run((hidden, head, labels, weights))
    assert_close(losses, true_losses, KERNEL[torch.float32], "losses")
    assert_close(dh, true_dh, KERNEL[torch.float32], "dh")


def test_large_logits_do_not_overflow() -> None:
    hidden, head, labels, weights = case(8)
    losses, dh = run((hidden * 1e4, head, labels, weights))
    assert bool(losses.isfinite().all()) and bool(dh.isfinite().all())


def test_weight_zero_gives_no_gradient() -> None:
    hidden, head, labels, weights = case(8)
    weights[3] = 0
    _, dh = run((hidden, head, labels, weights))
    assert not dh[3].any() and bool(dh[2].any())


def test_rows_of_a_chunk_follow_from_the_head_and_memory_counts_them() -> None:
    """On the meta device: real vocabularies. 256 MiB of logits in bf16, less with odd sizes, and 4,096 rows at most."""
    sizes = {(128_256, torch.bfloat16): 1024, (151_936, torch.bfloat16): 768, (262_144, torch.float32): 256, (97, torch.float32): 4096}
    for (vocab, dtype), rows in sizes.items():
        head = Head(partial(FrozenLinear, PlainWeight(torch.empty(vocab, 64, dtype=dtype, device="meta"))))
        assert gpu_chunk_rows(head) == rows
        logits = rows * vocab * dtype.itemsize
        assert logits <= GPU_CHUNK_BYTES
        assert logits < chunk_bytes(head, torch.device("cuda")) < 1.01 * logits + (8 << 20)
        assert chunk_bytes(head, torch.device("cpu")) == 3 * reference.CHUNK_ELEMENTS * 4


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_in_real_sizes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of GPT-2's odd size, the module's own chunks and blocks, against the reference in fp64."""
    monkeypatch.undo()
    g = torch.Generator(DEVICE).manual_seed(0)
    rows = gpu_chunk_rows(Head(partial(FrozenLinear, PlainWeight(torch.empty(50_257, 1, dtype=dtype, device="meta")))))
    hidden = torch.randn(rows + 100, 256, generator=g, device=DEVICE).to(dtype)
    head = Head(partial(FrozenLinear, PlainWeight((torch.randn(50_257, 256, generator=g, device=DEVICE) * 0.1).to(dtype))), softcap=30.0)
    labels = torch.randint(0, 50_257, (len(hidden),), generator=g, device=DEVICE)
    weights = torch.rand(len(hidden), generator=g, device=DEVICE)
    losses, dh = reference.linear_cross_entropy(hidden, head, labels, weights)
    true_head = Head(partial(FrozenLinear, PlainWeight(head.weight_VH.double())), softcap=30.0)
    true_losses, true_dh = reference.linear_cross_entropy(hidden.double(), true_head, labels, weights.double())
    assert dh is not None and true_dh is not None
    bound = KERNEL[torch.bfloat16] if dtype == torch.float16 else KERNEL[dtype]
    assert_close(losses, true_losses, bound, "losses")
    assert_close(dh, true_dh, bound, "dh")
    some = torch.tensor([rows + 3, 1, 77], device=DEVICE)
    some_losses, some_dh = reference.linear_cross_entropy(hidden[some], head, labels[some], weights[some])
    assert some_dh is not None and torch.equal(some_losses, losses[some]) and torch.equal(some_dh, dh[some])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reference.linear_cross_entropy(hidden, head, labels, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
