"""GPUs of no row in the table: what their driver says of them gives the rates of data sheets, and a name alone a guess."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tlora.planning import work
from tlora.shape.gpu_models import find_gpu, gpu_by_name_alone, gpu_by_properties, in_table


@pytest.mark.parametrize(
    ("row", "called", "multiprocessors", "gigahertz"),
    [  # of the makers' data sheets
        ("v100-16", "Tesla V100-SXM2-16GB", 80, 1.53),
        ("t4", "Tesla T4", 40, 1.59),
        ("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", 68, 1.545),
        ("titanrtx", "NVIDIA TITAN RTX", 72, 1.77),
        ("a100-80", "NVIDIA A100-SXM4-80GB", 108, 1.41),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 82, 1.695),
        ("a40", "NVIDIA A40", 84, 1.74),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 128, 2.52),
        ("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", 142, 2.505),
        ("h100", "NVIDIA H100 80GB HBM3", 132, 1.83),
        ("b200", "NVIDIA B200", 148, 1.85),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 170, 2.407),
        ("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617),
    ],
)
def test_properties_give_the_rates_of_data_sheets(row: str, called: str, multiprocessors: int, gigahertz: float) -> None:
    known = find_gpu(row)
    found = gpu_by_properties(called, known.memory_bytes, known.capability, multiprocessors, gigahertz * 1e9)
    assert found.tflops == pytest.approx(known.tflops, rel=0.01)
    assert found.flops == pytest.approx(known.flops, rel=0.01) and found.link_gb_per_second == known.link_gb_per_second


def test_a_name_alone_is_within_a_factor_of_ten_of_every_card_in_the_table() -> None:
    guessed = gpu_by_name_alone("GRID 9000")
    assert all(0.1 < guessed.flops / gpu.flops < 10 for gpu in in_table())
    assert not all(gpu.flops / find_gpu("h200").flops > 0.1 for gpu in in_table()), "an H200's speed is not"


def test_a_run_predicts_for_an_unknown_gpu_by_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    properties = SimpleNamespace(total_memory=16 << 30, multi_processor_count=46, clock_rate=1_710_000)
    monkeypatch.setattr(work, "can_be_asked", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Quadro RTX 5000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    here = work.known_here(torch.device("cuda"))
    assert here.model is not None and not here.measured and here.model.tflops == pytest.approx(46 * 1.71e9 * 1024 / 1e12)
    flops = work.rate_here(torch.device("cuda")).flops
    assert flops == pytest.approx(0.15 * here.model.tflops * 1e12), "on the plain path"
    del properties.clock_rate  # as of a build of torch without it
    assert work.rate_here(torch.device("cuda")).flops == pytest.approx(flops, rel=0.01)
    assert replace(here.model, capability=86).flops > 5 * here.model.flops, "with kernels"
