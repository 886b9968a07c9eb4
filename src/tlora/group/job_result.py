"""How one job ended, as a value that knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["done", "failed", "stopped"]


@dataclass(frozen=True)
class JobResult:
    """How one job ended. Losses are means per trained token: `train_loss` over the last ten steps, `eval_loss` of the last
    evaluation (of the best with `load_best_model_at_end`); steps without a finite loss are left out, and are among the `skipped_steps`,
    which changed nothing. `path` holds the adapter when `status` is "done".
    """

    name: str
    status: Status
    reason: str = ""
    rank: int = 0
    steps: int = 0
    total_steps: int = 0
    train_loss_first: float | None = None
    train_loss: float | None = None
    eval_loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_best: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    path: str = ""
    sweep_of: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
