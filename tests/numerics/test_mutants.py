"""The suite's own test: ten planted bugs, each of which the checks must catch, while they pass without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numerics import checks
from tests.numerics.mutants import MUTANTS, Mutant
from tests.numerics.poisons import POISONS
from tests.numerics.world import super_model

NAN_NEXT_DOOR = next(poison for poison in POISONS if poison.name == "3e38 activations")  # finite weights, NaN in each layer


@pytest.fixture(autouse=True)
def own_super_model() -> Iterator[None]:
    """Made before the bug is planted, since the check at load knows some bugs; and what a mutant leaves behind, nobody else may meet."""
    super_model.cache_clear()
    super_model()
    yield
    super_model.cache_clear()


@pytest.mark.slow
def test_without_a_mutant_all_checks_pass() -> None:
    checks.check_everything(NAN_NEXT_DOOR)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.slow
def test_mutant_is_caught(mutant: Mutant) -> None:
    with mutant.plant(), pytest.raises(AssertionError) as caught:
        checks.check_everything(NAN_NEXT_DOOR)
    print(f"{mutant.name}: {caught.value}")
