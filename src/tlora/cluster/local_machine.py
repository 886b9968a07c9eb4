"""What a back end of this machine is given: its GPUs, base models, and how jobs are trained there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tlora.cluster.limits import Limits
from tlora.errors import ConfigError
from tlora.job import BasePrecision, DType, LayoutSetting, MemoryLimit, Recompute, TrackerName, UnusedWeights


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """GPUs by the numbers of nvidia-smi, or as many one-thread ranks on a CPU. `base_models`: name -> directory or hub id.

    `output_dir` gets `jobs/<name>/` as `tlora train` leaves it, and the workers' logs. What stands behind it is as in a jobs file, but for
    `tick_seconds`, `limits`, `memory_bytes`, `kinds` and `calibrate`. The scheduler plans with the `memory_bytes` of each GPU until its
    worker has found what is free there; with `calibrate` workers also measure what a base costs at its first load. With `deterministic`,
    an adapter's bytes depend neither on the company that its job had nor on its moves. `kinds`: what each GPU is, as its driver calls it;
    none where that is not known. Raises ConfigError for `deterministic` on GPUs of several kinds.
    """

    gpus: tuple[int, ...]
    device: Literal["cuda", "cpu"]
    base_models: Mapping[str, str]
    output_dir: Path
    deterministic: bool = False
    tick_seconds: float = 60.0
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None
    layout: LayoutSetting = "auto"
    unused_weights: UnusedWeights = "refuse"
    recompute: Recompute = "auto"
    memory_limit: MemoryLimit = "auto"
    report_to: tuple[TrackerName, ...] = ()
    limits: Limits = field(default_factory=Limits)
    calibrate: bool = False
    memory_bytes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.deterministic and len(set(self.kinds)) > 1:
            each = ", ".join(f"{gpu} is {kind}" for gpu, kind in zip(self.gpus, self.kinds, strict=True))
            first = ",".join(str(gpu) for gpu, kind in zip(self.gpus, self.kinds, strict=True) if kind == self.kinds[0])
            raise ConfigError(
                f"deterministic: true keeps each job on one kind of GPU, for another gives other last bits, and {each}. "
                f"Take those of one kind (--gpus {first},), or deterministic: false"
            )
