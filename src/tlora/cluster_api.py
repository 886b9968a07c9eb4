"""What the HTTP API says of a cluster, and takes: read and written by the server and by its clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from tlora.api import Answer


class DrainOrder(BaseModel, frozen=True, extra="forbid"):
    draining: bool


class HostDrainOrder(BaseModel, frozen=True, extra="forbid"):
    """`finish`: its jobs train to their end there; else they go on elsewhere from their checkpoints."""

    draining: bool
    finish: bool = False


class GroupView(Answer):
    """Jobs that share a base on GPUs. Other tenants' jobs are only counted. `placement`: why the GPUs are of several hosts, or why they are
    not all that the scheduler gave it; "" for neither.
    """

    id: str
    base_model: str
    gpus: list[int]
    token_budget: int
    jobs: list[str]
    other_jobs: int
    placement: str = ""


class WaitingView(Answer):
    """`place`: among all tenants' jobs that wait for a GPU, 1 being the next; `estimated_start`, `deadline_missed`: as of a job. `tenant`:
    whose it is, by name, where those of all tenants are shown.
    """

    job: str
    name: str
    reason: str
    place: int | None = None
    estimated_start: float | None = None
    deadline_missed: bool = False
    tenant: str | None = None


class HostView(Answer):
    """`failure_domain`: what fails as one with it, as a rack. `kinds`: of each of its GPUs what its driver calls it, "" where that is not
    known. `in_use`: how many of its GPUs groups have. `draining`: nothing starts there any more. `unheard`: GPUs on which nobody is heard:
    no other job gets them until somebody is.
    """

    name: str
    failure_domain: str
    gpus: list[int]
    kinds: list[str]
    in_use: int
    draining: bool
    unheard: list[int] = []

    @property
    def state(self) -> str:
        """In words; "" for a host like any other."""
        if self.draining:
            return "drains" if self.in_use else "drained"
        return "" if not self.unheard else "not heard" if len(self.unheard) == len(self.gpus) else "not heard in part"


class ClusterView(Answer):
    object: Literal["cluster"] = "cluster"
    device: str
    gpus: list[int]
    hosts: list[HostView]
    groups: list[GroupView]
    waiting: list[WaitingView]
    others_waiting: int
    draining: bool

    @property
    def states(self) -> dict[int, str]:
        """Why GPUs that no group has are not free, in a word."""
        unheard = {gpu: "not heard" for host in self.hosts for gpu in host.unheard}
        return unheard | {gpu: "left" for host in self.hosts if host.draining for gpu in host.gpus}

    @property
    def unlike(self) -> dict[int, str]:
        """What each GPU is, where they are not all alike; else none."""
        found = {gpu: kind for host in self.hosts for gpu, kind in zip(host.gpus, host.kinds, strict=True)}
        return found if len(set(found.values())) > 1 else {}

    def kinds_of(self, gpus: Sequence[int]) -> str:
        """What those GPUs are, where not all are alike; else nothing."""
        return " and ".join(dict.fromkeys(self.unlike.get(gpu, "") for gpu in gpus))


class Drained(Answer):
    """Whether new orders are refused, and how many jobs have not ended."""

    draining: bool
    open_jobs: int


class HostDrained(Answer):
    """What was asked for a host."""

    host: str
    draining: bool
