"""One thread, fixed seeds, and the size of hypothesis' samples: small by default, the full matrix when `soak` tests are selected."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

# Before torch: on a busy machine, threads that spin as they wait take the cores from those they wait for (78 ms an operation, not 3).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import typer.testing
from hypothesis import HealthCheck, settings

from tests import forked
from tests.kernels import interpreter as interpreter  # before whatever imports triton
from tests.parts import pytest_addoption as pytest_addoption
from tests.parts import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.parts import read_part
from tests.small_disks import separate_mounts
from tlora.libraries import no_collection

_GPU_TESTS = Path(__file__).parent / "gpu"
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
for _name, _count in {"sample": 10, "soak": 20}.items():
    settings.register_profile(
        _name, max_examples=_count, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW_IS_FINE
    )
settings.load_profile("sample")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests fork after tokenizing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks transformers the old way
    typer.testing._get_command = cache(typer.main.get_command)  # its runner reads the options of all commands anew for each call
    separate_mounts()
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:  # as `nohup pytest` and `pytest &` in a script hand them on, down to each process
            signal.signal(number, handler)
    forked.ForkingPopen.environment = dict(os.environ)
    if "not soak" not in config.option.markexpr:
        settings.load_profile("soak")
    if part := config.getoption("part"):
        read_part(part)
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings, and other workers want the cores


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of a GPU are not even imported where they are left out: each worker of a run on several cores collects all tests."""
    return True if collection_path == _GPU_TESTS and "not gpu" in config.option.markexpr else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look for garbage in it, again and again, took a quarter of the time of the collection."""
    with no_collection():
        found = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # tests leave little garbage
    return found


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[dict[str, forked.Server]]:
    yield forked.ForkingPopen.servers
    for server in forked.ForkingPopen.servers.values():
        server.close()


@pytest.fixture(scope="module")
def forked_children(fork_servers: dict[str, forked.Server]) -> Iterator[None]:
    """`python -m tlora …` is forked from a process that has imported its libraries: a start takes 2 s of CPU time for data, else 7."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.ForkingPopen)
        yield


@pytest.fixture
def passing_path(tmp_path: Path) -> Iterator[Path]:
    """As `tmp_path`, and removed after the test: for what takes a disk where hundreds of tests leave it."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test is about the start itself."""
    monkeypatch.setattr(subprocess, "Popen", forked.ForkingPopen.__base__)


@pytest.fixture
def two_threads():
    """What holds with one thread must hold with two: other kernels, other splits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base with its tokenizer."""
    from tests.engine.tiny_runs import save_base  # the libraries that it needs are not every test's

    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def wide_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that the bits of a matrix product depend on how many rows it has: at width 64 they are equal by luck."""
    from tests.engine.tiny_runs import save_base

    return save_base(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=320)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a.jsonl … d.jsonl: 24, 9, 40 and 17 rows, the third with longer ones, and held-out.jsonl."""
    from tests.engine.tiny_runs import write_rows

    directory = tmp_path_factory.mktemp("data")
    for number, (name, count, high) in enumerate([("a", 24, 8), ("b", 9, 4), ("c", 40, 30), ("d", 17, 8), ("held-out", 7, 8)]):
        write_rows(directory / f"{name}.jsonl", count, number, high=high)
    return directory
