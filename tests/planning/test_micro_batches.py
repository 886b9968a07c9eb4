"""Token budget and recomputed layers: as few layers as fit for each size of a micro-batch, and the fastest of all choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.test_pack import job as flow_of
from tests.batching.test_pack import run as pack_all
from tlora.adapters.layout import AdapterLayout, AdapterShape
from tlora.batching.pipeline_model import NO_OVERHEAD, StageOverhead
from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.job import JobSpec, RunSpec
from tlora.kernels.device import as_if_on
from tlora.planning.job_work import trained_tokens
from tlora.planning.micro_batches import MicroBatches, SampleLengths, _filled, choose, cost_of, in_stages, sample_lengths
from tlora.planning.plan import RunPlan, describe_plan, settle
from tlora.planning.planned_job import PlannedJob
from tlora.planning.recompute_choices import recompute_choices
from tlora.planning.work import token_cost
from tlora.shape.memory import MemoryModel, Phase

GPU, MIB = torch.device("cuda"), 1 << 20
LAYOUT = AdapterLayout((AdapterShape("q", 16, 1024, 1024, 1.0),))
NO_LENGTHS = SampleLengths(np.zeros(0, np.int64), np.zeros(0))

memories = st.builds(
    lambda fixed, kept, share, backward, layers: MemoryModel(
        1000, (Phase(fixed, kept, kept * share / layers), Phase(0.0, kept + backward, kept * share / layers)), layers, 2, 4, step_copies=0
    ),
    st.floats(0, 1e6),
    st.floats(1, 5000),
    st.floats(0.1, 0.99),
    st.floats(0, 3000),
    st.integers(1, 40),
)


@given(memories, st.integers(-1000, 10**8), st.lists(st.integers(1, 10**6), min_size=1))
def test_as_few_layers_as_fit_and_never_fewer_for_more_tokens(memory: MemoryModel, room: int, sizes: list[int]) -> None:
    plan = memory.least_recomputed(room)
    assert list(plan.most_tokens) == sorted(plan.most_tokens) and plan.most_layers == memory.most_recomputed
    for tokens in sizes:
        layers = plan.layers(tokens)
        fits = [memory.activation_bytes(tokens, k) <= room for k in range(memory.most_recomputed + 1)]
        least = next((k for k, fit in enumerate(fits) if fit), memory.most_recomputed)
        # one token, where the division rounds the other way than the sum
        assert layers == least or layers - 1 == least == plan.layers(tokens - 1)
        assert not any(fits) or fits[layers]
    assert [plan.layers(n) for n in sorted(sizes)] == sorted(plan.layers(n) for n in sizes)


@given(memories, st.integers(1, 10**7), st.integers(1, 10**5))
def test_no_micro_batch_takes_more_than_the_largest_is_said_to(memory: MemoryModel, room: int, most: int) -> None:
    """A shorter one that recomputes fewer layers among them; where all fit, that is below the room."""
    plan = memory.least_recomputed(room)
    peak = memory.most_activation_bytes(most, plan)
    tried = {1, most, *range(1, most, max(1, most // 50)), *(n for n in plan.most_tokens if 0 < n <= most)}
    assert peak >= max(memory.activation_bytes(n, plan.layers(n)) for n in tried)
    assert peak <= room or not memory.most_tokens(room, memory.most_recomputed) >= most


def test_a_number_for_all_micro_batches() -> None:
    assert {same_for_all(3).layers(tokens) for tokens in (1, 100, 10**9)} == {3} and not same_for_all(3).varies
    assert RecomputePlan().layers(10**9) == 0
    plan = RecomputePlan((100, 200, 300))
    assert [plan.layers(n) for n in (1, 100, 101, 200, 201, 300, 301)] == [0, 0, 1, 1, 2, 2, 3]


# -- the choice ------------------------------------------------------------------------------------------------------------

# As an 8B: 2.9 MiB a token, of which a layer gives up 88 KiB.
EIGHT_B = MemoryModel(
    base_bytes=15 * 1024 * MIB,
    phases=(Phase(1000 * MIB, 2.5 * MIB, 0.088 * MIB), Phase(0, 2.9 * MIB, 0.088 * MIB)),
    num_layers=32,
    element_bytes=2,
    sum_bytes=4,
    step_copies=0,
    layer_weights=218_000_000,
    layer_features=81_920,
)


COST = token_cost(EIGHT_B, GPU)


def jobs_with(lengths: list[int], count: int = 4) -> tuple[PlannedJob, ...]:
    data: Any = SimpleNamespace(train=SimpleNamespace(lengths=np.array(lengths), epoch=len(lengths)), eval=None)
    specs = [JobSpec.model_validate({"name": f"job{i}", "data": "d", "batch_size": 8}) for i in range(count)]
    return tuple(PlannedJob(spec, data, max(lengths), LAYOUT) for spec in specs)


def plan_with(lengths: list[int], limit_gib: float, memory: MemoryModel = EIGHT_B, **settings: Any) -> RunPlan:
    jobs = jobs_with(lengths)
    run = RunSpec.model_validate({"base_model": "b", "jobs": [job.spec for job in jobs]} | settings)
    plan = RunPlan(jobs, max(lengths), RecomputePlan(), memory, int(limit_gib * 2**30), max(lengths), {})
    return settle(run, plan, memory, GPU)


MIXED = [16_300, *[1024] * 144]


def test_one_long_sample_does_not_make_all_short_ones_recompute() -> None:
    plan = plan_with(MIXED, 30.0)
    assert plan.recompute.layers(plan.token_budget) == 0 and plan.recomputed_layers > 16 and plan.largest == 16_384
    assert 2048 < plan.token_budget < 8192 and not any(job.problems for job in plan.jobs) and len(plan.resident) == 4
    assert plan.total_bytes(plan.resident) <= plan.limit_bytes
    one = MicroBatches(plan.largest, same_for_all(plan.recomputed_layers))
    lengths = sample_lengths(plan.jobs)
    assert cost_of(one, lengths, COST) > 1.12 * cost_of(plan.micro_batches, lengths, COST)
    line = describe_plan(plan)
    assert f"no layer recomputed in micro-batches of up to {plan.token_budget:,} tokens" in line
    assert f"and {plan.recomputed_layers} of 32 in that of a sample of 16,300 tokens by itself" in line
    assert plan.recomputed_by_tokens == {str(plan.token_budget): 0, "16384": plan.recomputed_layers}


def test_with_room_for_all_of_it_the_longest_sample_shares_a_micro_batch() -> None:
    plan = plan_with(MIXED, 70.0)
    assert plan.token_budget == plan.largest == 16_384 and plan.recomputed_layers == 0
    assert ", 0 of 32 layers recomputed" in describe_plan(plan)


@pytest.mark.parametrize(("recompute", "layers"), [("all", 32), (28, 28)])
def test_an_ordered_number_is_that_of_all_micro_batches(recompute: str | int, layers: int) -> None:
    plan = plan_with(MIXED, 30.0, recompute=recompute)
    assert plan.recompute == same_for_all(layers) and plan.token_budget == 16_384


def test_an_ordered_budget_is_kept_however_long_a_sample_is() -> None:
    plan = plan_with(MIXED, 30.0, token_budget=2048)
    assert plan.token_budget == 2048 and plan.recompute.layers(2048) == 0 < plan.recomputed_layers
    (warning,) = plan_warnings(2048)
    assert "token_budget 2048 is less than the longest sample, of 16300 tokens in job0" in warning
    assert plan_warnings(16_300) == ()


def plan_warnings(token_budget: int) -> tuple[str, ...]:
    from tlora.planning.plan import _budget_warnings

    jobs = list(jobs_with(MIXED))
    run = RunSpec.model_validate({"base_model": "b", "jobs": [job.spec for job in jobs], "token_budget": token_budget})
    return _budget_warnings(run, jobs, 16_300)


def test_a_longest_sample_that_fits_with_no_layers_left_is_refused_with_its_tokens() -> None:
    plan = plan_with(MIXED, 17.0)
    problem = plan.jobs[0].problems[0]
    assert "activations of 16384 tokens with 31 of 32 layers recomputed" in problem and "max_length: " in problem


def test_jobs_that_do_not_all_fit_leave_as_many_together_as_do() -> None:
    """Three of four large adapters, rather than one."""
    heavy = AdapterLayout((AdapterShape("q", 256, 1 << 20, 1 << 20, 1.0),))
    assert EIGHT_B.job_bytes(heavy) > 8192 * MIB
    jobs = tuple(replace_layout(job, heavy) for job in jobs_with([1024] * 64))
    run = RunSpec.model_validate({"base_model": "b", "jobs": [job.spec for job in jobs]})
    limit = EIGHT_B.total_bytes([heavy] * 3, 2048)
    plan = settle(run, RunPlan(jobs, 1024, RecomputePlan(), EIGHT_B, limit, 1024, {}), EIGHT_B, GPU)
    assert len(plan.resident) == 3 and not any(job.problems for job in plan.jobs)


def replace_layout(job: PlannedJob, layout: AdapterLayout) -> PlannedJob:
    return replace(job, layout=layout)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=30), st.floats(17.0, 90.0), st.sampled_from(["auto", 512, 4096]))
def test_what_is_chosen_fits_and_no_other_budget_of_the_same_room_is_faster(lengths: list[int], gib: float, budget: Any) -> None:
    jobs, limit, longest = jobs_with(lengths), int(gib * 2**30), max(lengths)
    run = RunSpec.model_validate({"base_model": "b", "jobs": [job.spec for job in jobs], "token_budget": budget})
    found = choose(run, jobs, longest, EIGHT_B, limit, COST)
    plan = RunPlan(jobs, found.token_budget, found.recompute, EIGHT_B, limit, longest, {})
    assert budget in ("auto", found.token_budget)
    layouts = [LAYOUT] * len(jobs)
    deepest = EIGHT_B.total_bytes(layouts, plan.largest, EIGHT_B.most_recomputed)
    assert plan.total_bytes(layouts) <= limit or deepest > limit or plan.recompute == same_for_all(EIGHT_B.most_recomputed)
    if budget == "auto" and plan.total_bytes(layouts) <= limit and found.recompute.varies:
        mix = sample_lengths(jobs)
        smaller = [MicroBatches(n, found.recompute) for n in range(128, found.token_budget, 128)]
        assert all(cost_of(found, mix, COST) <= cost_of(other, mix, COST) + 1e-12 for other in smaller)


def test_a_long_sample_costs_what_it_recomputes_and_no_other_does() -> None:
    plan, lengths = RecomputePlan((1000,) * 16 + (10**6,)), SampleLengths(np.array([100, 5000]), np.array([0.75, 0.25]))
    expected = 0.75 * COST.at(999, 0) + 0.25 * COST.at(5000, 16)  # ten of 100 leave 0.9 tokens free
    assert cost_of(MicroBatches(1000, plan), lengths, COST) == pytest.approx(expected)
    assert cost_of(MicroBatches(1000, plan), NO_LENGTHS, COST) == COST.at(1000, 0)


def test_check_shows_the_plan_next_to_one_number_for_all() -> None:
    plan = plan_with(MIXED, 30.0)
    run = RunSpec.model_validate({"base_model": "b", "jobs": [job.spec for job in plan.jobs], "memory_limit": plan.limit_bytes})
    data_of = {job.spec.name: 1.0 for job in plan.jobs}
    auto, none, _, every = recompute_choices(run, plan, data_of, GPU)
    assert (auto.recompute, auto.layers_of_budget, auto.recomputed_layers) == ("auto", 0, plan.recomputed_layers)
    assert auto.fits and every.fits and not none.fits and every.layers_of_budget == every.recomputed_layers == 32
    assert every.tokens_per_second * 1.12 < auto.tokens_per_second < none.tokens_per_second


@pytest.mark.parametrize("low", [20, 128])
@pytest.mark.parametrize("budget", [1024, 2048, 4096, 65_536])
def test_micro_batches_are_as_full_as_the_packer_makes_them(low: int, budget: int) -> None:
    """Of four jobs with batches of eight samples each, which never fill the largest budget; alone are those that are longer than the
    budget.
    """

    def batches(seed: int) -> Iterator[list[int]]:
        dice = np.random.default_rng(seed)
        while True:
            yield (dice.integers(low, 2049, 8) if low > 20 else np.clip(dice.lognormal(5.5, 0.8, 8), low, 2048).astype(int)).tolist()

    packed = pack_all([flow_of(f"job{i}", batches(i)) for i in range(4)], budget, 300, in_order=False)
    tokens, counts = np.unique([row.tokens for batch in packed for row in batch.rows], return_counts=True)
    offered = 4 * float(np.mean([sum(batch) for batch in itertools.islice(batches(4), 200)]))
    lengths = SampleLengths(tokens, tokens * counts / (tokens * counts).sum(), offered)
    shared = [batch.tokens for batch in packed if batch.tokens <= budget]
    assert _filled(budget, lengths) == pytest.approx(np.mean(shared), rel=0.06)


def test_a_budget_beyond_what_the_jobs_offer_is_predicted_to_be_no_faster() -> None:
    """Two batches of 4 x 256 tokens: all of both is 2,048 tokens, however many a micro-batch could hold."""
    _, jobs = sharing([(4, 256), (4, 256)])
    lengths = sample_lengths(jobs)
    each = [cost_of(MicroBatches(budget, RecomputePlan()), lengths, COST) for budget in (2048, 4096, 16_384)]
    assert lengths.offered == 2048 and each[1:] == [COST.at(2048, 0)] * 2 and each[0] >= each[1]


def test_a_class_without_small_tiles_pays_more_for_a_micro_batch() -> None:
    with as_if_on("H100", 90):
        small = token_cost(EIGHT_B, GPU).fixed_tokens
    for name, capability in (("A100", 80), ("RTX 4090", 89), ("RTX 5090", 120)):
        with as_if_on(name, capability):
            assert token_cost(EIGHT_B, GPU).fixed_tokens == 2 * small == pytest.approx(432)


def sharing(batches: list[tuple[int, int]]) -> tuple[RunSpec, list[PlannedJob]]:
    """Jobs with so many samples a step, of so many tokens each."""
    specs = [JobSpec.model_validate({"name": f"job{i}", "data": "d", "batch_size": size}) for i, (size, _) in enumerate(batches)]
    data: list[Any] = [SimpleNamespace(train=SimpleNamespace(lengths=np.full(64, tokens), epoch=64), eval=None) for _, tokens in batches]
    jobs = [PlannedJob(spec, own, int(own.train.lengths[0]), LAYOUT) for spec, own in zip(specs, data, strict=True)]
    return RunSpec.model_validate({"base_model": "b", "jobs": specs}), jobs


def test_stages_get_micro_batches_that_keep_them_busy() -> None:
    """Eight jobs whose batches together are one of the micro-batches that one GPU gets: over two stages smaller ones are faster."""
    run, jobs = sharing([(8, tokens) for tokens in (10, 20, 45, 150, 175, 175, 230, 240)])
    stages = in_stages(COST, 2, jobs, NO_OVERHEAD, 1)
    one, two = (choose(run, jobs, 240, EIGHT_B, 10**12, cost) for cost in (COST, stages))
    assert one.token_budget == 8192 and 1024 <= two.token_budget <= 2560
    assert stages.bubble(two.token_budget) < 0.1 < 0.3 < stages.bubble(8192)
    assert in_stages(COST, 1, jobs, NO_OVERHEAD, 1) is COST and COST.bubble(8192) == 0


# Of the eight jobs of bench/real_jobs.yaml: samples a step, and mean tokens of each twentieth of their samples, the shortest first.
_ALPACA = [24, 32, 37, 41, 48, 55, 67, 86, 103, 124, 146, 169, 194, 226, 264, 299, 329, 370, 406, 500]
REAL = [
    (8, _ALPACA),
    (4, [19, 22, 24, 26, 26, 27, 29, 31, 32, 33, 35, 36, 39, 41, 43, 46, 50, 58, 72, 105]),
    (4, [140, 160, 176, 185, 207, 241, 267, 280, 293, 311, 340, 383, 428, 499, 569, 671, 739, 844, 1027, 1321]),
    (8, [21, 26, 30, 34, 37, 41, 47, 54, 71, 91, 115, 137, 162, 193, 231, 270, 305, 339, 388, 473]),
    (2, [16, 18, 18, 20, 20, 21, 22, 23, 24, 25, 26, 27, 29, 31, 32, 35, 37, 39, 47, 59]),
    (4, [47, 69, 91, 108, 126, 147, 181, 211, 237, 266, 297, 339, 392, 461, 521, 608, 831, 1104, 1537, 2047]),
    (8, _ALPACA),
    (2, _ALPACA),
]


def real_jobs(times: int = 1) -> tuple[RunSpec, list[PlannedJob]]:
    """With batches so many times as large."""
    _, jobs = sharing([(times * size, 1) for size, _ in REAL])
    jobs = [replace(job, data=with_lengths(lengths), longest=max(lengths)) for job, (_, lengths) in zip(jobs, REAL, strict=True)]
    return RunSpec.model_validate({"base_model": "b", "layout": "stages", "jobs": [job.spec for job in jobs]}), jobs


def with_lengths(lengths: list[int]) -> Any:
    return SimpleNamespace(train=SimpleNamespace(lengths=np.repeat(lengths, 15), epoch=15 * len(lengths)), eval=None)


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_a_plan_over_stages_and_a_run_choose_alike(device: torch.device) -> None:
    run, jobs = real_jobs()
    overhead = StageOverhead(per_token=0.003, latency=8, launch=1100, host_ahead=True)
    plan = RunPlan(tuple(jobs), 2047, RecomputePlan(), EIGHT_B, 10**12, 2047, {}, stages=2, overhead=overhead)
    own = in_stages(token_cost(EIGHT_B, device), 2, jobs, overhead, sum(map(trained_tokens, jobs)))
    assert settle(run, plan, EIGHT_B, device).token_budget == choose(run, jobs, 2047, EIGHT_B, 10**12, own).token_budget < 2048


def test_a_lone_job_over_stages_gets_its_batch_in_several() -> None:
    run, jobs = sharing([(32, 128)])
    cost = in_stages(COST, 2, jobs, NO_OVERHEAD, 1)
    assert cost.bubble(4096) == pytest.approx(1 / 2, abs=0.02) and cost.bubble(512) == pytest.approx(1 / 9, abs=0.02)
    assert choose(run, jobs, 128, EIGHT_B, 10**12, cost).token_budget < 4096


def test_a_streamed_base_whose_link_is_hidden_gets_the_micro_batches_of_a_whole_one() -> None:
    """Else it would be predicted to be faster than the same base without a link, as larger ones cost less a token."""
    small = replace(EIGHT_B, layer_weights=15_000_000, layer_features=25_000)
    run, jobs = sharing([(8, 400)] * 4)
    whole, hidden, waited = (
        choose(run, jobs, 400, small, 10**12, token_cost(small, GPU, link_tokens)).token_budget for link_tokens in (0.0, 100.0, 20_000.0)
    )
    assert whole == hidden < waited
