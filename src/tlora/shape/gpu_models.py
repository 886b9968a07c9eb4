"""GPUs by the names that people have for them, for a plan where none is at hand. Does not import torch.

Bytes are those that nvidia-smi shows (with ECC where that is the maker's default); compute capability, the rate of dense products of
16-bit floats, summed in fp32, and the generation of PCI Express are the maker's (data sheets and architecture white papers). Nothing in the
table was measured; a file may hold what `tlora calibrate` has measured.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tlora.byte_size import Bytes
from tlora.errors import ConfigError, cut
from tlora.json_file import DECODER, read_object
from tlora.kernels.cards import HOPPER, CardClass, class_of_capability
from tlora.shape import GPU_SHARE
from tlora.shape.work import FP8_GAIN, WITH_FEATURES, TrainingRate

# What training an 8B makes of the rate of products, with what features take counted as weights: 17,016 tokens/s on an H200 are 0.66 of its
# 989 TFLOP/s (docs/benchmarks-history.md). Where tiles are loaded by pointer, products alone make about 0.8 of the rate; a step makes about
# 0.8 of theirs, which features take.
# What copies make of PCI Express with 16 lanes, about 0.8 of its rate, by its generation; 8 lanes make half of it.
_GEN3, _GEN4, _GEN5 = 12.0, 25.0, 50.0
# What copies from all other GPUs at once make of NVLink, one way: 350 of 450 GB/s on four H200s (docs/benchmarks-history.md), by its
# generation as servers have it. GeForce cards read no other's memory, and where there is no NVLink it is PCI Express.
_NVLINK2, _NVLINK3, _NVLINK4, _NVLINK5 = 117.0, 233.0, 350.0, 700.0
_SHARES = {"descriptor": 0.66, "pointers": 0.78}
# The plain path's: forced on an H100 it made 11,235 tokens/s of a 1.7B where Hopper's kernels made 49,837 of the same jobs, 0.225 of 0.66
# (bench/results/h100_2ecdd65_plain_real_1.7b.json, h100_6a3054d_real_1.7b.json). No card that takes it by itself was at hand.
_PLAIN_SHARE = 0.15
# A Hopper card's rate by the instructions of older ones: 9,887 tokens/s of an 8B on an H100 are 0.39 of its 989 TFLOP/s, and so 0.5 of them
# by that share (bench/results/h100_2daf61c_sm80_r16_8b.json).
_OLDER_INSTRUCTIONS = 0.5
# A multiprocessor's floating-point operations a clock are those of dense products of 16-bit floats, summed in fp32, by compute capability
# (NVIDIA's white papers of each architecture). Times the multiprocessors and the clock they give the data sheets' rates.
_PER_CLOCK = {0: 256, 70: 1024, 80: 2048, 86: 1024, 90: 4096, 100: 8192, 120: 1024}  # from that capability on
_GEFORCE_FROM = 75  # those sum in fp32 at half the rate, and their drivers' names say GeForce
_USUAL_HZ = 1.7e9  # where the driver names no clock: those of the table are from 1.4 to 2.6 GHz


@dataclass(frozen=True)
class GpuModel:
    """`capability` 89 is 8.9; `tflops`: 10^12 floating-point operations a second; `link_gb_per_second`: from the host's memory;
    `peer_gb_per_second`: from the other GPUs' of its host, 0 where it cannot read theirs. What follows is measured, or None:
    `link_back_gb_per_second`, to the host's memory; `training_tflops`, what training makes of `tflops`; `gain_in_8_bits`, how many times as
    fast it is with weights in 8 bits; `layer_seconds`, that a micro-batch takes each layer however few its tokens are.
    """

    name: str
    memory_bytes: int
    capability: int
    tflops: float
    link_gb_per_second: float
    peer_gb_per_second: float = 0.0
    link_back_gb_per_second: float | None = None
    training_tflops: float | None = None
    gain_in_8_bits: float | None = None
    layer_seconds: float | None = None

    @property
    def flops(self) -> float:
        """What training makes of `tflops`, features counted as weights, measured or extrapolated."""
        if self.training_tflops is not None:
            return self.training_tflops * 1e12 * WITH_FEATURES
        return self.flops_by(class_of_capability(self.capability))

    def flops_by(self, card: CardClass | None) -> float:
        """The same with the kernels of another class, or on the plain path, where these are forced."""
        if card is None:
            return _PLAIN_SHARE * self.tflops * 1e12
        own = class_of_capability(self.capability)
        older = own is not None and own.loads == "descriptor" and card.loads == "pointers"
        return _SHARES[card.loads] * self.tflops * 1e12 * (_OLDER_INSTRUCTIONS if older else 1.0)

    @property
    def smallest_rows(self) -> int:
        """Of a tile of its kernels; a Hopper card's on the plain path."""
        return (class_of_capability(self.capability) or HOPPER).smallest_rows

    @property
    def rate(self) -> TrainingRate:
        return TrainingRate(self.flops, self.gain_in_8_bits or FP8_GAIN)

    @property
    def fixed_work(self) -> float | None:
        """Tokens times weights of a layer that are multiplied, forwards and back, in `layer_seconds`."""
        return None if self.layer_seconds is None else self.layer_seconds * self.flops / 4

    @property
    def slower_link_gb_per_second(self) -> float:
        """Of the two directions between the host's memory and this GPU."""
        return min(self.link_gb_per_second, self.link_back_gb_per_second or self.link_gb_per_second)

    @property
    def limit_bytes(self) -> int:
        """What a run may plan with."""
        return int(GPU_SHARE * self.memory_bytes)


