"""The jobs that the benchmarks train, and their data: equal samples of random tokens, or real texts with their own lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.shapes import EXPERT_PARAMETERS
from tlora.data.dataset import Dataset, Sample, Writer
from tlora.data.order import global_batch
from tlora.data.prepare import prepare
from tlora.data.request import PrepareRequest
from tlora.errors import DataError
from tlora.job import DataConfig, JobSpec

ENDLESS = 10**6  # optimizer steps; the benchmark ends, not the jobs
SAMPLES = 64  # of random data per job and sample of a batch: more than are ever reached
REAL_VOCABULARY = 16384
_TURNS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Order:
    """What to train: job i has rank `ranks[i % len(ranks)]`; `lengths` is tokens per sample, or "real"."""

    jobs: int
    ranks: tuple[int, ...]
    batch_size: int
    lengths: int | str
    max_length: int = 2048
    experts: bool = False  # adapted too, with the rank divided by the experts of a token

    @property
    def real(self) -> bool:
        return self.lengths == "real"


@dataclass(frozen=True)
class Job:
    """One job and its tokens."""

    spec: JobSpec
    data: Dataset

    def batch(self, step: int) -> list[Sample]:
        """The samples of optimizer step `step`, as the engine takes them."""
        return [self.data[i] for i in global_batch(step, len(self.data), self.spec.batch_size, self.spec.seed)]

    @property
    def batch_tokens(self) -> float:
        """Tokens of a global batch, on average."""
        return float(self.data.lengths.mean()) * min(self.spec.batch_size, len(self.data))


def make_jobs(order: Order, vocab_size: int, data: Path | None, directory: Path) -> list[Job]:
    """The jobs of `order`; what they need on disk goes to `directory`. Real texts come from the files in `data`."""
    experts: dict[str, Any] = {"target_parameters": list(EXPERT_PARAMETERS), "expert_rank": "divide"} if order.experts else {}
    specs = [
        JobSpec(
            name=f"job{i}",
            data=DataConfig(path="-", max_length=order.max_length),
            r=order.ranks[i % len(order.ranks)],
            lora_alpha=2 * order.ranks[i % len(order.ranks)],
            batch_size=order.batch_size,
            max_steps=ENDLESS,
            learning_rate=1e-4,
            seed=i,
            **experts,
        )
        for i in range(order.jobs)
    ]
    if order.real:
        if data is None:
            raise SystemExit("real lengths need texts: say where their files are with --data")
        return _real_jobs(specs, vocab_size, data, directory)
    return [Job(spec, _random_data(directory / spec.name, int(order.lengths), order.batch_size, vocab_size, spec.seed)) for spec in specs]


def _random_data(directory: Path, length: int, batch_size: int, vocab_size: int, seed: int) -> Dataset:
    """Samples of `length` random tokens, all of them trained."""
    rng = np.random.default_rng(seed)
    writer = Writer(directory)
    for _ in range(SAMPLES * batch_size):
        writer.add(Sample(rng.integers(3, vocab_size, length).astype(np.int32), np.ones(length, np.float32)))
    writer.finish({})
    return Dataset(directory)


def _real_jobs(specs: Sequence[JobSpec], vocab_size: int, data: Path, directory: Path) -> list[Job]:
    """Job i takes file i of `data`, beginning again after the last; a tokenizer of their own words, loss on the completions.

    A job's weight is its tokens over the mean: all go through their data at the same pace, as with one epoch each. With equal
    shares a file of 7,000 tokens would weigh as much as one of 400,000, and its tiny batches are where PEFT is slowest.
    """
    files = sorted(file.resolve() for file in data.iterdir() if file.suffix in (".json", ".jsonl"))
    if not files:
        raise SystemExit(f"{data} holds no .json and no .jsonl file")
    tokenizer = train_tokenizer(files, min(REAL_VOCABULARY, vocab_size))
    tokenizer.save_pretrained(directory / "tokenizer")
    specs = [
        spec.model_copy(update={"data": spec.data.model_copy(update={"path": str(files[i % len(files)])})}) for i, spec in enumerate(specs)
    ]
    requests = [
        PrepareRequest(spec.name, spec.data, str(directory / "tokenizer"), vocab_size, directory / "cache", directory) for spec in specs
    ]
    sets: list[Dataset] = []
    for found in prepare(requests).values():
        if isinstance(found, DataError):
            raise found
        sets.append(found.train)
    tokens = [int(data.lengths.sum()) for data in sets]
    mean = sum(tokens) / len(tokens)
    return [Job(spec.model_copy(update={"weight": n / mean}), data) for spec, data, n in zip(specs, sets, tokens, strict=True)]


def train_tokenizer(files: Sequence[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over every string in `files`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", *_TURNS]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text for file in files for text in _strings(_read(file))), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1])
    wrapped.add_special_tokens({"additional_special_tokens": list(_TURNS[1:])})
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def _read(file: Path) -> object:
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line.strip()]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def describe(jobs: Sequence[Job]) -> list[dict[str, object]]:
    """Each job in a line of the result: rank, samples a step, and the lengths of its samples."""
    return [
        {
            "name": job.spec.name,
            "rank": job.spec.r,
            "batch_size": job.spec.batch_size,
            "samples": len(job.data),
            "data": ", ".join(Path(source.path).name for source in job.spec.data.sources),
            "mean_tokens": round(float(job.data.lengths.mean()), 1),
            "longest_tokens": int(job.data.lengths.max()),
        }
        for job in jobs
    ]
