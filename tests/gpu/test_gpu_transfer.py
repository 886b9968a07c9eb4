"""Tensors that go to the GPU and come back are the same, whatever their size, dtype and layout."""

from __future__ import annotations

import pytest
import torch

from tlora.kernels.transfer import download, upload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    sizes = [(0,), (1,), (3, 5), (1 << 20, 17), (4097, 4096)]
    before = [torch.randn(size).to(dtype) for size in sizes] + [torch.randn(300, 200).to(dtype).t()]
    there = [future.result() for future in upload(before, device)]
    back = [future.result() for future in download(there, device, torch.cuda.current_stream().record_event())]
    for old, moved, new in zip(before, there, back, strict=True):
        assert moved.is_cuda and not new.is_cuda
        assert torch.equal(moved.cpu().view(torch.uint8), old.contiguous().view(torch.uint8))
        assert torch.equal(new.view(torch.uint8), old.contiguous().view(torch.uint8))


def test_a_download_waits_for_its_event_and_holds_up_nobody() -> None:
    """The values are those that the stream has when the event has passed."""
    device = torch.device("cuda")
    values = torch.zeros(1 << 22, device=device)
    torch.cuda._sleep(200_000_000)
    values += 1
    (found,) = download([values], device, torch.cuda.current_stream().record_event())
    assert bool((found.result() == 1).all())