def link_rate(one: GpuModel, other: GpuModel) -> float:
    """Bytes a second between two GPUs: peers' copies, else through pinned memory of the host."""
    peer = min(one.peer_gb_per_second, other.peer_gb_per_second)
    return 1e9 * (peer or min(one.slower_link_gb_per_second, other.slower_link_gb_per_second))


def rated_as(name: str, plain: bool) -> str:
    """What predicted speeds of a GPU called `name` are those of, of which none was measured."""
    return f"extrapolated for {name}{' on the plain path' if plain else ''}"


def speeds_of(gpu: GpuModel) -> str:
    """The same of a GPU that a plan is for."""
    measured = gpu.training_tflops is not None
    return f"measured on {gpu.name}" if measured else rated_as(gpu.name, class_of_capability(gpu.capability) is None)


class _GpuFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    memory: Annotated[Bytes, Field(ge=1 << 17)]  # neither 24 nor 24576 is one of a GPU
    compute_capability: Annotated[float, Field(ge=3, le=20)]  # 8.9, not 89
    tflops: Annotated[float, Field(gt=0, le=1e6)]
    link_gb_per_second: Annotated[float, Field(gt=0, le=1e4)] = _GEN4
    peer_gb_per_second: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    link_back_gb_per_second: Annotated[float, Field(gt=0, le=1e4)] | None = None
    training_tflops: Annotated[float, Field(gt=0, le=1e6)] | None = None
    gain_in_8_bits: Annotated[float, Field(gt=0, le=10)] | None = None
    layer_seconds: Annotated[float, Field(ge=0, le=10)] | None = None
    measured: dict[str, Any] | None = None  # by `tlora calibrate`, and how; nothing is predicted with it


def _table(*rows: tuple[str, int, int, float, float, float]) -> dict[str, GpuModel]:
    made = [GpuModel(name, mebibytes << 20, capability, tflops, link, peer) for name, mebibytes, capability, tflops, link, peer in rows]
    return {_key(gpu.name): gpu for gpu in made}


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


_KNOWN = _table(
    ("T4", 15360, 75, 65, _GEN3, _GEN3),
    ("V100-16", 16384, 70, 125, _GEN3, _NVLINK2),
    ("V100-32", 32768, 70, 125, _GEN3, _NVLINK2),
    ("RTX 2080 Ti", 11264, 75, 53.8, _GEN3, 0),
    ("TITAN RTX", 24576, 75, 130.5, _GEN3, _GEN3),
    ("Quadro RTX 8000", 49152, 75, 130.5, _GEN3, _GEN3),
    ("RTX 3060", 12288, 86, 25.6, _GEN4, 0),
    ("RTX 3080", 10240, 86, 59.5, _GEN4, 0),
    ("RTX 3090", 24576, 86, 71, _GEN4, 0),
    ("RTX 4060 Ti 16", 16380, 89, 44, _GEN4 / 2, 0),
    ("RTX 4070 Ti Super", 16376, 89, 88, _GEN4, 0),
    ("RTX 4080", 16376, 89, 97.5, _GEN4, 0),
    ("RTX 4090", 24564, 89, 165.2, _GEN4, 0),
    ("RTX 5070 Ti", 16303, 120, 88, _GEN5, 0),
    ("RTX 5080", 16303, 120, 112.6, _GEN5, 0),
    ("RTX 5090", 32607, 120, 209.5, _GEN5, 0),
    ("RTX A6000", 49140, 86, 154.8, _GEN4, _GEN4),
    ("RTX 6000 Ada", 49140, 89, 364.2, _GEN4, _GEN4),
    ("RTX PRO 6000", 97887, 120, 503.8, _GEN5, _GEN5),
    ("A10", 23028, 86, 125, _GEN4, _GEN4),
    ("A40", 46068, 86, 149.7, _GEN4, _GEN4),
    ("A100-40", 40960, 80, 312, _GEN4, _NVLINK3),
    ("A100-80", 81920, 80, 312, _GEN4, _NVLINK3),
    ("L4", 23034, 89, 121, _GEN4, _GEN4),
    ("L40S", 46068, 89, 362, _GEN4, _GEN4),
    ("H100", 81559, 90, 989, _GEN5, _NVLINK4),
    ("H20", 97871, 90, 148, _GEN5, _NVLINK4),
    ("H200", 143771, 90, 989, _GEN5, _NVLINK4),
    ("B200", 183359, 100, 2250, _GEN5, _NVLINK5),
)
_ALIASES = {"a6000": "rtxa6000", "rtx6000ada": "rtx6000ada", "a100": "a100-80", "v100": "v100-16"}


