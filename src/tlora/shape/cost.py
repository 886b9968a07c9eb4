"""What a micro-batch costs in seconds and bytes on given GPUs, from constants that were measured, corrected by what is observed.

How the members of a group share its micro-batches is `sharing.py`'s; where the constants come from is `hardware.py`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tlora.batching.pipeline_model import turn_seconds
from tlora.errors import ConfigError
from tlora.protocol import BaseSpeed
from tlora.shape import GPU_SHARE
from tlora.shape.memory import ADAPTER_BYTES, PLANNED_TOKENS, BaseMemory, StageRooms
from tlora.shape.stages import LATENCY_SECONDS
from tlora.shape.token_cost import recompute_factor

LEAST_CORRECTION, MOST_CORRECTION = 0.5, 2.0
CONSTANTS_COUNT = 10  # observations that the constants weigh as much as: after so many a base's correction is half of what is seen
BASE_COUNTS = 200  # of one reach, that what is seen of its base weighs as much as: few groups of one reach are no sample of all jobs
REMEMBERED_SECONDS = 86400.0  # so that a swing over the day averages out. By time: 1,000 groups report 1,000 times as often as one
CORRECTED_FROM = 0.02  # less is noise (the mean of 100 jobs that are off by up to 15 %: 0.9 %), and each change costs all known paces


@dataclass(frozen=True, slots=True)
class BaseConstants:
    """What one base costs on one type of GPU under one set of kernels. `source` tells of each field where it was measured,
    or "extrapolated: " and from what.

    `tokens_per_second` is of one saturated GPU, without `launch_seconds`, which every micro-batch takes besides. `floor_seconds` is what
    the smallest micro-batch takes, whose kernels do not fill a GPU. `member_seconds` is taken by each further member of a group. The
    exchange is what summing gradients adds to a micro-batch on two GPUs of one node, and `exchange_gpu_seconds` what it takes for each
    further one of the node; or on several nodes, with any number. `base_bytes` are the weights, a copy on each GPU.
    """

    tokens_per_second: float
    launch_seconds: float
    member_seconds: float
    exchange_seconds: float
    exchange_between_nodes_seconds: float
    base_bytes: float
    activation_bytes_per_token: float
    gpu_bytes: float
    source: Mapping[str, str]
    floor_seconds: float = 0.0
    exchange_gpu_seconds: float = 0.0

    def exchange(self, gpus: int, nodes: int) -> float:
        """Seconds. A wide node takes no longer than several: what each further GPU takes was measured up to four."""
        if gpus == 1:
            return 0.0
        if nodes > 1:
            return self.exchange_between_nodes_seconds
        return max(
            self.exchange_seconds, min(self.exchange_seconds + self.exchange_gpu_seconds * (gpus - 2), self.exchange_between_nodes_seconds)
        )


def constants_digest(constants: BaseConstants) -> str:
    """Of the numbers, to which observations are ratios."""
    numbers = {name: value for name, value in asdict(constants).items() if name != "source"}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def scaled_constants(constants: BaseConstants, speed: float) -> BaseConstants:
    """On a GPU that trains `speed` times as fast, of which nothing is measured: what does not follow from products stays."""
    source = {**constants.source, "tokens_per_second": f"extrapolated: {speed:.3g} times {constants.source.get('tokens_per_second', '')}"}
    return replace(constants, tokens_per_second=constants.tokens_per_second * speed, source=source)


_UNKNOWN = BaseConstants(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.inf, {})


@dataclass(slots=True)
class _Mean:
    """Of what was observed over what the constants say. `weight` is the number of observations, of which old ones count for less."""

    ratio: float = 1.0
    weight: float = 0.0
    seen_at: float = 0.0

    def weight_at(self, now: float) -> float:
        return self.weight * math.exp((self.seen_at - now) / REMEMBERED_SECONDS)

    def see(self, ratio: float, now: float, least_weight: float = 0.0) -> None:
        self.weight = max(self.weight_at(now), least_weight) + 1
        self.ratio += (ratio - self.ratio) / self.weight
        self.seen_at = now


@dataclass(frozen=True, slots=True)
class Learned:
    """What was observed of a base, for another cost model with the same constants. `means` are of the base, of one GPU, of one node and of
    several: each with its ratio to the constants, the number of observations that it weighs as much as, and the seconds since the last.
    """

    corrections: tuple[float, float, float]
    means: tuple[tuple[float, float, float], ...]


class CostModel:
    """Seconds and bytes of a base's micro-batches, by the base's name. `fill_share` is the share of a full micro-batch that is tokens.

    What it predicts has changed `times_corrected` times, by `observe` and `measure`. `speed`: of training on the GPU that its constants
    are of, against an H200. `stage_rates`: bytes a second between two stages of a base on one node, and on two. Raises ConfigError for a
    base of which nothing is known.
    """

    budgets: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # tokens of a micro-batch per GPU that engines prepare, ascending

    def __init__(
        self,
        constants: Mapping[str, BaseConstants],
        fill_share: float = 0.95,
        speed: float = 1.0,
        stage_rates: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        assert 0 < fill_share <= 1 and speed > 0, (fill_share, speed)
        self.speed, self.stage_rates = speed, stage_rates
        self.constants = dict(constants)
        self.fill_share = fill_share
        self.memory: dict[str, BaseMemory] = {}  # of bases that were counted; of others the constants say it
        self.times_corrected = 0
        self._corrections: dict[str, list[float]] = {}  # one GPU, one node, several nodes
        self._observed: dict[str, _Mean] = {}
        self._observed_of_reach: dict[str, list[_Mean]] = {}
        self._recalled: dict[tuple[str, str], tuple[Learned, float]] = {}  # by base and digest: what waits for these constants
        for base, found in constants.items():
            self.add(base, found)

    def add(self, base: str, constants: BaseConstants) -> None:
        """A base that is known from now on; of one that was, corrections are forgotten, but for those that `recall` gave."""
        self.constants[base], self._corrections[base] = constants, [1.0, 1.0, 1.0]
        self._observed[base], self._observed_of_reach[base] = _Mean(), [_Mean(), _Mean(), _Mean()]
        self._go_on(base)

    def measure(self, base: str, device: str, speed: BaseSpeed) -> None:
        """The base's constants are those that were measured on a `device`. What is not measured so, exchange and memory, is as it was;
        of a base that was unknown it is 0, and fits.
        """
        found = asdict(speed)
        known = self.constants.get(base, _UNKNOWN)
        source = {**known.source, **dict.fromkeys(found, f"measured on this cluster's {device}")}
        self.add(base, replace(known, source=source, **found))
        self.times_corrected += 1

    def micro_batch_seconds(self, base: str, tokens: float, gpus: int, nodes: int, members: int) -> float:
        """Seconds of one micro-batch of `tokens` over all `gpus` together, for a group of `members` jobs.

        u(B, G) = f(G) + member_seconds * (members - 1) + B / (P * G); f(G) is the launch, and with it the exchange where there are several
        GPUs. P has the kernels' gain in it. t = sqrt(u^2 + floor_seconds^2), times the correction: far above
        the floor a micro-batch takes u, far below it the floor. Of the curves with one more constant that were tried over measured points
        of 128 to 8,192 tokens (`bench.cost_fit`) it is the nearest.

        Of a base in G stages: a turn of G micro-batches of B / G tokens through stages that never wait, G times what one takes the slowest.
        Nothing is exchanged; either end of a boundary copies a token's hidden states forward and their gradient back.
        """
        found, reach = self._of(base), _reach(gpus, nodes)
        stages = self._stages_on(base, gpus)
        exchange = found.exchange(gpus, nodes) if stages is None else 0.0
        filled = found.launch_seconds + exchange + found.member_seconds * (members - 1) + tokens / (found.tokens_per_second * gpus)
        if found.floor_seconds:
            filled = math.sqrt(filled * filled + found.floor_seconds * found.floor_seconds)
        if stages is not None:
            boundaries = 2 if gpus == 2 else 4
            filled = stages.slowest(gpus) * filled + boundaries * stages.boundary_bytes * tokens / self.stage_rates[nodes > 1]
        return self._corrections[base][reach] * self._ordered_factor(base) * filled

    def _stages_on(self, base: str, gpus: int) -> StageRooms | None:
        counted = self.memory.get(base)
        return None if counted is None else counted.stages_on(gpus)

    def is_cut(self, base: str, gpus: int) -> bool:
        """Whether it lies in stages on so many GPUs."""
        return self._stages_on(base, gpus) is not None

    def seconds_through_stages(self, base: str, fewest: int, gpus: int, nodes: int, members: Sequence[tuple[float, float]]) -> float:
        """Of a base that `is_cut`: until the tokens of `members` have gone through: so many each, and so many in its global batch.

        In `fewest` micro-batches, or more where stages would wait, as a group cuts batches into slices and tries how many are fastest
        (`group/nano_batching.py`): here as many as make up for what each takes besides its tokens, of 1,024 tokens or more. With p the part
        of the tokens and b the global batches of the job that is waited for, N^2 = (S - 1) b * seconds of all tokens / (p * those).
        """
        tokens = sum([own for own, _ in members])
        parts = [(own / tokens, own / batch) for own, batch in members]
        part, batches = max(parts, key=lambda each: each[0] * fewest + each[1] * (gpus - 1))

        def each(count: float) -> float:
            return self.micro_batch_seconds(base, tokens / count * gpus, gpus, nodes, len(members)) / gpus

        most = math.ceil(tokens / PLANNED_TOKENS[0])
        if part < 1:
            most = min(most, math.ceil((gpus - 1) * batches / (1 - part)))  # with so many none waits
        if most > fewest:
            work = (each(1) - each(most)) / (1 - 1 / most)
            besides, waits = each(most) - work / most, (gpus - 1) * batches / part * work
            fewest = max(fewest, round(math.sqrt(waits / besides)) if besides * most**2 > waits else most)
        return turn_seconds(fewest, each(fewest), gpus, parts, LATENCY_SECONDS)

    def recompute_factor(self, base: str, layers: int) -> float:
        """By how much longer a micro-batch takes with so many layers recomputed, beyond those that are in every one."""
        counted = self.memory.get(base)
        if not layers or counted is None or not counted.num_layers:
            return 1.0
        return recompute_factor(layers, counted.num_layers) / self._ordered_factor(base)

    def _ordered_factor(self, base: str) -> float:
        counted = self.memory.get(base)
        return 1.0 if counted is None else recompute_factor(counted.ordered_layers, counted.num_layers)

    def largest_micro_batch(self, base: str, seconds: float, gpus: int, nodes: int, members: int) -> float:
        """Tokens over all `gpus` together of the micro-batch that takes so long: the inverse of `micro_batch_seconds`. Not above 0 where
        none is so short. Over stages without copies, which a micro-batch of so many tokens takes besides."""
        found, reach, stages = self._of(base), _reach(gpus, nodes), self._stages_on(base, gpus)
        exchange = found.exchange(gpus, nodes) if stages is None else 0.0
        own = seconds / (self._corrections[base][reach] * self._ordered_factor(base))
        own /= 1.0 if stages is None else stages.slowest(gpus)
        filled = math.sqrt(max(0.0, own * own - found.floor_seconds * found.floor_seconds))
        return (filled - found.launch_seconds - exchange - found.member_seconds * (members - 1)) * found.tokens_per_second * gpus

    def capacity(self, base: str, tokens: float, gpus: int, nodes: int, members: int) -> float:
        """Tokens per second of full micro-batches: C = B / t(B, G). Of these `fill_share` are real ones."""
        return tokens / self.micro_batch_seconds(base, tokens, gpus, nodes, members)

    def alone_step_seconds(self, base: str, tokens_per_step: float, gpus: int, nodes: int = 1) -> float:
        """T0: `lone_step_seconds` under the largest budget."""
        return self.lone_step_seconds(base, self.budgets[-1] * gpus, gpus, nodes, tokens_per_step)

    def lone_step_seconds(self, base: str, token_budget: int, gpus: int, nodes: int, tokens: float) -> float:
        """Seconds of an optimizer step of `tokens` of a job by itself, in as few equal micro-batches as the budget over all GPUs allows.

        k * t(n / k, G) with k = ceil(n / budget); of a base in stages, `seconds_through_stages`.
        """
        if self.is_cut(base, gpus):
            fewest = max(gpus, math.ceil(tokens * gpus / token_budget))
            return self.seconds_through_stages(base, fewest, gpus, nodes, [(tokens, tokens)])
        count = math.ceil(tokens / token_budget)
        return count * self.micro_batch_seconds(base, tokens / count, gpus, nodes, 1)

    def room_bytes(self, base: str) -> float:
        """What may be planned for of a GPU of which nothing else is known: a share of the one whose constants the base has."""
        return GPU_SHARE * self._of(base).gpu_bytes

    def is_whole(self, base: str, room_bytes: float | None = None) -> bool:
        """Whether it lies whole on each of its group's GPUs, of which so much may be planned for."""
        counted, room = self.memory.get(base), self.room_bytes(base) if room_bytes is None else room_bytes
        return counted is None or counted.is_whole(room)

    def memory_bytes(
        self,
        base: str,
        adapter_parameters: float,
        tokens_per_gpu: float,
        gpus: int = 1,
        room_bytes: float | None = None,
        over_hosts: bool = False,
    ) -> float:
        """Bytes on each of `gpus` GPUs: weights, the state of `adapter_parameters` (all members together), activations of a micro-batch.
        `room_bytes`: what such a GPU has, which decides whether the base lies on it whole. `over_hosts`: in parts on several.
        """
        found, counted = self._of(base), self.memory.get(base)
        state = ADAPTER_BYTES * adapter_parameters
        if counted is None:
            return found.base_bytes + state + found.activation_bytes_per_token * tokens_per_gpu
        room = self.room_bytes(base) if room_bytes is None else room_bytes
        return state + counted.over(hosts=over_hosts).bytes_on(gpus, tokens_per_gpu, room)

    def least_bytes(
        self, base: str, adapter_parameters: float, tokens_per_gpu: float, gpus: int, room_bytes: float, over_hosts: bool = False
    ) -> float:
        """As `memory_bytes`, with as many layers recomputed as there are."""
        counted = self.memory.get(base)
        if counted is None:
            return self.memory_bytes(base, adapter_parameters, tokens_per_gpu, gpus, room_bytes, over_hosts)
        beside = counted.over(hosts=over_hosts).bytes_on(gpus, tokens_per_gpu, room_bytes, recomputed=True)
        return ADAPTER_BYTES * adapter_parameters + beside

    def recomputed_layers(
        self, base: str, adapter_parameters: float, tokens_per_gpu: float, gpus: int, room_bytes: float, over_hosts: bool = False
    ) -> int:
        """With how many layers recomputed, at least, that is within `room_bytes`."""
        counted = self.memory.get(base)
        if counted is None:
            return 0
        return counted.over(hosts=over_hosts).least_layers(gpus, tokens_per_gpu, room_bytes, ADAPTER_BYTES * adapter_parameters)

    def fits(
        self,
        base: str,
        adapter_parameters: float,
        tokens_per_gpu: float,
        gpus: int = 1,
        room_bytes: float | None = None,
        over_hosts: bool = False,
    ) -> bool:
        """Whether that is within what may be planned for of a GPU: `room_bytes`, where it is known."""
        room = self.room_bytes(base) if room_bytes is None else room_bytes
        return self.memory_bytes(base, adapter_parameters, tokens_per_gpu, gpus, room, over_hosts) <= room

    def observe(self, base: str, gpus: int, nodes: int, ratio: float, now: float) -> bool:
        """Take in how long something took, at `now` seconds, on one GPU, on one node, or on several. Whether predictions are now others.

        `ratio` is that over what this model says now. Times the correction it is the ratio to the constants, clamped, so that a step
        during which something was compiled counts no more than one of twice the time. Means of these are kept of the base and of each
        reach of it. A reach is corrected by its own mean, and by its base's where it has
        few observations. The corrections of a base change all together, and only when one of them is off by more than `CORRECTED_FROM`.
        """
        assert ratio > 0, ratio
        self._of(base)
        applied, reach = self._corrections[base], _reach(gpus, nodes)
        to_constants = min(max(applied[reach] * ratio, LEAST_CORRECTION), MOST_CORRECTION)
        whole, reaches = self._observed[base], self._observed_of_reach[base]
        whole.see(to_constants, now, CONSTANTS_COUNT)
        reaches[reach].see(to_constants, now)
        weights = [own.weight_at(now) for own in reaches]
        found = [
            (BASE_COUNTS * whole.ratio + weight * own.ratio) / (BASE_COUNTS + weight) for own, weight in zip(reaches, weights, strict=True)
        ]
        if all(abs(new - old) <= CORRECTED_FROM * old for new, old in zip(found, applied, strict=True)):
            return False
        self._corrections[base] = found
        self.times_corrected += 1
        return True

    def learned(self, base: str, now: float) -> Learned:
        """All that `observe` has taken in of the base until `now`."""
        one, node, nodes = self._corrections[base]
        means = (self._observed[base], *self._observed_of_reach[base])
        return Learned((one, node, nodes), tuple([(mean.ratio, mean.weight, now - mean.seen_at) for mean in means]))

    def recall(self, base: str, digest: str, learned: Learned, now: float) -> None:
        """Go on from what another model has `learned` of the base, as soon as its constants are those of `digest`."""
        assert len(learned.means) == 4, learned
        self._recalled[base, digest] = learned, now
        if base in self.constants:
            self._go_on(base)

    def _go_on(self, base: str) -> None:
        found = self._recalled.pop((base, constants_digest(self.constants[base])), None)
        if found is None:
            return
        learned, at = found
        self._corrections[base] = list(learned.corrections)
        whole, *reaches = [_Mean(ratio, weight, at - age) for ratio, weight, age in learned.means]
        self._observed[base], self._observed_of_reach[base] = whole, reaches
        self.times_corrected += 1

    def _of(self, base: str) -> BaseConstants:
        try:
            return self.constants[base]
        except KeyError:
            known = ", ".join(sorted(self.constants)) or "none"
            raise ConfigError(f"base model {base!r}: its cost was never measured; name one of {known}, or give constants for it") from None


def _reach(gpus: int, nodes: int) -> int:
    """0 for one GPU, 1 for several of one node, 2 for several nodes."""
    return 0 if gpus == 1 else 1 if nodes == 1 else 2
