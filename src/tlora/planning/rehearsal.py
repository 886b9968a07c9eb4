"""The largest micro-batches of a run, tried before its first step: later, a long sample would be the first to find too little memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tlora.job import RunSpec
from tlora.planning.memory_probe import Meter, probe_batch, residents, run_batch
from tlora.planning.plan import RunPlan, gib, settle
from tlora.supermodel.positions import learned_positions, longest_safe_sequence
from tlora.supermodel.supermodel import SuperModel

_TRIED = 4  # times
_LEFT_FREE = 16  # the part of the memory limit that is left free after a micro-batch ran out of memory


def rehearse(run: RunSpec, plan: RunPlan, model: SuperModel, meter: Meter, note: Callable[[str], object]) -> RunPlan:
    """Where samples are longer than the token budget: `plan`, after the longest by itself and a full micro-batch have shown that they take
    no more than is planned, or else a plan by what they take. `model` must have no resident.
    """
    left = 0  # bytes that the plan leaves free by now
    for _ in range(_TRIED):
        if plan.largest == plan.token_budget or not plan.can_run:
            break
        excess = _excess_bytes(plan, model, meter)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of other sizes than the run's
        if excess is not None and excess <= left:
            break
        more = plan.limit_bytes // _LEFT_FREE if excess is None else excess - left
        took = "ran out of memory" if excess is None else f"took {gib(more)} more than planned"
        note(f"a full micro-batch or that of the longest sample {took}: the plan leaves {gib(more)} more free")
        left += more
        plan = settle(run, plan, replace(plan.memory, base_bytes=plan.memory.base_bytes + more), model.device)
    return plan


def _excess_bytes(plan: RunPlan, model: SuperModel, meter: Meter) -> int | None:
    """By how much the two take more than is planned, with adapters like the largest two of the jobs; None where memory runs out."""
    before, excess = model.recompute, 0
    try:
        with residents(model, plan.can_run) as names:
            limits = plan.longest, learned_positions(model.model), longest_safe_sequence(model.model)
            longest = probe_batch(names[:1], plan.longest, model, min(limit for limit in limits if limit), plan.largest)
            for batch in (longest, probe_batch(names, plan.token_budget, model)):
                tokens = len(batch.input_ids_T)
                peaks = run_batch(model, batch, plan.recompute.layers(tokens), meter)
                excess = max(excess, max(peaks.head, peaks.layers) - plan.memory.activation_bytes(tokens, peaks.recomputed_layers))
    except torch.OutOfMemoryError:
        return None
    finally:
        model.recompute = before
    return excess
