"""Which steps are measured to find a number of nano-batches (`group/nano_batching.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tlora.batching.nano_batches import SliceCount
from tlora.group.nano_batching import NanoBatching


class Steps:
    """Of a lone job over two stages, by a clock of their own; the model's passes are graphs or `launched`."""

    def __init__(self, graphs: bool = True) -> None:
        self.now, self.seen = 0.0, list[float]()
        self.path = SimpleNamespace(launched_passes=0)
        model: Any = SimpleNamespace(fast_path=self.path if graphs else None)
        pipeline: Any = SimpleNamespace(seconds=lambda: self.now, depth=2)
        runs: Any = {"a": SimpleNamespace(spec=SimpleNamespace(name="a"))}
        self.batching = NanoBatching(model, pipeline, runs, lambda _: None)
        self.batching._cuts, self.batching._all_work = True, 1.0
        self.batching._choice = choice = SliceCount(8, 2)
        see = choice.see
        choice.see = lambda seconds: (self.seen.append(seconds), see(seconds))  # type: ignore[method-assign, assignment]
        self.batching.stepped(["a"])

    def take(self, seconds: float, launched: int = 0) -> None:
        self.now += seconds
        self.path.launched_passes += launched
        self.batching._work = 1.0
        self.batching.stepped(["a"])


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_with_passes_that_graphs_will_replay_is_not_measured(graphs: bool) -> None:
    steps = Steps(graphs)
    for seconds, launched in ((0.9, 2), (0.8, 1), (0.5, 0), (0.5, 0), (0.45, 0)):
        steps.take(seconds, launched)
    assert steps.seen == pytest.approx([0.5, 0.5, 0.45] if graphs else [0.9, 0.8, 0.5, 0.5, 0.45])


def test_where_all_steps_have_such_passes_a_count_is_measured_all_the_same() -> None:
    steps = Steps()
    for _ in range(6):
        steps.take(0.5, 1)
    assert steps.seen == pytest.approx([0.5, 0.5]), "the fifth, and the sixth of the same count"


def test_each_count_has_its_own_such_steps() -> None:
    steps = Steps()
    steps.take(0.5)
    steps.take(0.5)
    count = steps.batching._choice.count
    assert count != 2, "the first count is measured twice"
    for _ in range(4):
        steps.take(0.9, 1)
    steps.take(0.4)
    assert steps.seen == pytest.approx([0.5, 0.5, 0.4])
