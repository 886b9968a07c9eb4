"""How many bytes a run takes: counted from the real layers on torch's meta device, not guessed from a formula per family.

A forward over meta tensors saves for backward exactly what a real one saves; the bytes per token follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor

from tlora.adapters.bank import ROW_ALIGNMENT
from tlora.adapters.state import AdapterLayout
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels.linear_cross_entropy import CHUNK_ELEMENTS
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import hidden_states
from tlora.supermodel.lora_linear import ActiveBatch
from tlora.supermodel.supermodel import SuperModel

_PROBE_TOKENS = 64
_CPU_SHARE, _GPU_SHARE = 0.8, 0.95  # of what is free: the rest is for the allocator, the caches and others


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of the frozen base, of one token in flight, and what is alive beside them at the peak of a micro-batch."""

    base_bytes: int
    bytes_per_token: float
    fixed_bytes: int
    element_bytes: int  # of the compute dtype
    sum_bytes: int  # of the optimizer's

    def job_bytes(self, layout: AdapterLayout) -> int:
        """One resident adapter: weights and two moments, and in the bank weights and gradient sums by padded rows."""
        padded = sum(-(-s.rank // ROW_ALIGNMENT) * ROW_ALIGNMENT * (s.in_features + s.out_features) for s in layout.shapes)
        return 3 * self.sum_bytes * layout.numel + (self.element_bytes + self.sum_bytes) * padded

    def step_bytes(self, layout: AdapterLayout) -> int:
        """What one optimizer step takes for a moment: gradient, new weights and moments, denominator."""
        return 5 * self.sum_bytes * layout.numel

    def activation_bytes(self, token_budget: int) -> int:
        return int(self.bytes_per_token * token_budget) + self.fixed_bytes

    def total_bytes(self, layouts: list[AdapterLayout], token_budget: int) -> int:
        """Peak with these adapters resident: activations and an optimizer step are never alive together."""
        jobs = sum(self.job_bytes(layout) for layout in layouts)
        step = max((self.step_bytes(layout) for layout in layouts), default=0)
        return self.base_bytes + jobs + max(self.activation_bytes(token_budget), step)


def measure(model: SuperModel, base_bytes: int) -> MemoryModel:
    """Count on `model`, which must lie on the meta device. Uses a slot of its own, with all linears adapted."""
    head = model.base.head.weight_VH
    name = "memory probe"
    model.join(name, _probe_lora(model), TrainConfig(max_steps=1))
    few, many = (_saved_bytes(model, name, n) for n in (_PROBE_TOKENS, 2 * _PROBE_TOKENS))
    model.leave(name)
    widest = max((s for shape in model.targets().values() for s in shape), default=0)
    hidden, element = head.shape[1], head.element_size()
    moving = 3 * widest * element + 4 * hidden * element  # gradients in flight around the widest linear, and at the head
    chunk = 3 * CHUNK_ELEMENTS * max(element, 4)
    return MemoryModel(base_bytes, (many - few) / _PROBE_TOKENS + moving, chunk, element, model.bank.sum_dtype.itemsize)


def _probe_lora(model: SuperModel) -> LoraConfig:
    """All linears where they may be adapted (experts may not)."""
    names = [n for n in model.targets() if not any(n.startswith(block + ".") for block in expert_modules(model.model))]
    return LoraConfig(r=ROW_ALIGNMENT, target_modules=names)


def _saved_bytes(model: SuperModel, name: str, num_tokens: int) -> int:
    row = BatchRow(name, np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.float32))
    batch = collate([row], "meta")
    own = {p.untyped_storage()._cdata for p in model.model.parameters()} | {b.untyped_storage()._cdata for b in model.model.buffers()}
    seen: dict[int, Tensor] = {}  # holds the tensors, or a freed one's address would come again

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    active = ActiveBatch(batch, model.bank, {}, torch.zeros((), device="meta", requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), model.context.enter(active):
        hidden_states(model.base, batch.input_ids_T, batch.position_ids_T, batch.lengths)
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def memory_limit(device: torch.device) -> int:
    """Bytes that a run may take on `device` before the base is loaded."""
    if device.type == "cuda":
        return int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_CPU_SHARE * psutil.virtual_memory().available)
