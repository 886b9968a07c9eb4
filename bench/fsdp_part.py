"""The rival of `bench.shared_base`: one job after another on all GPUs by FSDP2, PEFT and Liger."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.machine import wait
from bench.shapes import shape_of
from bench.shared_base_rank import STD, Rank, open_process_group

WARM_UP_STEPS = 2


def fsdp(rank: Rank) -> None:
    """The strongest of what a user has today: FSDP2, PEFT with bf16 adapters, Liger. One job of rank 16 after another, all ranks on it.

    Samples of 2,048 tokens; each way to run it in turn, with more samples until it runs out of memory, which is noted. A rank that runs out
    where others do not leaves them waiting, so that nothing follows: `--ways` names what is known to fit.
    """
    if not open_process_group(rank, "fsdp"):
        return
    cuda = rank.device.type == "cuda"
    length = 2048 if cuda else 32
    ways = [(compiled, recomputed) for compiled in (True, False) for recomputed in (False, True)]
    for compiled, recomputed in ways if cuda else [(False, False), (False, True)]:
        for samples in range(1, min(4, rank.options.tokens // length) + 1) if cuda else [2]:
            name = f"{'compiled' if compiled else 'Liger'}, {'recomputed' if recomputed else 'kept'}, {samples} samples a GPU"
            if rank.options.ways is not None and re.search(rank.options.ways, name) is None:
                continue
            found = _all_or_none(rank, partial(_train_fsdp, rank, compiled, recomputed, samples, length))
            rank.note(name, found)
            if "error" in found:
                break


def _all_or_none(rank: Rank, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Where memory runs out on all ranks, nobody waits for another."""
    try:
        return train()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    finally:
        torch.compiler.reset()
        gc.collect()
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()


def _train_fsdp(rank: Rank, compiled: bool, recomputed: bool, samples: int, length: int) -> dict[str, Any]:
    model, vocab_size = _sharded(rank, compiled, recomputed)
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, fused=rank.device.type == "cuda")
    ids = torch.randint(3, vocab_size, (samples, length), generator=torch.Generator().manual_seed(rank.number)).to(rank.device)
    seconds = list[float]()
    for _ in range(WARM_UP_STEPS + rank.options.repeats):
        wait(rank.device)
        started = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(rank.device)
        seconds.append(time.perf_counter() - started)
    taken = statistics.median(seconds[WARM_UP_STEPS:])
    peak = torch.cuda.max_memory_allocated(rank.device) / 2**30 if rank.device.type == "cuda" else 0.0
    return {"seconds": taken, "tokens_per_second_of_all_ranks": rank.count * samples * length / taken, "peak_gib": peak}


def _sharded(rank: Rank, compiled: bool, recomputed: bool) -> tuple[Any, int]:
    """The model of `--shape` with one adapter, its parameters over all ranks; each rank draws its own shards."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config: Any = shape_of(rank.options.shape, rank.options.layers)
    if rank.device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        within = dict.fromkeys(("rope", "rms_norm", "swiglu"), not compiled)  # inductor fuses those of a layer itself
        getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{config.model_type}")(**within)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config, dtype=rank.dtype, attn_implementation="sdpa")
        adapter = PeftConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model: Any = get_peft_model(bare, adapter, autocast_adapter_dtype=False)
    mesh = init_device_mesh(rank.device.type, (rank.count,))
    if recomputed:
        bare.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in bare.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=rank.device)
    torch.manual_seed(rank.number)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local: Any = parameter.data
            local = local.to_local()
            local.fill_(1.0) if parameter.ndim == 1 else local.fill_(0.0) if "lora_B" in name else local.normal_(0.0, STD)
    bare.model.rotary_emb = _made(type(bare.model.rotary_emb), config, rank.device)
    return model.train(), config.vocab_size


def _made(kind: type[nn.Module], config: Any, device: torch.device) -> nn.Module:
    """A module without parameters whose buffers `to_empty` has left undefined, made anew."""
    made: Any = kind
    return made(config=config).to(device)
