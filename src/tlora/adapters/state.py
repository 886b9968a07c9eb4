"""One adapter as flat vectors (`layout.py`): the state that training carries from step to step.

Flat, because norm, clipping, AdamW, checkpoint and all-reduce of one job are then one operation each. No layers, no files here.
"""

from __future__ import annotations

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tlora.adapters.layout import AdapterLayout, AdapterShape

_LARGE, _DRAWERS = 1 << 22, 16  # parameters; one thread draws 50 million a second


@dataclass
class AdapterState:
    """Weights and optimizer state of one adapter, in full precision and flat.

    `step` counts global batches (the schedule's position), `updates` the AdamW updates among them: a step whose gradient was not
    finite counts in the first only, and `skipped` counts how many of those came in a row.
    """

    layout: AdapterLayout
    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0
    updates: int = 0
    skipped: int = 0

    def clone(self) -> AdapterState:
        return replace(self, params=self.params.clone(), exp_avg=self.exp_avg.clone(), exp_avg_sq=self.exp_avg_sq.clone())

    def to(self, device: torch.device) -> AdapterState:
        """This one where it is there already, else a copy. Moments that no update has changed yet are made there, not copied."""
        if self.params.device == device:
            return self
        params = self.params.to(device)
        if self.updates == 0:
            return replace(self, params=params, exp_avg=torch.zeros_like(params), exp_avg_sq=torch.zeros_like(params))
        return replace(self, params=params, exp_avg=self.exp_avg.to(device), exp_avg_sq=self.exp_avg_sq.to(device))

    def on_host(self, *, owned: bool = False) -> AdapterState:
        """In the host's memory: a copy, unless it is there already and `owned` by the caller alone. Waits for the device."""
        if owned and self.params.device.type == "cpu":
            return self
        params, exp_avg, exp_avg_sq = (_copy_to_host(t) for t in (self.params, self.exp_avg, self.exp_avg_sq))
        return replace(self, params=params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def _copy_to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu")
    if tensor.device.type != "cpu":
        host.zero_()  # fresh pages are made by all threads; a copy from a device would make them by one
    return host.copy_(tensor)


def init_state(layout: AdapterLayout, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> AdapterState:
    """A fresh adapter as PEFT makes one: A uniform in ±1/sqrt(K) (Kaiming with a = sqrt 5), B zero.

    Each module draws from a generator of its own, keyed by seed and name: targets do not change each other's start, and a large adapter
    is drawn by several threads. Rows of an embedding are NaN until the base's own take their place (`supermodel/new_tokens.py`).
    """
    params = _zeros(layout.numel, dtype)

    def draw(module: tuple[AdapterShape, Tensor, Tensor]) -> None:
        shape, a_rK, _ = module
        if shape.tokens:
            a_rK.fill_(math.nan)
            return
        generator = torch.Generator().manual_seed(zlib.crc32(shape.module.encode(), seed))  # 32 bits are all that it takes in
        a_rK.copy_(torch.empty(a_rK.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator).div_(math.sqrt(shape.in_features)))

    if layout.numel < _LARGE:
        for module in layout.views(params):
            draw(module)
    else:
        with ThreadPoolExecutor(_DRAWERS) as pool:
            list(pool.map(draw, layout.views(params)))
    return fresh_state(layout, params).to(torch.device(device))


def fresh_state(layout: AdapterLayout, params: Tensor) -> AdapterState:
    """An adapter on the host whose optimizer has not begun."""
    exp_avg, exp_avg_sq = (_zeros(layout.numel, params.dtype) for _ in range(2))
    return AdapterState(layout, params, exp_avg, exp_avg_sq)


def _zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Of the host, which takes memory where something else is written; torch.zeros writes its zeros, 12 bytes a parameter in all."""
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
