"""The kernels' promises as plain functions that raise AssertionError, over the smallest cases in which each can be broken.

They are checked in earnest, over many cases, by the tests beside this file. Here they must catch what `test_kernel_mutants.py` plants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.kernels import test_bank_chunks, test_fp8, test_fused_adamw, test_triton_cross_entropy, test_varlen_attention
from tests.kernels.linear_cases import Bank, Base, Bits, Job, bits_of, check_case, make_batch, run_kernels
from tests.kernels.test_fused_adamw import RULE, World, config_of
from tests.kernels.test_varlen_attention import Case, assert_true, computed, of_sample
from tests.supermodel.test_device_optimizer import TARGETS, Shared
from tests.tolerances import assert_close
from tlora.adapters.adamw import adamw_step
from tlora.job import LoraConfig
from tlora.kernels.cards import CLASSES
from tlora.kernels.tiles import TileTable

BY_POINTER = next(card for card in CLASSES if card.loads == "pointers")

# Runs that begin inside a tile, one of them over two tiles; another rank at each linear; one run with dropout; a scale each.
JOBS = (
    Job((20, 50), (8, 3), seed=1, gap=3),
    Job((5,), (4, 20), 0.3, seed=2, scale=0.7),
    Job((3,), (2, 2), seed=3, scale=2.5),
)


# -- linears -------------------------------------------------------------------------------------------------------------


def linear_is_the_formula() -> None:
    """L3: y, dx and each gradient sum against fp64, and nothing else is written."""
    check_case(Base(32, (32, 16), bias=True), JOBS, tail=3)


def _bits(base: Base, jobs: Sequence[Job]) -> list[Bits]:
    """What each of `jobs` gets among the others."""
    slots = Bank(base, jobs).slots
    batch = make_batch(base, jobs, slots, tail=3)
    y, dx = run_kernels(base, batch)
    return [Bits(y[t0:t1], dx[t0:t1], tuple(s.rows("da") + s.rows("db"))) for s, (t0, t1) in zip(slots, batch.spans, strict=True)]


def _assert_same(found: Bits, expected: Bits, which: object) -> None:
    assert not found.differences(expected), f"{which}: {found.differences(expected)} elements differ"


def linear_alone_is_together() -> None:
    """L1: the bits of a job among others, in another place of the tile and over another tile's edge, are those alone."""
    base = Base(32, (32, 16))
    for job, found in zip(JOBS[:2], _bits(base, [JOBS[2], *JOBS[:2]])[1:], strict=True):
        _assert_same(found, bits_of(base, [replace(job, gap=0)], 0), job)


def linear_alone_is_together_in_tiles_apart() -> None:
    """L1: the same where no tile has two runs, which is another kernel."""
    base, apart = Base(32, (32,)), Job((5,), (4,), seed=2, gap=128)
    found = _bits(base, [Job((20,), (8,), seed=1), apart])[1]
    _assert_same(found, bits_of(base, [replace(apart, gap=0)], 0), apart)


def linear_keeps_nan_next_door() -> None:
    """L2: what is in the neighbours before and behind changes no bit."""
    base = Base(32, (32, 16))
    healthy, beside = (_bits(base, [replace(JOBS[2], spoilt=v), *JOBS[:2], replace(JOBS[2], spoilt=v)]) for v in (1.0, math.nan))
    for job, found, expected in zip(JOBS[:2], beside[1:3], healthy[1:3], strict=True):
        _assert_same(found, expected, job)


def linear_sums_in_any_cut() -> None:
    """L1: sums over two micro-batches have the bits of sums over one."""
    base, whole = Base(32, (32,)), Job((33, 40), (8,), seed=1)
    expected = bits_of(base, [whole], 0)
    (slot,) = Bank(base, [whole]).slots
    for first, length in enumerate(whole.lengths):
        run_kernels(base, make_batch(base, [replace(whole, lengths=(length,))], [slot], tail=first, first=[first]))
    _assert_same(replace(expected, sums=tuple(slot.rows("da") + slot.rows("db"))), expected, "in two parts")


def linear_by_pointer_is_the_formula() -> None:
    """L3: with the loads and tiles of a card without bulk copies, where K ends within a block."""
    base = Base(48, (32, 16))
    base.group = replace(base.group, tiles=TileTable(card=BY_POINTER))
    check_case(base, JOBS, tail=3)


# -- fp8 -----------------------------------------------------------------------------------------------------------------


def fp8_rows_are_torchs() -> None:
    test_fp8.test_the_kernel_scales_rows_bit_for_bit_as_torch_does((48, 16, 16), scaled=True, dtype=torch.float32)


def fp8_spoils_one_row() -> None:
    """L2: a row with Inf has no scale, and the other rows keep their bits."""
    test_fp8.test_a_row_that_is_not_finite_has_no_scale_and_the_others_keep_their_bits(1, math.inf)


def fp8_linear_is_the_formula() -> None:
    test_fp8.test_a_group_over_an_fp8_weight_equals_fp64((32, (32, 16)), (8, 20), bias=True)


# -- head and loss -------------------------------------------------------------------------------------------------------

VOCABULARY = 8200  # two blocks, the second of them with logits past the vocabulary's end


