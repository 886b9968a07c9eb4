"""What torch's allocator is asked for. That it keeps to it: tests/gpu/test_gpu_allocator.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tlora.planning.allocator import tight_allocator

GPU, CPU, GIB = torch.device("cuda"), torch.device("cpu"), 1 << 30


class Driver:
    """A card of 80 GiB, of which this process holds 4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction, self.settings = 1.0, list[str]()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 4 * GIB * (index == 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: setattr(self, "fraction", fraction))
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)


def test_the_limit_counts_from_what_the_process_holds_and_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    with pytest.raises(RuntimeError, match="stopped"), tight_allocator(GPU, 32 * GIB):
        assert driver.fraction == (4 + 32 + 2) / 80 and driver.settings == ["expandable_segments:True"]
        raise RuntimeError("stopped")
    assert driver.fraction == 1.0 and driver.settings[1:] == ["expandable_segments:False"]
    with tight_allocator(GPU, 100 * GIB):
        assert driver.fraction == 1.0


@pytest.mark.parametrize(("device", "ordered", "settings"), [(GPU, "auto", ["expandable_segments:True"]), (CPU, GIB, [])])
def test_without_an_order_and_on_a_cpu_nothing_is_capped(
    device: torch.device, ordered: Any, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)
    with tight_allocator(device, ordered):
        assert driver.fraction == 1.0 and driver.settings == settings


def test_settings_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    with tight_allocator(GPU, 32 * GIB):
        assert driver.fraction == 38 / 80
    assert not driver.settings


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell its settings")
def test_torch_knows_the_setting() -> None:
    known, change = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before = known()
    try:
        change("expandable_segments:True")
        assert re.search(r"expandable_segments:True", known())
    finally:
        change(before or "expandable_segments:False")
