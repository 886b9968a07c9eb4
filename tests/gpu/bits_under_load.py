"""Do jobs keep their bits while other processes press on the GPU? `python -m tests.gpu.bits_under_load FAMILY graphs|hooks RUNS SEED`.

Trains jobs again and again, alone and in different company, and compares each gradient with that of the first time. With `graphs` passes
run as they do for users; with `hooks` they are not captured, and what each layer gives forward and back is compared too: the first thing
that differs says where to look. A line for each of the first differences, and one at the end; exit status 1 if anything differed.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
from torch import Tensor

from tests.gpu.test_fast_path_promises import STEPS, batch_of, join, make_shared
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.load import layers_of
from tlora.supermodel.supermodel import SuperModel

COMPANIES = ("abcd", "d", "c", "a", "b", "cab", "da")
_MOST_SHOWN = 4
Trace = list[tuple[str, Tensor]]
"""What was seen of one job, in order: its rows of what a layer gave, then its gradient, for each step."""


class Watch:
    """What layers give and get, [1, T, H], by name."""

    def __init__(self, shared: SuperModel) -> None:
        self.seen: Trace = []
        for number, layer in enumerate(layers_of(shared.base.decoder)):
            layer.register_forward_hook(lambda _layer, _args, out, number=number: self._see(number, out))
        shared.base.decoder.register_forward_hook(lambda *_: None)  # a graph would call none of them

    def _see(self, number: int, out: Tensor | tuple[Tensor, ...]) -> None:
        x = out[0] if isinstance(out, tuple) else out
        self.seen.append((f"out of layer {number}", x.detach().clone()))
        if x.requires_grad:
            x.register_hook(lambda dx: self.seen.append((f"gradient into layer {number}", dx.detach().clone())))


def rows_of(batch: PackedBatch, seen: Trace, t0: int, t1: int) -> Trace:
    """Of the tensors that have a row for each token."""
    count = len(batch.input_ids_T)
    flat = [(name, x.flatten(0, -2)) for name, x in seen]
    return [(name, x[t0:t1].cpu()) for name, x in flat if len(x) == count]


def train(shared: SuperModel, jobs: str, watch: Watch | None) -> dict[str, Trace]:
    for job in jobs:
        join(shared, job)
    found: dict[str, Trace] = {job: [] for job in jobs}
    for step in range(STEPS):
        batch = batch_of(jobs, step)
        shared.forward_backward(batch)
        for span in batch.spans:
            rows = [] if watch is None else rows_of(batch, watch.seen, span.t0, span.t1)
            found[span.job_id] += [(f"step {step}, {name}", x) for name, x in rows]
            found[span.job_id].append((f"step {step}, gradient", shared.gradient(span.job_id).cpu()))
        if watch is not None:
            watch.seen.clear()
        shared.optim_step(jobs)
    for job in jobs:
        shared.leave(job)
    return found


def difference(found: Trace, expected: Trace) -> str:
    """The first, in words; nothing where all bits are the same."""
    for (name, x), (_, y) in zip(found, expected, strict=True):
        if not torch.equal(x, y):
            at = (x != y).flatten().nonzero().flatten()
            some = at[:: max(1, len(at) // 8)][:8].tolist()
            most = float((x.double() - y.double()).abs().max())
            return f"{name} {list(x.shape)}: {len(at)} numbers, by up to {most:.3g} of {float(y.abs().max()):.3g}, at {some}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("how", choices=("graphs", "hooks"))
    parser.add_argument("runs", type=int)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    shared = make_shared(options.family, torch.bfloat16)
    watch = Watch(shared) if options.how == "hooks" else None
    first, rng, bad = dict[str, Trace](), random.Random(options.seed), 0
    called = f"{options.family}, {options.how}, seed {options.seed}"
    for run in range(options.runs):
        jobs = COMPANIES[0] if run == 0 else rng.choice(COMPANIES)
        for job, trace in train(shared, jobs, watch).items():
            if told := difference(trace, first.setdefault(job, trace)):
                bad += 1
                if bad <= _MOST_SHOWN:
                    print(f"{called}: run {run}, jobs {jobs}, job {job}: {told}", flush=True)
    print(f"{called}: {options.runs} runs, {bad} differences", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
