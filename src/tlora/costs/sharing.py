"""How the members of a group share its micro-batches: flows on a link, each with a weight, none faster than its batches allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.costs.cost import CostModel


@dataclass(frozen=True, slots=True)
class Member:
    """A job as a group's arithmetic sees it: tokens of its optimizer step, and its weight in the shares."""

    tokens_per_step: float
    weight: float


def group_step_seconds(cost: CostModel, base: str, token_budget: int, gpus: int, nodes: int, members: Sequence[Member]) -> list[float]:
    """Seconds between optimizer steps of each member, in their order, when all share by weight. `token_budget` is over all GPUs.

    Of a micro-batch of B tokens a member takes at most c_j = min(n_j, B), as it steps at most once in each. Those offers fill it up to
    E = min(fill_share * B, sum of c_j). Shares x_j are the weighted max-min of E under the caps c_j; a step takes n_j * t(E) / x_j.
    A member by itself has no neighbours to be packed with: k * t(n / k), k = ceil(n / B), which is `alone_step_seconds` where n <= B.
    """
    if len(members) == 1:
        return [lone_step_seconds(cost, base, token_budget, gpus, nodes, members[0].tokens_per_step)]
    offers = [member.tokens_per_step for member in members]
    caps = [tokens if tokens < token_budget else token_budget for tokens in offers]
    offered = sum(caps)
    filled = min(cost.fill_share * token_budget, offered)
    seconds = cost.micro_batch_seconds(base, filled, gpus, nodes, len(members))
    if filled == offered:  # a micro-batch has room for a whole batch of each
        return [seconds] * len(members)
    shares = share_tokens(filled, caps, [member.weight for member in members])
    return [tokens * seconds / share for tokens, share in zip(offers, shares, strict=True)]


def lone_step_seconds(cost: CostModel, base: str, token_budget: int, gpus: int, nodes: int, tokens: float) -> float:
    """`group_step_seconds` of a member by itself, with `tokens` in a step."""
    count = math.ceil(tokens / token_budget)
    return count * cost.micro_batch_seconds(base, tokens / count, gpus, nodes, 1)


def fastest_step_seconds(cost: CostModel, base: str, tokens: float, most_gpus: int, gpus_per_node: int) -> float:
    """The least time of an optimizer step of `tokens` on any number of GPUs up to `most_gpus`, alone or in a group.

    n * t(b, G) / b with b = min(n, largest budget * G). Within one GPU, one node, several nodes, more GPUs are never slower, so the most of
    each are tried. It counts a full budget's share where n is no multiple of it.
    """
    found: list[float] = []
    for gpus in sorted({1, min(gpus_per_node, most_gpus), most_gpus}):
        filled = min(tokens, cost.budgets[-1] * gpus)
        found.append(tokens * cost.micro_batch_seconds(base, filled, gpus, math.ceil(gpus / gpus_per_node), 1) / filled)
    return min(found)


def share_tokens(filled: float, caps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Tokens of each member in a micro-batch that holds `filled` of them: x_j = min(c_j, level * w_j), all together `filled`.

    That is less than the sum of the caps. The level is found by raising it: who has reached its cap at one level has at all higher
    ones, and what it leaves is for the others. Each pass caps another member, or is the last.
    """
    level = 0.0
    while True:
        left, weight = filled, 0.0
        for cap, own in zip(caps, weights, strict=True):
            if cap <= level * own:
                left -= cap
            else:
                weight += own
        raised = left / weight if weight else level
        if raised <= level:
            return [cap if cap <= level * own else level * own for cap, own in zip(caps, weights, strict=True)]
        level = raised
