"""Which devices take the fused kernels, as what class, and what is said where one does not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tlora.errors import ConfigError
from tlora.kernels import device
from tlora.kernels.device import FORCED, as_if_on, card_of, class_of, describe_class, launched_as, runs_kernels, why_plain

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    launched_as.cache_clear()
    yield
    launched_as.cache_clear()


def put_in(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared_memory: int) -> None:
    """This GPU is the one that is there."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize(
    ("capability", "shared_memory", "expected"),
    [
        ((8, 0), 166_912, "sm_80, 163 KB"),
        ((8, 6), 101_376, "sm_86, 99 KB"),
        ((8, 9), 101_376, "sm_89, 99 KB"),
        ((9, 0), 232_448, "sm_90, 227 KB"),
        ((12, 0), 101_376, "sm_120, 99 KB"),
    ],
    ids=["A100", "RTX 3090", "RTX 4090", "H100", "RTX 5090"],
)
def test_gpus_with_kernels(capability: tuple[int, int], shared_memory: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, capability, shared_memory)
    card = card_of(CUDA)
    assert card is not None and runs_kernels(CUDA) and why_plain(CUDA) is None and launched_as(CUDA) is card
    assert describe_class(card, CUDA) == expected and card.shared_memory <= shared_memory


@pytest.mark.parametrize(
    ("capability", "shared_memory", "why"),
    [
        ((7, 5), 65_536, "compute capability 7.5 has no bf16"),
        ((10, 0), 232_448, "the kernels were not made for compute capability 10.0"),
        ((11, 0), 232_448, "the kernels were not made for compute capability 11.0"),
        ((8, 6), 65_536, "the kernels of sm_86 take 99 KB of shared memory, and this GPU has 64 KB"),
    ],
    ids=["T4", "B200", "Thor", "none of this kind"],
)
def test_gpus_without(capability: tuple[int, int], shared_memory: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, capability, shared_memory)
    assert card_of(CUDA) is None and not runs_kernels(CUDA) and why_plain(CUDA) == why


def test_amds_gpus_call_themselves_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, (9, 0), 1 << 20)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not runs_kernels(CUDA) and why_plain(CUDA) == "the kernels are for NVIDIA GPUs"


def test_a_cpu_only_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_kernels(torch.device("cpu")) and "this run's device is cpu" in str(why_plain(torch.device("cpu")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_kernels(torch.device("cpu")) and not runs_kernels(torch.device("meta"))


def test_a_developer_forces_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, (9, 0), 232_448)
    monkeypatch.setenv(FORCED, "sm_86")
    card = card_of(CUDA)
    assert card is not None and describe_class(card, CUDA) == f"sm_86, 99 KB, {FORCED} on compute capability 9.0"
    monkeypatch.setenv(FORCED, "sm_75")
    with pytest.raises(ConfigError, match="must be one of plain, sm_80, sm_86, sm_89, sm_90, sm_120, and is 'sm_75'"):
        card_of(CUDA)
    monkeypatch.setenv(FORCED, "sm_90")
    with pytest.raises(ConfigError, match="a GPU of compute capability 8.0 does not run"):
        class_of(80)


def test_all_kernels_are_compiled_for_the_class_that_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose launches ask for no tile: recurrences, routers' products, experts' tables, on the plain path too."""
    compiled_as: list[tuple[str, int]] = []
    monkeypatch.setattr(device, "compile_as", lambda card, capability: compiled_as.append((card.name, capability)))
    put_in(monkeypatch, (9, 0), 232_448)
    assert runs_kernels(CUDA) and not compiled_as
    launched_as.cache_clear()
    monkeypatch.setenv(FORCED, "sm_86")
    with as_if_on("another", 90):
        assert runs_kernels(CUDA) and not compiled_as, "a plan for another machine launches nothing here"
    for _ in range(2):
        assert runs_kernels(CUDA) and compiled_as == [("sm_86", 90)]


def test_a_developer_forces_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, (9, 0), 232_448)
    monkeypatch.setenv(FORCED, "plain")
    assert card_of(CUDA) is None and not runs_kernels(CUDA) and why_plain(CUDA) == f"{FORCED} is plain, on compute capability 9.0"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not runs_kernels(torch.device("cpu"))
