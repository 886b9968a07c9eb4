"""What the jobs of a batch add at parameters of experts: rows of the bank, or the tables by which kernels find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tlora.adapter_shape import ExpertSize
from tlora.adapters.bank import AdapterBank
from tlora.kernels.multi_lora import LoraWeights
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.lora_linear import ActiveBatch, Context

if TYPE_CHECKING:
    from tlora.kernels.expert_kernels import ExpertBatch  # brings triton, which not every CPU install has


@dataclass(frozen=True)
class JobRows:
    """The jobs of a batch at one parameter: where their tokens end, and each one's rows and scale, None where it adapts it not. `batch`:
    the tables of kernels, where these compute experts.
    """

    ends: tuple[int, ...]
    slots: tuple[tuple[range, float] | None, ...]
    weights: LoraWeights
    anchor: Tensor | None = None
    batch: ExpertBatch | None = None


Source = Callable[[str], JobRows | None]
"""What jobs add at the parameter of a dotted name, in the pass that runs now; None where none does."""


def jobs_in(context: Context, on_kernels: Mapping[str, ExpertSize], parameter: str) -> JobRows | None:
    """A `Source`: of the batch that is active in `context`. `on_kernels`: all parameters, where kernels compute them."""
    active: ActiveBatch | None = context.active
    if active is None or active.bank is None:
        return None
    slots = tuple(active.bank.slot(span.job_id, parameter) for span in active.batch.spans)
    if not any(slots):
        return None
    rows = active.bank.linear(parameter)
    weights = LoraWeights(rows.a_RK, rows.b_RN, rows.da_RK, rows.db_RN)
    if on_kernels and not active.expert_batches:
        active.expert_batches.append(kernel_batch(active.batch, active.bank, on_kernels))
    batch = active.expert_batches[0] if active.expert_batches else None
    anchor = active.anchor if torch.is_grad_enabled() else None
    return JobRows(tuple(span.t1 for span in active.batch.spans), slots, weights, anchor, batch)


def kernel_batch(batch: PackedBatch, bank: AdapterBank | None, parameters: Mapping[str, ExpertSize]) -> ExpertBatch:
    """`batch` as the kernels of experts see it, without a bank the base alone. One copy to the device, which the host does not wait for."""
    from tlora.kernels.expert_kernels import make_batch

    addresses = [bank.addresses(span.job_id) if bank is not None and span.job_id in bank else {} for span in batch.spans]
    rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, size in parameters.items():
        order = [1, 0, 3, 2, 4] if size.exchanged else [0, 1, 2, 3, 4]
        slots = [of_job.get(name) for of_job in addresses]
        if any(slots):
            table = [(slot.a, slot.b, slot.da, slot.db, slot.rank) if slot else (0, 0, 0, 0, 0) for slot in slots]
            rows[name] = np.array(table, np.int64)[:, order], np.array([slot.scale if slot else 0.0 for slot in slots])
    return make_batch([span.lengths for span in batch.spans], len(batch.input_ids_T), rows, batch.input_ids_T.device)
