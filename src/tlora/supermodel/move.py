"""Puts a loaded model onto its device."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from tlora.kernels.transfer import upload
from tlora.libraries import no_collection
from tlora.supermodel.tensor_files import unmapped

_LARGE = 1 << 20  # numbers; what is smaller is moved one by one


def move_model(model: Any, place: torch.device) -> Any:
    """The model of `load_weights` on `place`, none of it in mapped files; large weights go onto a GPU by several threads."""
    if place.type == "cpu":
        return model._apply(unmapped)
    if place.type == "cuda":
        large = [p for p in model.parameters() if p.device.type == "cpu" and p.numel() >= _LARGE]
        with ThreadPoolExecutor(1) as executor:
            prepared = executor.submit(_prepare_libraries, place, model.dtype)
            uploads = upload([p.data for p in large], place)
            with no_collection():
                importlib.import_module("torch._inductor.compile_fx")  # takes 2 to 4 s, and compiling the layers will want it
            for parameter, uploaded in zip(large, uploads, strict=True):
                parameter.data = uploaded.result()
            prepared.result()
    return model.to(place)


def _prepare_libraries(place: torch.device, dtype: torch.dtype) -> None:
    """What the first product and the first kernel would wait for, half a second to two each, without Python's lock: cuBLAS's kernels, and
    the hash of Triton's own files that is part of each key in its cache.
    """
    with torch.cuda.device(place):
        square = torch.zeros(128, 128, dtype=dtype, device=place)
        torch.mm(square, square).sum().item()
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
