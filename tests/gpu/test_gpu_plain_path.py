"""The plain path on a GPU, forced where the card has fused kernels: attention by the library's kernels against fp64, training against PEFT,
neighbours' NaN stays theirs, nothing waits for the device, and a killed run resumes to the same bytes.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tlora
from tests.engine.tiny_runs import job, run_spec, save_base, sha256, write_rows
from tests.kernels.test_grouped_lora import MIXES, SIZE, case_of
from tests.kernels.test_multi_lora import Case, Found, oracle
from tests.numerics.checks import standard_jobs
from tests.numerics.peft_oracle import peft_train
from tests.numerics.world import WIDE, delta_error
from tests.supermodel.test_plain_path import SPOILT, spoil
from tests.tiny import FAMILIES, make_model, make_samples
from tests.tolerances import KERNEL, TRAINED, assert_close
from tlora.adapters.state import init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels.device import FORCED, launched_as
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.grouped_lora import ChunkedJobs, grouped_lora_linear, make_slots
from tlora.kernels.library_attention import attend_samples, kind_for, lay_out_samples
from tlora.kernels.multi_lora import LoraWeights
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.job_by_job import JobByJobOptimizer
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CUDA = torch.device("cuda")
LENGTHS = (1, 33, 7, 200, 64, 130)
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LORA = {"a": LoraConfig(r=4), "b": LoraConfig(r=64, lora_dropout=0.1), "c": LoraConfig(r=16, target_modules="all-linear")}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(FORCED, "plain")
    launched_as.cache_clear()
    yield
    launched_as.cache_clear()


# -- attention ---------------------------------------------------------------------------------------------------------


def heads(dtype: torch.dtype, size: int, num_heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """q, k, v as a family's layers give them: [1, H, T, D], seen from [T, H, D]."""
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, sum(LENGTHS), size, generator=g, dtype=torch.float64) for n in (num_heads, kv_heads, kv_heads)]
    return [t.to(CUDA, dtype).transpose(0, 1).requires_grad_() for t in drawn]


def true_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    repeat, owner = q.shape[1] // k.shape[1], torch.repeat_interleave(torch.tensor(LENGTHS)).to(CUDA)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    place = torch.arange(len(q), device=CUDA)
    distance = place[:, None] - place[None, :]
    visible = (owner[:, None] == owner[None, :]) & (distance >= 0) & (distance < (window or len(q)))
    scores = torch.einsum("ihd,jhd->hij", q, k) * 0.3
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("dtype", "size", "kind"),
    [
        (torch.bfloat16, 64, "flash"),
        (torch.float16, 128, "flash"),
        (torch.bfloat16, 256, "efficient"),
        (torch.bfloat16, 512, "efficient"),
        (torch.float32, 128, "efficient"),
        (torch.float64, 64, "padded"),
    ],
)
def test_attention(dtype: torch.dtype, size: int, kind: str, window: int | None) -> None:
    found, layout = heads(dtype, size), lay_out_samples(LENGTHS, CUDA)
    assert kind_for(found[0], found[2], CUDA, None) == kind
    true = [t.detach().double().requires_grad_() for t in found]
    out, expected = attend_samples(*found, layout, 0.3, window, None), true_attention(*true, window)  # type: ignore[misc,call-arg]
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(CUDA)
    out.backward(dout.to(dtype))
    expected.backward(dout)
    bound = 10 * KERNEL[dtype]
    assert_close(out, expected, bound, "out")
    for name, mine, its in zip("qkv", found, true, strict=True):
        assert mine.grad is not None and its.grad is not None
        assert_close(mine.grad, its.grad, bound, f"d{name}")


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 64), (torch.float64, 64)], ids=str
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_sample_leaks_nowhere(bad: float, dtype: torch.dtype, size: int) -> None:
    """The samples next to it lie in the same tiles of memory. dQ may be summed in another order, hence close and finite."""
    good, poisoned, layout = heads(dtype, size), heads(dtype, size), lay_out_samples(LENGTHS, CUDA)
    mine = torch.ones(sum(LENGTHS), dtype=torch.bool, device=CUDA)
    mine[34:41] = mine[241:305] = False  # the third and the fifth sample
    for t in poisoned:
        t.data[~mine] = bad
    outs = [attend_samples(*ts, layout, 0.3, None, None) for ts in (good, poisoned)]  # type: ignore[misc,call-arg]
    for out in outs:
        out.backward(torch.ones_like(out))
    assert torch.equal(outs[0][mine], outs[1][mine])
    for name, mine_t, its_t in zip("qkv", good, poisoned, strict=True):
        assert mine_t.grad is not None and its_t.grad is not None
        assert_close(its_t.grad[mine], mine_t.grad[mine], KERNEL[dtype], f"d{name}")


