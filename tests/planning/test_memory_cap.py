"""An ordered memory limit is the allocator's: what torch is asked for. That it keeps to it: tests/gpu/test_gpu_memory_cap.py."""

from __future__ import annotations

import re

import pytest
import torch

from tests.planning.test_micro_batches import EIGHT_B
from tlora.planning.memory_cap import capped_allocator, with_free_blocks

GPU, CPU, GIB = torch.device("cuda"), torch.device("cpu"), 1 << 30


class Driver:
    """A card of 80 GiB, of which this process holds 4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction, self.settings = 1.0, list[str]()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, _: setattr(self, "fraction", fraction))
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)


def test_the_limit_counts_from_what_the_process_holds_and_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    with pytest.raises(RuntimeError, match="stopped"), capped_allocator(GPU, 20 * GIB):
        assert driver.fraction == 24 / 80 and driver.settings == ["expandable_segments:True"]
        raise RuntimeError("stopped")
    assert driver.fraction == 1.0 and driver.settings[1:] == ["expandable_segments:False"]
    with capped_allocator(GPU, 100 * GIB):
        assert driver.fraction == 1.0


@pytest.mark.parametrize(("device", "ordered"), [(GPU, "auto"), (CPU, GIB)])
def test_without_an_order_and_on_a_cpu_nothing_is_capped(device: torch.device, ordered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    with capped_allocator(device, ordered):
        assert driver.fraction == 1.0 and not driver.settings
    assert with_free_blocks(EIGHT_B, device, ordered) is EIGHT_B


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    with capped_allocator(GPU, 20 * GIB):
        assert driver.fraction == 24 / 80
    assert not driver.settings


def test_a_part_of_the_limit_is_left_to_blocks_that_are_in_part_free() -> None:
    assert with_free_blocks(EIGHT_B, GPU, 64 * GIB).base_bytes == EIGHT_B.base_bytes + GIB


def test_torch_knows_the_setting() -> None:
    """The one that is asked for is asked of torch itself here."""
    known = torch._C._accelerator_getAllocatorSettings
    before = known()
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        assert re.search(r"expandable_segments:True", known())
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
