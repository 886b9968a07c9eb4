"""What was learned of speeds outlives the scheduler that learned it; a damaged file costs no more than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tlora.cluster.learned_costs import FILE, LearnedCosts
from tlora.protocol import BaseSpeed
from tlora.scheduler.gpu_kinds import GpuKinds
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants

OF = "models/base cuda"
OLD, NEW = "NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3"


def model() -> CostModel:
    return CostModel({"base": live_constants(16e9), "other": live_constants(2e9)})


def observed(times: int = 50, ratio: float = 1.4, cost: CostModel | None = None) -> CostModel:
    cost = cost or model()
    for number in range(times):
        cost.observe("base", 1, 1, ratio, float(number))
    return cost


def taught(directory: Path, of: str = OF, now: float = 7.0) -> tuple[CostModel, list[str]]:
    """A fresh model that was taught from the file, and what was said."""
    cost, said = model(), list[str]()
    LearnedCosts(directory, said.append).teach(cost, "base", of, now)
    return cost, said


def seconds(cost: CostModel, base: str = "base") -> float:
    return cost.micro_batch_seconds(base, 4096.0, 1, 1, 2)


def save(directory: Path, cost: CostModel, now: float = 60.0) -> None:
    learned = LearnedCosts(directory, pytest.fail)
    learned.teach(cost, "base", OF, now)
    learned.see(now, at_once=True)


def test_predictions_are_those_of_the_scheduler_before(tmp_path: Path) -> None:
    before = observed()
    assert seconds(before) > 1.1 * seconds(model()), "something was learned"
    save(tmp_path, before)
    after, said = taught(tmp_path)
    assert seconds(after) == seconds(before) and not said
    assert seconds(after, "other") == seconds(model(), "other")
    assert after.times_corrected > 0, "what was worked out before of predictions is void"
    for cost, now in ((before, 61.0), (after, 8.0)):
        for _ in range(30):
            cost.observe("base", 1, 1, 1.3, now)
    assert seconds(after) == pytest.approx(seconds(before), rel=1e-3), "the same observations weigh as much as before"
    assert len((tmp_path / FILE).read_bytes()) < 2000


@pytest.mark.parametrize("of", ["models/base cpu", "models/changed cuda"])
def test_another_device_or_base_learns_anew(tmp_path: Path, of: str) -> None:
    save(tmp_path, observed())
    after, said = taught(tmp_path, of)
    assert seconds(after) == seconds(model()) and not said


def test_it_waits_for_the_constants_that_a_worker_measures(tmp_path: Path) -> None:
    """A base begins with the constants of another one, and those that were measured come later, the same as before."""
    speed = BaseSpeed(9000.0, 0.02, 0.03, 0.001)
    before = model()
    before.measure("base", "H200", speed)
    for number in range(50):
        before.observe("base", 1, 1, 0.8, float(number))
    save(tmp_path, before)
    learned, after = LearnedCosts(tmp_path, pytest.fail), model()
    learned.teach(after, "base", OF, 0.0)
    assert seconds(after) == seconds(model()), "of these constants nothing was learned"
    for number in range(30):
        after.observe("base", 1, 1, 1.3, float(number))
    learned.see(40.0, at_once=True)
    after.measure("base", "H200", speed)
    assert seconds(after) == seconds(before)
    again, _ = taught(tmp_path)
    assert seconds(again) != seconds(model()), "each of the two is kept"
    again.measure("base", "H200", speed)
    assert seconds(again) == seconds(before)


def test_what_is_learned_of_a_kind_of_gpu_is_of_that_kind(tmp_path: Path) -> None:
    """The second scheduler hears of the kinds in another order, and of one before the base."""
    for begun in (False, True):
        learned, own = LearnedCosts(tmp_path, pytest.fail), model()
        kinds = GpuKinds(begin=lambda kind, cost, learned=learned: learned.teach_kind(kind, cost, 70.0))
        kinds.find((0, 1), (OLD, NEW), (0.1, 1.0))
        early = kinds.cost(NEW, own) if begun else None
        learned.teach(own, "base", OF, 70.0)
        old, new = kinds.cost(OLD, own), kinds.cost(NEW, own)
        assert early in (None, new) and seconds(own) == seconds(model())
        if not begun:
            alike = seconds(new)
            observed(cost=old), observed(ratio=0.7, cost=new)
            expected = seconds(old), seconds(new)
            assert expected[1] < alike < expected[0]
            learned.see(60.0, at_once=True)
        else:
            assert (seconds(old), seconds(new)) == expected
    assert seconds(taught(tmp_path)[0]) == seconds(model()), "nor of a cluster with one kind"


def _set(*path: Any, to: Any) -> Any:
    def change(content: Any) -> None:
        (content,) = content["bases"]["base"].values()
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: '{"version": 1, "bases": 3}',
        lambda text: '{"version": 1, "bases": {"base": 3}}',
        lambda text: '{"version": 1, "bases": {"base": {"0": 3}}}',
        *(
            lambda text, change=change: (content := json.loads(text), change(content))[0] and json.dumps(content)
            for change in (
                _set("corrections", to=[1.0]),
                _set("corrections", 0, to=1e9),
                _set("corrections", 1, to="fast"),
                _set("corrections", 2, to=float("nan")),
                _set("means", to=[]),
                _set("means", 0, to=[1.0, -3.0, 0.0]),
                _set("means", 3, to=[1.0]),
                _set("unix_seconds", to=None),
            )
        ),
    ],
)
def test_what_is_damaged_is_left_out_with_a_note(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, observed())
    path = tmp_path / FILE
    path.write_text(damage(path.read_text()))
    after, said = taught(tmp_path)
    assert seconds(after) == seconds(model())
    assert len(said) == 1 and str(path) in said[0] and "learned anew" in said[0]
    save_again = LearnedCosts(tmp_path, lambda _: None)
    save_again.teach(again := model(), "base", OF, 0.0)
    observed(cost=again)
    save_again.see(60.0, at_once=True)
    assert seconds(taught(tmp_path)[0]) == seconds(observed()), "the next save mends it"


def test_it_is_written_when_predictions_change_and_else_now_and_then(tmp_path: Path) -> None:
    learned, cost, path = LearnedCosts(tmp_path, pytest.fail), model(), tmp_path / FILE
    learned.teach(cost, "base", OF, 0.0)
    learned.see(0.0)
    assert not path.exists(), "nothing was learned"
    cost.observe("base", 1, 1, 2.0, 1.0)
    learned.see(1.0)
    first = path.read_bytes()
    cost.observe("base", 1, 1, 1.0, 2.0)  # changes a mean, and too little to correct anything
    learned.see(3.0)
    assert path.read_bytes() == first
    learned.see(62.0)
    second = path.read_bytes()
    assert second != first
    learned.see(1000.0, at_once=True)
    assert path.read_bytes() == second, "nothing new"


def test_a_place_that_cannot_be_written_is_said_once_and_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    directory = tmp_path / "gone"
    learned, cost = LearnedCosts(directory, said.append), observed()
    learned.teach(cost, "base", OF, 0.0)
    learned.see(60.0)
    learned.see(61.0, at_once=True)
    assert len(said) == 1 and "kept for this run only" in said[0]
    directory.mkdir()
    learned.see(62.0)
    assert (directory / FILE).exists()
