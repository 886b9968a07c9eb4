"""Tokenized samples on disk: written once, then read sample by sample from files that stay open.

A set is a directory of flat files (`tokens.bin`, `weights.bin`, `offsets.npy`, `trained.npy`; of pairs also `sequence_ends.npy`),
`meta.json` and a manifest with their hashes. It is written atomically. This module owns the files and their check;
`encode.py` decides what the tokens are, `order.py` the order of samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

from tlora import durable
from tlora.data.order import Epoch
from tlora.data.scratch import PROGRESS, Scratch, private_directory
from tlora.errors import DataError
from tlora.file_identity import FileIdentity, identity_of

FORMAT_VERSION = 7  # part of every cache key: raise it when the same input gives other tokens, weights, files or errors
SAVE_SECONDS = 0.25  # of work are lost at most when a process ends
_ROW_PARTS = {"lengths.bin": np.int64, "trained.bin": np.float64, "ends.bin": np.int64}  # numbers of each row, while a set is made
_KEPT_PARTS = ("tokens.bin", "weights.bin")
_PARTS = (*_KEPT_PARTS, *_ROW_PARTS)
_READ_AT_ONCE = 1 << 20  # numbers
_Number = TypeVar("_Number", np.int32, np.float32)
_arrays: WeakValueDictionary[FileIdentity, Any] = WeakValueDictionary()


@dataclass(frozen=True)
class Sample:
    """One training example. `loss_weights[i]` weighs the prediction *of* token i; the first token is never a target.

    A pair is one example of two sequences, the chosen answer with its prompt and then the rejected one with it; `lengths` are their
    tokens. No lengths means one sequence.
    """

    input_ids: npt.NDArray[np.int32]
    loss_weights: npt.NDArray[np.float32]
    lengths: tuple[int, ...] = ()

    @property
    def trained(self) -> float:
        """Sum of the weights of all targets."""
        ends = [0, *np.cumsum(self.lengths or [len(self.loss_weights)]).tolist()]
        return sum(float(self.loss_weights[start + 1 : end].sum(dtype=np.float64)) for start, end in pairwise(ends))


def join(sequences: Sequence[Sample]) -> Sample:
    """One example of several sequences."""
    ids, weights = (np.concatenate(parts) for parts in zip(*((s.input_ids, s.loss_weights) for s in sequences), strict=True))
    return Sample(ids, weights, tuple(len(s.input_ids) for s in sequences))


@dataclass(frozen=True)
class PackedSamples:
    """Samples one after another in one array, as the files of a set have them: quick to write, and to send to another process.

    `lengths` are tokens a sample, `trained` the sums of its loss weights; `ends` are those of each sample's sequences, of pairs only.
    """

    input_ids: npt.NDArray[np.int32]
    loss_weights: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]
    trained: npt.NDArray[np.float64]
    ends: npt.NDArray[np.int64] | None = None


def pack(samples: Sequence[Sample]) -> PackedSamples:
    """Pack samples of which all are pairs, or none is."""
    if not samples:
        return PackedSamples(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int64), np.empty(0, np.float64))
    for sample in samples:
        assert sample.input_ids.dtype == np.int32 and sample.loss_weights.dtype == np.float32, (
            sample.input_ids.dtype,
            sample.loss_weights.dtype,
        )
        assert sample.input_ids.shape == sample.loss_weights.shape, (sample.input_ids.shape, sample.loss_weights.shape)
    return PackedSamples(
        np.concatenate([sample.input_ids for sample in samples]),
        np.concatenate([sample.loss_weights for sample in samples]),
        np.array([len(sample.input_ids) for sample in samples], dtype=np.int64),
        np.array([sample.trained for sample in samples], dtype=np.float64),
        np.stack([np.cumsum(sample.lengths) for sample in samples]) if samples[0].lengths else None,
    )


class Dataset:
    """Samples of a finished set, or of the part of it that `indices` names.

    `lengths` are tokens a sample, of all its sequences; `trained` is the sum of the loss weights of a sample's targets. `epoch` is what
    an epoch takes: by default all samples.
    """

    def __init__(self, directory: Path, indices: npt.NDArray[np.int64] | None = None, epoch: Epoch | None = None) -> None:
        """Raises DataError for a set whose files have been cut or changed."""
        offsets, trained = _shared(directory / "offsets.npy", _load), _shared(directory / "trained.npy", _load)
        starts, ends = (offsets[:-1], offsets[1:]) if indices is None else (offsets[indices], offsets[indices + 1])
        self.directory = directory
        try:
            self.meta: dict[str, object] = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _changed(directory / "meta.json", str(error)) from error
        self.lengths: npt.NDArray[np.int64] = np.asarray(ends - starts)
        self.trained: npt.NDArray[np.float64] = np.asarray(trained if indices is None else trained[indices])
        self.epoch: Epoch = len(starts) if epoch is None else epoch
        self.max_token_id = int(str(self.meta["max_token_id"]))
        self._starts = starts
        ends = directory / "sequence_ends.npy"
        self._ends = _shared(ends, _load) if ends.is_file() else None
        self._places = np.arange(len(starts)) if indices is None else indices
        self._tokens: _NumberFile[np.int32] = _shared(directory / "tokens.bin", _open_tokens)
        self._weights: _NumberFile[np.float32] = _shared(directory / "weights.bin", _open_weights)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """Raises DataError where the files have been cut or changed since the set was opened."""
        start, count = int(self._starts[index]), int(self.lengths[index])
        ends = () if self._ends is None else (0, *self._ends[self._places[index]].tolist())
        lengths = tuple(int(end - begin) for begin, end in pairwise(ends))
        ids = self._tokens.read(start, count)
        if ids.view(np.uint32).max() > self.max_token_id:  # on a GPU such an id would end all jobs; a negative one is large here
            raise _changed(self._tokens.path, f"token ids from {ids.min()} to {ids.max()}, where {self.max_token_id} is the highest")
        return Sample(ids, self._weights.read(start, count), lengths)

    def tokens_at(self, indices: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The token at `places[i]` of the sample `indices[i]`, for each i."""
        return self._tokens.gather(self._starts[indices] + places)

    def was_named(self, key: str) -> bool:
        """Whether `key` (a set's directory and its number of samples) names this set as an earlier version made it from the same input."""
        earlier = self.meta.get("earlier_keys")
        return isinstance(earlier, list) and key in [f"{name}/{len(self)}" for name in earlier]

    @property
    def longest_sequences(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample's longest sequence."""
        return self.lengths if self._ends is None else np.diff(self._ends[self._places], axis=1, prepend=0).max(axis=1)


class _NumberFile(Generic[_Number]):
    """Numbers of one type in an open file. They are read, not mapped: reading a map beyond the end of a file that another program has
    truncated kills the process, and with it all jobs.
    """

    def __init__(self, path: Path, dtype: type[_Number]) -> None:
        self.path, self._dtype = path, dtype
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> npt.NDArray[_Number]:
        """`count` numbers from number `start` on. Raises DataError if the file has fewer."""
        numbers = np.empty(count, dtype=self._dtype)
        place = start * numbers.itemsize
        rest = numbers.data.cast("B")
        try:
            while done := os.preadv(self._descriptor, [rest], place):
                if done == len(rest):
                    return numbers
                rest, place = rest[done:], place + done
        except OSError as error:
            raise _changed(self.path, error.strerror or str(error)) from error
        raise _changed(self.path, f"a sample ends at byte {place + len(rest)}, behind the end of the file")

    def gather(self, places: npt.NDArray[np.int64]) -> npt.NDArray[_Number]:
        """The numbers at `places`, block by block, each read once. Raises DataError as `read`."""
        numbers = np.empty(len(places), dtype=self._dtype)
        order = np.argsort(places, kind="stable")
        cuts = np.flatnonzero(np.diff(places[order] // _READ_AT_ONCE)) + 1
        for part in np.split(order, cuts) if len(order) else []:
            first, last = int(places[part[0]]), int(places[part[-1]])
            numbers[part] = self.read(first, last + 1 - first)[places[part] - first]
        return numbers


def _open_tokens(path: Path) -> _NumberFile[np.int32]:
    return _NumberFile(path, np.int32)


def _open_weights(path: Path) -> _NumberFile[np.float32]:
    return _NumberFile(path, np.float32)


def _load(path: Path) -> npt.NDArray[Any]:
    numbers = np.load(path)
    numbers.setflags(write=False)
    return numbers


def _changed(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: another program has cut or changed this file of tokenized data ({what}). Resume the run: the data is tokenized again"
    )


def _shared(path: Path, read: Callable[[Path], Any]) -> Any:
    """One open file or array for all readers: a sweep may have hundreds of jobs on one set."""
    try:
        key = identity_of(path.stat())
        shared = _arrays.get(key)
        if shared is None:
            shared = _arrays[key] = read(path)
    except (OSError, ValueError, EOFError) as error:  # what numpy raises for a file that is cut
        raise _changed(path, str(error)) from error
    return shared


class Writer:
    """Fills a scratch directory next to `final` sample by sample; `finish` puts the set in place in one rename.

    Not `durable.write_directory`, which expects one writer and replaces what is there: any number of processes may make the same set at a
    time, and readers hold the first one's files open. With an `identity` (JSON, of everything that decides the set) what has been saved is
    kept when the process ends, and `counts` are those that an earlier process of the same identity has saved with it.
    """

    def __init__(self, final: Path, identity: object = None, beat: Callable[[], None] = lambda: None) -> None:
        self.final, self._identity = final, identity
        self._scratch = Scratch(final, keep=identity is not None)
        self._saved = time.monotonic()
        self.counts: dict[str, Any] | None = None
        self.max_token_id = -1
        progress = self._scratch.read_progress(identity)
        files = self._scratch.open_files(_PARTS, progress["files"], beat) if progress is not None else None
        if progress is not None and files is not None:
            self.counts, self.max_token_id = progress["counts"], progress["max_token_id"]
        else:
            self._scratch.empty()
            files = self._scratch.open_files(_PARTS)
            assert files is not None, "new files match nothing"
        self._files = files

    def add(self, sample: Sample) -> None:
        self.extend(pack([sample]))

    def extend(self, samples: PackedSamples) -> None:
        if not len(samples.lengths):
            return
        arrays = (samples.input_ids, samples.loss_weights, samples.lengths, samples.trained, samples.ends)
        for name, array in zip(_PARTS, arrays, strict=True):
            if array is not None:
                self._files[name].write(array.tobytes())
        self.max_token_id = max(self.max_token_id, int(samples.input_ids.max(initial=-1)))

    def save(self, counts: Callable[[], dict[str, Any]]) -> None:
        """Save what has been added, with these counts. At most four times a second: calls in between save nothing."""
        if self._scratch.keeps and time.monotonic() - self._saved >= SAVE_SECONDS:
            files = {name: file.state() for name, file in self._files.items()}
            progress = {"counts": counts(), "max_token_id": self.max_token_id, "files": files}
            self._scratch.write_progress(self._identity, progress)
            self._saved = time.monotonic()

    def finish(self, meta: dict[str, object]) -> None:
        """Write the index and `meta`, flush all to the disk, rename. When another process was faster, its equal set stays."""
        states = {name: file.state() for name, file in self._files.items()}
        self._close()
        for name in _KEPT_PARTS:  # the slow part comes first: until its end the next launch could resume here
            durable.sync(self._scratch.path / name)
        if self._scratch.keeps:
            self._check(states)
        whole = private_directory(self.final.parent)
        try:
            self._fill(whole, meta | {"max_token_id": self.max_token_id})
            durable.write_manifest(whole, {name: states[name][1] for name in _KEPT_PARTS})
            try:
                whole.rename(self.final)
            except OSError:
                if durable.find_damage(self.final) is not None:
                    raise
            durable.sync(self.final.parent)
        finally:
            shutil.rmtree(whole, ignore_errors=True)
        self.abandon()

    def _check(self, states: Mapping[str, Sequence[Any]]) -> None:
        """Check that the files are as written: locks may not hold on a file system that several hosts share."""
        files = self._scratch.open_files(_PARTS, states)
        if files is None:
            raise DataError(f"{self._scratch.path}: another program has written to these files while they were made; start again")
        for file in files.values():
            file.close()

    def _fill(self, whole: Path, meta: dict[str, object]) -> None:
        (self._scratch.path / PROGRESS).unlink(missing_ok=True)
        for name in _KEPT_PARTS:
            (self._scratch.path / name).rename(whole / name)
        lengths, trained, ends = (np.fromfile(self._scratch.path / name, dtype) for name, dtype in _ROW_PARTS.items())
        np.save(whole / "offsets.npy", np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        np.save(whole / "trained.npy", trained)
        if len(ends):
            np.save(whole / "sequence_ends.npy", ends.reshape(len(lengths), -1))
        (whole / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")

    def leave(self) -> None:
        """Close without finishing the set. What has been saved is kept."""
        self._close()
        self._scratch.leave()

    def abandon(self) -> None:
        self._close()
        self._scratch.remove()

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the disk is full: the buffers cannot be flushed
                file.close()


def find_damage(directory: Path, vocab_size: int, beat: Callable[[], None] = lambda: None) -> str | None:
    """The damage of the finished set in `directory`, by its hashes and the range of its ids; None if it is intact.

    "" for a set without hashes: made by an earlier version, or not a set. `beat` is called every few MiB.
    """
    if not (directory / durable.MANIFEST).is_file():
        return ""
    damage = durable.find_damage(directory, beat)
    if damage is not None:
        return damage
    lowest, highest = 0, 0
    with (directory / "tokens.bin").open("rb") as file:
        while (ids := np.fromfile(file, dtype=np.int32, count=_READ_AT_ONCE)).size:
            lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
    if lowest < 0 or highest >= vocab_size:
        return f"{directory} is damaged: it holds token ids from {lowest} to {highest}, and the vocabulary has {vocab_size}"
    return None


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
