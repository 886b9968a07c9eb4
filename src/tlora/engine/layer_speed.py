"""How fast a GPU trains: decoder layers that are made up, timed as a worker times its base (`calibration.probe`).

Two bases of different depth are timed in micro-batches of two sizes. The difference of the depths is what a layer takes, without head, loss
and optimizer; that of the sizes is what a token takes, without what each layer takes however few its tokens are.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tlora.engine.calibration import SAMPLE_TOKENS, CalibrationError, MadeUpJobs, Timed, probe, worth_trying
from tlora.job import BasePrecision
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class MadeUpBase:
    """Layers of Llama-3-8B's shape. `depths`: of the two bases. `samples`: of the micro-batches, the fewest first: 2,032 and 8,128 tokens
    are computed as 2,048 and 8,192, from which on training becomes no faster. `ranks`: of the jobs that share them, each with as many.
    """

    hidden_size: int = 4096
    intermediate_size: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    vocab_size: int = 32000
    depths: tuple[int, int] = (2, 6)
    samples: tuple[int, ...] = (16, 64)
    ranks: tuple[int, ...] = (16,)

    def __post_init__(self) -> None:
        assert not any(count % len(self.ranks) for count in self.samples), f"{self.samples} samples of {len(self.ranks)} jobs"

    @property
    def layer_weights(self) -> int:
        queries = self.hidden_size * self.hidden_size
        keys = self.hidden_size * self.hidden_size * self.key_value_heads // self.heads
        return 2 * queries + 2 * keys + 3 * self.hidden_size * self.intermediate_size

    def config(self, depth: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class LayerSpeed:
    """`flops`: floating-point operations a second that training makes. `layer_seconds`: of a micro-batch, besides them, in each layer; None
    where only one size was timed. `seconds`: of a layer, by tokens of the micro-batch.
    """

    flops: float
    layer_seconds: float | None
    seconds: Mapping[int, float]


def measure_layers(device: torch.device, dtype: torch.dtype, base: MadeUpBase, precision: BasePrecision | None = None) -> LayerSpeed:
    """Of layers held in `precision`. Raises CalibrationError where not even the smallest micro-batch can be timed."""
    shallow, deep = base.depths
    timed = {depth: _timed(_make(device, dtype, base, depth, precision), base) for depth in (deep, shallow)}
    both = sorted(timed[deep].keys() & timed[shallow].keys())
    per_layer = {tokens: (timed[deep][tokens] - timed[shallow][tokens]) / (deep - shallow) for tokens in both}
    return speed_of(per_layer, base)


def speed_of(seconds: Mapping[int, float], base: MadeUpBase) -> LayerSpeed:
    """From the `seconds` of a layer, by tokens of the micro-batch. Raises CalibrationError where more layers took no longer."""
    if not seconds or min(seconds.values()) <= 0:
        raise CalibrationError("more layers took no longer than few: the GPU is busy with something else")
    (few, few_seconds), (many, many_seconds) = min(seconds.items()), max(seconds.items())
    token_seconds, fixed = many_seconds / many, 0.0 if many > few else None
    if many > few and 0 < (slope := (many_seconds - few_seconds) / (many - few)) < token_seconds:  # else a fixed time is not to be seen
        token_seconds, fixed = slope, many_seconds - slope * many
    # a token's multiply-adds, as `shape.work` counts them: weights forwards and back, and causal attention
    multiply_adds = 2 * base.layer_weights + 3 * base.hidden_size * SAMPLE_TOKENS
    return LayerSpeed(2 * multiply_adds / token_seconds, fixed, dict(seconds))


def _make(
    device: torch.device, dtype: torch.dtype, base: MadeUpBase, depth: int, precision: BasePrecision | None
) -> Callable[[], SuperModel]:
    def make() -> SuperModel:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(base.config(depth), dtype=dtype, attn_implementation="sdpa")
        if precision is not None:
            hold(model, list(find_linears(model)), device, precision)
        return SuperModel(make_base(model.eval(), f"{depth} layers that are made up"))

    return make


def _timed(make: Callable[[], SuperModel], base: MadeUpBase) -> dict[int, float]:
    """Seconds by tokens of the micro-batch, of those that fit and end in time; the first does, or CalibrationError is raised."""
    found: dict[int, float] = {}
    model = make()
    last: Timed | None = None
    with tempfile.TemporaryDirectory(prefix="tlora-speed-") as directory:
        jobs = MadeUpJobs(model, Path(directory))
        for count in base.samples:
            if last is not None and not worth_trying(count * SAMPLE_TOKENS, last, model.device.type):
                break
            try:
                tokens = count // len(base.ranks) * SAMPLE_TOKENS
                last = _result(probe(model, [jobs.job(tokens, rank) for rank in base.ranks]))
            except CalibrationError:  # it takes more memory than there is
                if last is None:
                    raise
                break
            found[last.tokens] = last.seconds
    model.release_memory()
    del model, jobs
    gc.collect()
    return found


def _result(steps: Generator[None, None, _Value]) -> _Value:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
