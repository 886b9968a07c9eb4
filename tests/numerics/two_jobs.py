"""Two jobs for families whose attention or layers are the matter: one over samples of chosen lengths, one that joins later."""

from __future__ import annotations

import numpy as np

from tests.numerics.world import Job
from tests.tiny import make_samples
from tlora.data.dataset import Sample
from tlora.job import LoraConfig, TrainConfig


def samples(seed: int, lengths: tuple[int, ...]) -> tuple[Sample, ...]:
    rng = np.random.default_rng(seed)
    return tuple(Sample(rng.integers(3, 131, length).astype(np.int32), np.ones(length, np.float32)) for length in lengths)


def edges_and_late(targets: list[str] | str, lengths: tuple[int, ...]) -> list[Job]:
    """Both adapt `targets`; one has dropout and clips, the other decays. `lengths`: of the first one's samples."""
    return [
        Job(
            "edges",
            LoraConfig(r=3, lora_alpha=6, lora_dropout=0.1, target_modules=targets),
            TrainConfig(learning_rate=3e-3, batch_size=3, seed=1, max_grad_norm=0.3),
            samples(1, lengths),
            steps=2,
        ),
        Job(
            "late",
            LoraConfig(r=8, target_modules=targets),
            TrainConfig(learning_rate=5e-3, batch_size=2, seed=2, weight_decay=0.1, lr_scheduler_type="constant"),
            tuple(make_samples(4, seed=2, low=5, high=40)),
            steps=2,
            join_at=1,
        ),
    ]
