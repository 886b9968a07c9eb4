"""Dropout by counter: the right rate, and masks that depend on the sample's place in its own job and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tlora.kernels.dropout import _bits, _bits_numpy, keep_mask, token_keys


def keys_of(seed: int = 1, step: int = 2, sample: int = 3, length: int = 64) -> torch.Tensor:
    return torch.from_numpy(token_keys(seed, step, sample, length))


def correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack([left.flatten().float(), right.flatten().float()]))[0, 1]))


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_rate_over_all_and_over_each_token_and_feature(probability: float) -> None:
    tokens, features = 512, 512
    dropped = ~keep_mask(keys_of(length=tokens), 5, features, probability)
    for rate, count in (
        (dropped.float().mean(), tokens * features),
        (dropped.float().mean(0), tokens),
        (dropped.float().mean(1), features),
    ):
        sigma = (probability * (1 - probability) / count) ** 0.5
        assert float((rate - probability).abs().max()) < 5 * sigma


def test_probability_zero_keeps_all() -> None:
    assert bool(keep_mask(keys_of(), 5, 100, 0.0).all())


def test_mask_of_a_sample_does_not_depend_on_what_is_packed_beside_it() -> None:
    alone = keep_mask(keys_of(length=20), 9, 48, 0.3)
    packed = keep_mask(torch.cat([keys_of(sample=8, length=13), keys_of(length=20), keys_of(seed=4, length=5)]), 9, 48, 0.3)
    assert torch.equal(packed[13:33], alone)


def test_mask_of_a_prefix_is_the_prefix_of_the_mask() -> None:
    assert torch.equal(keys_of(length=50)[:20], keys_of(length=20))
    assert torch.equal(keep_mask(keys_of(), 9, 100, 0.3)[:, :40], keep_mask(keys_of(), 9, 40, 0.3))


@pytest.mark.parametrize("other", [{"seed": 7}, {"step": 7}, {"sample": 7}])
def test_seed_step_and_sample_each_give_another_mask(other: dict[str, int]) -> None:
    mine, its = (keep_mask(keys, 5, 256, 0.5) for keys in (keys_of(), keys_of(**other)))
    assert correlation(mine, its) < 5 / (64 * 256) ** 0.5


def test_layers_positions_and_features_are_uncorrelated() -> None:
    mask = keep_mask(keys_of(length=256), 5, 256, 0.5)
    assert correlation(mask, keep_mask(keys_of(length=256), 6, 256, 0.5)) < 0.02
    assert correlation(mask[1:], mask[:-1]) < 0.02 and correlation(mask[:, 1:], mask[:, :-1]) < 0.02


def test_a_gpu_and_a_cpu_hash_alike() -> None:
    keys = np.random.default_rng(0).integers(0, 2**32, 300, dtype=np.uint32).view(np.int32)
    for module_key in (0, 5, 2**31 - 1):
        torches = _bits(torch.from_numpy(keys), module_key, 70)
        assert int(torches.min()) >= 0 and np.array_equal(_bits_numpy(keys, module_key, 70), torches.numpy())