# -- linears, head -----------------------------------------------------------------------------------------------------


def on_gpu(case: Case) -> Case:
    moved = {name: getattr(case, name).to(CUDA) for name in ("x", "weight", "a", "b", "dy")}
    return replace(
        case,
        **moved,
        bias=case.bias if case.bias is None else case.bias.to(CUDA),
        keys=case.keys if case.keys is None else case.keys.to(CUDA),
    )


def run(case: Case, counts: tuple[int, ...]) -> Found:
    sums = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    lora = LoraWeights(case.a, case.b, torch.ones_like(case.a, dtype=sums), torch.ones_like(case.b, dtype=sums), case.module_key)
    x = case.x.clone().requires_grad_()
    slots = make_slots(ChunkedJobs(SIZE, counts), case.segments, sums, CUDA)
    y = grouped_lora_linear(x, lambda: FrozenLinear(PlainWeight(case.weight), case.bias), lora, slots, case.keys)
    y.backward(case.dy)
    assert x.grad is not None
    return Found(y.detach(), x.grad, lora.da_RK - 1, lora.db_RN - 1)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("counts", "ranks"), MIXES.values(), ids=MIXES)
def test_linears(counts: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, dropout: float) -> None:
    case = case_of(counts, ranks, dtype, k=96, n=160, dropout=dropout)
    found, true = run(on_gpu(case), counts), oracle(case)
    for name in ("y", "dx", "da", "db"):
        assert_close(getattr(found, name).cpu(), getattr(true, name), KERNEL[dtype], name)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_a_neighbour_holds_changes_no_bit(bad: float) -> None:
    counts, case = (2, 1, 3), on_gpu(case_of((2, 1, 3), (4, 64, 17), torch.bfloat16, k=96, n=160, dropout=0.3))
    middle, poisoned = case.segments[1], replace(case, x=case.x.clone(), dy=case.dy.clone(), a=case.a.clone(), b=case.b.clone())
    for values, own in (
        (poisoned.x, (middle.t0, middle.t1)),
        (poisoned.dy, (middle.t0, middle.t1)),
        (poisoned.a, (middle.r0, middle.r1)),
        (poisoned.b, (middle.r0, middle.r1)),
    ):
        values[slice(*own)] = bad
    healthy, beside = run(case, counts), run(poisoned, counts)
    for segment in (case.segments[0], case.segments[2]):
        tokens, rows = slice(segment.t0, segment.t1), slice(segment.r0, segment.r1)
        assert torch.equal(healthy.y[tokens], beside.y[tokens]) and torch.equal(healthy.dx[tokens], beside.dx[tokens])
        assert torch.equal(healthy.da[rows], beside.da[rows]) and torch.equal(healthy.db[rows], beside.db[rows])


# -- training ----------------------------------------------------------------------------------------------------------


def make_shared(dtype: torch.dtype, family: str = "llama", deterministic: bool = False) -> SuperModel:
    changes = SHAPE | ({"head_dim": 64} if hasattr(FAMILIES[family], "head_dim") else {})
    shared = SuperModel(make_base(make_model(family, dtype, **changes).to(CUDA), family), deterministic)
    assert shared.fast_path is None and isinstance(shared.optimizer, JobByJobOptimizer) and shared.plain_path.grouped != deterministic
    return shared


def batch_of(jobs: str, step: int) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in jobs:
        own = make_samples(3, seed=100 * step + ord(job_id), low=3, high=90, vocab=SPOILT)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, (ord(job_id), step, i)) for i, s in enumerate(own)]
    return collate(rows, CUDA, pad_to=1024)


def join(shared: SuperModel, jobs: str) -> None:
    for job_id in jobs:
        train = TrainConfig(learning_rate=1e-3, lr_scheduler_type="constant", seed=ord(job_id))
        state = init_state(shared.layout(LORA[job_id]), ord(job_id), torch.float32, CUDA)
        noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(job_id))).to(CUDA)
        shared.join(job_id, LORA[job_id], train, state=replace(state, params=state.params + 0.02 * noise))


def trained(shared: SuperModel, jobs: str, steps: int = 3) -> dict[str, Tensor]:
    join(shared, jobs)
    for step in range(steps):
        shared.forward_backward(batch_of(jobs, step))
        assert all(stats.applied for stats in shared.optim_step(jobs).values())
    return {job_id: shared.leave(job_id).params.cpu() for job_id in jobs}