def in_table() -> tuple[GpuModel, ...]:
    return tuple(_KNOWN.values())


def find_gpu(name: str, option: str = "--gpu") -> GpuModel:
    """The GPU called `name` ("rtx4090", "A100-40"), or the one that a file describes. `option`: that names it. Raises ConfigError."""
    found = _KNOWN.get(_key(name)) or _KNOWN.get(_key(_ALIASES.get(_key(name), "")))
    if found is not None:
        return found
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        known = ", ".join(re.sub(r" ", "", gpu.name.lower()) for gpu in _KNOWN.values())
        raise ConfigError(
            f"{option} {cut(name)}: is not known; name one of {known}, or a JSON file with {', '.join(_GpuFile.model_fields)}"
        )
    return _described(path, option)


def gpu_called(device_name: str) -> GpuModel | None:
    """The GPU that its driver calls so ("NVIDIA A100-SXM4-40GB"); None for one of no row."""
    key, rows = _key(device_name), _KNOWN | {alias: _KNOWN[_key(name)] for alias, name in _ALIASES.items()}
    row = max((name for name in rows if key.startswith(name)), key=len, default=None)
    return rows[row] if row is not None else None


def name_gpus(names: str, count: int | None = None) -> list[GpuModel]:
    """`count` GPUs of the models in `names`, with commas between, as many of each in this order; by default one of each. Raises
    ConfigError.
    """
    asked = [name.strip() for name in names.split(",")]
    if "" in asked:
        raise ConfigError(f"--gpu {cut(names)}: a name is empty. Write such as rtx4090,rtx3090")
    models = [find_gpu(name) for name in asked]
    count = len(models) if count is None else count
    if count % len(models):
        raise ConfigError(
            f"--gpus {count}: is no multiple of the {len(models)} models in --gpu {cut(names)}, of which as many each are planned for. "
            f"Give --gpus {-(-count // len(models)) * len(models)}, or name each GPU's model"
        )
    return [model for model in models for _ in range(count // len(models))]


def _described(path: Path, option: str) -> GpuModel:
    example = '{"name": "RTX 4090", "memory": "24GiB", "compute_capability": 8.9, "tflops": 165, "link_gb_per_second": 25}'
    try:
        given = _GpuFile.model_validate(read_object(path, DECODER))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"][:1]))
        raise ConfigError(f"{option} {path}: {key}: {first['msg']}. Write such as {example}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {error}. Write such as {example}") from None
    figures = given.model_dump(exclude={"name", "memory", "compute_capability", "measured"})
    return GpuModel(given.name, given.memory, round(10 * given.compute_capability), **figures)


# -- GPUs of no row in the table: nothing was measured of them -----------------------------------------------------------


def gpu_by_properties(name: str, memory_bytes: int, capability: int, multiprocessors: int, clock_hz: float) -> GpuModel:
    """Of `capability` 89 for 8.9. `clock_hz`: the highest of its multiprocessors, 0 where the driver does not say it. That it reads the
    memory of others is not assumed.
    """
    per_clock = _PER_CLOCK[max(first for first in _PER_CLOCK if first <= capability)]
    if capability >= _GEFORCE_FROM and "geforce" in name.lower():
        per_clock //= 2
    link = _GEN3 if capability < 80 else _GEN4 if capability < 90 else _GEN5
    return GpuModel(name, memory_bytes, capability, per_clock * multiprocessors * (clock_hz or _USUAL_HZ) / 1e12, link)


def gpu_by_name_alone(name: str) -> GpuModel:
    """In the geometric middle between the slowest and the fastest of the table: at most 9 times off for any of these, until workers have
    measured.
    """
    ordered = sorted(in_table(), key=lambda gpu: gpu.flops)
    slowest, fastest = ordered[0], ordered[-1]
    middle = math.sqrt(slowest.flops * fastest.flops)
    typical = min(ordered, key=lambda gpu: abs(math.log(gpu.flops / middle)))
    return GpuModel(name, typical.memory_bytes, typical.capability, typical.tflops * middle / typical.flops, typical.link_gb_per_second)
