"""Training as everybody knows it: PEFT, `torch.optim.AdamW`, transformers' schedules, one sample at a time, one job at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import get_scheduler

from tests.numerics.world import Job
from tlora.adapters.layout import AdapterLayout
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels.dropout import keep_mask, token_keys


class _Fp64Throughout(TorchFunctionMode):
    """transformers' norms and softmaxes cast to fp32, in an fp64 model too, which then rounds like fp32. Here they do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is Tensor.to and args[0].dtype == torch.float64:
            args = tuple(a for a in args if a is not torch.float32)
            kwargs = {k: v for k, v in kwargs.items() if v is not torch.float32}
            if len(args) == 1 and not kwargs:
                return args[0]
        if kwargs.get("dtype") is torch.float32 and func is F.softmax and args[0].dtype == torch.float64:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def fp64_throughout() -> Iterator[None]:
    with _Fp64Throughout():
        yield


class CounterDropout(nn.Module):
    """Our masks in PEFT's place for dropout: where they act and how they scale is then compared, not whose bits they are."""

    def __init__(self, name: str, probability: float) -> None:
        super().__init__()
        self.key, self.probability, self.token_keys = zlib.crc32(name.encode()) & 0x7FFFFFFF, probability, torch.empty(0, dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] != len(self.token_keys):  # no tokens' rows (ZAYA's, in the place of the token before the first)
            assert not bool(x.any()), "rows of nobody have numbers"
            return x
        keep = keep_mask(self.token_keys, self.key, x.shape[-1], self.probability)
        return x * keep / (1 - self.probability)


def peft_config(lora: LoraConfig, transposed: bool = False) -> peft.LoraConfig:
    return peft.LoraConfig(
        fan_in_fan_out=transposed,
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        trainable_token_indices=lora.trainable_token_indices,
        task_type="CAUSAL_LM",
    )


def peft_modules(model: Any) -> dict[str, Any]:
    """PEFT's LoRA layers by the name of the linear in the base."""
    return {n.removeprefix("base_model.model."): m for n, m in model.named_modules() if hasattr(m, "lora_A") and "default" in m.lora_A}


def make_peft(base: Any, lora: LoraConfig, layout: AdapterLayout, params: Tensor) -> Any:
    """A PEFT model over `base` (changed in place) with our starting weights. Its modules are compared with ours on the way."""
    base.set_attn_implementation("eager")
    model = peft.get_peft_model(base, peft_config(lora, layout.transposed))
    modules = peft_modules(model)
    assert list(modules) == [s.module for s in layout.linears]
    for shape, a, b in layout.views(params):
        if shape.tokens:
            continue
        module = modules[shape.module]
        assert module.r["default"] == shape.rank and module.scaling["default"] == shape.scale
        module.lora_A["default"].weight.data.copy_(a)
        module.lora_B["default"].weight.data.copy_(b.t())
        if lora.lora_dropout:
            module.lora_dropout["default"] = CounterDropout(shape.module, lora.lora_dropout)
    return model


def scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    special = {"min_lr_rate": config.min_lr_rate} if config.lr_scheduler_type == "cosine_with_min_lr" else None
    return get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_count(total_steps), total_steps, special)


def peft_train(base: Any, job: Job, layout: AdapterLayout, params: Tensor) -> tuple[list[Tensor], list[float]]:
    """Weight change of each module after the job, and its mean loss at each step."""
    model = make_peft(base, job.lora, layout, params)
    trained = [p for p in model.parameters() if p.requires_grad]
    c = job.train
    optimizer = torch.optim.AdamW(trained, c.learning_rate, (c.adam_beta1, c.adam_beta2), c.adam_epsilon, c.weight_decay)
    schedule, losses = scheduler(c, optimizer, job.steps), []
    for step in range(job.steps):
        total = 0.0
        for index in job.batch(step):
            loss = sample_loss(model, job, step, index)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if c.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, c.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    rows = [p.detach().double() for name, p in model.named_parameters() if "trainable_tokens_delta" in name]
    return [*(delta_weight(m) for m in peft_modules(model).values()), *rows], losses


def delta_weight(layer: Any) -> Tensor:
    """As [out, in], also over a `Conv1D`."""
    delta = layer.get_delta_weight("default").detach().double()
    return delta.t() if layer.fan_in_fan_out else delta


def sample_loss(model: Any, job: Job, step: int, index: int) -> Tensor:
    sample = job.samples[index]
    ids = torch.from_numpy(sample.input_ids).long()
    for module in model.modules():
        if isinstance(module, CounterDropout):
            module.token_keys = torch.from_numpy(token_keys(job.train.seed, step, index, len(ids)))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    token_losses = F.cross_entropy(logits, ids[1:], reduction="none")
    return (token_losses * torch.from_numpy(sample.loss_weights[1:])).sum() / job.normalizer(step)
