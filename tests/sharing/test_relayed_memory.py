"""Memory of ranks of several hosts, in one process: what each holds, what it takes, and how it is written."""

from __future__ import annotations

import gc
import mmap
import struct
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tlora.errors import RankError
from tlora.sharing.relayed_memory import RelayedMemory

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """The dtypes of all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("start", "content", "whole"), [(8, struct.pack("2q", -2, 5), True), (9, b"12345678", False), (8, b"1", False)])
def test_no_word_is_read_half_written(start: int, content: bytes, whole: bool) -> None:
    memory = RelayedMemory(32, 0, [0, 1], CPU, lambda *_: None)
    with Copies() as copies:
        memory.take(1, start, bytearray(content))
    assert copies.dtypes == [torch.int64 if whole else torch.uint8]
    read = torch.empty(len(content), dtype=torch.uint8)
    memory.read(1, start, read)
    assert read.numpy().tobytes() == content


@pytest.mark.parametrize(("sender", "start"), [(0, 0), (2, 0), (1, -1), (1, 32), (1, 25)])
def test_what_has_no_place_is_refused(sender: int, start: int) -> None:
    memory = RelayedMemory(32, 0, [0, 1], CPU, lambda *_: None)
    with pytest.raises(RankError, match=f"rank {sender} sent 8 bytes for byte {start} of a job that has no such"):
        memory.take(sender, start, bytearray(b"12345678"))


def test_what_is_not_read_has_no_place() -> None:
    sent: list[tuple[int, int, bytes]] = []
    memory = RelayedMemory(32, 5, [4, 5, 6], CPU, lambda *each: sent.append(each), heard=[2])
    memory.take(6, 0, bytearray(b"12345678"))
    with pytest.raises(RankError, match="rank 4 sent 8 bytes for byte 0"):
        memory.take(4, 0, bytearray(b"12345678"))
    memory.pass_on(0, 8, 0)
    assert sent == [(4, 0, bytes(8))], "it goes to who reads it"
    with pytest.raises(AssertionError, match="no place for what is sent to all"):
        memory.pass_on(0, 8)


class Runtime:
    """CUDA's, as far as it pins memory: `pinned` are the first and the last page of each, by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:  # noqa: N802  (CUDA's name)
        pages = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
        if any(first <= pages[1] and pages[0] <= last for first, last in self.pinned.values()):
            return 712
        self.pinned[address] = pages
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.pinned[address]

    def cudaGetErrorString(self, _: int) -> str:  # noqa: N802
        return "part or all of the requested memory range is already mapped"


def test_memory_is_unpinned_before_its_addresses_are_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is pinned once."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for _ in range(2):
        memory = RelayedMemory(1000, 0, [0, 1, 2], torch.device("cuda"), lambda *_: None)
        assert len(runtime.pinned) == 3
        del memory
        gc.collect()
        assert not runtime.pinned
