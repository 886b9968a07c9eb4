"""Samples one after another as chunks of a fixed length, each sample beginning a chunk of its own: tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from tlora.kernels.device import to_device

_MOST_KEPT = 8  # layouts of recent batches; all layers of a pass ask for the same


@dataclass(frozen=True)
class ChunkLayout:
    """Chunks of `size` tokens of samples of `lengths`, ordered by their place in their sample: the first chunks of all samples, then the
    second of those that have one, and so on, longer samples first. So chunks of one step of a scan are neighbours, and the states that go
    on are the first ones.
    """

    lengths: tuple[int, ...]
    size: int
    device: torch.device

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """How many samples have a first, a second, ... chunk."""
        counts = [-(-length // self.size) for length in self.lengths]
        return tuple(sum(count > step for count in counts) for step in range(max(counts)))

    @cached_property
    def _rows(self) -> np.ndarray:
        """The token of each slot, int64 [chunks * size]; -1 past the end of a sample."""
        starts = np.cumsum([0, *self.lengths])[:-1]
        order = sorted(range(len(self.lengths)), key=lambda i: -(-self.lengths[i] // self.size), reverse=True)
        chunks: list[np.ndarray] = []
        for step, count in enumerate(self.steps):
            inside = step * self.size + np.arange(self.size)
            chunks += [np.where(inside < self.lengths[i], starts[i] + inside, -1) for i in order[:count]]
        return np.concatenate(chunks)

    @cached_property
    def rows(self) -> Tensor:
        """int64 [chunks * size], 0 in slots without a token."""
        return to_device(np.maximum(self._rows, 0), self.device)

    @cached_property
    def is_token(self) -> Tensor:
        """bool [chunks * size]."""
        return to_device(self._rows >= 0, self.device)

    @cached_property
    def places(self) -> Tensor:
        """int64 [T]: the slot of each token."""
        slots = np.flatnonzero(self._rows >= 0)
        return to_device(slots[np.argsort(self._rows[slots])], self.device)

    def fill(self, values_TX: Tensor) -> Tensor:
        """[T, ...] -> [chunks, size, ...], zeros in slots without a token."""
        filled = values_TX.index_select(0, self.rows)
        keep = self.is_token.view(-1, *(1,) * (values_TX.ndim - 1))
        return torch.where(keep, filled, 0).unflatten(0, (-1, self.size))

    def take(self, values_CSX: Tensor) -> Tensor:
        """The way back."""
        return values_CSX.flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True)
class ChunkTables:
    """What kernels read of the chunks of one micro-batch; made once, read by all layers. int32 views of `buffer` on the device:

    `chunks` [T / size + samples, 4]: a chunk's first token, its tokens, the slot that it has in tensors with a row for each chunk, and a
    zero; chunks that are not there have no tokens. `samples` [samples, 4]: the first token, the tokens and the first slot, the longest
    first.
    `positions` [T]: the place of each token in its sample. Sizes depend on the numbers of tokens and samples alone.
    """

    num_tokens: int
    buffer: Tensor
    chunks: Tensor
    samples: Tensor
    positions: Tensor


def list_chunks(lengths: Sequence[int], size: int, device: torch.device) -> ChunkTables:
    """For samples of `lengths` one after another; a length may be zero. One copy to the device, which the host does not wait for."""
    lengths_S = np.asarray(lengths, np.int32)
    starts_S, counts_S = np.cumsum(lengths_S, dtype=np.int32) - lengths_S, -(-lengths_S // size)
    slots_S = np.cumsum(counts_S, dtype=np.int32) - counts_S
    owner = np.repeat(np.arange(len(lengths_S)), counts_S)
    inside = (np.arange(len(owner), dtype=np.int32) - slots_S[owner]) * size
    tokens = int(lengths_S.sum())
    chunks = np.zeros((tokens // size + len(lengths_S), 4), np.int32)
    chunks[: len(owner), :3] = np.stack([starts_S[owner] + inside, np.minimum(lengths_S[owner] - inside, size), np.arange(len(owner))], 1)
    samples = np.stack([starts_S, lengths_S, slots_S, np.zeros_like(slots_S)], 1)[np.argsort(-lengths_S, kind="stable")]
    positions = np.arange(tokens, dtype=np.int32) - np.repeat(starts_S, lengths_S)
    buffer = to_device(np.concatenate([chunks.ravel(), samples.ravel(), positions]).astype(np.int32), device)
    parts = buffer.split([chunks.size, samples.size, tokens])
    return ChunkTables(tokens, buffer, parts[0].view(-1, 4), parts[1].view(-1, 4), parts[2])


@lru_cache(_MOST_KEPT)
def lay_out_tables(lengths: tuple[int, ...], size: int, device: torch.device) -> ChunkTables:
    """As `list_chunks`, for all layers of a pass that is no state of its own."""
    return list_chunks(lengths, size, device)


@lru_cache(_MOST_KEPT)
def lay_out_chunks(lengths: tuple[int, ...], size: int, device: torch.device) -> ChunkLayout:
    """Of samples of `lengths`, none of them empty."""
    return ChunkLayout(lengths, size, device)
