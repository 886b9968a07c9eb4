"""How many samples of an evaluation set are training samples too, token for token: their loss measures what was learned by heart.

Most samples differ in their length or a few of their tokens, so that a large set is not read whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tlora.data.dataset import Dataset

_PROBES = (1 / 2, 1, 3 / 4, 1 / 4)  # places in a sample whose tokens are compared before whole samples are: a template's are often equal


def count_shared(train: Dataset, evaluation: Dataset) -> int:
    """The number of samples of `evaluation` that equal a sample of `train` token for token."""
    trained, evaluated = np.arange(len(train)), np.arange(len(evaluation))
    for probe in _PROBES:
        ours, theirs = _keys(train, trained, probe), _keys(evaluation, evaluated, probe)
        evaluated = evaluated[_are_in(theirs, ours)]
        trained = trained[_are_in(ours, theirs)]
    known = {_content(train, index) for index in trained.tolist()}
    return sum(_content(evaluation, index) in known for index in evaluated.tolist())


def _keys(dataset: Dataset, indices: npt.NDArray[np.int64], probe: float) -> npt.NDArray[np.int64]:
    """One number per sample, of its length and one of its tokens."""
    lengths = dataset.lengths[indices]
    tokens = dataset.tokens_at(indices, (probe * (lengths - 1)).astype(np.int64))
    return lengths << 32 | tokens


def _are_in(keys: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    known = np.unique(others)
    if not len(known):
        return np.zeros(len(keys), dtype=bool)
    return known[np.searchsorted(known, keys).clip(max=len(known) - 1)] == keys


def _content(dataset: Dataset, index: int) -> tuple[bytes, tuple[int, ...]]:
    sample = dataset[index]
    return sample.input_ids.tobytes(), sample.lengths
