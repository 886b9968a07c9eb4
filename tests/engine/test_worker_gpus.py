"""A worker's process sees its own GPUs alone before torch is imported, where it has something to load on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tlora.engine import worker as module
from tlora.engine.worker import Worker, serve
from tlora.errors import ConfigError
from tlora.link.endpoint import Endpoint
from tlora.worker_protocol import DesiredState, Load


@pytest.mark.parametrize(("device", "asked"), [("cuda", [(3,)]), ("cpu", [])])
def test_a_worker_is_bound_to_its_gpus_when_it_knows_that_it_loads_on_some(
    device: str, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of CPU processes numbers these: they are no GPUs, which CUDA_VISIBLE_DEVICES may hide."""
    order: list[Any] = []

    class Dialer:
        def __init__(self, _: Endpoint, worker: Worker, __: float) -> None:
            self.worker = worker

        def start(self) -> None:
            self.worker.hear(DesiredState(1, 1, Load("base", "out", device, 0.0)))

        def put(self, *_: Any) -> None: ...
        def drain(self, _: float) -> None:
            self.worker.hear(DesiredState(1, 2, Load("base", "out", device, 0.0), stop=True))

        def close(self) -> None: ...

    monkeypatch.setattr(module, "Dialer", Dialer)
    monkeypatch.setattr("tlora.engine.ranks.worker_group.WorkerGroup.go_on", lambda _: order.append("loads"))
    monkeypatch.setattr(module.os, "dup2", lambda *_: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    endpoint: Any = None
    assert serve(endpoint, (3,), order.append) == 0
    assert order == [*asked, "loads"]

    def refuse(_: tuple[int, ...]) -> None:
        raise ConfigError("hidden")

    if device == "cuda":
        with pytest.raises(ConfigError, match="hidden"):
            serve(endpoint, (3,), refuse)
        assert order == [*asked, "loads"], "nothing is loaded"
