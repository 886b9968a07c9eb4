"""What is noted of refused connections, on a clock of the test's own."""

from __future__ import annotations

from tlora.cluster.refusals import SAID, WINDOW_SECONDS, Refusals


class Noted:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.refusals = Refusals(self.lines.append, lambda: self.now)

    def flood(self, count: int) -> None:
        for number in range(count):
            self.refusals.see(f"reason {number}")

    def take(self) -> list[str]:
        lines = list(self.lines)
        self.lines.clear()
        return lines


def test_the_first_are_noted_one_by_one_and_the_rest_counted() -> None:
    noted = Noted()
    noted.flood(1000)
    assert noted.take() == [f"refused: reason {number}" for number in range(SAID)]
    noted.now = WINDOW_SECONDS
    noted.refusals.look()
    noted.refusals.look()
    assert noted.take() == [f"refused: {1000 - SAID} more connections in 60 s, the last: reason 999"]


def test_a_flood_that_goes_on_costs_one_note_a_window() -> None:
    noted = Noted()
    for second in range(int(10 * WINDOW_SECONDS)):
        noted.now = float(second)
        noted.flood(50)
        noted.refusals.look()
    lines = noted.take()
    assert len(lines) == SAID + 9 and all("3,000 more connections in 60 s" in line for line in lines[-8:])


def test_after_a_quiet_while_each_is_noted_again() -> None:
    noted = Noted()
    noted.flood(SAID + 1)
    noted.now = WINDOW_SECONDS
    noted.refusals.look()
    assert noted.take()[-1].startswith("refused: 1 more connection in")
    noted.now += WINDOW_SECONDS
    noted.flood(2)
    assert noted.take() == ["refused: reason 0", "refused: reason 1"]


def test_what_was_counted_is_told_in_the_end() -> None:
    noted = Noted()
    noted.flood(SAID)
    noted.refusals.tell_rest()
    assert len(noted.take()) == SAID
    noted.flood(3)
    noted.refusals.tell_rest()
    assert noted.take() == ["refused: 3 more connections in 0 s, the last: reason 2"]
