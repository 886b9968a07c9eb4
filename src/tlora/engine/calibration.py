"""How fast a base is on this device: micro-batches of jobs that are made up for it, timed. Once for each base, device and kind of run:
what was found is kept in the user's cache. When each of them is computed is decided in `background_calibration.py`.

The micro-batches of a probe are of one shape, which is a CUDA graph from the second on: that is how a job trains for most of its time.
Without one a small step takes up to four times as long (docs/adr/033-a-worker-measures-its-base-beside-its-jobs.md). If that were
taken for a job's time alone, so many jobs would be put together that each takes several times its bound.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from tlora import durable
from tlora.cache_directory import cache_dir
from tlora.data.dataset import Dataset, Sample, Writer
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Ended, Noted, Report
from tlora.job import DataConfig, JobSpec
from tlora.link.process_identity import ProcessIdentity, boot_id, identify
from tlora.protocol import BaseSpeed
from tlora.supermodel.load import find_directory
from tlora.supermodel.supermodel import SuperModel
from tlora.version import __version__
from tlora.worker_protocol import Load, Measured

PROBES = (128, 512, 2048, 8192)  # tokens of one job's micro-batch, about
MEMBERS = 4  # of the group whose micro-batch has the tokens of the second probe
MOST_SECONDS = {"cuda": 10.0, "cpu": 2.0}  # that the next probe may take by estimate; else it is left out
SAMPLE_TOKENS = 127  # no multiple of 64: its attention is that of mixed lengths
_WARM_UP = {"cuda": 3, "cpu": 1}  # micro-batches
_TIMED = {"cuda": 5, "cpu": 3}
_MOST_TURNS = {"cuda": 6, "cpu": 1}  # of as many timed ones, as long as each turn is faster than the one before
_FASTER = 0.95  # of its seconds per token: less is noise
_ENDLESS = 10**6  # optimizer steps


class CalibrationError(RuntimeError):
    """The base's speed could not be measured."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Micro-batches of `tokens` of all `members` together took `seconds` each."""

    members: int
    tokens: int
    seconds: float


def device_name(device: torch.device) -> str:
    """The device that a measurement is valid for: the GPU's model, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def recall(key: str, device: str) -> Measured | None:
    """The measurement of an earlier load of `key_of` on its `device`; None if there is none, or it is damaged: it can be measured again."""
    try:
        return Measured(device, TypeAdapter(BaseSpeed).validate_json(_path(key).read_bytes()))
    except (OSError, ValueError):
        return None


def keep(key: str, measured: Measured) -> None:
    """Save it for later loads of `key_of`. Raises TloraError, OSError."""
    path = _path(key)
    durable.make_directory(path.parent)
    durable.write_file(path, json.dumps(asdict(measured.speed)))


def fitted(points: Sequence[Timed]) -> BaseSpeed:
    """The constants of `shape.cost` through these points: rate and launch by the two largest of one job, the floor by the smallest, and
    the time of a further member by the group. Raises CalibrationError.
    """
    alone = sorted((point for point in points if point.members == 1), key=lambda point: point.tokens)
    if not alone or min(point.seconds for point in points) <= 0:
        raise CalibrationError("no time was measured")
    smallest, largest = alone[0], alone[-1]
    rate, launch = largest.tokens / largest.seconds, 0.0
    if len(alone) > 1 and largest.seconds > alone[-2].seconds:
        before = alone[-2]
        slope = (largest.seconds - before.seconds) / (largest.tokens - before.tokens)
        if (rest := largest.seconds - slope * largest.tokens) > 0:  # else a fixed time is not to be seen
            rate, launch = 1 / slope, rest
    above = launch + smallest.tokens / rate
    floor = math.sqrt(max(0.0, smallest.seconds**2 - above**2))
    groups = [point for point in points if point.members > 1]
    curve = [(point.members, math.sqrt(max(0.0, point.seconds**2 - floor**2)) - launch - point.tokens / rate) for point in groups]
    member = max([0.0, *(rest / (members - 1) for members, rest in curve)])
    return BaseSpeed(rate, launch, floor, member)


class MadeUpJobs:
    """Jobs over random tokens, for measurements. Their files lie in `directory`; no job of a user can have their names."""

    def __init__(self, model: SuperModel, directory: Path) -> None:
        self._length = min([SAMPLE_TOKENS, *(limit.tokens for limit in model.limits)])
        self._vocab_size, self._directory, self._made = model.base.vocab_size, directory, 0

    def job(self, tokens: int, rank: int = 16) -> JobRun:
        """A job whose global batches have about so many tokens, and whose adapters have that `rank`."""
        self._made += 1
        batch_size, directory = max(1, round(tokens / self._length)), self._directory / str(self._made)
        rng, writer = np.random.default_rng(self._made), Writer(directory)
        for _ in range(batch_size):
            writer.add(Sample(rng.integers(0, self._vocab_size, self._length).astype(np.int32), np.ones(self._length, np.float32)))
        writer.finish({})
        data = DataConfig(path="-", max_length=self._length)
        spec = JobSpec(name="made-up", data=data, r=rank, batch_size=batch_size, max_steps=_ENDLESS, learning_rate=1e-5)
        return JobRun(spec.model_copy(update={"name": f"(made up {self._made})"}), Dataset(directory), None)


def worth_trying(tokens: int, last: Timed, place: str) -> bool:
    """Whether a probe of so many tokens would end in time, judging by the `last` one."""
    return tokens / last.tokens * last.seconds * (_WARM_UP[place] + _TIMED[place]) <= MOST_SECONDS[place]


def probe(model: SuperModel, runs: Sequence[JobRun]) -> Generator[None, None, Timed]:
    """Time micro-batches that are each job's global batch, with the optimizer steps that they complete. Yields after each of them: others
    may use `model` until it goes on.

    Returns the median of their seconds, as one of them may have compiled a kernel. They are timed in turns until they get no faster, or
    for `MOST_SECONDS`: behind a load, kernels are compiled and tuned for longer than a few micro-batches take. Raises CalibrationError.
    """
    place, found, spent = model.device.type, list[Timed](), 0.0
    most = batch_tokens(runs)
    most += -most % 128  # a size that GEMMs compute whole tiles of
    with _resident(model, runs, most) as engine:
        for _ in range(_WARM_UP[place]):
            spent += time_micro_batch(engine, model.device)[1]
            yield
        while len(found) < _MOST_TURNS[place]:
            timed: list[tuple[int, float]] = []
            for _ in range(_TIMED[place]):
                timed.append(time_micro_batch(engine, model.device))
                yield
            spent += sum(seconds for _, seconds in timed)
            found.append(Timed(len(runs), timed[0][0], statistics.median(seconds for _, seconds in timed)))
            is_steady = len(found) > 1 and _cost(found[-1]) > _FASTER * _cost(found[-2])
            if is_steady or spent > MOST_SECONDS[place]:
                break
    return min(found, key=_cost)


def batch_tokens(runs: Sequence[JobRun]) -> int:
    """Of a micro-batch with the global batches of all."""
    return sum(run.spec.batch_size * int(run.train.lengths.max()) for run in runs)


def _cost(timed: Timed) -> float:
    """Seconds per token."""
    return timed.seconds / timed.tokens


def time_micro_batch(engine: Engine, device: torch.device) -> tuple[int, float]:
    """Tokens of a micro-batch, and its seconds. Work that was queued before is not counted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    packed = engine.run_micro_batch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert packed is not None, "the jobs have no end"
    return packed.tokens, time.perf_counter() - began


