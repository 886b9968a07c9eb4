"""The nodes of a simulated cluster: whose their GPUs are, which are lost, where workers stand, which bases they ran, when they fail."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora.errors import ConfigError
from tlora.protocol import GpusLost, NodeAdded
from tlora.sim.conditions import Conditions


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`nodes` of `gpus_per_node` each, in racks. After `tick_seconds` without a change its clock ticks (inf: never). Raises ConfigError."""

    nodes: int
    gpus_per_node: int = 8
    nodes_per_rack: int = 8
    tick_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "nodes_per_rack", "tick_seconds"):
            value: float = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} is {value}: it must be above 0")

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Machines:
    """`owner` maps each GPU in use to its group; `num_gpus` counts those that are not lost. A failure or repair is due at `next_at`."""

    def __init__(self, shape: ClusterShape, conditions: Conditions) -> None:
        self.owner: dict[int, str] = {}
        self.num_gpus = shape.num_gpus
        self._shape, self._conditions = shape, conditions
        self._lost: set[int] = set()
        self._warm: set[tuple[int, str]] = set()  # node and base that it has run
        self._workers: dict[int, tuple[tuple[int, ...], str]] = {}  # by each of its GPUs: all of them, and the base that it has loaded
        self._failures: list[tuple[float, int, int, tuple[int, ...]]] = []  # a heap: seconds, node, its failures, GPUs that come back
        if conditions.mtbf_hours is not None:
            self._failures = sorted((conditions.failure(str(node), 0)[0], node, 0, ()) for node in range(shape.nodes))
        self.next_at = self._failures[0][0] if self._failures else math.inf

    @property
    def repairs(self) -> bool:
        """Whether lost GPUs come back."""
        return bool(self._lost)

    def added(self) -> list[NodeAdded]:
        return [self._added(node, self._gpus_of(node)) for node in range(self._shape.nodes)]

    def take(self, group_id: str, gpus: Sequence[int]) -> bool:
        """Give the GPUs to a group. False if one of them is lost: the event that says so has not reached the scheduler yet."""
        for gpu in gpus:
            assert gpu not in self.owner, f"GPU {gpu} is {self.owner[gpu]}'s, and {group_id} shall have it"
        if self._lost and not self._lost.isdisjoint(gpus):
            return False
        for gpu in gpus:
            self.owner[gpu] = group_id
        return True

    def release(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            self.owner.pop(gpu, None)

    def num_nodes(self, gpus: Sequence[int]) -> int:
        """Nodes that these lie on."""
        return 1 if len(gpus) == 1 else len({gpu // self._shape.gpus_per_node for gpu in gpus})

    def start_seconds(self, base: str, gpus: Sequence[int], what: str) -> float:
        """Until a worker on just these has the base loaded, as one that stands has. A new one takes the place of those that have some of
        these; it takes longer where one of the nodes has never run the base, as it compiles. `what` names the start.
        """
        worker, moves = (tuple(sorted(gpus)), base), self._conditions.moves
        if all(self._workers.get(gpu) == worker for gpu in gpus):
            return moves.standing_start_seconds * self._conditions.delay_of(what)
        self._end_workers(gpus)
        self._workers |= dict.fromkeys(gpus, worker)
        return self._load_seconds(base, gpus, what)

    def grow_seconds(self, base: str, before: Sequence[int], after: Sequence[int], what: str) -> float:
        """Until a worker that goes on has the base loaded on the GPUs that it had not `before`. It is then one on those `after` alone."""
        self._end_workers({*before, *after})
        self._workers |= dict.fromkeys(after, (tuple(sorted(after)), base))
        return self._load_seconds(base, after, what)

    def _load_seconds(self, base: str, gpus: Sequence[int], what: str) -> float:
        moves, runs = self._conditions.moves, {(gpu // self._shape.gpus_per_node, base) for gpu in gpus}
        seconds = moves.warm_start_seconds if runs <= self._warm else moves.cold_start_seconds
        self._warm |= runs
        return seconds * self._conditions.delay_of(what)

    def _end_workers(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            for other in self._workers.get(gpu, ((), ""))[0]:
                del self._workers[other]

    def fail_or_repair(self) -> NodeAdded | GpusLost:
        """Apply the failure or repair that is due. The owner of a lost GPU stays as it is."""
        seconds, node, count, back = self._failures[0]
        conditions, gpus = self._conditions, self._gpus_of(node)
        if back:
            self._lost.difference_update(back)
            upcoming, event = (seconds + conditions.failure(str(node), count)[0], node, count, ()), self._added(node, back)
        else:
            what = conditions.failure(str(node), count)[1]
            lost = (gpus[int(2 * what * len(gpus))],) if what < 0.5 else gpus
            self._lost.update(lost)
            self._end_workers(lost)
            upcoming = (seconds + 3600 * conditions.repair_hours, node, count + 1, lost)
            event = GpusLost(lost, "GPU lost" if len(lost) < len(gpus) else "node lost")
        self.num_gpus = self._shape.num_gpus - len(self._lost)
        heapq.heapreplace(self._failures, upcoming)
        self.next_at = self._failures[0][0]
        return event

    def _gpus_of(self, node: int) -> tuple[int, ...]:
        size = self._shape.gpus_per_node
        return tuple(range(node * size, (node + 1) * size))

    def _added(self, node: int, gpus: tuple[int, ...]) -> NodeAdded:
        return NodeAdded(f"n{node}", gpus, f"r{node // self._shape.nodes_per_rack}")
