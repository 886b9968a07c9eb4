"""The planner's seconds of a base on a GPU, as constants of a scheduler's cost model: worked out once for a base, not at each decision.

A micro-batch of T tokens takes (T + fixed) times the seconds of a token, as `tlora plan` has it: so the constants of
t = launch + T / P are P, tokens a second, and launch = fixed / P. What plans do not count (members, exchanges) is as of a measured base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tlora.job import LinkSetting
from tlora.shape.base_parts import BaseParts
from tlora.shape.cost import BaseConstants, scaled_constants
from tlora.shape.gpu_models import GpuModel, find_gpu, link_rate
from tlora.shape.hardware import EXTRAPOLATED, LIVE_GPU, cost_model, nearest_of
from tlora.shape.token_cost import token_cost_on
from tlora.shape.work import sample_work

HOST_LINK_BYTES_PER_SECOND = 1.25e9
"""Between two hosts of a live cluster, until its own steps correct it: an Ethernet of 10 Gb/s, which one line of TLS fills."""
_RING_BYTES_PER_SECOND = 40e9
SAMPLE_TOKENS = 512  # of the samples whose attention is counted: jobs come later
_PLANNERS = "as tlora plan predicts for"
_SAME_BYTES = 0.01  # relative: of a base that is one of those with constants


def live_constants(base_bytes: float, parts: BaseParts | None = None, gpu: GpuModel | None = None) -> BaseConstants:
    """What a live scheduler begins with for a base of so many bytes on GPUs of a model: the constants that were fitted to measurements of
    that base on an H200, where both are those; else what the planner predicts. `gpu` None is a CPU: the
    constants of the measured base that is nearest in size, as are those of a base of which only bytes are known.
    Jobs that span hosts exchange their gradients at `HOST_LINK_BYTES_PER_SECOND`.
    """
    measured = cost_model(LIVE_GPU).constants
    like = _over_line(measured[nearest_of(measured, base_bytes)])
    usual = find_gpu("h200").flops
    if gpu is None:
        return like
    if parts is None or (gpu.flops == usual and abs(math.log(like.base_bytes / base_bytes)) < _SAME_BYTES):
        return scaled_constants(like, gpu.flops / usual) if gpu.flops != usual else like
    return predicted_constants(parts, gpu, like)


def live_stage_rates(gpu: GpuModel | None, links: LinkSetting = "auto") -> tuple[float, float]:
    """`CostModel.stage_rates` of GPUs of a model, by what `tlora plan` has: inside a host, and between two. None is a CPU, whose processes
    share memory.
    """
    if gpu is None:
        return math.inf, HOST_LINK_BYTES_PER_SECOND
    linked = replace(gpu, peer_gb_per_second=0.0) if links == "host" else gpu
    inside = link_rate(linked, linked)
    return inside, min(inside, HOST_LINK_BYTES_PER_SECOND)


def is_predicted(constants: BaseConstants) -> bool:
    """Whether they are the planner's, and none that were measured, or scaled from such."""
    return _PLANNERS in constants.source["tokens_per_second"]


def predicted_constants(parts: BaseParts, gpu: GpuModel, like: BaseConstants) -> BaseConstants:
    """The planner's seconds on one `gpu`, and what it does not count as of `like`."""
    rate = gpu.rate.multiply_adds_per_second("cuda", parts.in_8_bits)
    cost = token_cost_on("cuda", gpu.smallest_rows, parts.memory, fixed_work=gpu.fixed_work)
    token_seconds = sample_work(parts.timed_weights, parts.width, forwards=2).of(SAMPLE_TOKENS) / SAMPLE_TOKENS / rate
    launch_seconds = cost.fixed_tokens * 2 * parts.timed_weights / rate
    told = f"{EXTRAPOLATED}{_PLANNERS} {gpu.name} (docs/reference/layouts.md)"
    source: Mapping[str, str] = {**like.source, **dict.fromkeys(("tokens_per_second", "launch_seconds", "floor_seconds"), told)}
    return replace(like, tokens_per_second=1 / token_seconds, launch_seconds=launch_seconds, floor_seconds=0.0, source=source)


def _over_line(constants: BaseConstants) -> BaseConstants:
    """As they are where the gradients of a job that spans hosts go over a line of `HOST_LINK_BYTES_PER_SECOND`, once, where the files count
    a ring of `_RING_BYTES_PER_SECOND` that sends them twice, after the exchange of a node of eight.
    """
    node = constants.exchange_seconds + 6 * constants.exchange_gpu_seconds
    ring = max(0.0, constants.exchange_between_nodes_seconds - node)
    between = node + ring / 2 * _RING_BYTES_PER_SECOND / HOST_LINK_BYTES_PER_SECOND
    source = {**constants.source, "exchange_between_nodes_seconds": f"{EXTRAPOLATED}a line of {HOST_LINK_BYTES_PER_SECOND / 1e9:g} GB/s"}
    return replace(constants, exchange_between_nodes_seconds=between, source=source)
