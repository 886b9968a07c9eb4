"""The suite's own test: ten planted bugs, each of which the checks must catch, while they pass without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numerics import checks
from tests.numerics.mutants import MUTANTS, Mutant
from tests.numerics.poisons import POISONS
from tests.numerics.world import super_model

NAN_ADAPTER = POISONS[0]


@pytest.fixture(autouse=True)
def own_super_model() -> Iterator[None]:
    """Made before the bug is planted, since the check at load knows some bugs; and what a mutant leaves behind, nobody else may meet."""
    super_model.cache_clear()
    super_model()
    yield
    super_model.cache_clear()


def test_without_a_mutant_all_checks_pass() -> None:
    checks.check_everything(NAN_ADAPTER)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    with mutant.plant(), pytest.raises(AssertionError) as caught:
        checks.check_everything(NAN_ADAPTER)
    print(f"{mutant.name}: {caught.value}")
