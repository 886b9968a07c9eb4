"""Made-up simulations that hang together: a small event loop over GPUs without nodes, with or without sharing. Not our simulator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from tlora.sim.records import FinalState, GroupSpan, JobRecord, Sample, SimulationResult

BASES = ("llama-3-8b", "qwen3-0.6b")
_STATES: tuple[FinalState, ...] = ("done", "done", "done", "done", "done", "done", "done", "done", "cancelled", "failed")


@dataclass
class Order:
    job_id: str
    tenant: str
    base: str
    gpus: int
    submitted: float
    alone: float
    state: FinalState


@dataclass
class Running:
    number: int
    base: str
    gpus: tuple[int, ...]
    since: float
    left: dict[str, float] = field(default_factory=dict)


def make_orders(count: int, seed: int = 0) -> list[Order]:
    dice = random.Random(seed)
    now, orders = 0.0, []
    for index in range(count):
        now += dice.expovariate(1 / 900)
        state = dice.choice(_STATES) if count > 1 else "done"
        alone = dice.lognormvariate(8.5, 1.6) + 1
        orders.append(
            Order(
                f"job-{index}", f"user{dice.randrange(7)}", BASES[dice.random() < 0.3], dice.choice((1, 1, 1, 2, 4, 8)), now, alone, state
            )
        )
    return orders


def make_result(orders: list[Order], policy: str, kernels: str = "tlora", num_gpus: int = 32) -> SimulationResult:
    """`fifo` waits for the first in the queue, `backfill` does not, any other name also lets up to four jobs share GPUs."""
    result = SimulationResult(policy, kernels, "made-up", 0, num_gpus, 0.9, decisions=3 * len(orders), decision_seconds=0.002 * len(orders))
    result.settings = {"nodes": "4x8", "filters": "none", "compression": 1.0}
    speed = 1.0 if kernels == "tlora" else 0.8
    free, number = list(range(num_gpus)), 0
    queue: list[Order] = []
    running: list[Running] = []
    by_id = {order.job_id: order for order in orders}
    started: dict[str, float] = {}
    coming, now = list(orders), 0.0

    def rate(group: Running) -> float:
        return speed / (1 + 0.12 * (len(group.left) - 1))

    def close(group: Running) -> None:
        if now > group.since:
            result.spans.append(GroupSpan(f"g{group.number}", group.base, group.gpus, group.since, now, tuple(group.left)))
        group.since = now

    while coming or running or queue:
        ends = [now + min(group.left.values()) / rate(group) for group in running]
        until: float = min([*ends, *([coming[0].submitted] if coming else [])])
        for group in running:
            for job_id in group.left:
                group.left[job_id] -= (until - now) * rate(group)
        now = until
        while coming and coming[0].submitted <= now:
            queue.append(coming.pop(0))
        for group in list(running):
            over = [job_id for job_id, left in group.left.items() if left <= 1e-6]
            if over:
                close(group)
            for job_id in over:
                del group.left[job_id]
                result.jobs.append(_record(by_id[job_id], started[job_id], now, speed))
            if not group.left:
                running.remove(group)
                free = sorted([*free, *group.gpus])
        for order in list(queue):
            shared = [g for g in running if g.base == order.base and len(g.gpus) == order.gpus and len(g.left) < 4]
            if len(free) >= order.gpus:
                group = Running(number, order.base, tuple(free[: order.gpus]), now)
                number, free = number + 1, free[order.gpus :]
                running.append(group)
            elif shared and policy not in ("fifo", "backfill"):
                group = min(shared, key=lambda g: len(g.left))
                close(group)
            elif policy == "fifo":
                break
            else:
                continue
            group.left[order.job_id] = order.alone
            started[order.job_id] = now
            queue.remove(order)
        used = num_gpus - len(free)
        members = sum(len(group.left) for group in running)
        result.samples.append(
            Sample(now, len(queue), members, used, min(1.0, 0.5 * used / num_gpus + 0.004 * members), 500.0 * used, num_gpus)
        )
    return result


def _record(order: Order, started: float, finished: float, speed: float) -> JobRecord:
    alone, tokens = order.alone / speed, 2048.0
    steps = max(1.0, math.floor(order.alone * 7000 / tokens))
    slowdown = (finished - started) / alone
    return JobRecord(
        job_id=order.job_id,
        tenant=order.tenant,
        base_model=order.base,
        gpus=order.gpus,
        submitted_seconds=order.submitted,
        started_seconds=started,
        finished_seconds=finished,
        state=order.state,
        tokens_per_step=tokens,
        steps=steps,
        alone_seconds=alone,
        max_slowdown=1.5,
        windows=int(steps // 10),
        windows_beyond=0,
        regroupings=int(slowdown > 1.2),
        gpu_seconds=(finished - started) * order.gpus,
        worst_slowdown=slowdown * 1.05,
        mean_slowdown=slowdown,
    )
