"""Memory of one size on each rank that all ranks of the host can read. The one place that knows how a device does that.

Reads are one-sided: no rank waits for another, and no rank may write memory that may still be read. Memory of a rank that has ended
stays readable as long as a process has it mapped, except memory behind CUDA's IPC handles.

On a GPU this is torch's symmetric memory, a prototype API (`torch.distributed._symmetric_memory`). Copies between GPUs then go over
NVLink by the copy engines and take no processors from kernels. On a CPU it is anonymous shared memory.
"""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from tlora.errors import RankError
from tlora.sharing.host_memory import pin
from tlora.sharing.meeting_store import MeetingStore
from tlora.sharing.multicast import turn_multicast_off
from tlora.sharing.peers import Peers

_GROUP_TIME = timedelta(seconds=60)  # for peers to find each other


class PeerMemory(Protocol):
    """`own` is this rank's memory, bytes on its device. Peers may read what is written there once a message has announced it."""

    @property
    def own(self) -> Tensor: ...

    def read(self, peer: int, start: int, target: Tensor) -> None:
        """Copy the bytes of `peer` from `start` on into `target`, contiguous bytes on this rank's device. A GPU queues it on its current
        stream.
        """
        ...

    def pass_on(self, start: int, size: int, peer: int | None = None) -> None:
        """Let that peer, or all, have those bytes, which the device has written: nothing, where peers read them here."""
        ...


def open_peer_memory(num_bytes: int, peers: Peers, device: torch.device) -> PeerMemory:
    """`num_bytes`, as many on all ranks. Raises RankError where ranks cannot read each other's memory."""
    peers.agree("memory", [num_bytes, device.type], "a memory of bytes and device")
    if device.type != "cuda":
        return _HostMemory(num_bytes, peers)
    return _open_gpu_memory(num_bytes, peers, torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))


def open_host_memory(num_bytes: int, peers: Peers, device: torch.device, name: str) -> PeerMemory:
    """The same in the host's memory, to which `device` copies by itself; `name` tells it from others of these peers. Raises CapacityError
    where it cannot be pinned for that.
    """
    peers.agree(f"{name} memory", num_bytes, "a memory of bytes")
    memory = _HostMemory(num_bytes, peers, f"{name} ")
    if device.type == "cuda":
        memory.pin(device)
    return memory


class _HostMemory:
    """Anonymous shared memory, which a peer opens through this process's table of open files: a killed process leaves nothing behind."""

    def __init__(self, num_bytes: int, peers: Peers, key: str = "") -> None:
        """`key`: to be told from another such memory of these peers."""
        if not hasattr(os, "memfd_create"):
            raise RankError("ranks on a CPU share memory on Linux only, which this is not. Train without --gpus")
        self._rank = peers.rank
        descriptor = os.memfd_create("tlora-peers")
        try:
            os.ftruncate(descriptor, num_bytes)
            self.own = map_file(os.getpid(), descriptor, num_bytes)
            descriptors = peers.exchange(f"{key}descriptor", [os.getpid(), descriptor])
            try:
                self._parts = [map_file(pid, number, num_bytes) for pid, number in descriptors]
            except (RuntimeError, OSError) as error:
                why = str(error).splitlines()[0]
                raise RankError(f"ranks cannot read each other's memory ({why}). Run all as one user in one container") from None
            peers.exchange(f"{key}mapped", True)
        finally:
            os.close(descriptor)

    def read(self, peer: int, start: int, target: Tensor) -> None:
        target.copy_(self._parts[peer][start : start + target.numel()], non_blocking=True)

    def pass_on(self, start: int, size: int, peer: int | None = None) -> None:
        pass

    def pin(self, device: torch.device) -> None:
        """Let `device` copy from and to it by itself."""
        for part in (self.own, *self._parts[: self._rank], *self._parts[self._rank + 1 :]):
            pin(part, device, self)


