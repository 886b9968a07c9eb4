"""What `tlora calibrate` measured of a GPU: where it lies, who reads it, and files that are of no use here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tlora.kernels.cards import HOPPER
from tlora.planning import work
from tlora.shape.gpu_files import calibration_path, gpu_here, speed_here, training_speed, versions
from tlora.shape.gpu_models import find_gpu, speeds_of
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import token_cost_on
from tlora.shape.work import LAYER_OF_8B, WITH_FEATURES

NAME = "NVIDIA H200"
HERE = {"name": NAME, "memory": 143771 << 20, "compute_capability": 9.0, "tflops": 800, "training_tflops": 272, "layer_seconds": 3e-4}
TABLE = find_gpu("h200")
FLOPS = 272e12 * WITH_FEATURES


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))


def write(**changed: object) -> Path:
    path = calibration_path(NAME)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(HERE | {"measured": {"at": "2026-11-28", **versions()}} | changed))
    return path


def test_the_file_of_a_gpu_goes_before_the_table(tmp_path: Path) -> None:
    assert gpu_here(NAME, 90, 143771 << 20).model == TABLE
    path = write()
    assert path == tmp_path / "gpus" / "nvidia-h200.json"
    here = gpu_here(NAME, 90, 143700 << 20)
    assert here.measured and here.model is not None and here.model.flops == FLOPS
    assert here.told == f"speeds of {NAME} are those that `tlora calibrate` measured on 2026-11-28 ({path})"
    assert gpu_here("NVIDIA H100 80GB HBM3").model == find_gpu("h100"), "another GPU has a file of its own"
    write(training_tflops=136)
    assert (found := gpu_here(NAME)).model is not None and found.model.flops == FLOPS / 2, "a file that has changed is read again"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"name": "NVIDIA H200 NVL"}, "it is of a NVIDIA H200 NVL, and the GPU here is a NVIDIA H200"),
        ({"compute_capability": 8.0}, "it is of compute capability 8.0, and the GPU here has 9.0"),
        ({"memory": "80GiB"}, "it is of a GPU with 81,920 MiB, and the one here has 143,771"),
        ({"measured": versions() | {"torch": "1.0"}}, f"it was measured with torch 1.0, and here is {versions()['torch']}"),
        ({"measured": None}, "it was measured with torch unknown"),
        ({"tflops": -1}, "it cannot be read"),
    ],
)
def test_a_file_that_is_of_no_use_here_is_ignored_with_a_word(changed: dict[str, object], why: str) -> None:
    path = write(**changed)
    here = gpu_here(NAME, 90, 143771 << 20)
    assert here.model == TABLE and not here.measured
    assert here.told.startswith(f"{path} is ignored, {why}") and here.told.endswith(": run `tlora calibrate` to measure it")
    path.write_text("{")
    assert "it cannot be read" in gpu_here(NAME).told and gpu_here(NAME).model == TABLE


def test_runs_predict_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not here is stood in for by what torch says of one."""
    device, memory = torch.device("cuda"), MemoryModel(1, (), 32, 2, 4, 5, *LAYER_OF_8B)
    monkeypatch.setattr(work, "can_be_asked", lambda _: True)
    monkeypatch.setattr(work, "name_of", lambda _: NAME)
    monkeypatch.setattr(work, "capability_of", lambda _: 90)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=143771 << 20))
    monkeypatch.setattr(work, "card_of", lambda _: HOPPER)
    write()
    assert work.rate_here(device).flops == FLOPS and work.known_here(device).measured
    expected = token_cost_on("cuda", HOPPER.smallest_rows, memory, fixed_work=3e-4 * FLOPS / 4)
    assert work.token_cost(memory, device).fixed_tokens == expected.fixed_tokens
    write(name="another")
    assert work.rate_here(device).flops == TABLE.flops
    assert work.rate_here(torch.device("cpu")).flops is None
    monkeypatch.setattr(work, "is_forced", lambda: True)
    write()
    assert not work.known_here(device).measured, "it was measured with other kernels"


def test_a_live_scheduler_begins_with_the_speed_of_the_slowest() -> None:
    assert speed_here([NAME]) == (1.0, ())
    guess, (told,) = speed_here([NAME, "Voodoo 2"])
    assert guess == training_speed("Voodoo 2") and told.startswith(
        "the GPU 'Voodoo 2' is not in the table of GPUs: 0.11 of an H200's speed"
    )
    assert speed_here([]) == (1.0, ()), "a CPU"
    slow, _ = speed_here([NAME, "NVIDIA GeForce RTX 4090"])
    assert slow == pytest.approx(find_gpu("rtx4090").flops / TABLE.flops)
    path = write()
    speed, told = speed_here([NAME, NAME])
    assert speed == pytest.approx(FLOPS / TABLE.flops) and str(path) in told[0]


def test_plans_say_whose_speeds_they_have() -> None:
    write()
    here = gpu_here(NAME).model
    assert here is not None and speeds_of(here) == f"measured on {NAME}"
