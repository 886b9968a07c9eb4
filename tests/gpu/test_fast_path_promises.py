"""All families on a GPU: together is alone bitwise, NaN stays with its owner, nothing compiles again, nothing waits for the device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache

from tests.tiny import FAMILIES, make_model, make_samples
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels.device import launched_as
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
RANKS = {"a": 4, "b": 16, "c": 64, "d": 100}
DROPOUT = {"b": 0.1}
STEPS = 3
DETERMINISTIC = [(family, True) for family in FAMILIES]
EITHER_MODE = [*DETERMINISTIC, *((family, False) for family in FAMILIES)]
FEW = ["llama-tied", "gemma2", "phi3"]
"""Biases; windows, soft caps and scaled embeddings; linears that are joined already. The other families are made of the same parts."""


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[SuperModel]:
    """One super-model in bf16 for several tests, of (family, deterministic): to compile its layers takes longer than all they do."""
    torch._dynamo.reset()
    counters.clear()
    family, deterministic = request.param
    yield make_shared(family, torch.bfloat16, deterministic)
    torch._dynamo.reset()


@pytest.fixture
def shared(compiled: SuperModel) -> Iterator[SuperModel]:
    yield compiled
    for job_id in compiled.bank.jobs():
        compiled.leave(job_id)


def make_shared(family: str, dtype: torch.dtype, deterministic: bool = True) -> SuperModel:
    head = {"head_dim": 64} if hasattr(FAMILIES[family], "head_dim") else {}
    shared = SuperModel(make_base(make_model(family, dtype, **SIZE, **head).to("cuda"), family), deterministic)
    assert shared.fast_path is not None
    return shared


def join(shared: SuperModel, job_id: str) -> None:
    lora = LoraConfig(r=RANKS[job_id], lora_dropout=DROPOUT.get(job_id, 0.0))
    shared.join(job_id, lora, TrainConfig(learning_rate=1e-3, lr_scheduler_type="constant", seed=ord(job_id)))


def batch_of(job_ids: str, step: int, poisoned: str = "", pad_to: int = 1024, high: int = 90) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in job_ids:
        own = make_samples(3, seed=100 * step + ord(job_id), low=3, high=high)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        factor = float("nan") if job_id in poisoned else 1.0
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights * factor, normalizer, (7, step, i)) for i, s in enumerate(own)]
    return collate(rows, "cuda", pad_to)


def train(shared: SuperModel, job_ids: str, poisoned: str = "", pad_to: int = 1024, steps: int = STEPS) -> dict[str, Tensor]:
    for job_id in job_ids:
        join(shared, job_id)
    for step in range(steps):
        shared.forward_backward(batch_of(job_ids, step, poisoned, pad_to))
        stats = shared.optim_step(job_ids)
        assert all(stats[job_id].applied != (job_id in poisoned) for job_id in job_ids)
    return {job_id: shared.leave(job_id).params.cpu() for job_id in job_ids}


@pytest.mark.parametrize("compiled", EITHER_MODE, indirect=True, ids=str)
def test_a_neighbour_of_nan_changes_no_bit(shared: SuperModel) -> None:
    """In deterministic mode; otherwise the others stay finite and step."""
    healthy, beside = train(shared, "abc"), train(shared, "abc", poisoned="b")
    for job_id in "ac":
        assert bool(beside[job_id].isfinite().all())
        assert not shared.deterministic or torch.equal(healthy[job_id], beside[job_id]), job_id


@pytest.mark.parametrize("compiled", EITHER_MODE, indirect=True, ids=str)
def test_a_micro_batch_does_not_wait_for_the_device(shared: SuperModel) -> None:
    """Warm (each shape compiled, then captured), with batches already made: neither training nor evaluation synchronises."""
    for job_id in "abc":
        join(shared, job_id)
    batches = [batch_of("abc", step, pad_to=1024 + 128 * (step % 2)) for step in range(8)]
    for batch in batches[:6]:
        shared.forward_backward(batch)
        shared.evaluate(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[6:]:
            shared.forward_backward(batch)
            shared.evaluate(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(s.applied for s in shared.optim_step("abc").values())


@pytest.mark.parametrize("compiled", EITHER_MODE, indirect=True, ids=str)
def test_nothing_compiles_again_as_jobs_come_and_go(shared: SuperModel) -> None:
    graphs: list[int] = []
    for step, (present, pad_to, high) in enumerate([("a", 1024, 90), ("ab", 512, 30), ("cba", 1500, 200), ("ca", 0, 64), ("d", 2048, 90)]):
        for job_id in shared.bank.jobs():
            if job_id not in present:
                shared.leave(job_id)
        for job_id in present:
            if job_id not in shared.bank:
                join(shared, job_id)
        shared.forward_backward(batch_of(present, step, pad_to=pad_to, high=high))
        shared.optim_step(present)
        shared.evaluate(batch_of(present, step, pad_to=pad_to // 2, high=high))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs == [graphs[0]] * len(graphs), f"compiled again: {graphs}"


def check_together_is_alone(shared: SuperModel) -> None:
    """With a job that drops out beside those that do not, and of a rank above 64; each alone also behind less padding."""
    together = train(shared, "abcd")
    assert all(torch.equal(params, again) for params, again in zip(together.values(), train(shared, "abcd").values(), strict=True))
    for job_id in "abcd":
        assert torch.equal(train(shared, job_id)[job_id], together[job_id]), job_id
    assert torch.equal(train(shared, "a", pad_to=0)["a"], together["a"])
    assert torch.equal(train(shared, "cab")["a"], together["a"])


@pytest.mark.parametrize("compiled", DETERMINISTIC, indirect=True, ids=str)
def test_together_is_alone_bitwise(shared: SuperModel) -> None:
    """Last of those that share a super-model: from its largest rank on, S is as wide for all."""
    check_together_is_alone(shared)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", ["gemma3", "llama-tied"])
def test_bits_do_not_depend_on_what_inductor_times(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It times several forms of each elementwise kernel: the first, the last and any of them give the same bits, wherever a job lies."""
    dice, numbers = random.Random(0), itertools.count(1)
    found: list[dict[str, Tensor]] = []
    for draw in (lambda: next(numbers), lambda: -next(numbers), dice.random, dice.random):
        monkeypatch.setattr(CachingAutotuner, "bench", lambda *_, draw=draw, **__: float(draw()))
        torch._dynamo.reset()
        with fresh_cache():
            shared = make_shared(family, torch.bfloat16)
            found.append(train(shared, "abcd"))
            check_together_is_alone(shared)
    assert all(torch.equal(params, again[job_id]) for again in found[1:] for job_id, params in found[0].items())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", ["gemma3", "llama-tied"])
