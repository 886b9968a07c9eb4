"""The train loss that is shown while a job trains is that of its result."""

from __future__ import annotations

import math

import pytest

from tlora.wording.losses import recent_loss


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        ([(step, float(step)) for step in range(1, 26)], sum(range(16, 26)) / 10),
        ([(1, 3.0), (2, 5.0)], 4.0),
        ([(10, 7.0), (20, 3.0)], 3.0),  # logging_steps: 10
        ([(50, 7.0), (100, 3.0)], 3.0),
        ([(4, 100.0), (8, 1.0), (12, 2.0), (16, 3.0)], 2.0),  # logging_steps: 4, the rows of the steps 5 to 16
        ([(1, 2.0), (2, math.nan), (3, None), (4, 4.0)], 3.0),
        ([(1, math.nan)], None),
        ([], None),
    ],
)
def test_it_is_the_mean_of_what_was_logged_of_the_last_steps(rows: list[tuple[int, float | None]], right: float | None) -> None:
    logged = [{"step": step, "loss": loss} for step, loss in rows]
    assert recent_loss([*logged, {"step": 1000, "eval_loss": 9.0}]) == right