def loss_is_the_formula() -> None:
    """L3: where the largest logits stand in the last block, and with a soft cap."""
    cases: tuple[dict[str, Any], ...] = ({}, {"softcap": 2.0})
    for options in cases:
        hidden, head, labels, weights = test_triton_cross_entropy.case(3, vocab=VOCABULARY, **options)
        head.weight_VH[-3:] = hidden
        test_triton_cross_entropy.check((hidden, head, labels, weights))


def loss_of_a_row_is_its_own() -> None:
    """L1: a row's loss and gradient have the same bits in any company and place."""
    hidden, head, labels, weights = test_triton_cross_entropy.case(5, vocab=VOCABULARY)
    losses, dh = test_triton_cross_entropy.run((hidden, head, labels, weights))
    some_losses, some_dh = test_triton_cross_entropy.run((hidden[[3, 1]], head, labels[[3, 1]], weights[[3, 1]]))
    assert torch.equal(some_losses, losses[[3, 1]]) and torch.equal(some_dh, dh[[3, 1]])


def loss_of_a_wrong_label_is_nan() -> None:
    """L2: in its own row, and in no other."""
    test_triton_cross_entropy.test_a_label_outside_the_vocabulary_makes_its_own_row_nan(97)


# -- attention -----------------------------------------------------------------------------------------------------------

FULL, WINDOWED = Case(lengths=(70, 3)), Case(lengths=(70, 3), window=20, softcap=2.0)


def attention_is_the_formula() -> None:
    """L3: out, log-sum-exp and each gradient against fp64."""
    for case in (FULL, WINDOWED):
        tensors = case.draw()
        assert_true(case, computed(case, tensors), tensors)


def attention_of_a_sample_is_its_own() -> None:
    """L1: a sample has the same bits behind another as by itself."""
    packed, tensors = Case(lengths=(3, 70)), Case(lengths=(3, 70)).draw()
    alone = computed(Case(lengths=(70,)), [t[3:] for t in tensors])
    for name, one, other in zip(test_varlen_attention.NAMES, of_sample(packed, computed(packed, tensors), 1), alone, strict=True):
        assert torch.equal(one, other), name


# -- optimizer -----------------------------------------------------------------------------------------------------------


def adamw_is_torchs() -> None:
    """L3: two steps with clipping, decay and a large epsilon, and one whose gradient is below the limit; sums are zero afterwards."""
    world, true = World(counts=(48, 35)), None
    true = test_fused_adamw.double(world.state)
    for step, size in enumerate((1.0, 1e-3, 5.0)):
        rule = replace(RULE, epsilon=1e-2, updates=step)
        true.updates, grad = step, world.gradient(step, size)
        assert world.step(grad, rule)
        adamw_step(true, grad.double(), config_of(rule), 9)
        for name in ("params", "exp_avg", "exp_avg_sq"):
            assert_close(getattr(world.state, name), getattr(true, name), 1e-6, f"{name} after step {step}")


def adamw_takes_no_nan() -> None:
    """L2 begins here: a gradient that is not finite changes nothing."""
    test_fused_adamw.test_a_gradient_that_is_not_finite_changes_nothing(math.nan, 0, 0.0)


def adamw_stays_finite() -> None:
    test_fused_adamw.test_an_update_that_is_not_finite_changes_nothing("half")


def gradient_is_gathered() -> None:
    test_bank_chunks.test_gather_copies_each_run_to_its_place("odd", torch.float32)


def gradient_is_put_back() -> None:
    """L2: where it was, and over no bit of another adapter."""
    test_bank_chunks.test_scatter_writes_each_run_and_nothing_beside_it("odd", torch.float32)


def weights_are_written() -> None:
    test_bank_chunks.test_write_rounds_each_run_and_writes_nothing_beside_it("odd", torch.bfloat16)


def _shared() -> Shared:
    shared = Shared()
    shared.join("mine", LoraConfig(r=3, target_modules=["q_proj"]), weight_decay=0.3, max_grad_norm=0.05, warmup_steps=2)
    shared.join("other", LoraConfig(r=4, target_modules=["v_proj"]), learning_rate=1e-3, max_grad_norm=0.0)
    return shared


def due_jobs_step_by_their_own_rules() -> None:
    """L3: each as by `adamw_step`, together and apart."""
    shared = _shared()
    for step, due in enumerate((("other",), ("mine", "other"), ("other", "mine"))):
        for name in shared.jobs:
            shared.add_gradient(name, 10 * step + len(name))
        shared.step(*due)


def a_neighbours_nan_is_its_own() -> None:
    """L2: of two jobs that step together, one is refused its step."""
    shared = _shared()
    shared.add_gradient("mine", 1)
    shared.add_gradient("other", 2, size=math.nan)
    shared.step("other", "mine")
    assert [shared.jobs[name].stats[-1].applied for name in ("other", "mine")] == [False, True]


def rows_that_move_are_found() -> None:
    """L1: a larger job that joins between two steps moves the bank."""
    shared: Any = _shared()
    shared.add_gradient("mine", 1)
    shared.step("mine")
    before = [
        vars(shared.bank.linear(module)).copy() for module in TARGETS if module.endswith("q_proj")
    ]  # not freed: a bug may write there
    shared.join("large", LoraConfig(r=100))
    shared.add_gradient("mine", 2)
    shared.step("mine")
    del before
