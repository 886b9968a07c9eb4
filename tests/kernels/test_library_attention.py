"""Attention over packed samples in few calls: the padded batches against masked softmax in fp64; of the GPU's own kernels, which one runs
where, and the shapes. Their numbers are looked at on a GPU (`tests/gpu/test_gpu_plain_path.py`).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.supermodel.test_attention import LENGTHS, OPTIONS, check_against_oracle, check_no_leak
from tests.tolerances import KERNEL, assert_close
from tlora.kernels.library_attention import attend_samples, kind_for, lay_out_samples

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> Tensor:
    """In `packed_attention`'s shapes."""
    heads = (t[0].transpose(0, 1) for t in (q, k, v))
    window, softcap, sinks = (options.get(name) for name in ("sliding_window", "softcap", "sinks"))
    sinks_H = None if sinks is None else torch.tensor(sinks, dtype=q.dtype)
    return attend_samples(*heads, lay_out_samples(lengths, CPU), 0.3, window, softcap, sinks_H)[None]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_output_and_gradients(kv_heads: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_against_oracle(attend, kv_heads, dtype, options)


@pytest.mark.parametrize("lengths", [(64, 1, 65, 128), (130, 5, 5, 5), (200,)], ids=str)
def test_several_padded_lengths(lengths: tuple[int, ...]) -> None:
    """As each sample by itself."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, sum(lengths), 8, generator=g, dtype=torch.float64) for _ in range(3))
    alone = [
        torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=0.3)
        for parts in zip(*(t.split(list(lengths), 2) for t in (q, k, v)), strict=True)
    ]
    assert_close(attend(q, k, v, lengths), torch.cat(alone, 2).transpose(1, 2), KERNEL[torch.float64], "out")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_sample_leaks_nowhere(bad: float, options: dict[str, Any]) -> None:
    check_no_leak(attend, bad, options)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "value_size", "softcap", "kind"),
    [
        ((9, 0), torch.bfloat16, 128, 128, None, "flash"),
        ((10, 0), torch.float16, 64, 64, None, "flash"),
        ((9, 0), torch.bfloat16, 256, 256, None, "efficient"),
        ((9, 0), torch.bfloat16, 512, 512, None, "efficient"),
        ((9, 0), torch.bfloat16, 192, 128, None, "efficient"),
        ((9, 0), torch.float32, 128, 128, None, "efficient"),
        ((9, 0), torch.float64, 128, 128, None, "padded"),
        ((9, 0), torch.bfloat16, 128, 128, 50.0, "padded"),
        ((9, 0), torch.bfloat16, 20, 20, None, "padded"),
        ((7, 5), torch.float16, 128, 128, None, "efficient"),
        ((7, 0), torch.float32, 128, 128, None, "efficient"),
        ((7, 5), torch.bfloat16, 128, 128, None, "padded"),
    ],
)
def test_which_kernel_runs(
    capability: tuple[int, int], dtype: torch.dtype, size: int, value_size: int, softcap: float | None, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    heads: Any = [torch.empty(1, 1, n, dtype=dtype, device="meta") for n in (size, value_size)]
    assert kind_for(*heads, CUDA, softcap) == kind
    assert kind_for(*heads, CUDA, softcap, sinks=True) == "padded", "the library's kernels have no sinks"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kind_for(*(torch.empty(1, 1, 128, dtype=dtype) for _ in range(2)), CUDA, None) == "padded"
    assert kind_for(*(torch.empty(1, 1, 128, dtype=dtype) for _ in range(2)), CPU, None) == "padded"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 64)])
def test_the_gpus_kernels_take_what_they_are_given(
    dtype: torch.dtype, size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own account of their shapes: forwards, and FlashAttention's back (torch 2.13's of the other lacks an argument)."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(shared_memory_per_block_optin=232_448))
    total, layout = sum(LENGTHS), lay_out_samples(LENGTHS, CUDA, torch.device("meta"))
    q, k, v = (torch.empty(heads, total, size, dtype=dtype, device="meta").transpose(0, 1).requires_grad_() for heads in (4, 2, 2))
    out = attend_samples(q, k, v, layout, 0.3, window, None)
    assert out.shape == (total, 4, size) and out.dtype == dtype
    if kind_for(q, v, CUDA, None) == "efficient":
        return
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [grad.shape for grad in grads] == [t.shape for t in (q, k, v)]
