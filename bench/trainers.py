"""One job in the trainers that users of transformers and PEFT have: TRL's SFTTrainer, and transformers' Trainer where TRL is not installed.

Bases are bf16 with random weights, or in four bits by bitsandbytes from files, as QLoRA's users load them.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from bench import machine
from bench.peft_configs import lora_config
from bench.shapes import make_model
from bench.together import gib
from tlora.data.dataset import Dataset, Sample
from tlora.job import JobSpec

WARM_UP_STEPS = 3
IGNORED = -100
_PAD_MULTIPLE = 8


@dataclass(frozen=True)
class Setting:
    """One way to run a trainer."""

    name: str
    packing: bool = False
    padding_free: bool = False
    best: bool = True  # Liger where it is installed, bf16 adapters without autocast; else the libraries' defaults
    checkpointing: bool = False
    rows: int | None = None  # of one forward, at most; the others of the batch are accumulated
    four_bit: bool = False  # with best=False after prepare_model_for_kbit_training, else as loaded


@dataclass(frozen=True)
class Task:
    """One job: its samples, and the tokens that its optimizer steps take in `tlora train`."""

    spec: JobSpec
    data: Dataset
    tokens: int


class FourBitBase:
    """A base that is loaded once and trained by one job after another."""

    def __init__(self, files: Path, device: torch.device) -> None:
        self._files, self._device = files, device
        self._model: Any = None

    def take(self, prepared: bool) -> Any:
        """The base without adapters, for the caller alone until `give_back`; where that never came it is loaded anew."""
        model, self._model = self._model, None
        if model is None:
            model = self._load()
        if prepared:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # the trainer turns it on if asked
        for parameter in model.parameters():
            if not prepared and parameter.dtype == torch.float32:  # bf16 before it was prepared
                parameter.data = parameter.data.to(torch.bfloat16)
        model.gradient_checkpointing_disable()
        return model

    def give_back(self, model: Any) -> None:
        """`model`: with the adapter that was trained, which is dropped."""
        self._model = model.unload()

    def _load(self) -> Any:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
        )
        place = "cpu" if self._device.type == "cpu" else self._device.index or 0  # accelerate refuses a GPU that is not named by its number
        return AutoModelForCausalLM.from_pretrained(
            self._files, quantization_config=config, device_map={"": place}, dtype=torch.bfloat16, attn_implementation="sdpa"
        )


@dataclass(frozen=True)
class Target:
    """What is measured where: `steps` at most per job, of which the first `warm_up` do not count; after `seconds` none is begun."""

    shape: str
    device: torch.device
    tokenizer: Path
    steps: int
    seconds: float
    directory: Path
    base: FourBitBase | None = None  # for settings of four bits
    warm_up: int = WARM_UP_STEPS
    layers: int | None = None  # other than the shape's


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


def has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


class _Watch(TrainerCallback):
    """Notes when the steps that count begin and end; ends the training when the time is up."""

    def __init__(self, target: Target) -> None:
        self._device, self._seconds, self._warm_up = target.device, target.seconds, target.warm_up
        self.began = self.ended = 0.0
        self.steps = 0
        self.first = self.last = 0  # forward passes before those that count, and with them
        self._passes = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes += 1
        if state.global_step == self._warm_up:
            machine.wait(self._device)
            self.began, self.first = time.perf_counter(), self._passes
        elif state.global_step > self._warm_up:
            self.steps = state.global_step - self._warm_up
            late = time.perf_counter() - self.began >= self._seconds
            if late or state.global_step == state.max_steps:
                machine.wait(self._device)
                self.ended, self.last = time.perf_counter(), self._passes
                control.should_training_stop = True


def train(setting: Setting, task: Task, target: Target) -> dict[str, Any]:
    """Figures of one job; whatever a library raises is the caller's."""
    start, cuda = time.perf_counter(), target.device.type == "cuda"
    trainer, watch = _make_trainer(setting, task, target)
    counts: list[int] = []
    trainer.data_collator = _counting(trainer.data_collator, counts)
    if cuda:
        torch.cuda.reset_peak_memory_stats(target.device)
    trainer.train()
    tokens, seconds = sum(counts[watch.first : watch.last]), watch.ended - watch.began
    loss = _last_loss(trainer)
    if target.base is not None and setting.four_bit:
        target.base.give_back(trainer.model)
    if not watch.steps:
        return {"error": f"{trainer.state.global_step} steps, of which {target.warm_up} warm up: none was left to be measured"}
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": tokens / watch.steps,
        "steps": watch.steps,
        "seconds": seconds,
        "whole_seconds": time.perf_counter() - start,
        "peak_gib": gib(torch.cuda.max_memory_allocated(target.device)) if cuda else None,
        "checkpointing": setting.checkpointing,
        "train_loss": loss,
    }


