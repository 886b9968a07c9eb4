"""Which devices take the fused kernels: those with Hopper's instructions and its shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tlora.kernels.device import runs_kernels


@pytest.mark.parametrize(
    ("capability", "shared_memory", "expected"),
    [((8, 0), 167_936, False), ((8, 9), 101_376, False), ((9, 0), 232_448, True), ((10, 0), 232_448, True), ((12, 0), 101_376, False)],
    ids=["A100", "RTX 4090", "H100", "B200", "RTX 5090"],
)
def test_gpus(capability: tuple[int, int], shared_memory: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert runs_kernels(torch.device("cuda")) is expected


def test_a_cpu_only_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_kernels(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_kernels(torch.device("cpu")) and not runs_kernels(torch.device("meta"))
