"""When a pass is captured, launched as a graph or run as it is. What graphs compute is tested on a GPU (tests/gpu)."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tlora.supermodel import cuda_graphs
from tlora.supermodel.cuda_graphs import Backward, CudaGraphs, Shape, fine_size, rough_size

LAUNCH = 6000
"""Tokens that the device computes while a micro-batch is launched from Python."""


class Graphs:
    """CudaGraphs whose captures and passes are noted, in place of CUDA's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.graphs = object.__new__(CudaGraphs)
        self.graphs._captured, self.graphs._counts, self.graphs._padding = OrderedDict(), OrderedDict(), OrderedDict()
        self.graphs._bank_version, self.graphs._turn, self.graphs._source, self.graphs.num_launched = -1, None, None, 0
        self.graphs._others = ()
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

    def train(self, tokens: int, most: int = 8192, launch: int = LAUNCH, version: int = 0) -> int:
        """A pass of as many tokens as `size_for` chooses: how many those are."""
        size = self.graphs.size_for(shape_of(tokens), most, launch, shape_of, version)
        self.run(num_tokens=size, version=version)
        return size


def shape_of(tokens: int) -> Shape:
    return Shape(tokens, 0, "")


def cost(sizes: Sequence[int], chosen: Sequence[int]) -> int:
    """Of micro-batches of `sizes` tokens that ran with `chosen` ones, in tokens: one from a graph costs those, the first of a size
    `LAUNCH`, and the second, which is captured, twice as many.
    """
    assert all(size <= most for size, most in zip(sizes, chosen, strict=True))
    seen: Counter[int] = Counter()
    total = 0
    for size in chosen:
        seen[size] += 1
        total += size if seen[size] > 2 else max(size, seen[size] * LAUNCH)
    return total


def test_a_shape_is_captured_at_its_second_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    assert [graphs.run() for _ in range(3)] == [["run"], ["capture", "graph"], ["graph"]]
    assert graphs.graphs.num_captured == 1


def test_another_bank_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(2):
        graphs.run()
    assert graphs.run(version=1) == ["run"] and graphs.graphs.num_captured == 0


def test_the_pool_is_given_back_between_passes_and_shapes_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, opened = Graphs(monkeypatch), list[str]()
    graphs.graphs._like, graphs.graphs._keeper = torch.zeros(0, 4), "the first"  # type: ignore[assignment]
    monkeypatch.setattr(graphs.graphs, "_open_pool", lambda: (opened.append("pool"), "another"))
    for _ in range(2):
        graphs.run()
    turn = cuda_graphs._Turn()
    graphs.graphs._turn = weakref.ref(turn)
    graphs.graphs.release()
    assert not opened and graphs.graphs.num_captured == 1, "a pass was under way"
    del turn
    graphs.graphs.release()
    assert opened == ["pool"] and graphs.graphs._keeper == "another"  # type: ignore[comparison-overlap]
    assert [graphs.run() for _ in range(2)] == [["run"], ["capture", "graph"]]


def test_a_shape_whose_way_back_never_ran_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was trained in it, or it raised: nothing of its backward is compiled."""
    graphs = Graphs(monkeypatch)
    for _ in range(3):
        graphs.begin()
    assert [graphs.run() for _ in range(2)] == [["run"], ["capture", "graph"]]


def test_only_so_many_shapes_stay_captured_the_latest_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(2):
        graphs.run(shape="kept")
        graphs.run(shape="gone")
    for number in range(cuda_graphs._MOST_CAPTURED - 1):
        for _ in range(2):
            graphs.run(shape=f"other {number}")
        assert graphs.run(shape="kept") == ["graph"]
    assert graphs.graphs.num_captured == cuda_graphs._MOST_CAPTURED
    assert [graphs.run(shape="gone") for _ in range(3)] == [["run"], ["capture", "graph"], ["graph"]]


def test_a_shape_is_counted_however_many_others_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed lengths bring hundreds of shapes, each of them seldom."""
    graphs = Graphs(monkeypatch)
    graphs.run(shape="rare")
    for number in range(1000):
        graphs.run(shape=f"once {number}")
    assert graphs.run(shape="rare") == ["capture", "graph"]
    for number in range(cuda_graphs._MOST_COUNTED):
        graphs.run(shape=f"new {number}")
    assert len(graphs.graphs._counts) == cuda_graphs._MOST_COUNTED


def test_a_shape_that_cannot_be_captured_runs_as_it_is_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch, fails=True)
    graphs.run()
    with pytest.warns(RuntimeWarning, match="CUDA graph .*no room"):
        assert graphs.run() == ["capture", "run"]
    assert [graphs.run() for _ in range(3)] == [["run"]] * 3


def test_busy_until_the_pass_has_gone_back_or_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
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


def test_shapes_that_are_all_alike_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    assert [graphs.train(1000) for _ in range(5)] == [1000] * 5
    assert graphs.graphs.num_captured == 1


def test_other_sizes_are_padded_to_a_rough_one_which_soon_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    assert [graphs.train(size) for size in (1000, 900, 800, 990, 1020)] == [1000, 1024, 1024, 1024, 1024]
    assert graphs.graphs.num_captured == 1
    assert graphs.train(200) == 256, "a graph of 1,024 tokens would compute five times as many"
    assert graphs.train(600) == 768


