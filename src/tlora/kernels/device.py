"""Which devices run the fused kernels, as what class of GPU, and how small tables are copied to and from them. Does not import triton."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora.errors import ConfigError
from tlora.kernels.cards import CLASSES, HOPPER, CardClass, class_named, class_of_capability

FORCED = "TLORA_CARD_CLASS"
"""A developer's variable: the card at hand compiles and runs the kernels of this class, such as sm_80, or with "plain" none of them
(CONTRIBUTING.md).
"""
PLAIN = "plain"


class _Elsewhere(NamedTuple):
    name: str
    capability: int
    limit_bytes: int | None
    fixed_work: float | None


_elsewhere: ContextVar[_Elsewhere | None] = ContextVar("a GPU that is not here", default=None)


@contextmanager
def as_if_on(name: str, capability: int, limit_bytes: int | None = None, fixed_work: float | None = None) -> Iterator[None]:
    """Within it, a plan for a GPU is for one called `name`, of `capability` (89 for 8.9), in place of this machine's. Nothing is launched
    there. `limit_bytes`: what a run may plan with. `fixed_work`: tokens times weights of a layer that a micro-batch costs it besides its
    own, where that was measured.
    """
    token = _elsewhere.set(_Elsewhere(name, capability, limit_bytes, fixed_work))
    try:
        yield
    finally:
        _elsewhere.reset(token)


def may_run_kernels(device: torch.device) -> bool:
    """As `runs_kernels`; a GPU that cannot be asked, as on a host without one that plans for others, is taken to run them."""
    return not can_be_asked(device) or runs_kernels(device)


def can_be_asked(device: torch.device) -> bool:
    """Whether it is known what `device` is: not of a GPU on a host without one."""
    return device.type != "cuda" or _elsewhere.get() is not None or torch.cuda.is_available()


def runs_kernels(device: torch.device) -> bool:
    """Whether `device` runs the kernels: a GPU of one of `cards.CLASSES`, or a CPU under Triton's interpreter. What launches kernels asks
    first, so that a class that is forced is that of all of them.
    """
    if card_of(device) is None:
        return False
    if is_forced() and not is_elsewhere():
        launched_as(device)
    return True


def card_of(device: torch.device) -> CardClass | None:
    """The class of `device`; None where it runs no kernels. A CPU under Triton's interpreter is like a Hopper card."""
    if device.type == "cpu":
        return class_of(HOPPER.capability) if os.environ.get("TRITON_INTERPRET") == "1" else None
    if device.type != "cuda":
        return None
    card = None if torch.version.hip else class_of(capability_of(device))
    return card if card is not None and _shared_memory(device) >= card.shared_memory else None


def planned_card(device: torch.device) -> CardClass | None:
    """As `card_of`; a GPU that cannot be asked is taken for a Hopper card."""
    return card_of(device) if can_be_asked(device) else HOPPER


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may take."""
    if (gpu := _elsewhere.get()) is not None:
        card = class_of(gpu.capability)
        return card.shared_memory if card is not None else 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def why_plain(device: torch.device) -> str | None:
    """Why `device` runs no kernels; None where it does."""
    if card_of(device) is not None:
        return None
    if device.type != "cuda":
        return f"the kernels need a GPU, and this run's device is {device}"
    if torch.version.hip:
        return "the kernels are for NVIDIA GPUs"
    capability = capability_of(device)
    if _is_forced_plain():
        return f"{FORCED} is {PLAIN}, on compute capability {capability / 10}"
    card = class_of(capability)
    if card is not None:
        return (
            f"the kernels of {card.name} take {card.shared_kib} KB of shared memory, and this GPU has {_shared_memory(device) // 1024} KB"
        )
    if capability < CLASSES[0].capability:
        return f"compute capability {capability / 10} has no bf16"
    return f"the kernels were not made for compute capability {capability / 10}"


def describe_class(card: CardClass, device: torch.device) -> str:
    """`sm_89, 99 KB`."""
    forced = f", {FORCED} on compute capability {capability_of(device) / 10}" if is_forced() and device.type == "cuda" else ""
    return f"{card.name}, {card.shared_kib} KB{forced}"


@functools.cache  # asked at every launch of attention
def launched_as(device: torch.device) -> CardClass:
    """The class whose kernels are launched on `device`. Where it is forced, Triton compiles for that class from now on."""
    card = card_of(device) or HOPPER
    if device.type == "cuda" and is_forced() and not _is_forced_plain():
        compile_as(card, capability_of(device))
    return card


def class_of(capability: int) -> CardClass | None:
    """The class of GPUs of `capability` (90 for 9.0), or the forced one; None where the plain path is forced. Raises ConfigError for one
    that such a GPU cannot run.
    """
    if _is_forced_plain():
        return None
    if not is_forced():
        return class_of_capability(capability)
    name = os.environ[FORCED]
    try:
        card = class_named(name)
    except KeyError:
        raise ConfigError(
            f"{FORCED} must be one of {', '.join([PLAIN, *(card.name for card in CLASSES)])}, and is {name!r}. Unset it"
        ) from None
    if card.capability > capability and card.loads == "descriptor":
        raise ConfigError(f"{FORCED} is {name}, whose kernels a GPU of compute capability {capability / 10} does not run. Unset it")
    return card


def is_forced() -> bool:
    return FORCED in os.environ


def _is_forced_plain() -> bool:
    return os.environ.get(FORCED) == PLAIN


def tuned_as(gpu: str) -> str:
    """The name that tables of tiles have for a GPU: its own or, where another class is forced, one of that class's."""
    return f"{gpu} as {os.environ[FORCED]}" if is_forced() else gpu


