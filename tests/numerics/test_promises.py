"""L0 to L3 at the super-model's level: fixed jobs, drawn jobs, poisoned neighbours."""

from __future__ import annotations

import pytest

from tests.numerics import checks
from tests.numerics.poisons import POISONS, Poison
from tests.numerics.world import Trained, super_model


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    """The standard jobs, trained once for all tests that compare with them."""
    return checks.all_alone(super_model(), checks.standard_jobs())


@pytest.mark.parametrize("job", checks.standard_jobs(), ids=lambda job: job.name)
def test_l0_twice_alone(job: checks.Job) -> None:
    checks.check_l0(super_model(), job)


@pytest.mark.parametrize("packing_seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_l1_together_has_the_bytes_of_alone(packing_seed: int, alone: dict[str, Trained]) -> None:
    checks.check_l1(super_model(), checks.standard_jobs(), packing_seed, alone)


IN_EVERY_RUN = ("NaN adapter", "a loss that raises", "length = max")


@pytest.mark.parametrize(
    "poison", [pytest.param(poison, id=poison.name, marks=[] if poison.name in IN_EVERY_RUN else pytest.mark.slow) for poison in POISONS]
)
def test_l2_a_poisoned_neighbour_changes_nothing(poison: Poison, alone: dict[str, Trained]) -> None:
    checks.check_l2(super_model(), checks.standard_jobs(), poison, alone)


@pytest.mark.parametrize("packing_seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_l3_together_is_alone_but_for_rounding(packing_seed: int) -> None:
    checks.check_l3(super_model(), checks.standard_jobs(), packing_seed)


def test_equals_peft() -> None:
    checks.check_peft(super_model(), checks.standard_jobs())
