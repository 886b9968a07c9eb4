"""How runs start in tests of this package and of others that import it: from a process that has the libraries, data tokenized once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engine.tiny_runs import save_base as save_base
from tests.forked import ForkingPopen, Server
from tlora.adapter_shape import ExpertJobs
from tlora.data.prepare import DataWorker, Prepared, PrepareProgress, prepare
from tlora.data.request import PrepareRequest
from tlora.errors import DataError
from tlora.kernels.device import may_run_kernels
from tlora.planning import job_plan, plan
from tlora.planning.memory import measure
from tlora.shape.memory import MemoryModel
from tlora.supermodel.supermodel import SuperModel

if TYPE_CHECKING:
    from tests.engine.test_worker import Orders

_PREPARED: dict[str, Prepared] = {}
_MEASURED: dict[tuple[object, ...], MemoryModel] = {}


@pytest.fixture(scope="module", autouse=True)
def forked(forked_children: None) -> None:
    """Whatever a run starts."""


@pytest.fixture(scope="package", autouse=True)
def tokenize_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each file goes through the data worker once for this room's tests, and each base's memory is counted once: a process of its own for
    every run takes seconds, and the count a quarter of a short run.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(tmp_path_factory.getbasetemp() / "tokens"))
        monkeypatch.setattr(job_plan, "prepare", prepare_once)
        monkeypatch.setattr(plan, "measure", measure_once)
        yield


@pytest.fixture(scope="package")
def made(
    wide_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory, tokenize_once: None, fork_servers: dict[str, Server]
) -> Orders:
    """What workers of this room's tests are compared with."""
    from tests.engine.test_worker import Orders

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(subprocess, "Popen", ForkingPopen)
        return Orders(wide_base, data, tmp_path_factory.mktemp("whole") / "out")


def prepare_once(
    requests: Sequence[PrepareRequest],
    on_progress: Callable[[PrepareProgress], None] | None = None,
    started: DataWorker | None = None,
) -> dict[str, Prepared | DataError]:
    missing = [request for request in requests if _anonymous(request) not in _PREPARED]
    made = prepare(missing, on_progress, started) if missing else {}
    for request in missing:
        found = made[request.key]
        if isinstance(found, Prepared):
            _PREPARED[_anonymous(request)] = found
    return {r.key: made[r.key] if r.key in made else _PREPARED[_anonymous(r)] for r in requests}


def measure_once(model: SuperModel, base_bytes: int, device: torch.device, rank: int, adapts_experts: ExpertJobs = False) -> MemoryModel:
    place = (str(device), may_run_kernels(device))
    key = (
        model.model.config.to_json_string(),
        str(model.base.head.weight_VH.dtype),
        tuple(model.targets()),
        base_bytes,
        place,
        rank,
        adapts_experts,
    )
    if key not in _MEASURED:
        _MEASURED[key] = measure(model, base_bytes, device, rank, adapts_experts)
    return _MEASURED[key]


def _anonymous(request: PrepareRequest) -> str:
    return repr(replace(request, key=""))
