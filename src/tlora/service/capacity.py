"""Whether a job can ever fit into the memory of this server's GPUs: arithmetic over a base's outline, so that it is said at submission."""

from __future__ import annotations

from dataclasses import replace

from tlora.api import OrderSpec
from tlora.errors import ModelError
from tlora.job import Recompute
from tlora.service.base_shapes import adapter_parameters, known_outline, precision_of
from tlora.service.config import ServerConfig
from tlora.service.machine import Devices
from tlora.service.problems import RefusedError
from tlora.shape.base_parts import BaseParts, with_stages
from tlora.shape.base_shape import BaseShape
from tlora.shape.memory import ADAPTER_BYTES, BaseMemory, least_gpus
from tlora.shape.stages import LEAST_STAGES
from tlora.wording.numbers import gib

_MOST_REMEMBERED = 1_000
_SHAPE = {
    "base_model",
    "r",
    "target_modules",
    "target_parameters",
    "expert_rank",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
}


class Capacity:
    """Of one server. A base of which nothing is known yet is not judged. Safe in several threads."""

    def __init__(self, config: ServerConfig, places: Devices) -> None:
        self._directory = config.directory / "bases"
        self._recompute: Recompute = config.recompute
        self._precision = precision_of(config, places.device)
        self._place = "a GPU here" if places.device == "cuda" else "this machine"
        self._most, self._gpus = places.memory_bytes, len(places.gpus)
        self._hosts_may_come = config.hosts_may_come
        there = self._gpus or places.engine_gpus
        self._cuts = config.layout == "stages" and (there != 1 or self._hosts_may_come)  # else it lies as with auto
        self._limit = None if config.memory_limit == "auto" else config.memory_limit
        if config.memory_limit != "auto" and (self._most is None or config.memory_limit < self._most):
            self._most, self._place = config.memory_limit, "a run here (memory_limit)"
        self._outlines: dict[str, BaseShape] = {}
        self._parameters: dict[str, int] = {}  # of an adapter, by base and shape

    def learn(self, name: str, base_model: str) -> None:
        """The base's outline was made."""
        outline = known_outline(self._directory, base_model, self._precision)
        if outline is not None:
            if self._cuts or self._hosts_may_come:
                outline = replace(outline, memory=with_stages(outline.memory, outline.parts, ordered=self._cuts))
            self._outlines[name] = outline

    def memory_of(self, name: str) -> BaseMemory | None:
        """What is known of the base's bytes."""
        outline = self._outlines.get(name)
        return None if outline is None else outline.memory.recomputing(self._recompute)

    def parts_of(self, name: str) -> BaseParts | None:
        """What is known of what its layers compute."""
        outline = self._outlines.get(name)
        return None if outline is None else outline.parts

    def check(self, order: OrderSpec) -> None:
        """Raises RefusedError for a base that cannot be cut as is ordered, targets that it has not, and an adapter that fits beside it on
        no GPU.
        """
        if (uncut := self.why_uncut(order.base_model)) is not None:
            remedy = "Order another base, or ask the server's operator for layout: auto"
            raise RefusedError(400, "base_not_served", f"{uncut}. {remedy}", "base_model")
        outline = self._outlines.get(order.base_model)
        if outline is None or order.start_from is not None:  # which has the shape of an adapter that was trained here
            return
        try:
            parameters = self._count(order, outline)
        except ModelError as error:
            raise RefusedError(400, "unknown_target", str(error), "target_modules") from None
        reason = self.why_never(order.base_model, parameters)
        if reason is not None:
            raise RefusedError(400, "rank_too_large", f"r: {order.largest_rank}: {reason}", "r")

    def why_never(self, base: str, parameters: int) -> str | None:
        """Why an adapter of so many parameters can never be trained over the base, if so. A lower bound: activations are not counted."""
        outline = self._outlines.get(base)
        if outline is None or self._most is None or not self._gpus or self._hosts_may_come:  # whose GPUs may be larger
            return None
        beside = outline.memory.least_weights(self._gpus)
        if beside + ADAPTER_BYTES * parameters <= self._most:
            return None
        if beside >= self._most:
            how = "streamed from the host's memory" if beside == outline.memory.streamed_bytes else f"on each of {self._gpus} GPUs"
            parts = f", or {gib(beside)} {how}" if beside < outline.bytes else ""
            takes = f"base_model {base!r} alone takes {gib(outline.bytes)}{parts}"
            return f"{takes}, and {self._place} has {gib(self._most)}. Order a smaller base"
        state = gib(ADAPTER_BYTES * parameters)
        return (
            f"an adapter of {parameters:,} parameters takes {state} with its gradient and Adam's moments, beside {gib(beside)} "
            f"of the base, and {self._place} has {gib(self._most)}. Order a smaller r, or fewer target_modules"
        )

    def why_uncut(self, base: str) -> str | None:
        """Why the base cannot be cut into stages though that is ordered, if so."""
        outline = self._outlines.get(base)
        if not self._cuts or outline is None or not outline.parts.no_stages:
            return None
        return f"base_model {base!r} cannot be cut into stages: {outline.parts.no_stages}"

    def least_gpus(self, base: str) -> int:
        """On fewer the base leaves no room for jobs, or is in no stages as it is ordered; 1 where that is not known."""
        outline, least = self._outlines.get(base), LEAST_STAGES if self._cuts else 1
        most = self._limit if self._hosts_may_come else self._most  # their GPUs may be larger: the back end counts as they come
        if outline is None or most is None:
            return least
        there = None if self._hosts_may_come else self._gpus  # any number may come
        return max(least, least_gpus(outline.memory.bytes_by_gpus[:there], most) or 1)

    def most_gpus(self, base: str, there: int) -> int:
        """That a job gets of `there` (0: not known): in stages one for each layer."""
        outline = self._outlines.get(base)
        layers = len(outline.parts.layers) if self._cuts and outline is not None else 0
        return min(there or layers, layers or there)

    def _count(self, order: OrderSpec, outline: BaseShape) -> int:
        shape = order.model_dump_json(include=_SHAPE)
        found = self._parameters.get(shape)
        if found is None:
            found = adapter_parameters(outline, order)
            if len(self._parameters) >= _MOST_REMEMBERED:
                self._parameters.clear()
            self._parameters[shape] = found
        return found
