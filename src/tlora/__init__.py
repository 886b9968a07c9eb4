"""tlora: many LoRA jobs over one frozen language model. The public names, loaded on first use: `import tlora` loads no torch."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from tlora.version import __version__ as __version__

if TYPE_CHECKING:
    from tlora.adapters.peft import save_adapter
    from tlora.engine.train import JobResult, train
    from tlora.job import DataConfig, JobSpec, LoraConfig, RunSpec, TrainConfig
    from tlora.sharing.peers import Sharing
    from tlora.supermodel.batch import BatchRow, collate
    from tlora.supermodel.peft_plugin import accelerate_peft
    from tlora.supermodel.supermodel import SuperModel

_HOME = {
    "BatchRow": "tlora.supermodel.batch",
    "DataConfig": "tlora.job",
    "JobResult": "tlora.engine.train",
    "JobSpec": "tlora.job",
    "LoraConfig": "tlora.job",
    "RunSpec": "tlora.job",
    "Sharing": "tlora.sharing.peers",
    "SuperModel": "tlora.supermodel.supermodel",
    "TrainConfig": "tlora.job",
    "accelerate_peft": "tlora.supermodel.peft_plugin",
    "collate": "tlora.supermodel.batch",
    "save_adapter": "tlora.adapters.peft",
    "train": "tlora.engine.train",
}
__all__ = [
    "BatchRow",
    "DataConfig",
    "JobResult",
    "JobSpec",
    "LoraConfig",
    "RunSpec",
    "Sharing",
    "SuperModel",
    "TrainConfig",
    "accelerate_peft",
    "collate",
    "save_adapter",
    "train",
]

if "TLORA_PLUGINS" in os.environ:
    from tlora.registry import load_plugins

    load_plugins()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tlora' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