def test_a_size_gets_a_graph_of_its_own_once_its_padding_has_cost_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(2):
        graphs.run(num_tokens=1024)
    chosen = [graphs.train(800) for _ in range(100)]
    padded = -(-3 * (LAUNCH - 800) // 224)
    assert chosen == [1024] * padded + [800] * (100 - padded)
    assert graphs.graphs._is_captured(shape_of(800)) and shape_of(800) not in graphs.graphs._padding


def test_sizes_that_seldom_come_again_get_a_graph_of_a_finer_size_together(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    for _ in range(2):
        graphs.run(num_tokens=4096)
    chosen = [graphs.train(3100 + number % 200) for number in range(100)]
    assert chosen[:3] == [4096] * 3 and chosen[-3:] == [3328] * 3 == [fine_size(3100 + number) for number in range(97, 100)]
    assert chosen == sorted(chosen, reverse=True) and graphs.graphs.num_captured == 2


@pytest.mark.parametrize("options", [{"most": 0}, {"most": 900}, {"launch": 0}, {"launch": 950}], ids=str)
def test_no_further_than_memory_has_room_for_and_launching_takes(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python launches what is larger while the device computes."""
    graphs = Graphs(monkeypatch)
    graphs.train(300)
    assert graphs.train(900, **options) == 900
    assert graphs.train(300, most=350) == 350 and graphs.train(300, launch=383) == 300


@pytest.mark.parametrize("tokens", [1, 128, 129, 192, 193, 1000, 1024, 1025, 5000, 8192])
def test_rough_and_fine_sizes(tokens: int) -> None:
    rough, fine = rough_size(tokens), fine_size(tokens)
    assert max(tokens, 128) <= rough < max(1.5 * tokens, 129)
    assert rough & (rough - 1) == 0 or 4 * rough // 3 & (4 * rough // 3 - 1) == 0
    assert tokens <= fine <= rough and fine % 16 == 0 and (fine - tokens < 16 or fine - tokens < tokens / 8)
    assert fine_size(fine) == fine and rough_size(rough) == rough


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("samples", "gain"), [(4, 1.8), (32, 1.15)])
def test_real_lengths_cost_less_than_without_padding(samples: int, gain: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they begin, 60 micro-batches of short texts; in a thousand less too."""
    lengths = np.random.default_rng(seed).lognormal(4.6, 0.7, (1000, samples)).clip(16, 1024).astype(int).sum(1)
    sizes = (-(-lengths // 16) * 16).tolist()
    graphs = Graphs(monkeypatch)
    chosen = [graphs.train(size) for size in sizes]
    assert cost(sizes[:60], chosen[:60]) * gain < cost(sizes[:60], sizes[:60])
    assert cost(sizes, chosen) < cost(sizes, sizes)


def test_graphs_of_a_stage_read_what_the_stage_before_sends_and_leave_its_gradient_there() -> None:
    """Replays are stood in for by functions on the memory that the graphs were captured with: out = 2 x, and dx = 3 dout."""
    captured_x = torch.zeros(4, 2, requires_grad=True)
    captured_x.grad = torch.zeros(4, 2)
    ends, tokens = cuda_graphs._Ends(torch.zeros(4, 2), torch.zeros(4, 2)), torch.zeros(4)
    forward: Any = SimpleNamespace(replay=lambda: ends.hidden_TH.copy_(2 * captured_x.detach()))
    backward: Any = SimpleNamespace(replay=lambda: captured_x.grad.copy_(3 * ends.dhidden_TH))  # type: ignore[union-attr]
    captured = cuda_graphs._Captured(forward, backward, [tokens], ends, captured_x)
    for number in (1.0, 5.0):
        x_TH = torch.full((4, 2), number, requires_grad=True)
        hidden_TH, back = captured.run([torch.full((4,), number)], x_TH)
        assert torch.equal(hidden_TH, torch.full((4, 2), 2 * number)) and torch.equal(tokens, torch.full((4,), number))
        back(torch.full((4, 2), 10 * number))
        first = x_TH.grad
        assert first is not None and torch.equal(first, torch.full((4, 2), 30 * number))
        captured_x.grad.zero_()
        assert torch.equal(first, torch.full((4, 2), 30 * number)), "the gradient lies in memory that the next pass writes"


def test_passes_that_are_no_replays_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    counts: list[int] = []
    for _ in range(4):
        graphs.run()
        counts.append(graphs.graphs.num_launched)
    assert counts == [1, 2, 2, 2], "launched, captured, and twice replayed"


def test_what_graphs_of_another_open_pass_have_run_is_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Graphs(monkeypatch), Graphs(monkeypatch)
    for each in (first, second):
        each.graphs._others = [first.graphs, second.graphs]
    back = first.begin()
    assert second.run() == ["run"], "what has not gone back has compiled nothing"
    back(torch.zeros(1))
    third = Graphs(monkeypatch)
    third.graphs._others = [first.graphs, third.graphs]
    assert third.run() == ["capture", "graph"] and third.run() == ["graph"]
    assert first.run() == ["capture", "graph"]