def test_training_is_pefts() -> None:
    """Three jobs together, fp32, in default mode: weight changes as PEFT and torch's AdamW make them, one job after another on the CPU."""
    jobs = [replace(each, pause_after=None, join_at=0) for each in standard_jobs()]
    shared = SuperModel(make_base(make_model(**dict(WIDE)).to(CUDA), "llama"))  # type: ignore[arg-type]
    assert shared.plain_path.grouped
    for each in jobs:
        shared.join(each.name, each.lora, each.train, each.steps)
    for step in range(max(each.steps for each in jobs)):
        due = [each for each in jobs if step < each.steps]
        shared.forward_backward(collate([each.row(step, i) for each in due for i in each.batch(step)], CUDA))
        shared.optim_step([each.name for each in due])
    for each in jobs:
        state = shared.leave(each.name)
        found = [s.scale * (b.double().t() @ a.double()) for s, a, b in state.layout.views(state.params.cpu())]
        start = init_state(state.layout, each.train.seed, torch.float32).params
        expected, _ = peft_train(make_model(**dict(WIDE)), each, state.layout, start)  # type: ignore[arg-type]
        assert delta_error(found, expected) <= TRAINED[torch.float32], each.name


def test_together_is_alone_bitwise_in_deterministic_mode() -> None:
    shared = make_shared(torch.bfloat16, deterministic=True)
    together = trained(shared, "abc")
    for job_id, found in together.items():
        assert torch.equal(found, trained(shared, job_id)[job_id]), job_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_neighbour_of_nan_stays_by_itself(dtype: torch.dtype) -> None:
    """NaN in every hidden state of `b`: the others' losses keep their bits, their gradients are finite and the same but for dQ's order."""
    found: list[dict[str, Tensor]] = []
    for bad in (False, True):
        shared = make_shared(dtype, "gemma3")
        join(shared, "abc")
        batch = batch_of("abc", 0)
        middle = batch.spans[1]
        batch.input_ids_T[middle.t0 : middle.t1] = SPOILT
        if bad:
            shared.base.model.get_input_embeddings().register_forward_hook(spoil)
        losses = shared.forward_backward(batch)
        found.append({j: shared.bank.gradient(j) for j in "abc"} | {f"loss {j}": losses[j].loss_sum for j in "abc"})
        stats = shared.optim_step("abc")
        assert [stats[j].applied for j in "abc"] == [True, not bad, True]
    healthy, beside = found
    for name in ("loss a", "loss c"):
        assert torch.equal(healthy[name], beside[name]), name
    for name in "ac":
        assert_close(beside[name], healthy[name], KERNEL[dtype], name)


def test_nothing_waits_for_the_device() -> None:
    shared = make_shared(torch.bfloat16)
    join(shared, "abc")
    batches = [batch_of("abc", step) for step in range(3)]
    shared.forward_backward(batches[0])
    shared.optim_step("abc")  # libraries make their workspaces
    torch.cuda.set_sync_debug_mode("error")
    try:
        shared.forward_backward(batches[1])
        steps = shared.measure_gradients("abc").update()
        shared.evaluate(batches[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not steps.done and all(stats.applied for stats in steps.read().values())


# -- runs --------------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import tlora
from tlora.group.stream import Stream
compute, left = Stream.compute, [int(sys.argv[2])]
def counting(*args):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(*args)
Stream.compute = counting
tlora.train(tlora.RunSpec.model_validate_json(open(sys.argv[1]).read()), device="cuda")
"""


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_killed_run_resumes(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In deterministic mode to the bytes of the run that nothing killed."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base = save_base(tmp_path / "base")
    orders = [
        job(name, str(write_rows(tmp_path / f"{name}.jsonl", 24, i)), r=4 * 4**i, save_steps=2, lora_dropout=0.1 * i)
        for i, name in enumerate(("a", "b"))
    ]
    settings: dict[str, Any] = {"deterministic": deterministic, "dtype": "bfloat16"}
    whole = tlora.train(run_spec(base, tmp_path / "whole", orders, **settings), device="cuda")
    order = run_spec(base, tmp_path / "out", orders, **settings)
    (tmp_path / "order.json").write_text(order.model_dump_json())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "order.json"), "4"], env=os.environ | {FORCED: "plain"}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    resumed = tlora.train(order, device="cuda", resume=True)
    assert all(result.status == "done" for result in (*whole.values(), *resumed.values()))
    for name in ("a", "b"):
        assert not deterministic or sha256(tmp_path / "out" / name) == sha256(tmp_path / "whole" / name), name
