"""Checkpoints whose towers transformers makes with the package timm (Gemma 3n, FastVLM, PerceptionLM), where that is not installed.

A tower is one small layer then. It is right where the text model alone is run: a tower's weights are let go before anything is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.models.timm_wrapper import TimmWrapperModel
from transformers.utils import is_timm_available


class _Tower(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.proj = torch.nn.Linear(3, 3)
        self.post_init()


@contextmanager
def small_towers() -> Iterator[None]:
    """Within it, such checkpoints are made without the package."""
    from_config: Any = AutoModel.from_config

    def make(config: Any, **rest: Any) -> Any:
        by_timm = AutoModel._model_mapping.get(type(config), None) is TimmWrapperModel and not is_timm_available()
        return (_Tower if by_timm else from_config)(config, **rest)

    with patch.object(AutoModel, "from_config", make):
        yield
