"""What a `ClusterState` is made of, beside jobs: nodes and groups. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora.protocol import JobGroup


@dataclass(slots=True)
class Node:
    """`free` holds the node's free GPUs, in rising order. `place` is the node's own in the order in which nodes came."""

    name: str
    rack: str
    gpus: tuple[int, ...]
    free: list[int]
    place: int = 0
    groups: tuple[str, ...] | None = field(default=None, compare=False)  # as `groups_on` gave them, as long as no GPU changes hands


@dataclass(slots=True)
class Group:
    """`need` is the sum over its members; `step_seconds` the time between their optimizer steps, in their order."""

    group: JobGroup
    num_nodes: int
    need: float
    step_seconds: list[float]
    changed_at: float
    ready: bool = False
