"""Bases with recurrent layers, and jobs that train rows of the embedding, on a GPU: bytes together = alone, numbers as on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import transformers

from tests.numerics.peft_oracle import fp64_throughout
from tests.numerics.test_hybrids import jobs as hybrid_jobs
from tests.numerics.test_hybrids import targets
from tests.numerics.test_new_tokens import jobs as token_jobs
from tests.numerics.two_jobs import samples
from tests.numerics.world import Job, Trained, delta_error, train, train_alone
from tests.tiny import make_model
from tests.tolerances import TRAINED
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import supermodel
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDER = {"hidden_size": 256, "mamba_n_heads": 32}
HEADS = {"linear_num_value_heads": 16, "linear_num_key_heads": 8}  # the fused kernels take widths that are multiples of 16
MOST_ERROR = 5e-2  # of a gradient in bf16, by two programs: relative, in norm


LFM2 = pytest.param("lfm2", marks=pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="its convolution takes no keywords before transformers 5.23"
))  # fmt: skip


def model_on(device: str, family: str, dtype: torch.dtype, deterministic: bool) -> SuperModel:
    return SuperModel(make_base(make_model(family, dtype, **WIDER).to(device), family), deterministic)


def trained(family: str, jobs: Sequence[Job], device: str, dtype: torch.dtype, seed: int) -> dict[str, Trained]:
    """In default mode, without casts to fp32 in fp64."""
    with fp64_throughout():
        found = train(model_on(device, family, dtype, False), jobs, seed, deterministic=False)
    assert all(one.error is None for one in found.values()), found
    return found


def check_bytes(model: SuperModel, jobs: Sequence[Job]) -> None:
    """Together, in two packings and twice, alone."""
    alone = {job.name: train_alone(model, job).sha256 for job in jobs}
    for seed in (1, 2, 2):
        together = train(model, jobs, seed)
        assert all(one.error is None for one in together.values()), together
        assert {name: one.sha256 for name, one in together.items()} == alone, f"packing {seed}"


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", LFM2, "granite-4-h"])
def test_a_hybrid_together_is_alone_in_bf16(family: str) -> None:
    check_bytes(model_on("cuda", family, torch.bfloat16, True), hybrid_jobs(family, short=True))


@pytest.mark.parametrize("family", ["qwen3.5", LFM2, "granite-4-h"])
def test_a_hybrid_trains_as_on_a_cpu(family: str) -> None:
    """In fp64, in default mode: packed, adapters grouped, the library's attention, all samples of a recurrence in one call."""
    jobs = hybrid_jobs(family)
    found, true = (trained(family, jobs, device, torch.float64, 3) for device in ("cuda", "cpu"))
    for job in jobs:
        assert delta_error([x.cpu() for x in found[job.name].delta()], true[job.name].delta()) <= TRAINED[torch.float32], job.name


def fused_model(family: str, deterministic: bool, **changes: object) -> SuperModel:
    """On compiled layers: its linears' widths are multiples of 16."""
    base = make_base(make_model(family, torch.bfloat16, **{"hidden_size": 256, **HEADS, **changes}).to("cuda"), family)
    model = SuperModel(base, deterministic)
    assert model.fast_path is not None, model.kernels_on(torch.device("cuda"), deterministic)
    return model


@pytest.mark.parametrize("size", [16, 128])
def test_on_compiled_layers_together_is_alone(size: int) -> None:
    model = fused_model("qwen3.5", True, linear_key_head_dim=size, linear_value_head_dim=size)
    check_bytes(model, hybrid_jobs("qwen3.5", short=True))
    check_bytes(model, hybrid_jobs("qwen3.5"))


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_compiled_layers_and_graphs_give_the_plain_paths_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of one shape: run as it is, captured, replayed, and with all layers computed again. Other samples each time."""
    fast = fused_model(family, False)
    monkeypatch.setattr(supermodel, "why_not_fused", lambda *_: "this test compares with the plain path")
    plain = SuperModel(make_base(make_model(family, torch.bfloat16, hidden_size=256, **HEADS).to("cuda"), family))
    assert plain.fast_path is None
    for turn in range(5):
        fast.recomputed_layers = 2 if turn == 4 else 0
        found, true = (gradient_of(model, family, turn) for model in (fast, plain))
        error = float((found - true).norm() / true.norm())
        assert error <= MOST_ERROR, f"turn {turn}: the gradient is off by {error}"
    assert fast.fast_path is not None and fast.fast_path._graphs is not None
    if family == "qwen3.5":
        assert fast.fast_path._graphs.num_captured >= 1, "nothing was captured"


def test_a_layer_computed_again_has_the_same_bits() -> None:
    kept, again = (gradient_of(fused_model("qwen3.5", True), "qwen3.5", 0, layers) for layers in (0, 2))
    assert torch.equal(kept, again)


def gradient_of(model: SuperModel, family: str, turn: int, recomputed: int | None = None) -> torch.Tensor:
    """Of a job with all linears, over samples of `turn` with the same lengths in another order."""
    if recomputed is not None:
        model.recomputed_layers = recomputed
    lora = LoraConfig(r=8, target_modules=targets(family))
    if "a" not in model.bank:
        model.join("a", lora, TrainConfig(lr_scheduler_type="constant", seed=1))
        params = model.state("a").params
        params += 0.05 * torch.randn(params.shape, generator=torch.Generator().manual_seed(1)).to(params)
        model.rewrite("a")
    lengths = [70, 5, 130, 1, 64, 2]
    drawn = [samples(10 * turn + i, (n + 1,))[0] for i, n in enumerate(lengths[turn % 6 :] + lengths[: turn % 6])]
    rows = [BatchRow("a", s.input_ids, s.loss_weights, 300.0, (1, turn, i)) for i, s in enumerate(drawn)]
    model.forward_backward(collate(rows, torch.device("cuda")))
    found = model.gradient("a").clone()
    model.zero_grad_of("a")
    return found


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_trained_rows_together_are_alone(family: str) -> None:
    jobs = [replace(job, train=job.train.model_copy(update={"adam_epsilon": 1e-5})) for job in token_jobs()]
    check_bytes(model_on("cuda", family, torch.bfloat16, True), jobs)
    found, true = (trained(family, jobs, device, torch.float32, 4) for device in ("cuda", "cpu"))
    for job in jobs:
        assert delta_error([x.cpu() for x in found[job.name].delta()], true[job.name].delta()) <= 1e-2, job.name