@contextmanager
def _resident(model: SuperModel, runs: Sequence[JobRun], tokens: int) -> Iterator[Engine]:
    def listen(report: Report) -> None:
        """Raise at any failure report: the time measured after it would mean something else."""
        if isinstance(report, Ended) and report.status != "stopped":
            raise CalibrationError(report.reason or "it ended before its time was taken")
        if isinstance(report, Noted):
            raise CalibrationError(report.line)

    engine = Engine(model, tokens, listen)
    try:
        for run in runs:
            engine.join(run)
        yield engine
    finally:
        engine.stop()


def _path(key: str) -> Path:
    return cache_dir() / "speeds" / f"{key}.json"


def key_of(load: Load, device: str) -> str:
    """The cache key: all that decides the speed, which is the base's files, how it is held and run, the device and the software.

    It lists the base's directory, so that a load asks once.
    """
    files = sorted(path for path in find_directory(load.base_model).iterdir() if path.is_file())
    what: list[Any] = [
        [PROBES, SAMPLE_TOKENS, _MOST_TURNS],
        load.base_model,
        device,
        load.dtype,
        load.base_precision,
        *([load.layout] if load.layout != "auto" else []),
        load.deterministic,
        __version__,
        torch.__version__,
    ]
    what += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


class Attempt:
    """Of this process at one base on one device, which have the `key` of `key_of`."""

    def __init__(self, key: str) -> None:
        self._path = _directory() / f"{key}.{os.getpid()}"
        self._identity = identify(os.getpid())

    @contextmanager
    def mark(self) -> Iterator[None]:
        """Within this block the end of the process is blamed on the measurement, unless the cache cannot be written."""
        if self._identity is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(asdict(self._identity)))
        try:
            yield
        finally:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def find_deadly(key: str) -> Path | None:
    """The file of a measurement in which a process was killed; None where there is none. Those of before the last start of this machine
    are removed: what ended them is not known.
    """
    for path in sorted(_directory().glob(f"{key}.*")):
        with suppress(OSError, ValueError, TypeError):
            found = ProcessIdentity(**json.loads(path.read_text()))
            if found.boot != boot_id():
                path.unlink(missing_ok=True)
            elif not found.is_alive:
                return path
    return None


def _directory() -> Path:
    return cache_dir() / "measuring"
