"""What a file of a bounded event log begins with: events after which a fresh scheduler has the GPUs and bases that there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tlora.protocol import Action, BaseAdded, BaseMeasured, Event, GpusLost, GpusUnheard, KindsFound, MemoryFound, NodeAdded, NodeDraining


class LogHead:
    """As large as the cluster is, or was at most, however many hosts have come and gone. Jobs and groups are not in it.

    Of hosts that are lost as many GPUs are kept as there are fewer than there were at most: jobs may wait for these.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, NodeAdded] = {}  # each with the GPUs that it has
        self._node_of: dict[int, str] = {}
        self._draining: dict[str, NodeDraining] = {}
        self._num_gpus = self._most_gpus = 0  # of nodes that are not to be left; that there ever were of them
        self._lost: dict[int, NodeAdded] = {}  # GPU -> its node, with it alone; those lost last behind
        self._memory: dict[int, int] = {}
        self._kinds: dict[int, tuple[str, float]] = {}
        self._unheard: dict[int, str] = {}
        self._bases: dict[str, BaseAdded] = {}
        self._measured: dict[str, BaseMeasured] = {}

    def see(self, item: Event | Action) -> None:
        match item:
            case NodeAdded():
                self._add(item)
            case NodeDraining(name) if name in self._nodes:
                if name not in self._draining:
                    self._num_gpus -= len(self._nodes[name].gpus)
                self._draining[name] = item
            case GpusLost(gpus):
                self._lose(gpus)
            case GpusUnheard(gpus, why):
                self._unheard |= dict.fromkeys(gpus, why)
            case MemoryFound(gpus, memory_bytes):
                self._memory |= dict(zip(gpus, memory_bytes, strict=True))
            case KindsFound(gpus, kinds, speeds):
                self._kinds |= dict(zip(gpus, zip(kinds, speeds, strict=True), strict=True))
            case BaseAdded(name):
                self._bases[name] = item
            case BaseMeasured(name):
                self._measured[name] = item
            case _:
                pass

    def _add(self, added: NodeAdded) -> None:
        name, known = added.node, self._nodes.get(added.node, replace(added, gpus=()))
        new = [gpu for gpu in added.gpus if gpu not in self._node_of]
        self._nodes[name] = replace(known, gpus=tuple(sorted((*known.gpus, *new))))
        self._num_gpus += len(new) + (len(known.gpus) if self._draining.pop(name, None) is not None else 0)
        self._most_gpus = max(self._most_gpus, self._num_gpus)
        for gpu in new:
            self._node_of[gpu] = name
            self._lost.pop(gpu, None)
        self._forget()

    def _lose(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            self._unheard.pop(gpu, None)
            if (name := self._node_of.pop(gpu, None)) is None:
                continue
            node = self._nodes[name]
            left = self._nodes[name] = replace(node, gpus=tuple([other for other in node.gpus if other != gpu]))
            self._num_gpus -= name not in self._draining
            self._lost[gpu] = replace(node, gpus=(gpu,))
            if not left.gpus:
                del self._nodes[name]
                self._draining.pop(name, None)
        self._forget()

    def _forget(self) -> None:
        """Those lost first that are more than there are too few now."""
        while len(self._lost) > self._most_gpus - self._num_gpus:
            gpu = next(iter(self._lost))
            del self._lost[gpu]
            self._memory.pop(gpu, None)
            self._kinds.pop(gpu, None)

    def events(self) -> Iterator[Event]:
        for name, draining in self._draining.items():
            yield self._nodes[name]
            yield draining
        yield from [node for name, node in self._nodes.items() if name not in self._draining]
        lost: dict[str, NodeAdded] = {}
        for gpu, node in self._lost.items():
            known = lost.get(node.node, replace(node, gpus=()))
            lost[node.node] = replace(known, gpus=(*known.gpus, gpu))
        if lost := {name: node for name, node in lost.items() if name not in self._draining}:  # its return would take that back
            yield from lost.values()
            yield GpusLost(tuple([gpu for node in lost.values() for gpu in node.gpus]))
        if self._memory:
            yield MemoryFound(tuple(self._memory), tuple(self._memory.values()))
        if self._kinds:
            kinds, speeds = zip(*self._kinds.values(), strict=True)
            yield KindsFound(tuple(self._kinds), kinds, speeds)
        for why in filter(None, dict.fromkeys(self._unheard.values())):
            yield GpusUnheard(tuple(gpu for gpu, said in self._unheard.items() if said == why), why)
        yield from self._bases.values()
        yield from self._measured.values()
