"""Hosts of a cluster: what a worker says of its own, and the numbers that GPUs of several hosts have in the cluster.

A GPU of the controller's host keeps nvidia-smi's number. Those of the hosts that come are counted on from a multiple of `STRIDE` each, so
that no two GPUs have one number; over the line a host's own numbers are used.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence

import psutil

from tlora.cluster.gpus import left_visible, list_gpus, list_links
from tlora.cluster.kept_kind import processor_here
from tlora.cluster.local_machine import LocalMachine
from tlora.link.process_identity import boot_id
from tlora.protocol import Event, KindsFound, MemoryFound, NodeAdded
from tlora.shape import CPU_SHARE, GPU_SHARE
from tlora.shape.gpu_files import training_speed
from tlora.wording.numbers import quantity
from tlora.worker_protocol import Device, DeviceLink, HostLabels

OWN_NODE = "local"  # the controller's host, as a scheduler's node
STRIDE = 1000
HOST, FAILURE_DOMAIN, ADDRESS = "TLORA_HOST", "TLORA_FAILURE_DOMAIN", "TLORA_ADDRESS"
ANY_OF = "TLORA_ANY_OF"  # set by an agent for the processes that it starts: GPUs of which each can have any
PROCESS, ENDED = "TLORA_PROCESS", "TLORA_ENDED"  # likewise: `HostLabels.process` and, with commas, `ended`


def describe_host(gpus: Sequence[int]) -> HostLabels:
    """This host, for a worker with these GPUs, or so many processes on its CPU. The environment may name the host, its failure
    domain and its address, and an agent says more there: `HOST`, `FAILURE_DOMAIN`, `ADDRESS`, `ANY_OF`, `PROCESS`, `ENDED`.
    """
    known = {} if left_visible() == () else list_gpus()
    there = [known.get(gpu) for gpu in gpus]
    memory = psutil.virtual_memory().total
    devices = tuple(Device(gpu.name, gpu.memory_bytes, gpu.uuid) if gpu is not None else Device("cpu", memory) for gpu in there)
    links = tuple(DeviceLink(*pair, kind) for pair, kind in (list_links() if known else {}).items() if set(pair) <= set(gpus))
    name = os.environ.get(HOST) or platform.node()
    whose, any_of = os.environ.get(FAILURE_DOMAIN, ""), tuple(gpus) if ANY_OF in os.environ else ()
    ended = tuple(filter(None, os.environ.get(ENDED, "").split(",")))
    own = os.environ.get(ADDRESS, ""), processor_here(), any_of, os.environ.get(PROCESS, ""), ended
    return HostLabels(name, whose, boot_id(), devices, links, *own)


class Hosts:
    """The hosts that have come, by their names."""

    def __init__(self, own: tuple[int, ...]) -> None:
        """`own`: the GPUs of the controller's host."""
        self._own = frozenset(own)
        self._next = (max(own, default=0) // STRIDE + 1) * STRIDE
        self._first: dict[str, int] = {}
        self._of_workers: dict[int, int] = {}  # by GPU of another host

    def first_number(self, host: HostLabels) -> int:
        """What is added to the numbers of that host's GPUs."""
        if host.name not in self._first:
            self._first[host.name] = self._next
            self._next += STRIDE
        return self._first[host.name]

    def host_of(self, gpu: int) -> int:
        """A number of its host."""
        return -1 if gpu in self._own else gpu // STRIDE

    def take_on(self, gpus: tuple[int, ...]) -> None:
        """A worker of another host has come that can have these of the cluster's numbers, and no others."""
        self._of_workers |= dict.fromkeys(gpus, gpus[0])

    def worker_of(self, gpu: int) -> int:
        """One number for all GPUs of which one worker can have any: those of the controller's host, those of the agent that has started
        the worker, or the one with which it has come by itself.
        """
        return self._of_workers.get(gpu, self.host_of(gpu))

    def on_one_host(self, gpus: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `gpus` that are of one host, of the one that has most of them."""
        return tuple(max(by_host(gpus, self.host_of).values(), key=len))

    def why_not(self, host: HostLabels, gpus: tuple[int, ...]) -> str:
        """What is wrong with a host's labels; "" if nothing is."""
        if not host.name or host.name == OWN_NODE:
            return f"its host calls itself {host.name!r}, which is no name for it here. Set {HOST} there to another"
        there = host.any_of or gpus
        if not there or any(list(some) != sorted(set(some)) for some in (there, gpus)) or not all(0 <= gpu < STRIDE for gpu in there):
            return f"it has GPUs {list(there)}, and a worker has some from 0 to {STRIDE - 1}, in ascending order. Start it with such"
        if not set(gpus) <= set(there):
            return f"it has GPUs {list(gpus)}, and those of its agent are {list(there)}"
        if len(host.devices) != len(there):
            return f"it names {quantity(len(host.devices), 'device')} for its {quantity(len(there), 'GPU')}"
        uuids = {device.uuid for device in host.devices if device.uuid}
        if uuids and host.boot == boot_id():
            for gpu, facts in list_gpus().items():
                if gpu in self._own and facts.uuid in uuids:
                    return f"its GPU is GPU {gpu} of this cluster under another name. Start it with GPUs that the cluster does not have"
        return ""


def by_host(gpus: Iterable[int], host_of: Callable[[int], int]) -> dict[int, list[int]]:
    """In the order of `gpus`."""
    found: dict[int, list[int]] = {}
    for gpu in gpus:
        found.setdefault(host_of(gpu), []).append(gpu)
    return found


def own_events(machine: LocalMachine, note: Callable[[str], None]) -> list[Event]:
    """What a scheduler is told of the controller's own GPUs; `note` of their kinds, where there are several."""
    gpus, kinds = machine.gpus, machine.kinds
    speeds = tuple(map(training_speed, kinds))
    if len(set(kinds)) > 1:
        each = ", ".join(f"{gpu} is {kind} ({speed:.2f} x an H200)" for gpu, kind, speed in zip(gpus, kinds, speeds, strict=True))
        note(f"GPUs of several kinds: {each}; jobs are placed by each one's speed")
    rooms = [(gpu, room) for gpu, room in zip(gpus, machine.memory_bytes, strict=False) if room]
    found: list[Event] = [KindsFound(gpus, kinds, speeds)] if kinds else []
    found.append(NodeAdded(OWN_NODE, gpus))
    return [*found, MemoryFound(tuple(gpu for gpu, _ in rooms), tuple(room for _, room in rooms))] if rooms else found


def node_events(host: HostLabels, gpus: tuple[int, ...]) -> list[Event]:
    """What a scheduler is told of a host's GPUs, whose numbers are the cluster's. What they are comes first: it places jobs on a node at
    once.
    """
    rooms = tuple(_room(device, len(host.devices)) for device in host.devices)
    kinds = tuple([device.kind for device in host.devices])
    named: list[Event] = [KindsFound(gpus, kinds, tuple(map(training_speed, kinds)))] if "cpu" not in kinds else []
    known: list[Event] = [MemoryFound(gpus, rooms)] if all(rooms) else []
    return [*named, *known, NodeAdded(host.name, gpus, host.failure_domain)]


def _room(device: Device, places: int) -> int:
    """Bytes that may be planned for until the worker has found what is free there."""
    return int((CPU_SHARE / places if device.kind == "cpu" else GPU_SHARE) * device.memory_bytes)
