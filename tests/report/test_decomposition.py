"""What a gain comes from: factors whose product is the gain, one with the next where a policy is missing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_simulation_page import make_view

from tlora.report.simulation_page import simulation_page
from tlora.scheduler.policies import POLICIES
from tlora.sim.scenario import contender
from tlora.wording.metrics import CHAIN, decomposition_text, factors

GAINS = {name: at + 1.0 for at, (name, _) in enumerate(CHAIN)}


def test_each_step_of_the_chain_is_a_policy_of_the_command_line() -> None:
    assert all("/".join(contender(name, "tlora")) == name and name.split("/")[0] in POLICIES for name, _ in CHAIN)


def test_the_factors_make_the_gain() -> None:
    found = factors(GAINS)
    assert [means for means, _ in found] == [means for _, means in CHAIN[1:]]
    assert math.prod(factor for _, factor in found) == pytest.approx(GAINS["residual_capacity/tlora"])
    assert decomposition_text(GAINS).startswith("8.00 = kernels 2.00 \u00d7 backfill 1.50 \u00d7 shortest first 1.33")


def test_a_policy_that_is_missing_gives_its_factor_to_the_next() -> None:
    few = {name: GAINS[name] for name in ("fifo/peft", "srtf/tlora", "residual_capacity/tlora")}
    assert factors(few) == [
        ("kernels and backfill and shortest first and preemption", pytest.approx(5.0)),
        ("order and growth and sharing", pytest.approx(8 / 5)),
    ]
    for name in few:
        assert decomposition_text({key: value for key, value in few.items() if key != name}) == ""
    assert decomposition_text(few | {"fifo/peft": math.nan}) == ""


def test_the_page_shows_it() -> None:
    view = make_view(20)
    text = "Where the gain of residual_capacity comes from: <b>3.00 = kernels 1.50 \u00d7 backfill and"
    assert text in simulation_page(view)
    two = [policy for policy in view.policies if policy.name != "fifo/tlora"]
    ratios = [row for row in view.ratios if "fifo/tlora" not in (row["name"], row["against"])]
    assert "comes from" not in simulation_page(replace(view, policies=two, ratios=ratios))
