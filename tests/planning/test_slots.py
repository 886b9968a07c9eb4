"""How many layers are on the device: against all numbers, tried one after another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlora.planning.slots import choose_slots


@given(st.integers(2, 70), st.integers(0, 80), st.floats(0.1, 5.0))
def test_it_is_about_as_good_as_the_best_of_all(most: int, held: int, fetched: float) -> None:
    """Each layer that stays is not fetched, and leaves less room to micro-batches: a valley, as that of real bases."""

    def cost(slots: int) -> float:
        return max(1.0, fetched * (72 - slots) / 36) + 4.0 / (80 - slots)

    found = choose_slots(most, lambda slots: slots if slots <= held else None, lambda _: 0, cost)
    fitting = [slots for slots in range(2, most + 1) if slots <= held]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting and cost(found) <= 1.02 * min(map(cost, fitting))


def test_what_lacks_least_goes_before_what_costs_least() -> None:
    assert choose_slots(5, lambda slots: slots, lambda slots: slots < 4, float) == 4
