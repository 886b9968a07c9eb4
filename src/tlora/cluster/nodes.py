"""The hosts of a cluster, as its back end tells the scheduler of them: which GPUs each has, and which hosts an operator wants left."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tlora import durable
from tlora.errors import CheckpointError, ConfigError
from tlora.json_file import read_object
from tlora.protocol import Event, GpusLost, NodeAdded, NodeDraining

FILE = "draining.json"


@dataclass(slots=True)
class _Node:
    rack: str
    gpus: set[int] = field(default_factory=set[int])
    draining: bool = False


class Nodes:
    """Which hosts are to be left is kept in the store's `workers/`: the next controller leaves them too, from `begin` on, when it has taken
    over the groups that run there. Not for several threads.
    """

    def __init__(self, workers: Path | None = None) -> None:
        self._nodes: dict[str, _Node] = {}
        self._begun = False
        self._path = workers / FILE if workers is not None else None
        self._left: dict[str, bool] = {}  # hosts that are to be left -> when their jobs have ended
        with contextlib.suppress(OSError, ValueError):
            found = read_object(self._path) if self._path is not None else {}
            self._left = {str(name): bool(finish) for name, finish in found.items()}

    def see(self, events: Iterable[Event]) -> list[Event]:
        """Take in what has come and gone. Returns what the scheduler is told: nothing of GPUs that come to a host that is to be left."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, NodeAdded):
                is_left = self._begun and event.node not in self._nodes and event.node in self._left
                node = self._nodes.setdefault(event.node, _Node(event.rack))
                node.gpus.update(event.gpus)
                if node.draining:
                    continue
                if is_left:
                    told += [event, self.drain(event.node, finish=self._left[event.node])]
                    continue
            elif isinstance(event, GpusLost):
                for node in self._nodes.values():
                    node.gpus.difference_update(event.gpus)
            told.append(event)
        return told

    def begin(self) -> list[Event]:
        """No group is taken over from now on. Returns what the scheduler is told of the hosts that are to be left."""
        self._begun = True
        return [self.drain(name, finish=finish) for name, finish in self._left.items() if name in self._nodes]

    @property
    def sizes(self) -> list[int]:
        """GPUs of each host that is not to be left."""
        return [len(node.gpus) for node in self._nodes.values() if not node.draining]

    @property
    def widest(self) -> int:
        """GPUs of that which has most of them."""
        return max(self.sizes, default=0)

    @property
    def num_gpus(self) -> int:
        """Of all that are not to be left."""
        return sum(self.sizes)

    @property
    def used(self) -> Iterable[Collection[int]]:
        """GPUs of each host that is not to be left."""
        return [node.gpus for node in self._nodes.values() if not node.draining]

    @property
    def num_left(self) -> int:
        """GPUs of those that are to be left."""
        return sum(len(node.gpus) for node in self._nodes.values() if node.draining)

    def gpus_of(self, name: str) -> set[int]:
        return self._nodes[name].gpus

    def is_left(self, gpu: int) -> bool:
        """Whether its host is to be left."""
        left = [self._nodes[name] for name in self._left if name in self._nodes]
        return any(gpu in node.gpus for node in left if node.draining)

    def check(self, name: str) -> None:
        """Raises ConfigError for a host that there is not."""
        if name not in self._nodes:
            raise ConfigError(f"unknown host {name!r}. There are {', '.join(sorted(self._nodes))}")

    def drain(self, name: str, *, finish: bool) -> NodeDraining:
        """The host is to be left; `finish`: when its jobs have ended."""
        self._nodes[name].draining = True
        self._keep({**self._left, name: finish})
        return NodeDraining(name, finish)

    def take_back(self, name: str) -> NodeAdded:
        """The host is used again, with the GPUs that it has now."""
        node = self._nodes[name]
        node.draining = False
        self._keep({other: finish for other, finish in self._left.items() if other != name})
        return NodeAdded(name, tuple(sorted(node.gpus)), node.rack)

    def _keep(self, left: dict[str, bool]) -> None:
        if self._path is not None and left != self._left:
            with contextlib.suppress(CheckpointError):  # a full disk: it holds for this controller
                durable.write_file(self._path, json.dumps(left) + "\n")
        self._left = left
