"""How the members of a group share its micro-batches: flows on a link, each with a weight, none faster than its batches allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.protocol import JobProfile
from tlora.shape.cost import CostModel

ROUNDING = 1e-9  # relative: what is met exactly is met


@dataclass(frozen=True, slots=True)
class Member:
    """A job as a group's arithmetic sees it: tokens of its optimizer step, its weight in the shares, and the tokens of each of its samples
    if all are of one length; 0 if they are not, and fill nearly any space between them.
    """

    tokens_per_step: float
    weight: float
    sample_tokens: int = 0


def even_sample_tokens(profile: JobProfile) -> int:
    """`Member.sample_tokens`: the longest, if the shortest is within a factor of 2 of it as far as the histogram tells."""
    return profile.longest_sample_tokens if sum(map(bool, profile.length_histogram)) == 1 else 0


def group_step_seconds(cost: CostModel, base: str, token_budget: int, gpus: int, nodes: int, members: Sequence[Member]) -> list[float]:
    """Seconds between optimizer steps of each member, in their order, when all share by weight. `token_budget` is over all GPUs.

    A member by itself has no neighbours to be packed with: `lone_step_seconds`.
    """
    if len(members) == 1:
        return [cost.lone_step_seconds(base, token_budget, gpus, nodes, members[0].tokens_per_step)]
    return shared_seconds(cost, base, token_budget, gpus, nodes, members)[1]


def shared_seconds(
    cost: CostModel, base: str, token_budget: int, gpus: int, nodes: int, members: Sequence[Member]
) -> tuple[float, list[float]]:
    """Of several members: seconds of a micro-batch, t(E), and between optimizer steps of each, n_j * t(E) / x_j (`fill`). Over a base in S
    stages it is S micro-batches of B / S.
    """
    filled, shares = fill(cost.fill_share, token_budget, gpus, members)
    if cost.is_cut(base, gpus):
        batches = [(share, member.tokens_per_step) for member, share in zip(members, shares, strict=True)]
        seconds = cost.seconds_through_stages(base, gpus, gpus, nodes, batches)
    else:
        seconds = cost.micro_batch_seconds(base, filled, gpus, nodes, len(members))
    return seconds, [seconds * (member.tokens_per_step / share) for member, share in zip(members, shares, strict=True)]


def fill(fill_share: float, token_budget: int, gpus: int, members: Sequence[Member]) -> tuple[float, list[float]]:
    """Tokens E of a micro-batch of B = `token_budget`, over all `gpus`, and each member's part x_j of them, on average.

    A member takes at most c_j = min(n_j, B), as it steps at most once in each. E = min(fill_share * B, sum of c_j), and the shares are
    the weighted max-min of E under the caps c_j. Two cases fill less (tests/shape/test_fill.py packs samples of such groups):

    - All but one reach their caps, and nobody fills what the end of that one's batch leaves free. Its step takes whole micro-batches, in
      which it has the room r = B - sum of the others' c_j: n / r + 1/2 on average of batches whose lengths vary. Where all its samples have
      one length, r is what whole ones of them take, and it is ceil(n / r).
    - None of one member's samples, all of one length, has room beside what all others offer, which is less than such a sample: they run in
      turns.
    """
    caps = [member.tokens_per_step if member.tokens_per_step < token_budget else token_budget for member in members]
    offered, filled = sum(caps), fill_share * token_budget
    if offered <= filled:  # a micro-batch has room for a whole batch of each
        return offered, caps
    weights = [member.weight for member in members]
    samples = [member.sample_tokens for member in members]
    if longest := max(samples):
        sample, own = longest * gpus, caps[samples.index(longest)]
        beside = offered - own
        if beside < sample and beside + sample > token_budget:
            filled = min(filled, (beside + min(own, _whole(token_budget, sample))) / 2)
            return filled, share_tokens(filled, caps, weights)
    shares = share_tokens(filled, caps, weights)
    short = [number for number, (share, cap) in enumerate(zip(shares, caps, strict=True)) if share < cap]
    if len(short) == 1:
        number, tokens = short[0], members[short[0]].tokens_per_step
        room = token_budget - offered + caps[number]
        even = _whole(room, members[number].sample_tokens * gpus)
        count = math.ceil(tokens / even * (1 - ROUNDING)) if even else tokens / room + 0.5
        shares[number] = min(shares[number], tokens / count)
        filled = sum(shares)
    return filled, shares


def _whole(tokens: float, sample: int) -> float:
    """As many of them as whole samples take; 0 where samples are of several lengths, or none fits."""
    return tokens // sample * sample if sample else 0.0


def fastest_step_seconds(cost: CostModel, base: str, tokens: float, most_gpus: int, gpus_per_node: int) -> float:
    """The least time of an optimizer step of `tokens` on any number of GPUs up to `most_gpus`, alone or in a group.

    n * t(b, G) / b with b = min(n, largest budget * G). Over several nodes more GPUs are never slower, so only the most are tried; within
    one an exchange takes longer the more there are. It counts a full budget's share where n is no multiple of it.
    """
    found: list[float] = []
    for gpus in {*range(1, min(gpus_per_node, most_gpus) + 1), most_gpus}:
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
