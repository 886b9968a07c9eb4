"""Streams of GPUs are made once for each purpose: torch gives 32 in turns, and another's may be captured at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tlora
from tlora.kernels.device import own_stream
from tlora.kernels.transfer import download

GPU = torch.device("cuda", 0)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The streams that torch was asked for, each a name of its own."""
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *of: made.append(of) or f"stream {len(made)}")
    own_stream.cache_clear()
    yield made
    own_stream.cache_clear()


def test_a_purpose_has_one_stream_however_often_it_is_asked_for(ring: list[object]) -> None:
    for _ in range(40):
        names = {own_stream(GPU, "passes"), own_stream(GPU, "passes", 1), *(own_stream(GPU, "transfer", n) for n in range(8))}
        assert len(names) == 10
    assert len(ring) == 10


def test_streams_are_made_in_one_place() -> None:
    package = Path(tlora.__file__).parent
    makers = {str(path.relative_to(package)) for path in package.rglob("*.py") if "cuda.Stream(" in path.read_text(encoding="utf-8")}
    assert makers == {"kernels/device.py"}


@pytest.mark.gpu
def test_copies_of_other_threads_do_not_meet_the_stream_that_is_captured() -> None:
    """More of them than torch has streams, while a graph is captured."""
    values, graph = torch.arange(1000.0, device=GPU), torch.cuda.CUDAGraph()
    twice, after = values * 2, torch.cuda.current_stream().record_event()

    def copy() -> None:
        for _ in range(12):
            for future in download([values] * 8, GPU, after):
                assert future.result()[-1] == 999

    copy()  # what is allocated once is there
    with torch.cuda.stream(own_stream(GPU, "passes")), ThreadPoolExecutor(1) as others:
        graph.capture_begin(capture_error_mode="thread_local")
        twice.add_(1)
        others.submit(copy).result()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert twice[-1] == 999 * 2 + 1