def map_file(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    """The bytes of an open file of that process, shared with it."""
    return torch.from_file(f"/proc/{pid}/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)


class _GpuMemory:
    """`parts`: the memory of each rank as this device reads it. They live as long as `keep`."""

    def __init__(self, own: Tensor, parts: Sequence[Tensor], keep: object) -> None:
        self.own, self._parts, self._keep = own, parts, keep

    def read(self, peer: int, start: int, target: Tensor) -> None:
        target.copy_(self._parts[peer][start : start + target.numel()], non_blocking=True)

    def pass_on(self, start: int, size: int, peer: int | None = None) -> None:
        pass


def _open_gpu_memory(num_bytes: int, peers: Peers, device: torch.device) -> PeerMemory:
    """Symmetric memory; where one rank cannot have it, CUDA's IPC handles for all, and a warning."""
    refusals = list[str]()
    for way, connect in (("torch's symmetric memory", _connect_symmetric), ("CUDA's IPC handles", _connect_ipc)):
        try:
            memory, why = connect(num_bytes, peers, device), None
        except RankError:
            raise
        except Exception as error:  # a library's border: what it raises depends on version, driver and container
            memory, why = None, " ".join(str(error).split())[:200]
        reasons = [w for w in peers.exchange(f"through {way}", why) if w is not None]
        if memory is not None and not reasons:
            if refusals:
                warnings.warn(
                    f"ranks read each other's memory through {way}, at two thirds of the speed: {refusals[0]}", RuntimeWarning, stacklevel=2
                )
            return memory
        refusals.append(f"{way} (torch {torch.__version__}) cannot be had: {reasons[0]}")
    raise RankError(f"GPUs cannot read each other's memory. {'; '.join(refusals)}. Use GPUs of one host that all ranks can see")


def _connect_symmetric(num_bytes: int, peers: Peers, device: torch.device) -> _GpuMemory:
    turn_multicast_off()  # torch reads it as it allocates
    from torch._C._distributed_c10d import _SymmetricMemory

    store, own, why = MeetingStore(peers), None, None
    group = _register_group(peers, store)
    try:
        torch.cuda.empty_cache()  # this memory is not the caching allocator's
        own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    except RuntimeError as error:
        why = str(error)
    refused = [w for w in peers.exchange("allocated", why) if w is not None]  # else some would wait for a rank that does not come
    if own is None or refused:
        raise RuntimeError(refused[0])
    handle = _SymmetricMemory.rendezvous(own, group.group_name)
    assert not handle.multicast_ptr, "multicast is on, and must not be"
    return _GpuMemory(own, [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(peers.world_size)], (handle, group, store))


def _register_group(peers: Peers, store: Store) -> Any:
    """A group of the peers that symmetric memory finds by its name, and whose `store` it uses. The registry does not hold it: keep both.
    torch's default group is left to the process's own training code.
    """
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

    name: Any = f"tlora-peers-{peers.name}"
    group = ProcessGroup(store, peers.rank, peers.world_size)
    gloo = ProcessGroupGloo(PrefixStore(f"{name}/gloo", peers.store), peers.rank, peers.world_size, _GROUP_TIME)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    return group


def _connect_ipc(num_bytes: int, peers: Peers, device: torch.device) -> _GpuMemory:
    own = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    handles = peers.exchange("handles", handle_words(own.untyped_storage()._share_cuda_()))
    parts = [own if peer == peers.rank else _open_handle(words, num_bytes) for peer, words in enumerate(handles)]
    return _GpuMemory(own, parts, None)


# Of an IPC handle: device, handle, bytes, offset, counter's handle, its offset, event's handle, whether to wait for that.
_HANDLE = (int, bytes, int, int, bytes, int, bytes, bool)


def handle_words(fields: Sequence[Any]) -> list[Any]:
    """An IPC handle as JSON: the store may be on another host, so nothing that comes from it is unpickled."""
    assert tuple(map(type, fields)) == _HANDLE, f"torch {torch.__version__} has other IPC handles: {fields}"
    return [base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


def handle_fields(words: Any) -> list[Any]:
    """What `handle_words` was made of. Raises RankError for anything else."""
    try:
        assert len(words) == len(_HANDLE)
        values = [base64.b64decode(word, validate=True) if kind is bytes else word for word, kind in zip(words, _HANDLE, strict=True)]
        assert tuple(map(type, values)) == _HANDLE
    except (AssertionError, TypeError, ValueError):
        raise RankError(f"a rank sent {str(words)[:80]!r}, which is no handle of GPU memory. Start all ranks with one version") from None
    return values


def _open_handle(words: Any, num_bytes: int) -> Tensor:
    """A peer's memory."""
    storage = torch.UntypedStorage._new_shared_cuda(*handle_fields(words))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (num_bytes,), (1,))
