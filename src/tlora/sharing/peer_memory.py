"""Memory of one size on each rank that all ranks of the host can read. The one place that knows how a device does that.

Reads are one-sided: no rank waits for another, and what is read must not be written any more. Memory of a rank that has ended stays
readable as long as somebody has it mapped.

On a GPU this is torch's symmetric memory, a prototype API (`torch.distributed._symmetric_memory`). Copies between GPUs then go over
NVLink by the copy engines and take no processors from kernels. On a CPU it is anonymous shared memory.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from tlora.errors import RankError
from tlora.sharing.peers import Peers


class PeerMemory(Protocol):
    """`own` is this rank's memory, bytes on its device; filled before the ranks next exchange a word, and never after."""

    @property
    def own(self) -> Tensor: ...

    def read(self, peer: int, start: int, target: Tensor) -> None:
        """Copy the bytes of `peer` from `start` on into `target`, contiguous bytes on this rank's device. A GPU queues it on its current
        stream.
        """
        ...


def open_peer_memory(num_bytes: int, peers: Peers, device: torch.device) -> PeerMemory:
    """`num_bytes`, as many on all ranks. Raises RankError where ranks cannot read each other's memory."""
    peers.agree("memory", [num_bytes, device.type], "memory of bytes on")
    if device.type != "cuda":
        return _HostMemory(num_bytes, peers)
    return _GpuMemory(num_bytes, peers, torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))


class _HostMemory:
    """Anonymous shared memory, which a peer opens through this process's table of open files: nothing is left behind by who is killed."""

    def __init__(self, num_bytes: int, peers: Peers) -> None:
        if not hasattr(os, "memfd_create"):
            raise RankError("a shared base on a CPU needs Linux, which this is not. Load the base unshared")
        descriptor = os.memfd_create("tlora-shared-base")
        try:
            os.ftruncate(descriptor, num_bytes)
            self.own = _map(os.getpid(), descriptor, num_bytes)
            found = peers.exchange("descriptor", [os.getpid(), descriptor])
            try:
                self._parts = [_map(pid, number, num_bytes) for pid, number in found]
            except (RuntimeError, OSError) as error:
                why = str(error).splitlines()[0]
                raise RankError(f"ranks cannot read each other's memory ({why}). Run all as one user in one container") from None
            peers.exchange("mapped", True)
        finally:
            os.close(descriptor)

    def read(self, peer: int, start: int, target: Tensor) -> None:
        target.copy_(self._parts[peer][start : start + target.numel()])


def _map(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    return torch.from_file(f"/proc/{pid}/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)


class _GpuMemory:
    def __init__(self, num_bytes: int, peers: Peers, device: torch.device) -> None:
        # A program that uses NVLink's multicast can put all GPUs of a host out of service. torch reads this as it allocates.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        try:
            from torch._C._distributed_c10d import _SymmetricMemory

            name = f"tlora-shared-base-{peers.name}"
            self.own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            peers.exchange("allocated", True)  # so that none dies between the others' first and last word to each other
            _SymmetricMemory.set_group_info(name, peers.rank, peers.world_size, peers.store)
            self._handle = _SymmetricMemory.rendezvous(self.own, name)
            self._parts = [self._handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(peers.world_size)]
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            why = " ".join(str(error).split())[:300]
            raise RankError(
                f"GPUs cannot read each other's memory through torch's symmetric memory (torch {torch.__version__}: {why}). "
                "A shared base needs GPUs of one host that are connected by NVLink, each of which all ranks can see"
            ) from None
        assert not self._handle.multicast_ptr, "multicast is on, and must not be"

    def read(self, peer: int, start: int, target: Tensor) -> None:
        target.copy_(self._parts[peer][start : start + target.numel()], non_blocking=True)
