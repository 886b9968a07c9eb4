"""`tlora calibrate`: measures a GPU of this machine, and writes the file from which plans take what they know of a GPU
(`shape/gpu_models.py`).

Products and copies are timed alone, training as a worker times its base (`layer_speed.py`). Each takes as long as its repeats take, and
nothing sleeps.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tlora import durable
from tlora.engine.calibration import CalibrationError
from tlora.engine.layer_speed import LayerSpeed, MadeUpBase, measure_layers
from tlora.errors import CapacityError, ConfigError
from tlora.kernels.device import runs_kernels
from tlora.planning.plan import pick_device
from tlora.shape.gpu_files import calibration_path, versions
from tlora.shape.gpu_models import GpuModel, find_gpu, gpu_called
from tlora.sharing.link_speed import LinkSpeed, Repeated, measure_both_ways, measure_copies, measure_peers, repeat
from tlora.supermodel.held_linear import precisions_on
from tlora.wording.dtypes import dtype_name
from tlora.wording.numbers import gib, quantity

_LAST_BEGIN_SECONDS = 100.0  # from then on nothing is begun that a file can do without: it shall take 3 minutes at most
_LEFT_TO_OTHERS = 2 << 30  # bytes of a GPU: contexts of this process and of a desktop take less
_UNSTEADY = 0.1  # by which the median of repeats exceeds the best, or products get slower from the first to the last measurement
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 256}  # rows, columns and inner size
_PRODUCTS = 20

Note = Callable[[str], object]


@dataclass(frozen=True)
class ProductSpeed:
    """Of one large product, repeated. `flops`: floating-point operations a second, of the best repeat."""

    flops: float
    repeated: Repeated


@dataclass(frozen=True)
class Measurements:
    """Of one device. `product_flops`: floating-point operations a second of one large product in `dtype`; `peer_bytes`: that it reads of
    the other GPUs' memory in a second, 0 where it cannot, None where there is none; `gain_in_8_bits` None where it has no such weights.
    """

    dtype: str
    product_flops: float
    copy_bytes: float
    launch_seconds: float  # of the host, for a small kernel
    link: LinkSpeed
    peer_bytes: float | None
    training: LayerSpeed
    gain_in_8_bits: float | None
    unsteady: tuple[str, ...] = ()  # what says that the device had other work to do, or changed its clock


@dataclass(frozen=True)
class Calibrated:
    """The file that was written, and the GPU as plans read it from there. `warnings`: why its figures may be too low."""

    path: Path
    gpu: GpuModel
    seconds: float
    warnings: tuple[str, ...] = field(default=())


def calibrate(device: str | None = None, out: Path | None = None, note: Note = print) -> Calibrated:
    """Measure the GPU `device`, by default the first, and write the file `out`, by default the one that this machine reads of such GPUs.

    `note` gets a line per measurement. Raises ConfigError without a GPU and for a file that cannot be written, and CapacityError where not
    even small layers can be trained on the GPU.
    """
    place = pick_device(device)
    if place.type != "cuda":
        raise ConfigError(
            f"calibrate measures a GPU, and the device here is {place}. Run it on the machine that has the GPU; "
            "for a GPU of the table, plans need no file: tlora plan --gpu NAME"
        )
    place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    begun, name = time.monotonic(), torch.cuda.get_device_name(place)
    path = out or calibration_path(name)
    if out is None:
        durable.make_directory(path.parent)
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: its directory cannot be written. Give a file in one that is there")
    free, total = torch.cuda.mem_get_info(place)
    major, minor = torch.cuda.get_device_capability(place)
    note(f"{name}, {gib(total)}, compute capability {major}.{minor}")
    warnings = list[str]()
    if (taken := total - free - torch.cuda.memory_reserved(place)) > _LEFT_TO_OTHERS:
        warnings.append(
            f"other processes have {gib(taken)} of this GPU: what they compute meanwhile makes it look slower. End them, and repeat"
        )
    peers = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    try:
        with torch.cuda.device(place):
            measured = measure(place, half_precision(place), MadeUpBase(), peers, note, deadline=begun + _LAST_BEGIN_SECONDS)
    except CalibrationError as error:
        raise CapacityError(f"{name} cannot be measured: {error}. Run it while nothing else uses the GPU") from None
    known, peer_bytes = gpu_called(name), measured.peer_bytes
    if peer_bytes is None:
        peer_bytes = known.peer_gb_per_second * 1e9 if known is not None else 0.0
        source = f"as in the table of GPUs: {_gb(peer_bytes)}" if known is not None else "taken as not possible"
        warnings.append(f"this process sees one GPU: copies between GPUs were not measured, and are {source}")
    fields = spec_of(name, total, 10 * major + minor, peer_bytes, measured)
    seconds = time.monotonic() - begun
    fields["measured"] |= {"seconds": round(seconds, 1), "at": time.strftime("%Y-%m-%d"), **versions()}
    durable.write_file(path, json.dumps(fields, indent=1) + "\n")
    return Calibrated(path, find_gpu(str(path), "--out"), seconds, (*warnings, *measured.unsteady))


def measure(
    device: torch.device, dtype: torch.dtype, base: MadeUpBase, gpus: list[torch.device], note: Note, deadline: float
) -> Measurements:
    """All of `device`. `gpus`: of its host, itself among them. What a file can do without is left out after `deadline`, which is of
    `time.monotonic`.
    """
    first = measure_product(device, dtype)
    note(f"dense products in {dtype_name(dtype)}: {first.flops / 1e12:,.1f} TFLOP/s")
    copies, launch = measure_copies(device), _launch_seconds(device)
    note(f"copies within its memory: {_gb(copies)} read and written; a launch takes the host {1e6 * launch:.1f} us")
    link = measure_both_ways(device)
    note(f"the host's memory: {_gb(link.to_device)} from there, {_gb(link.to_host)} to there, {_gb(link.both)} each way at once")
    peer_bytes = _measure_peers(device, gpus, note)
    if not runs_kernels(device):
        note("the fused kernels do not run here: what is timed is the plain path")
    note("training is timed; the first time its kernels are compiled, which takes a minute or two")
    training = measure_layers(device, dtype, base)
    note(_told_of(training, dtype))
    gain = _gain_in_8_bits(device, dtype, base, training, note, deadline)
    last = measure_product(device, dtype)
    slowed = first.flops / last.flops - 1
    unsteady = [
        f"{what} of one kind differ by {share:.0%}"
        for what, share in (
            ("products", first.repeated.spread),
            ("copies from and to the host", link.spread),
            ("products before and after training", slowed),
        )
        if share > _UNSTEADY
    ]
    busy = [f"{', '.join(unsteady)}: the GPU has other work to do, or is short of power or cooling"] if unsteady else []
    return Measurements(dtype_name(dtype), max(first.flops, last.flops), copies, launch, link, peer_bytes, training, gain, tuple(busy))


def spec_of(name: str, memory_bytes: int, capability: int, peer_bytes: float, measured: Measurements) -> dict[str, Any]:
    """What the file holds: the fields that `find_gpu` reads, and under "measured" the rest."""
    link, training = measured.link, measured.training
    optional = {"gain_in_8_bits": measured.gain_in_8_bits, "layer_seconds": training.layer_seconds}
    return {
        "name": name,
        "memory": memory_bytes,
        "compute_capability": capability / 10,
        "tflops": _rounded(measured.product_flops / 1e12),
        "training_tflops": _rounded(training.flops / 1e12),
        "link_gb_per_second": _rounded(link.to_device / 1e9),
        "link_back_gb_per_second": _rounded(link.to_host / 1e9),
        "peer_gb_per_second": _rounded(peer_bytes / 1e9),
        **{key: _rounded(value) for key, value in optional.items() if value is not None},
        "measured": {
            "dtype": measured.dtype,
            "layer_seconds_by_tokens": {str(tokens): _rounded(seconds) for tokens, seconds in training.seconds.items()},
            "link_both_gb_per_second": _rounded(link.both / 1e9),
            "copy_gb_per_second": _rounded(measured.copy_bytes / 1e9),
            "launch_microseconds": _rounded(1e6 * measured.launch_seconds),
            "peers": measured.peer_bytes is not None,
            "unsteady": list(measured.unsteady),
            "host": f"{platform.machine()}, {psutil.cpu_count()} cores",
        },
    }


def _launch_seconds(device: torch.device) -> float:
    """Kernels of a few numbers, which the device computes faster than the host queues them."""
    count, values = 1000, torch.zeros(16, device=device)

    def step() -> None:
        for _ in range(count):
            values.add_(1)

    return repeat(step, [device], 5).best / count


def _measure_peers(device: torch.device, gpus: list[torch.device], note: Note) -> float | None:
    """None where there is no other GPU, 0 where one cannot read another."""
    if len(gpus) < 2:
        return None
    pairs = [(one, other) for one in gpus for other in gpus if one != other]
    if device.type == "cuda" and not all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
        note(f"the {len(gpus)} GPUs cannot read each other's memory")
        return 0.0
    found = measure_peers(gpus)
    note(f"the memory of {quantity(len(gpus) - 1, 'other GPU')}, while all read: {_gb(found)}")
    return found


def _gain_in_8_bits(
    device: torch.device, dtype: torch.dtype, base: MadeUpBase, training: LayerSpeed, note: Note, deadline: float
) -> float | None:
    if "fp8" not in precisions_on(device, dtype):
        return None
    if time.monotonic() > deadline:
        note("weights in 8 bits: left out for time. What was compiled is kept: run it again to measure them too")
        return None
    try:
        found = measure_layers(device, dtype, base, "fp8")
    except (CalibrationError, CapacityError) as error:
        note(f"weights in 8 bits: not measured: {error}")
        return None
    tokens = max(found.seconds.keys() & training.seconds.keys(), default=0)
    gain = training.seconds[tokens] / found.seconds[tokens] if tokens else found.flops / training.flops
    note(f"with weights in 8 bits: {gain:.2f} times as fast")
    return gain


def _told_of(training: LayerSpeed, dtype: torch.dtype) -> str:
    fixed = f", and {1e6 * training.layer_seconds:.0f} us a layer however few tokens" if training.layer_seconds is not None else ""
    each = ", ".join(f"{1e3 * seconds:.2f} ms for {tokens:,} tokens" for tokens, seconds in sorted(training.seconds.items()))
    return f"training over an 8B's layers in {dtype_name(dtype)}: {training.flops / 1e12:,.1f} TFLOP/s{fixed} (a layer: {each})"


def _gb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.1f} GB/s"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def measure_product(device: torch.device, dtype: torch.dtype) -> ProductSpeed:
    size = _PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    found = repeat(lambda: torch.mm(a, b, out=out), [device], _PRODUCTS)
    return ProductSpeed(2 * size**3 / found.best, found)


def half_precision(device: torch.device) -> torch.dtype:
    """The 16 bits that a GPU trains in."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
