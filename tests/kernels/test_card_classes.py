"""Every kernel of the rule, compiled for each class of GPU, which need not be there: it fits into a block, spills nothing to speak of, and
loads what its loops read asynchronously.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.interpreter import interpreted
from tlora.kernels.cards import CLASSES, CardClass, class_of_capability

pytest.importorskip("triton")

with interpreted():
    from tests.kernels.compiled_kernels import EXPERTS_IN_LOOPS, IN_LOOPS, Compiled, compiled
    from tlora.kernels.compile_request import (
        AttentionRequest,
        CompileRequest,
        ConvolutionRequest,
        DeltaRequest,
        ExpertRequest,
        GroupRequest,
        HeadRequest,
        PackedRequest,
        RowsRequest,
    )

LEAST_MEMORY = ("sm_86", "sm_120")  # shared memory: the oldest and the newest class of it
MOST_STACK = 64  # bytes
# sm_90: of a tile that was chosen on Hopper cards by its time. Another would change bits, and is to be timed there first. sm_120: of two
# linears' input gradient by Triton 3.7.1, which puts by at most 26 registers once a tile, and none in the loops of its products.
KNOWN_STACKS = {("sm_90", "dkv_kernel"): 296, ("sm_120", "gemm_kernel"): 96}
FP32_STACK = 512  # of fp32 kernels, which are for those who want its precision: as FMAs these took up to 9,488
EXPERTS = (  # Qwen3-30B-A3B's two parameters, and gate and up of gpt-oss: in columns, biased
    (2048, 1536, 128, 8, False, False, True, "bfloat16"),
    (768, 2048, 128, 8, False, False, False, "bfloat16"),
    (2880, 5760, 32, 4, True, True, True, "bfloat16"),
)
ROUTERS = ((2048, 128, False), (2880, 32, True), (4096, 8, False))  # Qwen3-30B-A3B's, gpt-oss-20b's, Mixtral's
DELTA = (16, 128, 32, 128, True, "float32")  # Qwen3.5-9B's
IN_RULE = (
    *("system_kernel", "invert_kernel", "prepare_kernel", "scan_kernel", "output_kernel"),
    *("within_kernel", "scan_back_kernel", "output_back_kernel"),
)
Shape = tuple[int, tuple[int, ...]]  # a group's in features and widths
WIDE, PAIR, DOWN = (4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,))
SMALL = (2048, (2048,))
ENDS_WITHIN = (1040, (48,))  # K is no multiple of a block


def order(card: CardClass, dtype: str, width: int, *groups: Shape, dropout: bool = False, bias: bool = False) -> CompileRequest:
    fp8 = dtype == "float8_e4m3fn"
    made = tuple(GroupRequest(inner, widths, bias, fp8) for inner, widths in groups)
    return CompileRequest("no GPU of this name", card.capability, 132, "bfloat16" if fp8 else dtype, width, dropout, made)


def attentions(card: CardClass, dtype: str, *orders: AttentionRequest) -> CompileRequest:
    """With the head and the loss."""
    head = HeadRequest(128256, softcap=any(each.softcap for each in orders))
    return CompileRequest("no GPU of this name", card.capability, 132, dtype, 16, False, (), orders, head)


def routers(*dtypes: str) -> tuple[RowsRequest, ...]:
    return tuple(RowsRequest(*each, dtype) for dtype in dtypes for each in ROUTERS)


def recurrent(card: CardClass, dtype: str) -> CompileRequest:
    """The layers of Qwen3.5 that are not attention."""
    rule, convolution = DeltaRequest(*DELTA), ConvolutionRequest(8192, 4, False, True)
    return replace(order(card, dtype, 16), delta_rules=(rule,), convolutions=(convolution,))


def usual(card: CardClass) -> list[CompileRequest]:
    """What a bf16 run without dropout launches first, and what one over a base in 4 bits adds."""
    linears = replace(order(card, "bfloat16", 16, SMALL), packed=(PackedRequest(64, "bfloat16"), PackedRequest(128, "float16", zero=True)))
    return [linears, attentions(card, "bfloat16", AttentionRequest(32, 8, 128, 0, False))]


def all_16_bits(card: CardClass) -> list[CompileRequest]:
    """Groups of one to three linears, each kind of rank, dropout, biases, each size of heads, windows, caps; fp8 where the class has it."""
    heads = [AttentionRequest(32, 8, size, 0, False) for size in (64, 80, 128, 256)]
    heads += [AttentionRequest(32, 8, size, 4096, True) for size in (128, 256)]
    heads += [AttentionRequest(64, 8, 64, window, False, "bfloat16") for window in (0, 128)]  # gpt-oss
    return [
        order(card, "bfloat16", 64, WIDE, PAIR, DOWN, ENDS_WITHIN, dropout=True),
        order(card, "bfloat16", 16, WIDE, PAIR, bias=True),
        order(card, "bfloat16", 256, WIDE),
        replace(order(card, "float16", 64, DOWN), packed=(PackedRequest(128, "float16"),)),
        attentions(card, "bfloat16", *heads),
        attentions(card, "float16", heads[2]),
        replace(
            order(card, "bfloat16", 16), experts=tuple(ExpertRequest(*each) for each in EXPERTS), routers=routers("bfloat16", "float32")
        ),
        recurrent(card, "bfloat16"),
        *([order(card, "float8_e4m3fn", 64, WIDE, DOWN)] if card.fp8 else []),
    ]


def all_fp32(card: CardClass) -> list[CompileRequest]:
    heads = [AttentionRequest(32, 8, size, 0, False) for size in (64, 128)]  # larger ones do not run on tensor cores in fp32
    return [
        order(card, "float32", 64, WIDE, DOWN, ENDS_WITHIN, dropout=True),
        replace(order(card, "float32", 16, WIDE, bias=True), packed=(PackedRequest(64, "bfloat16"),)),
        attentions(card, "float32", *heads),
        replace(order(card, "float32", 16), experts=(ExpertRequest(2048, 1536, 128, 8, False, False, True, "float32"),)),
        replace(order(card, "float32", 16), routers=routers("float32")),
    ]


def check(card: CardClass, orders: list[CompileRequest], cache: Path, most_stack: int = MOST_STACK) -> Counter[str]:
    kernels = compiled(orders, cache)
    print(f"{card.name}\n" + "\n".join(map(str, kernels)))
    bad = [f"{kernel}: {fault}" for kernel in kernels for fault in faults(card, kernel, most_stack)]
    assert not bad, "\n".join(bad)
    return Counter(kernel.name for kernel in kernels)


def faults(card: CardClass, kernel: Compiled, most_stack: int) -> list[str]:
    found = []
    if kernel.shared_memory > card.shared_memory:
        found.append(f"takes {kernel.shared_memory} bytes of shared memory of {card.shared_memory}")
    if kernel.lost:
        found.append(f"lacks {kernel.lost} of its products")
    if kernel.stack > max(most_stack, KNOWN_STACKS.get((card.name, kernel.name), 0)):
        found.append(f"has a stack of {kernel.stack} bytes")
    if kernel.name in (*IN_LOOPS, *EXPERTS_IN_LOOPS):
        if not kernel.products:
            found.append("runs on no tensor core")
        if not kernel.copies and kernel.stages > 1:
            found.append("waits for each load")
    return found


@pytest.mark.parametrize(
    "card", [pytest.param(card, id=card.name, marks=[] if card.name == LEAST_MEMORY[0] else [pytest.mark.slow]) for card in CLASSES]
)
def test_what_most_runs_launch(card: CardClass, tmp_path: Path) -> None:
    found = check(card, usual(card), tmp_path)
    assert found["gemm_kernel"] >= 4 and found["dequantize_kernel"] == 2 and all(found[name] for name in IN_LOOPS)


@pytest.mark.slow
@pytest.mark.parametrize("card", [pytest.param(c, id=c.name, marks=[] if c.name in LEAST_MEMORY else [pytest.mark.soak]) for c in CLASSES])
def test_all_in_16_bits(card: CardClass, tmp_path: Path) -> None:
    found = check(card, all_16_bits(card), tmp_path)
    assert all(found[name] for name in (*IN_LOOPS, *EXPERTS_IN_LOOPS, "add_dropped_kernel", "cross_entropy_kernel", "update_kernel"))
    assert all(found[name] for name in (*IN_RULE, "prepare_back_kernel", "fold_kernel", "convolve_kernel", "convolve_back_kernel"))
    assert not card.fp8 or (found["quantize_kernel"] and found["transpose_kernel"])


@pytest.mark.soak
@pytest.mark.parametrize("card", CLASSES, ids=lambda card: card.name)
def test_all_in_fp32(card: CardClass, tmp_path: Path) -> None:
    check(card, all_fp32(card), tmp_path, FP32_STACK)


def test_a_kernel_that_does_not_fit_is_found() -> None:
    """Of each fault one, or the tests above might look at nothing."""
    card = class_of_capability(86)
    assert card is not None
    sound = Compiled("gemm_kernel", {}, 4, 3, 255, MOST_STACK, card.shared_memory, ("cp.async",), ("mma.sync",))
    assert not faults(card, sound, MOST_STACK)
    for field, value, fault in (
        ("shared_memory", card.shared_memory + 1, "shared memory"),
        ("stack", MOST_STACK + 1, "stack of 65 bytes"),
        ("copies", (), "waits for each load"),
        ("products", (), "no tensor core"),
        ("lost", 1, "lacks 1 of its products"),
    ):
        (found,) = faults(card, Compiled(**vars(sound) | {field: value}), MOST_STACK)
        assert re.search(fault, found)


@pytest.mark.parametrize(
    ("capability", "name"),
    [(75, None), (80, "sm_80"), (86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90"), (100, None), (103, None), (110, None),
     (120, "sm_120"), (121, "sm_120"), (130, None)],
)  # fmt: skip
def test_a_gpu_is_of_the_newest_class_of_its_generation(capability: int, name: str | None) -> None:
    card = class_of_capability(capability)
    assert (None if card is None else card.name) == name
