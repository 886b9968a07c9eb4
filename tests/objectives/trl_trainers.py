"""TRL's own trainers over our adapters: what objectives are compared with."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.numerics.peft_oracle import peft_config, peft_modules
from tests.tolerances import TRAINED, assert_close
from tlora.adapters.state import AdapterState, init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.supermodel import SuperModel

TRAIN = TrainConfig(lr_scheduler_type="constant", learning_rate=1e-3)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def learned_state(model: SuperModel, lora: LoraConfig, seed: int) -> AdapterState:
    """An adapter with a B that is not zero: the policy is not the reference."""
    state = init_state(model.layout(lora), seed, torch.float32)
    state.params.add_(torch.randn(state.params.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return state


def trl_trainer(
    kind: str,
    base: Path,
    state: AdapterState,
    directory: Path,
    rows: list[dict[str, Any]],
    start: AdapterState | None,
    **settings: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer of that `kind` ("DPO"), which began with the adapter `start` and holds ours by now, and its batch of all `rows`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about themselves
        import trl

        config = getattr(trl, f"{kind}Config")(
            output_dir=str(directory), per_device_train_batch_size=len(rows), use_cpu=True, bf16=False, report_to=[],
            gradient_checkpointing=False, max_length=None, disable_tqdm=True, logging_strategy="no", save_strategy="no", **settings,
        )  # fmt: skip
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if start is not None:  # as PeftModel.from_pretrained(model, DIRECTORY, is_trainable=True) gives it
            model = get_peft_model(model, peft_config(LORA))
            _write(model, start)
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=peft_config(LORA) if start is None else None,
        )
        batch = next(iter(trainer.get_train_dataloader()))
    _write(trainer.model, state)
    return trainer, batch


def _write(model: Any, state: AdapterState) -> None:
    """Into the adapter that PEFT trains."""
    modules: dict[str, Any] = peft_modules(model)
    for shape, a, b in state.layout.views(state.params):
        modules[shape.module].lora_A["default"].weight.data.copy_(a)
        modules[shape.module].lora_B["default"].weight.data.copy_(b.t())


def check_gradients(trainer: Any, state: AdapterState, grad_P: Tensor) -> None:
    """Our gradient of `state` is that of the trainer's adapter."""
    modules = peft_modules(trainer.model)
    for shape, da, db in state.layout.views(grad_P):
        assert_close(da, modules[shape.module].lora_A["default"].weight.grad, TRAINED[torch.float32], f"dA of {shape.module}")
        assert_close(db, modules[shape.module].lora_B["default"].weight.grad.t(), TRAINED[torch.float32], f"dB of {shape.module}")
