"""GPUs have the numbers of nvidia-smi, whatever CUDA_VISIBLE_DEVICES leaves of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlora.cluster import gpus
from tlora.cluster.gpus import Gpu, count_as_the_driver_does, list_gpus, numbers_of, room_of, see_only, visible
from tlora.errors import ConfigError

THERE = {0: Gpu(0, "GPU-a0"), 1: Gpu(16 << 30, "GPU-b1"), 2: Gpu(80 << 30, "GPU-b2")}


def test_gpus_are_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0, 81559, GPU-4c\necho 1, [N/A], GPU-5d\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list_gpus() == {0: Gpu(81559 << 20, "GPU-4c"), 1: Gpu(0, "GPU-5d")}
    program.write_text("#!/bin/sh\nexit 9\n")
    assert list_gpus() == {}
    program.unlink()
    assert list_gpus() == {}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ("2,0", (2, 0)),
        ("GPU-b2, GPU-a", (2, 0)),
        ("", ()),
        ("-1", ()),
        ("1,7,0", (1,)),  # as in CUDA, none behind one that there is not
        ("2,GPU-b,0", (2,)),  # nor behind one that may be either of two
        ("GPU-c,1", ()),
    ],
)
def test_what_cuda_visible_devices_leaves(names: str, left: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert visible(THERE) == left


def test_all_where_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(THERE) == (0, 1, 2) and visible({}) == () and numbers_of([1, 0]) == (1, 0)


def test_a_part_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4c1f")
    with pytest.raises(ConfigError, match="MIG-4c1f is a part of a GPU"):
        visible(THERE)


@pytest.mark.parametrize(("names", "indices", "numbers"), [("6,3", [0, 1], (6, 3)), ("5", [0], (5,)), ("GPU-b2,GPU-a", [1], (0,))])
def test_a_worker_gets_the_gpus_that_torch_counts_here(
    names: str, indices: list[int], numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of cuda:0 under CUDA_VISIBLE_DEVICES=6,3 computes on GPU 6, and not on GPU 0, which is somebody else's."""
    monkeypatch.setattr(gpus, "list_gpus", lambda: THERE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert numbers_of(indices) == numbers


def test_what_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", dict)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b2")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=GPU-b2: which GPUs these are cannot be determined"):
        numbers_of([0])


def test_the_order_is_the_drivers_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    count_as_the_driver_does()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    count_as_the_driver_does()
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.parametrize(("left", "chosen"), [(None, (1,)), ("2,0,1", (1,)), ("0,1,2,3", (1, 3)), ("GPU-b2,GPU-b1", (1, 2))])
def test_a_worker_sees_its_own_gpus_whatever_its_allocation_has(
    left: str | None, chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES of a Slurm job or a container names all that it got; a worker's numbers are the controller's."""
    monkeypatch.setattr(gpus, "list_gpus", lambda: THERE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", left or "")
    if left is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_only(chosen)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, chosen))


@pytest.mark.parametrize(("left", "there"), [("0,1", "it leaves GPU 0, 1,"), ("", "it leaves none,"), ("GPU-b1", "it leaves GPU 1,")])
def test_a_worker_never_takes_another_gpu_than_its_own(left: str, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", lambda: THERE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", left)
    with pytest.raises(ConfigError, match=f"--gpus 1,3: CUDA_VISIBLE_DEVICES={left} hides GPU (1, )?3 ") as raised:
        see_only((1, 3))
    assert there in str(raised.value) and os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_what_may_be_planned_for_is_a_share_of_each_card() -> None:
    """Of unequal cards each has its own; where the driver does not tell of one, a worker will say what it finds."""
    assert room_of((1, 2), THERE, "auto") == (int(0.92 * (16 << 30)), int(0.92 * (80 << 30)))
    assert room_of((2, 1), THERE, 20 << 30) == (20 << 30, int(0.92 * (16 << 30))), "a memory_limit lowers it"
    assert room_of((0, 1), THERE, "auto") == (0, int(0.92 * (16 << 30))) and room_of((7,), THERE, "auto") == (0,)
    assert room_of((0, 7, 1), THERE, 20 << 30) == (20 << 30, 20 << 30, int(0.92 * (16 << 30))), "where the driver does not tell, too"
