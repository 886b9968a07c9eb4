"""When a pass is captured, launched as a graph or run as it is. What graphs compute is tested on a GPU (tests/gpu)."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora.supermodel import cuda_graphs
from tlora.supermodel.cuda_graphs import Backward, CudaGraphs


class Graphs:
    """CudaGraphs whose captures and passes are noted, in place of CUDA's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.graphs = object.__new__(CudaGraphs)
        self.graphs._captured, self.graphs._counts, self.graphs._bank_version, self.graphs._turn = OrderedDict(), OrderedDict(), -1, None
        self.done: list[str] = []

        def capture(_batch: object, _state: object) -> Any:
            self.done.append("capture")
            if fails:
                raise torch.OutOfMemoryError("no room")
            captured = object.__new__(cuda_graphs._Captured)
            monkeypatch.setattr(cuda_graphs._Captured, "run", lambda *_: self.note("graph"))
            return captured

        self.graphs._capture = capture  # type: ignore[method-assign]
        self.graphs.run_uncaptured = lambda *_: self.note("run")  # type: ignore[method-assign]
        monkeypatch.setattr(cuda_graphs, "_inputs", lambda *_: [])

    def note(self, what: str) -> tuple[torch.Tensor, Backward]:
        self.done.append(what)
        return torch.zeros(1), lambda _: None

    def begin(self, num_tokens: int = 64, shape: str = "", version: int = 0, depth: int = 0) -> Backward:
        """One forward; gives the way back."""
        batch: Any = SimpleNamespace(input_ids_T=torch.zeros(num_tokens))
        return self.graphs.run(batch, SimpleNamespace(shape=shape), version, depth)[1]  # type: ignore[arg-type]

    def run(self, **options: Any) -> list[str]:
        """One pass, there and back: what was done for it."""
        before = len(self.done)
        self.begin(**options)(torch.zeros(1))
        return self.done[before:]


def test_a_shape_is_captured_at_its_third_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    assert [graphs.run() for _ in range(4)] == [["run"], ["run"], ["capture", "graph"], ["graph"]]
    assert graphs.graphs.num_captured == 1


@pytest.mark.parametrize("change", [{"num_tokens": 128}, {"shape": "another"}, {"depth": 1}])
def test_other_shapes_are_counted_apart(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.run()
    assert graphs.run(**change) == ["run"] and graphs.run() == ["graph"]


def test_another_bank_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.run()
    assert graphs.run(version=1) == ["run"] and graphs.graphs.num_captured == 0


def test_only_so_many_shapes_stay_captured_the_latest_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.run(shape="kept")
        graphs.run(shape="gone")
    for number in range(cuda_graphs._MOST_CAPTURED - 1):
        for _ in range(3):
            graphs.run(shape=f"other {number}")
        assert graphs.run(shape="kept") == ["graph"]
    assert graphs.graphs.num_captured == cuda_graphs._MOST_CAPTURED
    assert [graphs.run(shape="gone") for _ in range(3)] == [["run"], ["run"], ["capture", "graph"]]


def test_a_shape_is_counted_however_many_others_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed lengths bring hundreds of shapes, each of them seldom."""
    graphs = Graphs(monkeypatch)
    for turn in range(2):
        graphs.run(shape="rare")
        for number in range(500):
            graphs.run(shape=f"once {number} {turn}")
    assert graphs.run(shape="rare") == ["capture", "graph"]
    for number in range(cuda_graphs._MOST_COUNTED):
        graphs.run(shape=f"new {number}")
    assert len(graphs.graphs._counts) == cuda_graphs._MOST_COUNTED


def test_a_shape_that_cannot_be_captured_runs_as_it_is_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch, fails=True)
    graphs.run(), graphs.run()
    with pytest.warns(RuntimeWarning, match="CUDA graph .*no room"):
        assert graphs.run() == ["capture", "run"]
    assert [graphs.run() for _ in range(3)] == [["run"]] * 3


def test_busy_until_the_pass_has_gone_back_or_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(2):
        graphs.run()
    backward = graphs.begin()
    assert graphs.graphs.busy
    with pytest.raises(AssertionError):
        graphs.begin()
    backward(torch.zeros(1))
    assert not graphs.graphs.busy
    backward = graphs.begin()
    del backward
    assert not graphs.graphs.busy