def _last_loss(trainer: Any) -> float | None:
    """Mean over all steps: a base that was loaded wrongly shows here."""
    return next((row["train_loss"] for row in reversed(trainer.state.log_history) if "train_loss" in row), None)


def _make_trainer(setting: Setting, task: Task, target: Target) -> tuple[Any, _Watch]:
    spec, watch = task.spec, _Watch(target)
    lora = lora_config(target.shape, spec.r, spec.lora_alpha)
    model = _make_base(setting, target)
    if setting.best:
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        for parameter in model.parameters():
            if parameter.requires_grad and setting.four_bit:  # PEFT leaves those of a quantized base in fp32
                parameter.data = parameter.data.to(torch.bfloat16)
    make = _sft_trainer if has_trl() else _plain_trainer
    return make(setting, task, target, model, lora, watch), watch


def _make_base(setting: Setting, target: Target) -> Any:
    if setting.four_bit:
        assert target.base is not None, f"{setting.name} needs a base that is loaded in four bits"
        return target.base.take(prepared=not setting.best)
    return make_model(target.shape, target.device, torch.bfloat16 if target.device.type == "cuda" else torch.float32, target.layers)


def _arguments(setting: Setting, task: Task, target: Target) -> dict[str, Any]:
    """Of TrainingArguments, which SFTConfig shares."""
    cuda, spec = target.device.type == "cuda", task.spec
    rows = min(spec.batch_size, setting.rows or spec.batch_size)
    return {
        "output_dir": str(target.directory),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": spec.batch_size // rows,
        "max_steps": target.steps,
        "learning_rate": spec.learning_rate,
        "gradient_checkpointing": setting.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": cuda and not setting.best,
        "use_liger_kernel": cuda and setting.best and has_liger(),
        "use_cpu": not cuda,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": spec.seed,
    }


def _sft_trainer(setting: Setting, task: Task, target: Target, model: Any, lora: LoraConfig, watch: _Watch) -> Any:
    from datasets import Dataset as Rows
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        **_arguments(setting, task, target),
        max_length=task.spec.data.max_length if setting.packing or not setting.padding_free else None,
        packing=setting.packing,
        padding_free=setting.padding_free,
    )
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Rows.from_list(_rows(task)),
        processing_class=AutoTokenizer.from_pretrained(target.tokenizer),
        peft_config=None if setting.best else lora,
        callbacks=[watch],
    )


def _plain_trainer(setting: Setting, task: Task, target: Target, model: Any, lora: LoraConfig, watch: _Watch) -> Any:
    if setting.packing:
        raise ModuleNotFoundError("packing several samples into a row of the batch is TRL's, which is not installed")
    tokenizer = AutoTokenizer.from_pretrained(target.tokenizer)
    collate: Any = (
        DataCollatorWithFlattening(separator_id=IGNORED)
        if setting.padding_free
        else DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=_PAD_MULTIPLE, label_pad_token_id=IGNORED)
    )
    return Trainer(
        model=model if setting.best else get_peft_model(model, lora),
        args=TrainingArguments(**_arguments(setting, task, target), remove_unused_columns=False),
        train_dataset=_rows(task),  # pyright: ignore[reportArgumentType]
        data_collator=collate,
        callbacks=[watch],
    )


def _rows(task: Task) -> list[dict[str, list[int]]]:
    return [row_of(task.data[i]) for i in range(len(task.data))]


def row_of(sample: Sample) -> dict[str, list[int]]:
    """As the trainers take it: targets without a weight are ignored."""
    ids = sample.input_ids.tolist()
    return {"input_ids": ids, "labels": [token if weight > 0 else IGNORED for token, weight in zip(ids, sample.loss_weights, strict=True)]}


def _counting(collate: Callable[..., Mapping[str, torch.Tensor]], counts: list[int]) -> Callable[..., Mapping[str, torch.Tensor]]:
    """`collate`, which also appends each batch's tokens without padding to `counts`."""

    def counted(rows: Any) -> Mapping[str, torch.Tensor]:
        batch = collate(rows)
        mask = batch.get("attention_mask")
        counts.append(int(mask.sum()) if mask is not None else batch["input_ids"].numel())
        return batch

    return counted
