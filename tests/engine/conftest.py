"""A tiny base with its tokenizer, a few data files, and data tokenized once for all tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import write_rows
from tests.tiny import make_model
from tlora.data.prepare import Prepared, PrepareProgress, PrepareRequest, WorkerProcess, prepare
from tlora.errors import DataError
from tlora.planning import plan
from tlora.planning.memory import MemoryModel, measure
from tlora.supermodel.supermodel import SuperModel

_PREPARED: dict[PrepareRequest, Prepared] = {}
_MEASURED: dict[tuple[object, ...], MemoryModel] = {}


def save_base(directory: Path, **changes: Any) -> Path:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    shape = {"num_hidden_layers": 1, "max_position_embeddings": 2048, **changes}
    make_model("llama", vocab_size=len(tokenizer) + 3, **shape).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def wide_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that the bits of a matrix product depend on how many rows it has: at width 64 they are equal by luck."""
    return save_base(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=320)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a.jsonl … d.jsonl: 24, 9, 40 and 17 rows, the third with longer ones, and held-out.jsonl."""
    directory = tmp_path_factory.mktemp("data")
    for number, (name, count, high) in enumerate([("a", 24, 8), ("b", 9, 4), ("c", 40, 30), ("d", 17, 8), ("held-out", 7, 8)]):
        write_rows(directory / f"{name}.jsonl", count, number, high=high)
    return directory


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
        monkeypatch.setattr(plan, "prepare", prepare_once)
        monkeypatch.setattr(plan, "measure", measure_once)
        yield


def prepare_once(
    requests: Sequence[PrepareRequest],
    on_progress: Callable[[PrepareProgress], None] | None = None,
    started: WorkerProcess | None = None,
) -> dict[str, Prepared | DataError]:
    missing = [request for request in requests if _anonymous(request) not in _PREPARED]
    made = prepare(missing, on_progress, started) if missing else {}
    for request in missing:
        found = made[request.key]
        if isinstance(found, Prepared):
            _PREPARED[_anonymous(request)] = found
    return {r.key: made[r.key] if r.key in made else _PREPARED[_anonymous(r)] for r in requests}


def measure_once(model: SuperModel, base_bytes: int, device: torch.device, rank: int) -> MemoryModel:
    key = (model.model.config.to_json_string(), str(model.base.head.weight_VH.dtype), tuple(model.targets()), base_bytes, str(device), rank)
    if key not in _MEASURED:
        _MEASURED[key] = measure(model, base_bytes, device, rank)
    return _MEASURED[key]


def _anonymous(request: PrepareRequest) -> PrepareRequest:
    return replace(request, key="")
