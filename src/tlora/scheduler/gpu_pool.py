"""The GPUs of a cluster as the scheduler believes them to be: on which node each is, which are free, which group has the others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


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
class GpuPool:
    """Nodes and their GPUs. A GPU is free or a group's; which group gets which is not decided here."""

    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    node_names: list[str] = field(default_factory=list[str])  # by their place
    with_free: list[int] = field(default_factory=list[int])  # places of the nodes with free GPUs, rising
    node_of: dict[int, str] = field(default_factory=dict[int, str])
    nodes_by_free: dict[int, dict[str, None]] = field(default_factory=dict[int, dict[str, None]])  # number of free GPUs -> nodes
    group_on: dict[int, str] = field(default_factory=dict[int, str])  # GPU that is not free -> its group
    draining: set[str] = field(default_factory=set[str])  # nodes that are to be left
    unheard: set[int] = field(default_factory=set[int])  # GPUs whose host is silent: none of them is free
    node_size: int = 0  # GPUs of the largest node that is not to be left
    num_gpus: int = 0
    most_gpus: int = 0  # that there ever were: those that are lost may come back
    num_free: int = 0
    _together: int | None = field(default=None, compare=False)  # as `most_together` gave it, as long as no GPU comes or goes

    def add_node(self, name: str, rack: str, gpus: tuple[int, ...]) -> None:
        """GPUs that are there already are left as they are: the event may come twice."""
        new = [gpu for gpu in gpus if gpu not in self.node_of]
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, rack, (), [], len(self.node_names))
            self.node_names.append(name)
        self.draining.discard(name)
        node.gpus = tuple(sorted((*node.gpus, *new)))
        for gpu in new:
            self.node_of[gpu] = name
        self.num_gpus += len(new)
        self.most_gpus = max(self.most_gpus, self.num_gpus)
        self.node_size, self._together = max(self.node_size, len(node.gpus)), None
        self._set_free(node, sorted((*node.free, *(gpu for gpu in new if gpu not in self.unheard))))

    @property
    def lasting_nodes(self) -> Mapping[str, Node]:
        """Those that are not to be left."""
        return {name: node for name, node in self.nodes.items() if name not in self.draining} if self.draining else self.nodes

    @property
    def most_together(self) -> int:
        """The most GPUs that a job gets on whole nodes of the largest size and a part of one more, were all of them free."""
        if self._together is None:
            sizes = [len(node.gpus) for node in self.lasting_nodes.values()]
            smaller = [size for size in sizes if size < self.node_size]
            self._together = self.node_size * sizes.count(self.node_size) + max(smaller, default=0)
        return self._together

    def drain(self, name: str) -> None:
        """The node is to be left: what becomes free there is removed."""
        self.draining.add(name)
        self._find_node_size()

    def remove(self, lost: Collection[int]) -> None:
        """GPUs that no group has."""
        for name in dict.fromkeys(self.node_of[gpu] for gpu in lost):
            node = self.nodes[name]
            node.gpus = tuple(gpu for gpu in node.gpus if gpu not in lost)
            self._set_free(node, [gpu for gpu in node.free if gpu not in lost])
        for gpu in lost:
            del self.node_of[gpu]
        self.num_gpus -= len(lost)
        self._find_node_size()

    def _find_node_size(self) -> None:
        self._together = None
        self.node_size = max((len(node.gpus) for node in self.lasting_nodes.values()), default=0)

    def take(self, gpus: Sequence[int], group_id: str) -> None:
        """Free GPUs, for the group."""
        for gpu in gpus:
            self.group_on[gpu] = group_id
        for name, own in self._by_node(gpus).items():
            node = self.nodes[name]
            left = [gpu for gpu in node.free if gpu not in own]
            assert len(left) + len(own) == len(node.free), f"GPUs {sorted(set(own) - set(node.free))} of {name} are not free"
            self._set_free(node, left)

    def give_back(self, gpus: Sequence[int]) -> None:
        """GPUs of a group; those of a node that is to be left are removed."""
        for gpu in gpus:
            del self.group_on[gpu]
        for name, own in self._by_node(gpus).items():
            node = self.nodes[name]
            self._set_free(node, sorted((*node.free, *(gpu for gpu in own if gpu not in self.unheard))))
            if name in self.draining:
                self.remove(set(own))

    def set_unheard(self, gpus: Collection[int], *, yes: bool) -> None:
        """While nothing is heard of the host of `gpus`, no group gets them; one that has them keeps them."""
        (self.unheard.update if yes else self.unheard.difference_update)(gpus)
        for name, own in self._by_node([gpu for gpu in gpus if gpu in self.node_of]).items():
            node = self.nodes[name]
            free = set(node.free).difference(own) if yes else {*node.free, *(gpu for gpu in own if gpu not in self.group_on)}
            self._set_free(node, sorted(free))

    def is_avoided(self, node: str) -> bool:
        """Whether the node is to be left, or some of its GPUs are not heard."""
        return node in self.draining or (bool(self.unheard) and not self.unheard.isdisjoint(self.nodes[node].gpus))

    def is_left(self, gpu: int) -> bool:
        """Whether no group is to get it that does not have it."""
        return gpu in self.unheard or self.node_of[gpu] in self.draining

    def _by_node(self, gpus: Sequence[int]) -> Mapping[str, Sequence[int]]:
        if len(gpus) == 1:
            return {self.node_of[gpus[0]]: gpus}
        gpus_by_node: dict[str, list[int]] = {}
        for gpu in gpus:
            gpus_by_node.setdefault(self.node_of[gpu], []).append(gpu)
        return gpus_by_node

    def num_nodes(self, gpus: Collection[int]) -> int:
        """Nodes that `gpus` lie on."""
        return 1 if len(gpus) == 1 else len({self.node_of[gpu] for gpu in gpus})

    def groups_on(self, node: str) -> tuple[str, ...]:
        """Groups with GPUs on the node, in the order of these."""
        holder = self.nodes[node]
        if holder.groups is None:
            on = self.group_on
            holder.groups = tuple(dict.fromkeys([on[gpu] for gpu in holder.gpus if gpu in on]))
        return holder.groups

    def _set_free(self, node: Node, free: list[int]) -> None:
        by_free = self.nodes_by_free
        before = by_free.get(len(node.free))
        if before is not None:
            before.pop(node.name, None)
        if bool(free) != bool(node.free):
            if free:
                insort(self.with_free, node.place)
            else:
                del self.with_free[bisect_left(self.with_free, node.place)]
        self.num_free += len(free) - len(node.free)
        node.free, node.groups = free, None
        if len(free) not in by_free:
            by_free[len(free)] = {}
        by_free[len(free)][node.name] = None
