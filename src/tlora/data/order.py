"""Which sample comes when: the order of an epoch, the global batches cut from it, the split into train and eval.

Counter-based: every answer depends on its arguments only, so a resumed job needs no random state.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tlora.errors import DataError

_SPLIT_STREAM = 2**64 - 1  # the epoch number that no epoch reaches: the split must not equal an epoch's order


def epoch_order(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """A permutation of `range(num_samples)` that depends on (seed, epoch) only.

    Sorts Philox's raw 64-bit stream, which numpy promises to keep, unlike `Generator.permutation`.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def global_batch(step: int, num_samples: int, batch_size: int, seed: int) -> list[int]:
    """Sample indices of optimizer step `step` (from 0). Epochs follow one another; an epoch's last batch may be smaller."""
    assert step >= 0 and num_samples > 0 and batch_size > 0, (step, num_samples, batch_size)
    epoch, batch = divmod(step, -(-num_samples // batch_size))
    return _order_of_epoch(seed, epoch, num_samples)[batch * batch_size : (batch + 1) * batch_size].tolist()


@lru_cache(maxsize=64)  # 8 bytes a sample; one epoch of each of 64 jobs
def _order_of_epoch(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    order = epoch_order(seed, epoch, num_samples)
    order.setflags(write=False)
    return order


def split(num_samples: int, eval_size: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Disjoint ascending indices (train, eval): `eval_size` below 1 is a share of the samples (at least one), else a count."""
    count = max(1, round(num_samples * eval_size)) if 0 < eval_size < 1 else int(eval_size)
    if count >= num_samples:
        raise DataError(f"eval_size {eval_size:g} takes {count} of {num_samples} samples and leaves none to train on; lower it or add rows")
    order = epoch_order(seed, _SPLIT_STREAM, num_samples)
    return np.sort(order[count:]), np.sort(order[:count])
