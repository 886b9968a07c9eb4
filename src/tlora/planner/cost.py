"""What a micro-batch costs in seconds and bytes on given GPUs, from constants that were measured, corrected by what is observed.

How the members of a group share its micro-batches is `sharing.py`'s; where the constants come from is `hardware.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tlora.errors import ConfigError

ADAPTER_BYTES = 18  # per trained parameter: fp32 master, two moments and gradient, bf16 copy
MEMORY_SHARE = 0.92  # of a GPU that may be planned for; the rest is the allocator's
OBSERVED_SHARE = 0.1  # of the newest observation in the correction, which so remembers about ten
LEAST_CORRECTION, MOST_CORRECTION = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class BaseConstants:
    """What one base costs on one type of GPU under one set of kernels. `source` tells of each field where it was measured,
    or "extrapolated: " and from what.

    `tokens_per_second` is of one saturated GPU, without `launch_seconds`, which every micro-batch takes besides. `member_seconds` is
    taken by each further member of a group. The exchange is what summing gradients adds to a micro-batch on several GPUs of one node,
    or on several nodes. `base_bytes` are the weights, a copy on each GPU.
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


class CostModel:
    """Seconds and bytes of a base's micro-batches, by the base's name. `fill_share` is the share of a full micro-batch that is tokens.

    The one thing that changes in it is the correction by `observe`, so far `times_corrected` times. Raises ConfigError for a base of
    which nothing is known.
    """

    budgets: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # tokens of a micro-batch per GPU that engines prepare, ascending

    def __init__(self, constants: Mapping[str, BaseConstants], fill_share: float = 0.95) -> None:
        assert 0 < fill_share <= 1, fill_share
        self.constants = dict(constants)
        self.fill_share = fill_share
        self.times_corrected = 0
        self._corrections = {base: [1.0, 1.0, 1.0] for base in self.constants}  # one GPU, one node, several nodes

    def micro_batch_seconds(self, base: str, tokens: float, gpus: int, nodes: int, members: int) -> float:
        """Seconds of one micro-batch of `tokens` over all `gpus` together, for a group of `members` jobs.

        t(B, G) = f(G) + member_seconds * (members - 1) + B / (P * G), times the correction; f(G) is the launch, and with it the exchange
        where there are several GPUs (scheduling.md, "The policy"). P has the kernels' gain in it.
        """
        found, reach = self._of(base), _reach(gpus, nodes)
        exchange = (0.0, found.exchange_seconds, found.exchange_between_nodes_seconds)[reach]
        return self._corrections[base][reach] * (
            found.launch_seconds + exchange + found.member_seconds * (members - 1) + tokens / (found.tokens_per_second * gpus)
        )

    def capacity(self, base: str, tokens: float, gpus: int, nodes: int, members: int) -> float:
        """Tokens per second of full micro-batches: C = B / t(B, G). Of these `fill_share` are real ones."""
        return tokens / self.micro_batch_seconds(base, tokens, gpus, nodes, members)

    def alone_step_seconds(self, base: str, tokens_per_step: float, gpus: int, nodes: int = 1) -> float:
        """T0: seconds of an optimizer step of a job by itself, in as few equal micro-batches as the largest budget allows.

        k * t(n / k, G) with k = ceil(n / (largest budget * G)).
        """
        count = math.ceil(tokens_per_step / (self.budgets[-1] * gpus))
        return count * self.micro_batch_seconds(base, tokens_per_step / count, gpus, nodes, 1)

    def memory_bytes(self, base: str, adapter_parameters: float, tokens_per_gpu: float) -> float:
        """Bytes on each GPU: weights, the state of `adapter_parameters` (all members together), activations of a micro-batch."""
        found = self._of(base)
        return found.base_bytes + ADAPTER_BYTES * adapter_parameters + found.activation_bytes_per_token * tokens_per_gpu

    def fits(self, base: str, adapter_parameters: float, tokens_per_gpu: float) -> bool:
        """Whether that is within the share of a GPU that may be planned for."""
        return self.memory_bytes(base, adapter_parameters, tokens_per_gpu) <= MEMORY_SHARE * self._of(base).gpu_bytes

    def observe(self, base: str, gpus: int, nodes: int, predicted_seconds: float, observed_seconds: float) -> None:
        """Correct later predictions for groups of this base on one GPU, on one node, or on several, whichever this was.

        `predicted_seconds` is what this model says now, its correction included: observed / predicted * correction is then the ratio to
        the constants. The correction is the exponentially weighted mean of these ratios, each first clamped, so that a step during
        which something was compiled counts no more than a step of twice the time.
        """
        assert predicted_seconds > 0 and observed_seconds > 0, (predicted_seconds, observed_seconds)
        self._of(base)
        corrections, reach = self._corrections[base], _reach(gpus, nodes)
        ratio = corrections[reach] * observed_seconds / predicted_seconds
        clamped = min(max(ratio, LEAST_CORRECTION), MOST_CORRECTION)
        corrections[reach] += OBSERVED_SHARE * (clamped - corrections[reach])
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