def test_bits_do_not_depend_on_how_long_the_first_batch_is(family: str) -> None:
    """For which a layer is compiled: a job that trains alone begins with a shorter one than among others, or after a probe of memory."""
    found: list[dict[str, Tensor]] = []
    for pad_to in (256, 8192):
        torch._dynamo.reset()
        with fresh_cache():
            shared = make_shared(family, torch.bfloat16)
            train(shared, "a", pad_to=pad_to, steps=1)
            found.append(train(shared, "abcd"))
    assert all(torch.equal(params, found[1][job_id]) for job_id, params in found[0].items())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", FEW)
def test_together_is_alone_bitwise_in_fp32(family: str) -> None:
    check_together_is_alone(make_shared(family, torch.float32))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("family", "depth"), [*((family, 0) for family in FAMILIES), *((family, 1) for family in FEW)])
def test_a_pass_from_a_graph_has_the_bits_of_one_that_was_not(family: str, depth: int) -> None:
    """Batches of one shape, with other samples, jobs in other places, and other weights at each step."""
    shared, found = make_shared(family, torch.bfloat16), list[dict[str, Tensor]]()
    shared.recomputed_layers = depth
    for watched in (False, True):
        hook = shared.base.decoder.register_forward_hook(lambda *_: None) if watched else None
        for job_id in "abc":
            join(shared, job_id)
        for step, order in enumerate(("abc", "bca", "cab", "abc", "bca")):
            shared.forward_backward(batch_of(order, step))
            assert all(stats.applied for stats in shared.optim_step("abc").values())
        if hook is not None:
            hook.remove()
        found.append({job_id: shared.leave(job_id).params.cpu() for job_id in "abc"})
    assert shared.fast_path is not None and shared.fast_path._graphs is not None and shared.fast_path._graphs.num_captured > 0
    assert all(torch.equal(found[0][job_id], found[1][job_id]) for job_id in "abc")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_is_padded_for_a_graph_has_the_bits_of_one_that_was_not(family: str) -> None:
    """Batches of ever other sizes: soon most of them come from graphs of larger ones, on cards whose launches were measured."""
    shared, found, computed = make_shared(family, torch.bfloat16), list[dict[str, Tensor]](), list[int]()
    for most_tokens in (0, 2048):
        for job_id in "abc":
            join(shared, job_id)
        before = shared.passes.computed_tokens
        for step in range(10):
            shared.forward_backward(replace(batch_of("abc", step, pad_to=0), most_tokens=most_tokens))
            assert all(stats.applied for stats in shared.optim_step("abc").values())
        computed.append(shared.passes.computed_tokens - before)
        found.append({job_id: shared.leave(job_id).params.cpu() for job_id in "abc"})
    assert shared.fast_path is not None and shared.fast_path._graphs is not None and shared.fast_path._graphs.num_captured > 0
    if launched_as(torch.device("cuda")).sized:
        assert computed[0] < computed[1] < 1.4 * computed[0]
    else:
        assert computed[0] == computed[1]
    assert all(torch.equal(found[0][job_id], found[1][job_id]) for job_id in "abc")


@pytest.mark.usefixtures("fresh_compiler")
def test_a_join_that_moves_the_bank_drops_what_was_captured() -> None:
    shared = make_shared("llama", torch.bfloat16)
    graphs = shared.fast_path._graphs  # type: ignore[union-attr]
    join(shared, "a")
    for step in range(3):
        shared.forward_backward(batch_of("a", step))
    assert graphs is not None and graphs.num_captured == 1
    join(shared, "c")
    shared.forward_backward(batch_of("a", 3))
    assert graphs.num_captured == 0
    shared.leave("c")
    join(shared, "b")  # into the gap that "c" left; S is as wide as its rank now, so that what came before counts for nothing
    for step in range(4, 7):
        shared.forward_backward(batch_of("a", step))
    assert graphs.num_captured == 1
