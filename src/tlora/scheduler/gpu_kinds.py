"""Of which kind each GPU is, how fast each kind trains, and what bases cost there. Where all are of one kind nothing differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tlora.shape.cost import CostModel, scaled_constants


@dataclass(slots=True)
class GpuKinds:
    """`kind_of` a GPU, of those of which it is known; `speeds` of training there against an H200. Each kind has a cost model of its own,
    which its measurements and its steps correct: the constants of the cluster's, scaled until a worker has measured there. `begin` gets the
    kind and its model, once, before anything is predicted by it.

    Times alone, and whatever is predicted for GPUs that are not chosen yet, are those of the `reference`: the slowest kind that is there.
    Jobs on a faster one have slowdowns below 1, which is what they are worth more there.
    """

    kind_of: dict[int, str] = field(default_factory=dict[int, str])
    speeds: dict[str, float] = field(default_factory=dict[str, float])
    begin: Callable[[str, CostModel], object] = lambda _, __: None
    _costs: dict[str, CostModel] = field(default_factory=dict[str, CostModel])

    @property
    def differ(self) -> bool:
        return len(self.speeds) > 1

    def find(self, gpus: Sequence[int], kinds: Sequence[str], speeds: Sequence[float]) -> bool:
        """Whether anything is another than before. The speed of a kind is the first that was heard of it."""
        before = dict(self.kind_of), len(self.speeds)
        self.kind_of |= dict(zip(gpus, kinds, strict=True))
        for kind, speed in zip(kinds, speeds, strict=True):
            if 0 < speed < math.inf:  # nor a NaN
                self.speeds.setdefault(kind, speed)
        return before != (self.kind_of, len(self.speeds))

    def reference(self) -> str:
        """ "": the kind that the cluster's own cost model is of."""
        return min(self.speeds, key=self.speeds.__getitem__, default="")

    def slowest(self, gpus: Iterable[int]) -> str:
        """The kind by which a group on `gpus` goes: replicas wait for the last. An unknown GPU counts as the reference."""
        if not self.differ:
            return self.reference()
        return min(self._kinds_of(gpus), key=lambda kind: (self.speeds[kind], kind), default=self.reference())

    def speed_of(self, gpu: int) -> float:
        """An unknown one counts as the reference; where nothing is known of any, all are alike."""
        return self.speeds.get(self.kind_of.get(gpu, ""), self.speeds.get(self.reference(), 1.0))

    def are_mixed(self, gpus: Iterable[int]) -> bool:
        """Whether a group on `gpus` has them of several kinds."""
        return self.differ and len(self._kinds_of(gpus)) > 1

    def _kinds_of(self, gpus: Iterable[int]) -> set[str]:
        reference = self.reference()
        return {self.kind_of.get(gpu, reference) for gpu in gpus} & self.speeds.keys()

    def fastest_first(self) -> list[str]:
        return sorted(self.speeds, key=lambda kind: (-self.speeds[kind], kind))

    def measured_on(self, device: str, own: CostModel) -> CostModel:
        """Which model a measurement on `device` is of."""
        return self.cost(device, own) if device in self.speeds else own

    def cost(self, kind: str, own: CostModel) -> CostModel:
        """Of bases on GPUs of `kind`. `own`: the cluster's, which it is where the kind is as fast and no other is there."""
        speed = self.speeds.get(kind, own.speed)
        if speed == own.speed and not self.differ:
            return own
        found = self._costs.get(kind)
        if found is None:
            found = self._costs[kind] = CostModel({}, own.fill_share, stage_rates=own.stage_rates)
            self.begin(kind, found)
        found.memory = own.memory
        if len(found.constants) != len(own.constants):
            for base, constants in own.constants.items():
                if base not in found.constants:
                    found.add(base, scaled_constants(constants, speed / own.speed))
        return found
