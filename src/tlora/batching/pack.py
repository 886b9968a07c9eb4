"""Which samples run together in one forward-backward: fair among flows first, then the fullest use of the budget.

Pure and deterministic on integers: the same flows give the same micro-batches on every rank, so no plan is ever sent.
Tensors are made elsewhere; what a budget costs in memory or seconds is not known here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.batching.flow import Flow, Kind, enter_line

SMALLEST_BUDGET = 128  # tokens: of those that are chosen, rather than ordered, below the longest sample
_LARGEST_STEP = 128  # tokens between prepared sizes: a GEMM computes whole tiles of 128 rows, so that finer sizes save it nothing
_CHOICES_PER_FLOW = 64  # samples (or runs of samples) of one flow that the search for the fullest fill looks at
_MOST_CHOICES = 256  # and of all flows: equal lengths, which no choice can fill better, still take under 2 ms
_SPREADS = 3  # standard deviations above the mean of a global batch that a micro-batch still holds
_GOOD_ENOUGH = 256  # stop searching once padding is at most budget/256

_Alternative = tuple[int, range]  # tokens, and the indices of the pending samples that have them


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of one job in a micro-batch."""

    job_id: str
    sample: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples for one forward-backward. Rows of one job are adjacent and in the order of its cursor."""

    kind: Kind
    rows: tuple[Row, ...]
    tokens: int
    budget: int  # what `pack` was given, or the tokens of a longer sample; `prepared_budget` says how small a shape would do


@dataclass(slots=True)
class _Plan:
    """Indices into the pending samples of flows; nothing is taken before the plan is final."""

    picks: list[tuple[int, int]]  # (flow, index), in the order in which fairness chose them
    tokens: int
    virtual_times: list[float]
    counts: list[int]  # fair picks per flow: always its first pending samples
    level: float  # virtual time that the line has reached


def pack(flows: Sequence[Flow], budget: int, *, in_order: bool, stages: int = 1) -> MicroBatch | None:
    """Take the next micro-batch of at most `budget` tokens from `flows` (in order of joining); None if nothing is pending. A sample of
    more tokens is a micro-batch by itself when its turn comes, so that shorter ones do not share what it costs.

    It is all train or all eval, as the flow with the least virtual time is. Flows are served by least virtual time; the
    space left at the end goes to the samples that fill it best. With `in_order` a job's samples enter in the order of its
    cursor (the choice is among flows only), without it the filling may choose any sample of a flow's current global batch.

    With several `stages` jobs' batches take turns. A batch is followed by the job's next one when its last micro-batch has come back
    through all stages: where the batches of all jobs advance in step, none is left to enter meanwhile (docs/adr/044-packing.md).
    """
    enter_line(flows, lead_tokens=2 * max([budget, *(flow.longest_tokens for flow in flows)]))
    runnable = [flow for flow in flows if flow.runnable]
    if not runnable:
        return None
    kind = min(runnable, key=lambda flow: flow.virtual_time).kind  # min takes the first of equals
    runnable = [flow for flow in runnable if flow.kind == kind]
    if stages > 1:
        order = batches_in_turn(runnable, budget)
        budget = max(budget, runnable[order[0]].pending[0].tokens)
        plan = _serve_batches(runnable, order, budget)
    else:
        budget = max(budget, min(runnable, key=lambda flow: flow.virtual_time).pending[0].tokens)  # served first, it leaves no space
        plan = _serve_fairly(runnable, budget)
    if any(count < len(flow.pending) for count, flow in zip(plan.counts, runnable, strict=True)):
        plan = _fill_up(runnable, plan, budget, in_order)
    return _take(runnable, plan, budget)


def _take(flows: Sequence[Flow], plan: _Plan, budget: int) -> MicroBatch:
    rows: list[Row] = []
    for number, flow in enumerate(flows):
        indices = sorted((index for owner, index in plan.picks if owner == number), reverse=True)
        items = [flow.take(index) for index in indices]
        rows += [Row(flow.job_id, item.sample, item.tokens) for item in reversed(items)]
    assert 0 < plan.tokens == sum(row.tokens for row in rows) <= budget, f"packed {plan.tokens} tokens into {budget}"
    return MicroBatch(flows[0].kind, tuple(rows), plan.tokens, budget)


def batches_in_turn(flows: Sequence[Flow], budget: int) -> list[int]:
    """Numbers of `flows` as several stages serve their batches: what has begun, the fewest tokens left first, then the least virtual time.

    Before these, by virtual time, whole batches of flows that are further behind than any of which a batch has begun: where large batches
    take turns, a small one need not wait for them.
    """
    begun = [number for number, flow in enumerate(flows) if flow.begun]
    level = min((flows[number].virtual_time for number in begun), default=-math.inf)
    rest = sorted((n for n in range(len(flows)) if not flows[n].begun), key=lambda number: flows[number].virtual_time)
    behind = [number for number in rest if flows[number].virtual_time < level and flows[number].pending_tokens <= budget]
    begun.sort(key=lambda number: flows[number].pending_tokens)
    return [*behind, *begun, *(number for number in rest if number not in behind)]


def _serve_batches(flows: Sequence[Flow], order: Sequence[int], budget: int) -> _Plan:
    """Give each flow in turn all that is left of its batch, until a sample does not fit."""
    plan = _Plan([], 0, [flow.virtual_time for flow in flows], [0] * len(flows), min(flow.virtual_time for flow in flows))
    for number in order:
        flow = flows[number]
        for item in flow.pending:
            if plan.tokens + item.tokens > budget:
                return plan
            plan.picks.append((number, plan.counts[number]))
            plan.tokens += item.tokens
            plan.counts[number] += 1
            plan.virtual_times[number] += item.tokens / flow.weight
    return plan


def _serve_fairly(flows: Sequence[Flow], budget: int) -> _Plan:
    """Give each sample's turn to the flow with the least virtual time, until that flow's next sample does not fit.

    When less than two micro-batches are on offer, a flow's turn is all that is left of its batch: it can then offer its
    next one. Sample by sample, equal jobs would advance in step and all run dry in the same micro-batch.
    """
    finish_batches = sum(flow.pending_tokens for flow in flows) < 2 * budget
    plan = _Plan([], 0, [flow.virtual_time for flow in flows], [0] * len(flows), 0.0)
    line = [(flow.virtual_time, number) for number, flow in enumerate(flows)]
    heapq.heapify(line)
    while line:
        plan.level, number = line[0]
        flow, index = flows[number], plan.counts[number]
        tokens = flow.pending[index].tokens
        if plan.tokens + tokens > budget:
            break
        plan.picks.append((number, index))
        plan.tokens += tokens
        plan.counts[number] += 1
        plan.virtual_times[number] += tokens / flow.weight
        if plan.counts[number] == len(flow.pending):
            heapq.heappop(line)
        elif not finish_batches:
            heapq.heapreplace(line, (plan.virtual_times[number], number))
    return plan


def _fill_up(flows: Sequence[Flow], fair: _Plan, budget: int, in_order: bool) -> _Plan:
    """Add what fills the remaining space best; if that leaves a gap, take back the last 1, 2, 4, … fair picks and try again.

    The flow that is furthest behind is always served: its pick stays. Only for a gap above 1/32 is more than half taken back.
    """
    best, undo = fair, 0
    while True:
        plan = _without_last(flows, fair, undo)
        _add_best_fit(flows, plan, budget, in_order)
        if undo == 0 or plan.tokens > best.tokens:
            best = plan
        gap, picks = budget - best.tokens, len(fair.picks)
        most_undone = picks - 1 if gap > budget // 32 else picks // 2
        if gap <= budget // _GOOD_ENOUGH or undo >= most_undone:
            return best
        undo = min(max(1, 2 * undo), most_undone)


def _without_last(flows: Sequence[Flow], fair: _Plan, undo: int) -> _Plan:
    keep = len(fair.picks) - undo
    plan = _Plan(fair.picks[:keep], fair.tokens, list(fair.virtual_times), list(fair.counts), fair.level)
    for number, index in fair.picks[keep:]:
        tokens = flows[number].pending[index].tokens
        plan.tokens -= tokens
        plan.counts[number] -= 1
        plan.virtual_times[number] -= tokens / flows[number].weight
    return plan


def _add_best_fit(flows: Sequence[Flow], plan: _Plan, budget: int, in_order: bool) -> None:
    """Subset sum: of each choice at most one alternative, the sum as close to the space left as possible.

    `reached[k]` is the set of sums that the first k choices can make, as the bits of one integer: an alternative costs one
    shift, under a microsecond for 8,192 tokens. Flows further behind come first, and no more of them than it takes.
    """
    space = budget - plan.tokens
    mask = (1 << (space + 1)) - 1
    reached: list[int] = [1]
    choices: list[tuple[int, list[_Alternative]]] = []
    looked_at = 0
    for number in sorted(range(len(flows)), key=plan.virtual_times.__getitem__):
        if space - (reached[-1].bit_length() - 1) <= budget // _GOOD_ENOUGH or looked_at >= _MOST_CHOICES:
            break
        for alternatives in _alternatives(flows[number], plan.counts[number], space, in_order):
            sums = reached[-1]
            for tokens, _ in alternatives:
                sums |= reached[-1] << tokens
            looked_at += len(alternatives)
            if sums & mask != reached[-1]:
                choices.append((number, alternatives))
                reached.append(sums & mask)
    target = reached[-1].bit_length() - 1
    plan.tokens += target
    for k in range(len(choices) - 1, -1, -1):
        number, alternatives = choices[k]
        weight, time = flows[number].weight, plan.virtual_times[number]
        possible: list[_Alternative] = [(0, range(0)), *alternatives]
        possible = [(tokens, indices) for tokens, indices in possible if tokens <= target and reached[k] >> (target - tokens) & 1]
        tokens, indices = min(possible, key=lambda alternative: abs(time + alternative[0] / weight - plan.level))
        plan.picks += [(number, index) for index in indices]
        plan.virtual_times[number] = time + tokens / weight
        target -= tokens
    assert target == 0, f"{target} tokens of the best fit were not found again"


def _alternatives(flow: Flow, first: int, space: int, in_order: bool) -> list[list[_Alternative]]:
    """What a flow can add to `space` after its first `first` samples: choices, each a list of (tokens, indices).

    In order: one choice among its next 1, 2, 3, … samples. Else one choice per sample, lengths spread evenly.
    """
    pending = flow.pending
    if in_order:
        runs: list[_Alternative] = []
        tokens = 0
        for index in range(first, min(len(pending), first + _CHOICES_PER_FLOW)):
            tokens += pending[index].tokens
            if tokens > space:
                break
            runs.append((tokens, range(first, index + 1)))
        return [runs] if runs else []
    fitting = sorted((pending[index].tokens, index) for index in range(first, len(pending)) if pending[index].tokens <= space)
    count = min(len(fitting), _CHOICES_PER_FLOW)
    chosen = [fitting[len(fitting) - 1 - k * len(fitting) // count] for k in range(count)]
    return [[(tokens, range(index, index + 1))] for tokens, index in chosen]


def prepared_budget(tokens: int, token_budget: int) -> int:
    """The smallest prepared size that holds `tokens`: a multiple of 128 (of a sixteenth of the budget below 2,048), or `token_budget`. Of
    a sample that is longer than the budget, the next multiple of 128.
    """
    assert tokens > 0, f"a micro-batch of {tokens} tokens"
    if tokens > token_budget:
        return -(-tokens // _LARGEST_STEP) * _LARGEST_STEP
    step = min(_LARGEST_STEP, -(-token_budget // 256) * 16)
    return min(token_budget, -(-tokens // step) * step)


def auto_token_budget(
    longest_tokens: int, global_batch_tokens: Sequence[float], cap_tokens: int, *, filled: bool = True, spreads: Sequence[float] = ()
) -> int:
    """The default budget for jobs whose global batches have about `global_batch_tokens` each: a multiple of 128, at most
    `cap_tokens`, at least the longest sample (even above the cap: a sample cannot be split).

    `filled`: micro-batches should all be full. Four jobs or more: two thirds of what all but the largest offer, so that they can
    fill a micro-batch while that one ends its batch, or a twelfth of the largest batch if that is more: then its ends are rare. Over
    60 random mixes of four jobs padding was at most 2.5 %, ends of batches included. Fewer jobs: the largest batch in one micro-batch.
    Else the batches of all jobs in one micro-batch, which varies in size with their samples: fewer micro-batches.

    `spreads`: standard deviations of `global_batch_tokens`. Where a micro-batch should hold whole batches it holds those that are
    `_SPREADS` above the mean: a batch that is cut takes a second micro-batch, nearly empty (a lone job over an 8B on an H100: 17 % slower).
    """
    assert longest_tokens > 0, f"the longest sample has {longest_tokens} tokens"
    assert not spreads or len(spreads) == len(global_batch_tokens), f"{len(spreads)} spreads of {len(global_batch_tokens)} jobs"
    largest = max(global_batch_tokens, default=0.0)
    spreads = spreads or [0.0] * len(global_batch_tokens)
    if not filled:
        wanted = sum(global_batch_tokens) + _SPREADS * math.hypot(*spreads)
    elif len(global_batch_tokens) < 4:
        wanted = max((mean + _SPREADS * spread for mean, spread in zip(global_batch_tokens, spreads, strict=True)), default=0.0)
    else:
        wanted = max(sum(global_batch_tokens) - largest, largest / 8) * 2 / 3 // 128 * 128
    return max(-(-longest_tokens // 128) * 128, min(cap_tokens // 128, math.ceil(wanted / 128)) * 128)
