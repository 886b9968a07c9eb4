"""LobRA's setting by arms, predicted: six tasks with samples of up to 16,384 tokens over a 7B on sixteen A100s of 40 GB.

    python -m bench.lobra [--steps 20] [--seed 0] [--json FILE]

LobRA (arXiv 2509.01193) trains all tasks in common steps, with tensor parallelism and without recomputation, its samples padded to buckets
of 2^k. Its scripts run this setting homogeneously as 2 replicas of 8 GPUs, and unequally as 6 of one GPU that hold 2,048 tokens, one of two
(4,096) and one of eight (16,384). Both are predicted here, the unequal one as the best plan for these lengths, beside this program's means,
added one by one; all by the one model of seconds.

GPU-seconds of an arm are GPUs x the end of the slowest replica, over all steps. Lengths are drawn (the paper's data is not at hand),
seconds are multiply-adds, attention included, over what training is predicted to make of an A100, bytes are counted. Nothing is measured.
Left out, in all arms: the exchange of gradients, the optimizer's step, and the time of the planner.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from bench import machine
from bench.cards import outline_base
from bench.length_mixes import LengthJob, drawn_job
from tlora.adapter_shape import LoraShape
from tlora.adapters.layout import make_layout
from tlora.batching.dispatch import Rank, dispatch
from tlora.batching.flow import Flow, Item
from tlora.batching.pack import SMALLEST_BUDGET, pack, prepared_budget
from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.batching.replicas import cut
from tlora.planning.layout_units import Device
from tlora.planning.micro_batches import MicroBatches, SampleLengths, cost_of
from tlora.service.base_shapes import Precision, find_outline
from tlora.shape.gpu_models import find_gpu
from tlora.shape.work import JobWork

GPU, GPUS, RANK = "a100-40", 16, 16
LONGEST = 16384
SHAPE = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=LONGEST,
    tie_word_embeddings=False,
    pad_token_id=0,
)
# Mean tokens, spread and samples of a step: instructions, code, mathematics, chats, and news and bills to summarise.
TASKS = {
    "instructions": (210, 0.9, 128),
    "code": (270, 0.7, 128),
    "mathematics": (250, 0.6, 128),
    "chats": (700, 0.8, 128),
    "news": (950, 0.6, 64),
    "bills": (3900, 0.7, 16),
}
MIXES = {"few long samples": 16, "many long samples": 64}  # bills of a step
HOLDS = {1: 2048, 2: 4096, 4: 8192, 8: LONGEST}  # tokens by GPUs of a replica, without recomputation; that of 4 lies between LobRA's others
HOMOGENEOUS = ((8, LONGEST),) * 2
UNEQUAL = tuple(
    ((1, HOLDS[1]),) * (8 - 2 * twos - 4 * fours) + ((2, HOLDS[2]),) * twos + ((4, HOLDS[4]),) * fours + ((8, LONGEST),)
    for fours in range(3)
    for twos in range((8 - 4 * fours) // 2 + 1)
)  # that hold the longest, of the sixteen; LobRA's own is among them
PUBLISHED = 0.4503, 0.6067  # fewer GPU-seconds


@dataclass(frozen=True)
class Setting:
    """Bytes and seconds of the base on one GPU. `room_bytes`: what base and adapters leave to activations."""

    device: Device
    room_bytes: int

    def sample_seconds(self, tokens: int) -> float:
        """Of its products on one GPU, in an ideal micro-batch."""
        work = JobWork(tokens, float(tokens), 2, 0.0)
        return work.multiply_adds(self.device.parts.timed_weights, self.device.parts.width) / self.device.rate

    def micro_batch_seconds(self, lengths: Sequence[int], shape: int, recomputed: int = 0) -> float:
        """Of samples in one shape of so many tokens on one GPU."""
        products = self.device.cost(self.device.parts.memory).products(shape, recomputed)
        return sum(self.sample_seconds(n) for n in lengths) * products * shape / sum(lengths)

    def parallel_seconds(self, lengths: Sequence[int], gpus: int) -> float:
        """Of a micro-batch on `gpus` with tensor parallelism: all divided, and four ring all-reduces of the hidden states a layer."""
        parts, tokens = self.device.parts, sum(lengths)
        sent = 2 * (gpus - 1) / gpus * tokens * parts.hidden_size * parts.memory.element_bytes
        reduces = 4 * len(parts.layers) * sent / (self.device.gpu.peer_gb_per_second * 1e9)
        return self.micro_batch_seconds(lengths, tokens) / gpus + reduces


def make_setting(directory: Path) -> Setting:
    gpu = find_gpu(GPU)
    base = outline_base(SHAPE, directory / "base")
    how = Precision("bfloat16", None, gpu=gpu.name, capability=gpu.capability, rank=RANK)
    shape = find_outline(directory / "outlines", str(base), how)
    adapter = make_layout(LoraShape(r=RANK), shape.linears)
    return Setting(Device(gpu, shape.parts, gpu.limit_bytes), shape.parts.memory.room([adapter] * len(TASKS), gpu.limit_bytes))


def bucket_of(tokens: int) -> int:
    """The least power of two that holds them, from 256 on: seven buckets up to 16,384."""
    return max(256, 1 << math.ceil(math.log2(tokens)))


def padded_micro_batches(lengths: Sequence[int], holds: int) -> list[list[int]]:
    """Samples padded to their buckets, in micro-batches of one bucket each."""
    buckets: dict[int, int] = defaultdict(int)
    for n in lengths:
        buckets[bucket_of(n)] += 1
    made: list[list[int]] = []
    for size, count in sorted(buckets.items(), reverse=True):
        at_once = max(1, holds // size)
        made += [[size] * min(at_once, count - start) for start in range(0, count, at_once)]
    return made


def tensor_parallel_step(setting: Setting, step: Sequence[Sequence[int]], replicas: Sequence[tuple[int, int]]) -> list[float]:
    """Ends of LobRA's replicas: samples dispatched by predicted seconds to those that hold them."""
    lengths = [n for batch in step for n in batch]
    seconds = [setting.parallel_seconds([bucket_of(n)], 1) for n in lengths]
    ranks: list[Rank] = []
    for gpus, holds in replicas:
        full = [min(256, holds)] * (holds // 256)
        speed = setting.parallel_seconds(full, 1) / setting.parallel_seconds(full, gpus)
        ranks.append(Rank(speed, frozenset(i for i, n in enumerate(lengths) if bucket_of(n) <= holds)))
    shares = dispatch(seconds, ranks).items
    return [
        sum(setting.parallel_seconds(made, gpus) for made in padded_micro_batches([lengths[i] for i in share], holds))
        for share, (gpus, holds) in zip(shares, replicas, strict=True)
    ]


def packed_seconds(setting: Setting, micro: MicroBatches, batches: Sequence[Sequence[int]]) -> float:
    """Of one replica's parts of all tasks' batches, by `pack`."""
    flows = [Flow(str(task)) for task, batch in enumerate(batches) if batch]
    for flow in flows:
        flow.offer([Item(sample, n) for sample, n in enumerate(batches[int(flow.job_id)])])
    seconds = 0.0
    while (packed := pack(flows, micro.token_budget, in_order=False)) is not None:
        tokens = prepared_budget(packed.tokens, micro.token_budget)
        seconds += setting.micro_batch_seconds([row.tokens for row in packed.rows], tokens, micro.recompute.layers(tokens))
    return seconds


def padded_step(setting: Setting, step: Sequence[Sequence[int]], micro: MicroBatches) -> list[float]:
    """Each replica has as many samples of each bucket as any other, and one plan of recomputation for all of them."""
    lengths = sorted((n for batch in step for n in batch), reverse=True)
    ends: list[float] = []
    for replica in range(GPUS):
        made = padded_micro_batches(lengths[replica::GPUS], micro.token_budget)
        ends.append(sum(setting.micro_batch_seconds(own, sum(own), micro.recompute.layers(sum(own))) for own in made))
    return ends


def packed_step(setting: Setting, step: Sequence[Sequence[int]], micro: MicroBatches) -> list[float]:
    """Each task's batch is cut by tokens, as that of a job of sixteen equal replicas is."""
    cuts = [cut(batch, GPUS) for batch in step]
    return [
        packed_seconds(setting, micro, [[batch[i] for i in shares[replica]] for batch, shares in zip(step, cuts, strict=True)])
        for replica in range(GPUS)
    ]


def dispatched_step(setting: Setting, step: Sequence[Sequence[int]], micro: MicroBatches) -> list[float]:
    """The samples of all tasks are dispatched together by predicted seconds, with what their own micro-batches recompute."""
    samples = [(task, n) for task, batch in enumerate(step) for n in batch]
    budget = micro.token_budget

    def seconds(n: int) -> float:
        shape = max(budget, prepared_budget(n, budget))
        return setting.sample_seconds(n) * setting.device.cost(setting.device.parts.memory).products(shape, micro.recompute.layers(shape))

    shares = dispatch([seconds(n) for _, n in samples], [Rank()] * GPUS).items
    ends: list[float] = []
    for share in shares:
        batches: list[list[int]] = [[] for _ in step]
        for item in share:
            batches[samples[item][0]].append(samples[item][1])
        ends.append(packed_seconds(setting, micro, batches))
    return ends


def for_all(setting: Setting, tokens: int) -> RecomputePlan:
    """In every micro-batch what one of `tokens` needs."""
    return same_for_all(setting.device.parts.memory.least_recomputed(setting.room_bytes).layers(tokens))


def with_lanes(setting: Setting, jobs: Sequence[LengthJob]) -> MicroBatches:
    """Each micro-batch recomputes what it needs, with the budget that is predicted to be the fastest."""
    plan = setting.device.parts.memory.least_recomputed(setting.room_bytes)
    tokens, counts = np.unique(np.concatenate([np.repeat(job.lengths, job.batch_size) for job in jobs]), return_counts=True)
    lengths = SampleLengths(tokens, tokens * counts / float((tokens * counts).sum()))
    cost = setting.device.cost(setting.device.parts.memory)
    tried = [MicroBatches(budget, plan) for budget in range(SMALLEST_BUDGET, LONGEST + 1, SMALLEST_BUDGET)]
    return min(tried, key=lambda micro: cost_of(micro, lengths, cost))


@dataclass(frozen=True)
class Arm:
    """`ends` of a step's replicas, of so many GPUs each."""

    name: str
    widths: tuple[int, ...]
    ends: Callable[[Sequence[Sequence[int]]], list[float]]


def make_arms(setting: Setting, lanes: MicroBatches, replicas: Sequence[tuple[int, int]]) -> list[Arm]:
    """`replicas`: LobRA's unequal ones."""
    one_plan, ones = MicroBatches(LONGEST, for_all(setting, LONGEST)), (1,) * GPUS
    widths = tuple(gpus for gpus, _ in replicas)
    kinds = ", ".join(f"{widths.count(gpus)} x {gpus}" for gpus in sorted(set(widths)))
    return [
        Arm("LobRA's homogeneous: 2 x 8 GPUs, padded", (8, 8), lambda step: tensor_parallel_step(setting, step, HOMOGENEOUS)),
        Arm(f"LobRA's unequal: {kinds} GPUs, padded", widths, lambda step: tensor_parallel_step(setting, step, replicas)),
        Arm("16 x 1 GPU, padded, one recomputation for all", ones, lambda step: padded_step(setting, step, one_plan)),
        Arm("and packed", ones, lambda step: packed_step(setting, step, one_plan)),
        Arm("and recomputation by micro-batch", ones, lambda step: packed_step(setting, step, lanes)),
        Arm("and dispatched by seconds", ones, lambda step: dispatched_step(setting, step, lanes)),
    ]


def measure(setting: Setting, bills: int, steps: int, seed: int) -> dict[str, Any]:
    """All arms over the same steps."""
    tasks = TASKS | {"bills": (*TASKS["bills"][:2], bills)}
    jobs = [drawn_job(name, mean, sigma, LONGEST, batch) for name, (mean, sigma, batch) in tasks.items()]
    made = [[[item.tokens for item in job.batch(seed + n, number)] for n, job in enumerate(jobs)] for number in range(steps)]
    lengths = np.array([n for step in made for batch in step for n in batch])
    lanes = with_lanes(setting, jobs)
    best = min(UNEQUAL, key=lambda replicas: max(tensor_parallel_step(setting, made[0], replicas)))
    rows: list[dict[str, Any]] = []
    for arm in make_arms(setting, lanes, best):
        ends = [arm.ends(step) for step in made]
        gpu_seconds = GPUS * sum(map(max, ends)) / steps
        busy = sum(gpus * end for own in ends for gpus, end in zip(arm.widths, own, strict=True)) / steps
        row: dict[str, Any] = {"arm": arm.name, "gpu_seconds_a_step": gpu_seconds, "busy_share": busy / gpu_seconds}
        row["fewer"] = 1 - gpu_seconds / (rows[0]["gpu_seconds_a_step"] if rows else gpu_seconds)
        rows.append(row | {"tokens_per_gpu_second": float(lengths.sum()) / steps / gpu_seconds})
    return {
        "tasks": tasks,
        "mean_tokens": float(lengths.mean()),
        "tokens_beyond_2048": float(lengths[lengths > HOLDS[1]].sum() / lengths.sum()),
        "token_budget": lanes.token_budget,
        "recomputed_of_full": lanes.recompute.layers(lanes.token_budget),
        "recomputed_of_longest": lanes.recompute.layers(LONGEST),
        "arms": rows,
    }


def format_mix(name: str, found: dict[str, Any]) -> str:
    lines = [f"{name}: mean {found['mean_tokens']:.0f} tokens, {found['tokens_beyond_2048']:.0%} of them in samples above 2,048"]
    for row in found["arms"]:
        text = f"  {row['arm']:<46} {row['gpu_seconds_a_step']:7.1f} GPU-seconds a step, {row['fewer']:6.1%} fewer"
        lines.append(f"{text} (busy {row['busy_share']:.0%}; {row['tokens_per_gpu_second']:,.0f} tokens a GPU-second)")
    plan = f"{found['token_budget']:,} tokens, {found['recomputed_of_full']} of 32 layers recomputed"
    return "\n".join([*lines, f"  the last two: micro-batches of {plan}, {found['recomputed_of_longest']} in that of {LONGEST:,}"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"{args.steps} steps say nothing. Give 1 or more")
    with tempfile.TemporaryDirectory() as directory:
        setting = make_setting(Path(directory))
    memory = setting.device.parts.memory
    setup = {"gpu": GPU, "gpus": GPUS, "rank": RANK, "steps": args.steps, "seed": args.seed, "published_fewer": PUBLISHED}
    setup |= {"tokens_held_without_recomputation": memory.most_tokens(setting.room_bytes, 0)}
    found: dict[str, Any] = {"benchmark": "lobra", **machine.facts(torch.device("cpu"), args.commit), "setup": setup, "mixes": {}}
    for name, bills in MIXES.items():
        found["mixes"][name] = measure(setting, bills, args.steps, args.seed)
        print(format_mix(name, found["mixes"][name]), flush=True)
    machine.write(args.json, found)


if __name__ == "__main__":
    main()
