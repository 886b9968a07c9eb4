"""Which key was meant: other programs' names by a table, typing errors by similarity."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_BATCH = "batch_size", "samples per optimizer step; micro-batches are made by the program"
_TRAIN_ON = "train_on", "'completions' is the default, 'last' trains the last answer alone, 'all' every token"
_SHARE = "warmup_steps", "a value below 1 is a share of all steps"
_EVAL = "eval_size", "a value below 1 is a share of the rows"
_DTYPE = "dtype", "'auto', 'float32', 'bfloat16' or 'float16'"
_EPOCH = "'epoch' or a number of steps"

_PLAIN = "adapters are plain LoRA, without biases, and begin as PEFT's do by default"
_OWN_CHOICE = "the program decides this itself"

# Keys of PEFT, transformers and TRL to which nothing here corresponds -> why. A similar name would be another thing.
_ABSENT: dict[str, str] = {
    **dict.fromkeys(("use_dora", "use_qalora", "qalora_group_size", "use_bdlora", "layer_replication", "bias", "lora_bias"), _PLAIN),
    **dict.fromkeys(("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "arrow_config"), _PLAIN),
    **dict.fromkeys(("optim", "optimizer", "optim_args", "optim_target_modules"), "the optimizer is AdamW"),
    **dict.fromkeys(
        ("loss_type", "ld_alpha", "use_weighting", "label_smoothing"), "each objective has one loss, that of `dpo` is the sigmoid's"
    ),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size", "eval_packing", "group_by_length", "padding_free"), _OWN_CHOICE),
    **dict.fromkeys(("attn_implementation", "flash_attention", "flash_attn", "torch_compile", "use_liger_kernel"), _OWN_CHOICE),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "`--gpus` trains on several GPUs"),
}

# Other programs' key -> (ours, what to know about it).
_OLD: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("lora_r", "lora_rank", "rank", "network_dim", "lora_dim"), ("r", "")),
    **dict.fromkeys(("alpha", "lora_scale", "network_alpha"), ("lora_alpha", "")),
    **dict.fromkeys(("dropout", "lora_drop"), ("lora_dropout", "")),
    **dict.fromkeys(("lora_target_modules", "lora_target", "target", "targets", "modules", "lora_modules"), ("target_modules", "")),
    "lora_target_linear": ("target_modules", "'all-linear' is the default"),
    "modules_to_save": ("trainable_token_indices", "whole modules are not trained; list the ids of the new tokens"),
    **dict.fromkeys(("new_tokens", "token_indices", "trainable_tokens"), ("trainable_token_indices", "ids of tokens")),
    **dict.fromkeys(("rslora", "use_rs_lora", "rs_lora"), ("use_rslora", "")),
    **dict.fromkeys(("lora_model_dir", "adapter", "adapter_name_or_path", "peft_path", "init_from"), ("adapter_path", "")),
    **dict.fromkeys(
        ("cutoff_len", "sequence_len", "max_seq_length", "max_seq_len", "seq_len", "context_length", "block_size", "model_max_length"),
        ("max_length", ""),
    ),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio"), _SHARE),
    **dict.fromkeys(("warmup", "num_warmup_steps", "lr_warmup_steps"), _SHARE),
    "lr": ("learning_rate", ""),
    **dict.fromkeys(("scheduler", "lr_scheduler", "scheduler_type", "schedule"), ("lr_scheduler_type", "")),
    **dict.fromkeys(("min_lr_ratio", "cosine_min_lr_ratio"), ("min_lr_rate", "")),
    **dict.fromkeys(("num_epochs", "epochs", "n_epochs", "num_train_epoch"), ("num_train_epochs", "")),
    **dict.fromkeys(("steps", "num_steps", "total_steps", "iters", "max_iters"), ("max_steps", "")),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size", "train_batch_size", "gradient_accumulation_steps", "global_batch_size", "bs"),
        _BATCH,
    ),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "train_on_inputs", "mask_prompt", "train_on_prompt"), _TRAIN_ON),
    **dict.fromkeys(("sample_packing", "neat_packing", "pack"), ("packing", "rows of max_length tokens, which batch_size counts")),
    **dict.fromkeys(("val_set_size", "val_size", "test_size", "eval_split", "validation_split"), _EVAL),
    **dict.fromkeys(("eval_dataset", "eval_data", "eval_file", "validation_file", "val_data"), ("eval_path", "")),
    **dict.fromkeys(("dataset", "datasets", "train_file", "train_dataset", "data_path", "dataset_path", "path", "file"), ("data", "")),
    **dict.fromkeys(("dataset_format", "type", "data_format", "dataset_type"), ("format", "")),
    **dict.fromkeys(("template", "chat_template_path", "chat_template_jinja"), ("chat_template", "a file with a Jinja template")),
    **dict.fromkeys(("model_name_or_path", "model", "model_name", "base_model_name_or_path", "pretrained_model"), ("base_model", "")),
    **dict.fromkeys(("output", "out", "out_dir", "save_dir", "output_path"), ("output_dir", "")),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision", "fp32"), _DTYPE),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit"), ("base_precision", "'nf4' or 'fp8'")),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), ("recompute", "'auto' is the default")),
    **dict.fromkeys(("full_determinism", "use_deterministic_algorithms"), ("deterministic", "")),
    **dict.fromkeys(("beta1", "adam_b1"), ("adam_beta1", "")),
    **dict.fromkeys(("beta2", "adam_b2"), ("adam_beta2", "")),
    **dict.fromkeys(("eps", "epsilon", "adam_eps"), ("adam_epsilon", "")),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "max_norm", "clip_grad_norm"), ("max_grad_norm", "0 switches clipping off")),
    **dict.fromkeys(("wd", "decay"), ("weight_decay", "")),
    **dict.fromkeys(("early_stopping", "patience", "early_stop_patience"), ("early_stopping_patience", "")),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "evals_per_epoch"), ("eval_steps", _EPOCH)),
    **dict.fromkeys(("save_strategy", "saves_per_epoch", "checkpointing_steps"), ("save_steps", _EPOCH)),
    **dict.fromkeys(("keep_checkpoints", "max_checkpoints"), ("save_total_limit", "")),
    **dict.fromkeys(("log_every", "logging_interval"), ("logging_steps", "")),
    **dict.fromkeys(("random_seed", "data_seed"), ("seed", "")),
    **dict.fromkeys(("num_gpus", "n_gpus", "replicas", "data_parallel_size"), ("gpus", "")),
    "share": ("weight", ""),
    **dict.fromkeys(("job_name", "id", "run_name", "adapter_name"), ("name", "")),
    **dict.fromkeys(("logger", "loggers", "tracker"), ("report_to", "")),
    **dict.fromkeys(("max_tokens", "max_tokens_per_batch"), ("token_budget", "tokens per micro-batch")),
    **dict.fromkeys(("max_memory", "gpu_memory_limit"), ("memory_limit", "bytes")),
    **dict.fromkeys(("threads", "num_threads", "omp_num_threads"), ("cpu_threads", "")),
    **dict.fromkeys(("tasks", "runs", "adapters"), ("jobs", "")),
    **dict.fromkeys(("default", "common"), ("defaults", "")),
    **dict.fromkeys(("grid", "search"), ("sweep", "")),
}


def meant(key: str, known: Iterable[str]) -> tuple[str, str]:
    """Which of `known` was probably meant by a key that is not among them, "" for none, and what to know about it."""
    names, spelt = list(known), _spelt(key)
    right, note = _OLD.get(spelt, ("", ""))
    if right in names:
        return right, note
    if spelt in _ABSENT:
        return "", ""
    by_folded = {name.casefold(): name for name in reversed(names)}
    close = difflib.get_close_matches(key.casefold().replace("-", "_"), by_folded, n=1, cutoff=0.7)
    return (by_folded[close[0]] if close else ""), ""


def _spelt(key: str) -> str:
    """As the keys above are."""
    return key.lower().replace("-", "_")


def suggest(key: str, known: Iterable[str]) -> str:
    """A hint for a key that is not among `known`: the one that was probably meant, or why there is none, or else all of them."""
    names = list(known)
    right, note = meant(key, names)
    if right:
        return f"did you mean {right!r}" + (f" ({note})" if note else "") + "?"
    if why := _ABSENT.get(_spelt(key)):
        return f"{why}; leave it out"
    return f"known here: {', '.join(sorted(names))}"
