"""Counter-based dropout: whether an element is kept is a hash of (token key, module key, feature), never of a generator's state.

So a sample's mask does not depend on packing, on neighbours or on resuming, and backward makes it again instead of storing it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_MUL1, _MUL2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # "lowbias32", C. Wellons 2018; the second as a signed int32
_SMALL = 1 << 16  # elements of a mask


def token_keys(seed: int, step: int, sample: int, num_tokens: int) -> np.ndarray:
    """int32 [num_tokens]: one key per position of one sample in one optimizer step of one job."""
    state = np.random.SeedSequence((seed, step, sample)).generate_state(1, np.uint32)[0]
    positions = np.arange(num_tokens, dtype=np.uint32)
    return _mix_numpy(positions * np.uint32(_GOLDEN) ^ state).view(np.int32)


def _mix_numpy(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(_MUL1)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(_MUL2 + (1 << 32))
    return h ^ (h >> np.uint32(16))


def _mix_(h: Tensor) -> Tensor:
    """The same hash in place on int32, whose shift keeps the sign: the mask makes it a logical shift."""
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_MUL1)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_MUL2)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def threshold_of(probability: float) -> int:
    """The hash, of 31 bits, from which on an element is kept."""
    return int(probability * 2**31)


def keep_mask(keys_T: Tensor, module_key: int, num_features: int, probability: float | Tensor) -> Tensor:
    """bool [T, K], true where the element is kept; P(false) = `probability`, or each token's `threshold_of` it, int32 [T, 1].

    `keys_T` int32 from `token_keys`; `module_key` a 31-bit number of the layer.
    """
    if isinstance(probability, Tensor):
        return _bits(keys_T, module_key, num_features) >= probability
    threshold = threshold_of(probability)
    if keys_T.device.type == "cpu" and len(keys_T) * num_features <= _SMALL:
        return torch.from_numpy(_bits_numpy(keys_T.numpy(), module_key, num_features) >= threshold)
    return _bits(keys_T, module_key, num_features) >= threshold


def _bits(keys_T: Tensor, module_key: int, num_features: int) -> Tensor:
    """int32 [T, K], none of them negative."""
    row = _mix_(keys_T ^ module_key)
    column = _mix_(torch.arange(num_features, dtype=torch.int32, device=keys_T.device) * (_GOLDEN - (1 << 32)))
    return _mix_(row[:, None] ^ column[None, :]).bitwise_and_(0x7FFFFFFF)


def _bits_numpy(keys_T: np.ndarray, module_key: int, num_features: int) -> np.ndarray:
    """The same as uint32. NumPy's small operations take a fourth of the time of torch's, and large ones have one thread."""
    row = _mix_numpy(keys_T.view(np.uint32) ^ np.uint32(module_key))
    return _mix_numpy(row[:, None] ^ _columns_numpy(num_features)) & np.uint32(0x7FFFFFFF)


@cache
def _columns_numpy(num_features: int) -> np.ndarray:
    """uint32 [1, K], the same for every mask."""
    return _mix_numpy(np.arange(num_features, dtype=np.uint32) * np.uint32(_GOLDEN))[None, :]
