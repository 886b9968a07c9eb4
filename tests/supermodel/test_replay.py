"""When a pass is captured, replayed or run as it is. What is replayed is tested on a GPU (tests/gpu/test_fast_path_promises.py)."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora.supermodel import replay
from tlora.supermodel.replay import Replays


class Graphs:
    """Replays whose captures and passes are noted, in place of CUDA's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.replays = object.__new__(Replays)
        self.replays._captured, self.replays._counts, self.replays._bank_version = OrderedDict(), OrderedDict(), -1
        self.done: list[str] = []

        def capture(_batch: object, _flight: object) -> Any:
            self.done.append("capture")
            if fails:
                raise torch.OutOfMemoryError("no room")
            captured = object.__new__(replay._Captured)
            monkeypatch.setattr(replay._Captured, "run", lambda *_: self.done.append("replay"))
            return captured

        self.replays._capture = capture  # type: ignore[method-assign]
        self.replays.run_uncaptured = lambda _batch: self.done.append("run")  # type: ignore[method-assign,assignment,return-value]
        monkeypatch.setattr(replay, "_inputs", lambda *_: [])

    def run(self, num_tokens: int = 64, shape: str = "", version: int = 0, depth: int = 0) -> list[str]:
        before = len(self.done)
        batch: Any = SimpleNamespace(input_ids_T=torch.zeros(num_tokens))
        self.replays.run(batch, SimpleNamespace(shape=shape), version, depth)  # type: ignore[arg-type]
        return self.done[before:]


def test_a_shape_is_captured_at_its_third_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    assert [graphs.run() for _ in range(4)] == [["run"], ["run"], ["capture", "replay"], ["replay"]]
    assert graphs.replays.num_captured == 1


@pytest.mark.parametrize("change", [{"num_tokens": 128}, {"shape": "another"}, {"depth": 1}])
def test_other_shapes_are_counted_apart(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.run()
    assert graphs.run(**change) == ["run"] and graphs.run() == ["replay"]


def test_another_bank_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.run()
    assert graphs.run(version=1) == ["run"] and graphs.replays.num_captured == 0


def test_only_so_many_shapes_stay_captured_the_latest_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.run(shape="kept")
        graphs.run(shape="gone")
    for number in range(replay._MOST_CAPTURED - 1):
        for _ in range(3):
            graphs.run(shape=f"other {number}")
        assert graphs.run(shape="kept") == ["replay"]
    assert graphs.replays.num_captured == replay._MOST_CAPTURED
    assert [graphs.run(shape="gone") for _ in range(3)] == [["run"], ["run"], ["capture", "replay"]]


def test_a_shape_is_counted_however_many_others_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed lengths bring hundreds of shapes, each of them seldom."""
    graphs = Graphs(monkeypatch)
    for turn in range(2):
        graphs.run(shape="rare")
        for number in range(500):
            graphs.run(shape=f"once {number} {turn}")
    assert graphs.run(shape="rare") == ["capture", "replay"]
    for number in range(replay._MOST_COUNTED):
        graphs.run(shape=f"new {number}")
    assert len(graphs.replays._counts) == replay._MOST_COUNTED


def test_a_shape_that_cannot_be_captured_runs_as_it_is_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch, fails=True)
    graphs.run(), graphs.run()
    with pytest.warns(RuntimeWarning, match="was not captured as a CUDA graph and runs slower: no room"):
        assert graphs.run() == ["capture", "run"]
    assert [graphs.run() for _ in range(3)] == [["run"]] * 3
