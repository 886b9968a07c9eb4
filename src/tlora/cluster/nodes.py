"""The hosts of a cluster, as its back end tells the scheduler of them: which GPUs each has, and which hosts an operator wants left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tlora.errors import ConfigError
from tlora.protocol import Event, GpusLost, NodeAdded, NodeDraining


@dataclass(slots=True)
class _Node:
    rack: str
    gpus: set[int] = field(default_factory=set[int])
    draining: bool = False


class Nodes:
    """Not for several threads."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def see(self, events: Iterable[Event]) -> list[Event]:
        """Take in what has come and gone. Returns what the scheduler is told: nothing of GPUs that come to a host that is to be left."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, NodeAdded):
                node = self._nodes.setdefault(event.node, _Node(event.rack))
                node.gpus.update(event.gpus)
                if node.draining:
                    continue
            elif isinstance(event, GpusLost):
                for node in self._nodes.values():
                    node.gpus.difference_update(event.gpus)
            told.append(event)
        return told

    @property
    def sizes(self) -> list[int]:
        """GPUs of each host."""
        return [len(node.gpus) for node in self._nodes.values()]

    @property
    def widest(self) -> int:
        """GPUs of the host that has most of them."""
        return max(self.sizes, default=0)

    @property
    def num_gpus(self) -> int:
        """Of all hosts."""
        return sum(self.sizes)

    def check(self, name: str) -> None:
        """Raises ConfigError for a host that there is not."""
        if name not in self._nodes:
            raise ConfigError(f"unknown host {name!r}. There are {', '.join(sorted(self._nodes))}")

    def drain(self, name: str, *, finish: bool) -> NodeDraining:
        """The host is to be left; `finish`: when its jobs have ended."""
        self._nodes[name].draining = True
        return NodeDraining(name, finish)

    def take_back(self, name: str) -> NodeAdded:
        """The host is used again, with the GPUs that it has now."""
        node = self._nodes[name]
        node.draining = False
        return NodeAdded(name, tuple(sorted(node.gpus)), node.rack)
