"""Shares of a micro-batch: nothing lost, no cap broken, by weight among those without; and the step seconds that follow."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.shape.test_cost import ROUND
from tlora.shape.cost import CostModel
from tlora.shape.sharing import Member, fill, group_step_seconds, share_tokens

COST = CostModel({"base": ROUND})
TOKENS = st.floats(1, 50_000)
MEMBERS = st.lists(st.builds(Member, TOKENS, st.floats(0.001, 10_000)), min_size=2, max_size=30)
BUDGETS = st.sampled_from(CostModel.budgets)


def count_short(members: list[Member], shares: list[float], budget: int) -> int:
    """Of those that do not have as much of a micro-batch as they offer."""
    return sum(share < min(member.tokens_per_step, budget) for share, member in zip(shares, members, strict=True))


@given(members=st.lists(st.tuples(TOKENS, st.floats(1e-6, 1e6)), min_size=1, max_size=30), part=st.floats(0.001, 0.999))
def test_shares_are_weighted_max_min(members: list[tuple[float, float]], part: float) -> None:
    caps, weights = [cap for cap, _ in members], [weight for _, weight in members]
    filled = part * sum(caps)
    shares = share_tokens(filled, caps, weights)
    assert sum(shares) == pytest.approx(filled)
    assert all(0 < share <= cap for share, cap in zip(shares, caps, strict=True))
    uncapped = [share / weight for share, cap, weight in zip(shares, caps, weights, strict=True) if share < cap]
    level = max(uncapped)
    assert uncapped == pytest.approx([level] * len(uncapped))
    assert all(cap / weight <= level * (1 + 1e-9) for share, cap, weight in zip(shares, caps, weights, strict=True) if share == cap)


def test_what_a_capped_member_leaves_is_for_the_others_by_weight() -> None:
    assert share_tokens(1000, [100, 900, 900], [1, 1, 2]) == pytest.approx([100, 300, 600])
    assert share_tokens(1000, [100, 350, 10_000], [1, 1, 1]) == pytest.approx([100, 350, 550])


@given(tokens=TOKENS, weight=st.floats(0.001, 1000), budget=BUDGETS, where=st.sampled_from([(1, 1), (4, 1), (16, 2)]))
def test_a_member_by_itself_is_alone(tokens: float, weight: float, budget: int, where: tuple[int, int]) -> None:
    gpus, nodes = where
    found = group_step_seconds(COST, "base", budget * gpus, gpus, nodes, [Member(tokens, weight)])
    if tokens <= budget * gpus or budget == COST.budgets[-1]:
        assert found == [COST.alone_step_seconds("base", tokens, gpus, nodes)]
    else:
        assert found[0] >= COST.alone_step_seconds("base", tokens, gpus, nodes) * (1 - 1e-12)


@pytest.mark.parametrize(("tokens", "count"), [(1024, 1), (1025, 2), (2048, 2), (5000, 5)])
def test_a_member_by_itself_with_more_than_a_micro_batch_takes_several(tokens: float, count: int) -> None:
    expected = count * 0.01 + tokens / 10_000
    assert group_step_seconds(COST, "base", 1024, 1, 1, [Member(tokens, 1.0)]) == pytest.approx([expected])


@given(members=MEMBERS, budget=BUDGETS)
def test_no_member_steps_twice_in_a_micro_batch_and_no_token_is_lost(members: list[Member], budget: int) -> None:
    steps = group_step_seconds(COST, "base", budget, 1, 1, members)
    filled, shares = fill(COST.fill_share, budget, 1, members)
    most = min(0.95 * budget, sum(min(member.tokens_per_step, budget) for member in members))
    assert filled <= most * (1 + 1e-9)
    assert filled == pytest.approx(most) or count_short(members, shares, budget) == 1
    seconds = COST.micro_batch_seconds("base", filled, 1, 1, len(members))
    assert min(steps) >= seconds * (1 - 1e-9)
    rate = sum(member.tokens_per_step / step for member, step in zip(members, steps, strict=True))
    assert rate == pytest.approx(filled / seconds)


@given(members=MEMBERS.filter(lambda members: len(members) > 2), budget=BUDGETS)
def test_a_further_member_makes_nobody_of_several_faster(members: list[Member], budget: int) -> None:
    """Unless one alone was short of its cap, whose end of a batch the newcomer fills."""
    _, shares = fill(COST.fill_share, budget, 1, members[:-1])
    assume(count_short(members[:-1], shares, budget) != 1)
    before = group_step_seconds(COST, "base", budget, 1, 1, members[:-1])
    after = group_step_seconds(COST, "base", budget, 1, 1, members)
    assert all(late >= early * (1 - 1e-9) for early, late in zip(before, after[:-1], strict=True))


def test_members_whose_batches_all_fit_step_in_each_micro_batch() -> None:
    steps = group_step_seconds(COST, "base", 8192, 2, 1, [Member(1000, 5.0), Member(3000, 1.0)])
    assert steps == pytest.approx([0.01 + 0.02 + 0.001 + 4000 / 20_000] * 2)


def test_a_full_micro_batch_is_shared_by_weight_and_its_padding_is_nobodys() -> None:
    steps = group_step_seconds(COST, "base", 10_000, 1, 1, [Member(19_000, 1.0), Member(19_000, 3.0)])
    seconds = 0.01 + 0.001 + 0.95
    assert steps == pytest.approx([19_000 * seconds / 2375, 19_000 * seconds / 7125])