def name_of(device: torch.device) -> str:
    """What a GPU is called."""
    gpu = _elsewhere.get()
    return gpu.name if gpu is not None else torch.cuda.get_device_name(device)


def is_elsewhere() -> bool:
    """Whether what is planned is for a GPU that is not here."""
    return _elsewhere.get() is not None


def limit_elsewhere() -> int | None:
    """Bytes that a run may plan with on a GPU that is not here; None for one that is."""
    gpu = _elsewhere.get()
    return gpu.limit_bytes if gpu is not None else None


def fixed_work_elsewhere() -> float | None:
    """What was measured of a GPU that is not here; None where it is not known."""
    gpu = _elsewhere.get()
    return gpu.fixed_work if gpu is not None else None


def capability_of(device: torch.device) -> int:
    """Compute capability of a GPU: 90 for 9.0."""
    if (gpu := _elsewhere.get()) is not None:
        return gpu.capability
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def likely_capability(device: torch.device) -> int:
    """As `capability_of`; of a GPU that cannot be asked, 80."""
    return capability_of(device) if can_be_asked(device) else CLASSES[0].capability


@functools.cache
def own_stream(device: torch.device, purpose: str, number: int = 0, priority: int = 0) -> torch.cuda.Stream:
    """This process's stream for `purpose` on a GPU, the same one each time. torch gives 32 of them in turns, so that one that is made anew
    for each use would in time be another's: a thread that waits for it while a graph is captured there ends with an error.
    """
    return torch.cuda.Stream(device, priority)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU through pinned memory: from pageable memory the copy would wait for all that the GPU still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ToHost:
    """A small tensor on its way to the host: `read` waits for what was queued before it, and for nothing behind. Any thread may read."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self._values = tensor.clone()

    @property
    def done(self) -> bool:
        """`read` does not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Any:
        """Nested lists of numbers, as `Tensor.tolist`."""
        if self._event is not None:
            with torch.cuda.device(self._event.device):  # else a thread of its own would begin to use the first GPU
                self._event.synchronize()
        return self._values.tolist()


def mark_on(device: torch.device) -> ToHost:
    """Nothing, that is there when the device has done all that it was given."""
    return ToHost(torch.empty(0, device=device))


def compile_as(card: CardClass, capability: int) -> None:
    """A developer's switch, to try an older card's kernels on a newer card: its bits are those of the older instructions, its speed is not.

    From now on Triton chooses instructions as for `card`, assembles them for a GPU of `capability`, and refuses what takes more shared
    memory than `card` has.
    """
    import triton.backends.nvidia.compiler as backend
    import triton.compiler.compiler as compiler
    from triton import knobs

    at_hand = backend.sm_arch_from_capability(capability)
    knobs.runtime.override_arch = f"sm{card.capability}"
    backend.sm_arch_from_capability = lambda _: at_hand
    compiler.max_shared_mem = lambda _: card.shared_memory
