"""Layers in the host's memory: what is asked before any is taken, and what a process reads from there."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bench.shared_models import random_rows
from tlora.errors import CapacityError, ConfigError
from tlora.kernels.frozen import PlainWeight
from tlora.sharing import host_memory
from tlora.sharing.host_memory import Alone, HostMemory, Streaming, free_host_bytes
from tlora.sharing.layer_stream import LayerStream
from tlora.sharing.layout import lay_out
from tlora.sharing.link_speed import measure_link
from tlora.sharing.shards import fill

CPU = torch.device("cpu")


def test_a_stream_over_it_gives_each_weight_and_holds_the_slots() -> None:
    shapes = {"x": (16, 16), "y": (32, 16)}
    weights = [{f"{i}.{key}": PlainWeight(torch.empty(*shape, device="meta")) for key, shape in shapes.items()} for i in range(5)]
    layout = lay_out(weights, 1)
    rows, memory, alone = random_rows(0, layout, torch.float32, CPU), HostMemory(layout.rank_bytes, CPU), Alone(Streaming(3))
    fill(memory.own, layout, alone.rank, rows)
    stream = LayerStream(layout, memory, alone.rank, alone.slots, CPU)
    for number in (0, 1, 2, 3, 4, 3, 2, 1, 0, 4):
        assert torch.equal(stream.tensors(f"{number}.y")["weight"].view(32, 16), rows(f"{number}.y", 0, 32))
    assert stream.held_bytes == layout.rank_bytes + 3 * layout.slot_bytes  # on a CPU both are the host's memory
    assert stream.stats().bytes == stream.stats().layers * layout.slot_bytes


def test_too_little_host_memory_is_one_message_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 10 << 30)
    monkeypatch.setattr(host_memory.mmap, "mmap", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(
        CapacityError, match=r"have 9\.50 GiB to be streamed.* at most 90% of the 10\.00 GiB that are free.*Free host memory"
    ):
        HostMemory(int(9.5 * 2**30), CPU)


@pytest.mark.parametrize("slots", [1, 0, -1])
def test_fewer_than_two_slots_are_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match=f"slots is {slots}, and must be 2 or more"):
        Streaming(slots)


def test_what_a_container_leaves_is_what_is_free(tmp_path: Path) -> None:
    """The least of all groups above; pages of files that were read do not count as taken; both versions of control groups."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for directory, most in ((inner, "max"), (tmp_path / "outer", str(8 << 30))):
        (directory / "memory.max").write_text(f"{most}\n")
        (directory / "memory.current").write_text(f"{5 << 30}\n")
        (directory / "memory.stat").write_text(f"anon {2 << 30}\ninactive_file {1 << 30}\n")
    memberships = tmp_path / "cgroup"
    memberships.write_text("0::/outer/inner\n")
    assert host_memory._left_by_groups(memberships, tmp_path) == 4 << 30
    old = tmp_path / "memory" / "outer"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{3 << 30}")
    (old / "memory.usage_in_bytes").write_text(f"{2 << 30}")
    (old / "memory.stat").write_text(f"total_inactive_file {1 << 29}\n")
    memberships.write_text("9:cpu,cpuacct:/outer\n4:memory:/outer\n")
    assert host_memory._left_by_groups(memberships, tmp_path) == 3 << 29
    assert host_memory._left_by_groups(tmp_path / "absent", tmp_path) == float("inf")
    assert free_host_bytes() > 0


def test_the_link_has_a_rate() -> None:
    assert measure_link(CPU) > 0


class Runtime:
    """The driver of a GPU that does not pin memory: the calls that are made of it."""

    def __init__(self, status: int) -> None:
        self.status, self.asked = status, list[int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.asked.append(num_bytes)
        return self.status

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {1: "invalid argument", 2: "out of memory"}[status]

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        raise AssertionError("what was never pinned is unpinned")


@pytest.mark.parametrize(
    ("ordered", "remedy"),
    [(True, "take layout: streamed out"), (False, "take a base, a base_precision or a GPU with which the base fits there")],
)
@pytest.mark.parametrize(("status", "why"), [(1, "invalid argument"), (2, "out of memory")])
def test_a_driver_that_refuses_to_pin_is_one_message_with_a_remedy(
    status: int, why: str, ordered: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no order to take out where a plan chose to stream."""
    runtime = Runtime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(CapacityError) as caught:
        HostMemory(512 << 20, torch.device("cuda", 0), ordered)
    assert str(caught.value) == (
        f"0.50 GiB of the host's memory cannot be pinned (cudaHostRegister: {why}), and layers are streamed from pinned memory. Free host "
        f"memory, raise the container's limits, or {remedy}"
    )
    assert runtime.asked == [512 << 20]
    gc.collect()
    assert HostMemory(512 << 20, CPU).own.numel() == 512 << 20, "the block is free again"
