"""One thread, fixed seeds, and the size of hypothesis' samples: small by default, the full matrix when `soak` tests are selected."""

from __future__ import annotations

import os

# Before torch: on a busy machine, threads that spin as they wait take the cores from those they wait for (78 ms an operation, not 3).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.kernels import interpreter as interpreter  # before whatever imports triton
from tests.parts import pytest_addoption as pytest_addoption
from tests.parts import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.parts import read_part

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("sample", max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("sample")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests fork after tokenizing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.21 asks transformers the old way
    if config.getoption("part"):
        read_part(config.getoption("part"))
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings, and other workers want the cores


@pytest.fixture
def two_threads():
    """What holds with one thread must hold with two: other kernels, other splits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
