"""Jobs with lengths of real and of drawn samples, endless in global batches: what packing and pipelines are tried on without a GPU."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import yaml

from bench.base_files import write_tokenizer
from tlora.batching.flow import Item
from tlora.batching.pipeline_model import OfferedJob
from tlora.data.order import epoch_order
from tlora.data.prepare import prepare
from tlora.data.request import PrepareRequest
from tlora.errors import DataError
from tlora.job import DataConfig

_REAL = Path(__file__).with_name("real_jobs.yaml")
_DRAWN = 512  # samples of a job whose lengths are drawn


@dataclass(frozen=True)
class LengthJob:
    """Lengths of a job's samples in tokens, and the samples of a global batch."""

    name: str
    lengths: npt.NDArray[np.int64]
    batch_size: int

    def batch(self, seed: int, number: int) -> list[Item]:
        """Of endless ones; each epoch has an order of its own, and its last samples that fill no batch are left out."""
        epoch, place = divmod(number, len(self.lengths) // self.batch_size)
        order = epoch_order(seed, epoch, len(self.lengths))
        return [Item(int(sample), int(self.lengths[sample])) for sample in order[place * self.batch_size : (place + 1) * self.batch_size]]


class _Batches:
    """A job's, without an end. They can be copied where they stand, which iterators of itertools cannot from Python 3.14 on."""

    def __init__(self, job: LengthJob, seed: int) -> None:
        self._job, self._seed, self._number = job, seed, 0

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        self._number += 1
        return self._job.batch(self._seed, self._number - 1)


def offered(jobs: Sequence[LengthJob]) -> dict[str, OfferedJob]:
    return {job.name: OfferedJob(job.name, _Batches(job, seed)) for seed, job in enumerate(jobs)}


def real_jobs() -> list[LengthJob]:
    """The eight jobs of real_jobs.yaml, tokenized as `bench.real_jobs` does."""
    content = yaml.safe_load(_REAL.read_text(encoding="utf-8"))
    most = content["defaults"]["max_length"]
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer("llama-3-8b", Path(directory) / "tokenizer")
        requests = [
            PrepareRequest(
                job["name"],
                DataConfig(path=job["data"], max_length=most),
                str(Path(directory) / "tokenizer"),
                128256,
                Path(directory) / "cache",
                _REAL.parent,
            )
            for job in content["jobs"]
        ]
        made = prepare(requests)
        found: list[LengthJob] = []
        for job in content["jobs"]:
            if isinstance(own := made[job["name"]], DataError):
                raise own
            found.append(LengthJob(job["name"], np.array(own.train.lengths, np.int64), job["batch_size"]))
    return found


def drawn_job(name: str, mean: float, sigma: float, most: int, batch_size: int) -> LengthJob:
    """Log-normal with this mean before it is clipped to 32 and `most`: the middles of equal shares, so that nothing is left to chance."""
    median = mean / math.exp(sigma * sigma / 2)
    quantiles = [NormalDist().inv_cdf((k + 0.5) / _DRAWN) for k in range(_DRAWN)]
    lengths = [min(max(round(median * math.exp(sigma * quantile)), 32), most) for quantile in quantiles]
    return LengthJob(name, np.array(lengths, np.int64), batch_size)


def summaries() -> list[LengthJob]:
    """Four jobs of eight samples a step as in LoRAFusion's evaluation (three summarisation sets and their mixture): drawn, with means of
    500, 950, 1,800 and 1,100 tokens, of at most 4,096.
    """
    means = {"xsum-like": (500, 0.6), "cnn-like": (950, 0.5), "wikisum-like": (1800, 0.4), "mixed": (1100, 0.7)}
    return [drawn_job(name, mean, sigma, 4096, 8) for name, (mean, sigma) in means.items()]


def long_tailed() -> list[LengthJob]:
    """Six jobs of eight samples a step, most samples short and a few up to 16,384 tokens: drawn."""
    means = {"chat": (300, 0.8), "code": (700, 1.0), "summary": (1000, 0.8), "qa": (500, 0.7), "books": (2500, 1.1), "papers": (4000, 0.9)}
    return [drawn_job(name, mean, sigma, 16384, 8) for name, (mean, sigma) in means.items()]


def mixes() -> dict[str, list[LengthJob]]:
    real = real_jobs()
    four = [job for job in real if job.name in ("alpaca", "toolcall", "sft", "c4")]
    return {"real, 4 jobs": four, "real, 8 jobs": real, "summaries, 4 jobs": summaries(), "long-tailed, 6 jobs": long_tailed()}
