"""The one kind of GPU, or of processor, on which a deterministic cluster keeps its jobs: another kind gives other last bits.

It is kept in the store's `workers/kind.json` until all jobs have ended: after a restart it decides which hosts may come, not the first
that dials.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
from collections.abc import Callable
from pathlib import Path

from tlora import durable
from tlora.errors import CheckpointError
from tlora.json_file import read_object
from tlora.worker_protocol import HostLabels

FILE = "kind.json"
_IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")  # of /proc/cpuinfo: what libraries choose kernels by,
_OF_VECTORS = {  # with those of its flags: a virtual machine may lack some of its processor's. On x86 sme is no matter of vectors
    "flags": re.compile(r"s?sse|avx|amx|fma|f16c|gfni|vaes|vpclmul"),
    "Features": re.compile(r"asimd|fphp|sve|sme|bf16|i8mm|fcma|ebf16"),
}
_WITH = ", with "  # which is in no name of a GPU


class KeptKind:
    """`name` is "" until the first host has come to stay."""

    def __init__(self, directory: Path, own: str, note: Callable[[str], None]) -> None:
        """`directory`: the store's `workers/`; `own`: of the controller's own GPUs, "" where it has none. `note` of jobs that change it."""
        self._path, self._note = directory / FILE, note
        self.name = _read(self._path)
        if own:
            if self.name and not _are_one(self.name, own):
                note(f"{FILE}: jobs here began on {self.name} and go on on {own}: they will not have the bytes of a cluster of one kind")
                self.name = ""
            self.settle(own)

    def settle(self, kind: str) -> None:
        """A host that has come to stay has GPUs of that kind."""
        if self.name and (_WITH in self.name or _WITH not in kind or not _are_one(self.name, kind)):
            return
        self.name = kind
        try:
            durable.write_file(self._path, json.dumps({"kind": kind}) + "\n")
        except CheckpointError as error:
            self._note(f"the kind of GPU on which jobs stay is not kept for a restart: {error}")

    def forget(self) -> None:
        """No job is left that began here."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def why_not(self, host: HostLabels) -> str:
        """Why that host may not train here; "" if it may."""
        kinds = kinds_of(host)
        kept = self.name or next(iter(kinds), "")
        other = next((kind for kind in kinds if not _are_one(kind, kept)), None)
        if other is None:
            return ""
        told = f"has {_beside(other, kept)}, and this cluster is deterministic: it keeps its jobs on {_beside(kept, other)}"
        why = f"{told}, for another kind gives other last bits"
        return f"{why}. Take it into a cluster of its own, or set deterministic: false"


def kinds_of(host: HostLabels) -> list[str]:
    """Of its GPUs, or its processor."""
    return [device.kind if device.kind != "cpu" else host.processor or "cpu" for device in host.devices]


def processor_here() -> str:
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        told = ""
    return processor_of(told) or platform.machine()


def processor_of(told: str) -> str:
    """The first processor's maker and design, and what it can do with vectors, of the text of /proc/cpuinfo; "" where that says neither."""
    lines = told.partition("\n\n")[0].splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    design = " ".join([found[key] for key in _IDENTITY if key in found])
    flags = {flag for key, of_vectors in _OF_VECTORS.items() for flag in found.get(key, "").split() if of_vectors.match(flag)}
    return design + _WITH + " ".join(sorted(flags)) if flags else design


def _are_one(kind: str, other: str) -> bool:
    """Of processors one of which is known by its design alone, as earlier versions knew them, that is compared."""
    if _WITH in kind and _WITH in other:
        return kind == other
    return kind.partition(_WITH)[0] == other.partition(_WITH)[0]


def _beside(kind: str, other: str) -> str:
    """In words: of two processors of one design what this one has and lacks."""
    (design, _, own), (other_design, _, others) = kind.partition(_WITH), other.partition(_WITH)
    if design != other_design:
        return design
    more, less = (" ".join(sorted(set(these.split()) - set(those.split()))) for these, those in ((own, others), (others, own)))
    return design + (f" with {more}" if more else "") + (f" without {less}" if less else "")


def _read(path: Path) -> str:
    try:
        return str(read_object(path)["kind"])
    except (OSError, ValueError, KeyError):
        return ""
