"""Experts as LoRA targets: PEFT's adapters of parameters, gradient by gradient; together is alone bitwise; neighbours with NaN; files."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.planted import Change, planted
from tests.supermodel.test_experts import FAMILIES as SMALL
from tests.supermodel.test_experts import SIZE
from tests.tiny import LINEAR
from tests.tolerances import LOGITS, TRAINED, assert_close
from tlora.adapters import peft as peft_files
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.peft import load_params, save_adapter
from tlora.errors import ModelError
from tlora.job import JobSpec, LoraConfig, TrainConfig
from tlora.kernels import experts
from tlora.kernels.experts import ExpertRun
from tlora.planning.start import adopt_adapter_config
from tlora.supermodel import experts as blocks
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.experts import Experts
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.scaled_experts import why_left
from tlora.supermodel.supermodel import SuperModel

FAMILIES: dict[str, Any] = {
    **SMALL,
    "gemma4": transformers.Gemma4TextConfig(
        **SIZE,
        head_dim=64,
        global_head_dim=64,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=64,
        vocab_size_per_layer_input=131,
        hidden_size_per_layer_input=0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **SIZE,
        head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "llama4": transformers.Llama4TextConfig(
        **SIZE, head_dim=64, num_local_experts=8, num_experts_per_tok=1, intermediate_size_mlp=320, attention_chunk_size=16, moe_layers=[1]
    ),
    "minimax-m2": transformers.MiniMaxM2Config(**SIZE, head_dim=64, num_local_experts=8, num_experts_per_tok=2),
    "qwen3.5-moe": transformers.Qwen3_5MoeTextConfig(
        **SIZE,
        **LINEAR | {"head_dim": 64},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "nemotron-3-h": transformers.NemotronHConfig(
        **{key: value for key, value in SIZE.items() if key != "num_hidden_layers"},
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
    ),
}
IN_FP32 = ("nemotron-3-h",)  # whose own experts add slots in fp32, in an fp64 model too
# DeepSeek's router, Llama 4's scores and Qwen3.5's decays are fp32 as well: a GPU rounds these by how many tokens there are.
IN_FP32_BY_TOKENS = ("deepseek-v3", "qwen3.5-moe", "llama4")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
UP_DOWN = ["experts.up_proj", "experts.down_proj"]  # of experts without gates
TRAIN = TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=0.0, seed=1)
LENGTHS = {"a": (63, 1, 64), "b": (65, 7), "c": (3, 19, 2)}
JOBS = {
    "a": LoraConfig(r=4, target_parameters=BOTH, target_modules=[]),
    "b": LoraConfig(r=6, target_parameters=["gate_up_proj"], target_modules=["o_proj"], expert_rank="divide"),
    "c": LoraConfig(r=16, target_modules=["o_proj"], lora_dropout=0.1),
}


def make_model(family: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Two of the experts have the same scores: every choice between them is a tie. torch's grouped product has no fp64: eager experts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=dtype)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith((".gate.weight", "router.weight", "router.proj.weight")):
                    nn.init.normal_(p, std=0.3)
                    p[1] = p[0]
                elif name.endswith("bias"):
                    nn.init.normal_(p, std=0.1)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model.eval().to(device)


def lora_of(family: str, job_id: str) -> LoraConfig:
    lora = JOBS[job_id]
    if "nemotron" not in family or not lora.target_parameters:
        return lora
    return lora.model_copy(update={"target_parameters": UP_DOWN[: len(lora.target_parameters)]})


def make_shared(family: str, dtype: torch.dtype, deterministic: bool = True, device: str = "cpu") -> SuperModel:
    return SuperModel(make_base(make_model(family, dtype, device), family), deterministic)


def batch_of(job_ids: str, step: int, neighbour_token: int | None = None, device: str = "cpu") -> PackedBatch:
    """`neighbour_token`: what stands in the samples of all jobs but the first."""
    rows: list[BatchRow] = []
    for job_id in job_ids:
        rng = np.random.default_rng(100 * step + ord(job_id))
        for i, length in enumerate(LENGTHS[job_id]):
            ids = rng.integers(3, 130, length).astype(np.int32)
            if neighbour_token is not None and job_id != job_ids[0]:
                ids[length // 2] = neighbour_token
            rows.append(
                BatchRow(job_id, ids, np.ones(length, np.float32), float(sum(LENGTHS[job_id]) - len(LENGTHS[job_id])), (7, step, i))
            )
    return collate(rows, device)


def join(shared: SuperModel, job_ids: str) -> None:
    for job_id in job_ids:
        shared.join(job_id, lora_of(shared.base.name, job_id), TRAIN.model_copy(update={"seed": ord(job_id)}))


def train(shared: SuperModel, job_ids: str, steps: int = 2) -> dict[str, Tensor]:
    join(shared, job_ids)
    for step in range(steps):
        shared.forward_backward(batch_of(job_ids, step, device=shared.device.type))
        assert all(stats.applied for stats in shared.optim_step(job_ids).values())
    return {job_id: shared.leave(job_id).params for job_id in job_ids}


# -- against PEFT --------------------------------------------------------------------------------------------------------


def in_peft(family: str, directory: Path, device: str) -> Any:
    with warnings.catch_warnings():  # of patterns, which it looks for among modules alone, and applies to parameters too
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        return peft.PeftModel.from_pretrained(make_model(family, torch.float64, device), str(directory), is_trainable=True)


def file_of(layout: AdapterLayout, flat_P: Tensor, lora: LoraConfig, directory: Path) -> dict[str, Tensor]:
    directory.mkdir(exist_ok=True)
    save_adapter(directory, layout, flat_P, lora, "some/base")
    return load_file(directory / "adapter_model.safetensors")


def peft_parameters(model: Any) -> dict[str, Any]:
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def loss_of(model: Any, batch: PackedBatch) -> Tensor:
    """Of one sample after another."""
    total, start = torch.zeros((), dtype=torch.float64, device=batch.labels_T.device), 0
    for length in batch.lengths:
        own = slice(start, start + length)
        logits = model(input_ids=batch.input_ids_T[own][None], use_cache=False).logits[0]
        total = total + (F.cross_entropy(logits, batch.labels_T[own], reduction="none") * batch.grad_weights_T[own]).sum()
        start += length
    return total


def check_against_peft(family: str, lora: LoraConfig, directory: Path, steps: int = 3, device: str = "cpu") -> None:
    in_fp32 = IN_FP32 if device == "cpu" else (*IN_FP32, *IN_FP32_BY_TOKENS)
    shared, inside = make_shared(family, torch.float64, device=device), torch.float32 if family in in_fp32 else torch.float64
    shared.join("a", lora, TRAIN)
    layout, params = shared.state("a").layout, shared.state("a").params
    noise = torch.randn(params.shape, generator=torch.Generator().manual_seed(0), dtype=params.dtype)
    params += noise.to(device) * 0.02  # B is not zero from here on
    shared.rewrite("a")
    begun = params.clone()
    file_of(layout, params, lora, directory / "begun")
    theirs = in_peft(family, directory / "begun", device)
    parameters = peft_parameters(theirs)
    optimizer = torch.optim.AdamW(parameters.values(), lr=TRAIN.learning_rate, weight_decay=TRAIN.weight_decay)
    for step in range(steps):
        batch = batch_of("a", step, device=device)
        ours = shared.forward_backward(batch)["a"]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(theirs, batch)
        loss.backward()
        assert ours.mean == pytest.approx(float(loss.detach()), rel=1e-5 if family in in_fp32 else 1e-8)
        gradients = file_of(layout, shared.gradient("a"), lora, directory / "gradients")
        assert gradients.keys() == parameters.keys()
        for name, gradient in gradients.items():
            expected = torch.zeros_like(gradient) if parameters[name].grad is None else parameters[name].grad
            assert_close(gradient, expected.cpu(), TRAINED[inside], f"step {step}, {name}")
        for parameter in parameters.values():  # an expert without tokens has a gradient of zero, and its weights decay
            assert parameter.grad is not None
        optimizer.step()
        shared.optim_step(["a"])
    trained = file_of(layout, shared.state("a").params, lora, directory / "trained")
    start = file_of(layout, begun, lora, directory / "begun")
    for name, weights in trained.items():
        assert_close(weights - start[name], parameters[name].detach().cpu() - start[name], TRAINED[inside], name)
    again = in_peft(family, directory / "trained", device)
    logits = again(input_ids=batch.input_ids_T[None, :63], use_cache=False).logits
    assert_close(logits, theirs(input_ids=batch.input_ids_T[None, :63], use_cache=False).logits, LOGITS[inside])
    theirs.save_pretrained(directory / "peft", save_embedding_layers=False)
    adopted, _ = adopt_adapter_config(JobSpec(name="x", data={"path": "-"}), directory / "peft")  # type: ignore[arg-type]
    assert shared.layout(adopted) == layout
    assert_close(load_params(directory / "peft", layout, torch.float64), shared.state("a").params.cpu(), TRAINED[inside])


SLOW = pytest.mark.slow
DIVIDED = LoraConfig(r=12, lora_alpha=8, target_parameters=BOTH, target_modules=["o_proj"], expert_rank="divide")
CASES = [
    pytest.param("qwen3-moe", DIVIDED, id="qwen3-moe"),
    pytest.param("llama4", LoraConfig(r=3, target_parameters=BOTH, target_modules=["o_proj"]), id="llama4"),
    pytest.param(  # in every run `test_mxfp4_checkpoint.py` has the family
        "gpt-oss", LoraConfig(r=3, target_parameters=BOTH, target_modules=[]), id="gpt-oss", marks=SLOW
    ),
    pytest.param("gemma4", LoraConfig(r=2, target_parameters=BOTH, target_modules=["o_proj"]), id="gemma4", marks=SLOW),
    pytest.param("mixtral", LoraConfig(r=3, target_parameters=["down_proj"], target_modules=[], use_rslora=True), id="one", marks=SLOW),
    pytest.param(
        "mixtral",
        DIVIDED.model_copy(update={"rank_pattern": {"experts.down_proj": 5}, "use_rslora": True, "target_parameters": BOTH}),
        id="mixtral-patterns",
        marks=SLOW,
    ),
    *(pytest.param(family, DIVIDED, id=family, marks=SLOW) for family in ("deepseek-v3", "glm4-moe", "minimax-m2", "qwen3.5-moe")),
    pytest.param(
        "nemotron-3-h",
        LoraConfig(r=3, target_parameters=UP_DOWN, target_modules=["in_proj", "q_proj", "o_proj", "3.mixer.up_proj"]),
        id="nemotron-3-h",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_gradients_and_steps_are_pefts(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    check_against_peft(family, lora, tmp_path)


def test_tokens_that_are_scaled_elsewhere_or_at_several_experts_are_refused() -> None:
    """Llama 4: scores behind its experts are not what its block computes; with two experts a token it is left frozen, and says so."""
    with planted((blocks, "_scaled", lambda _, x_TH, weights_TK: (x_TH, weights_TK))):
        assert "computes something else than its parameters say" in (make_shared("llama4", torch.float32).experts.why_not or "")
    two = copy.deepcopy(FAMILIES["llama4"])
    two.num_experts_per_tok = 2
    shared = SuperModel(make_base(transformers.AutoModelForCausalLM.from_config(two).eval(), "llama4"))
    with pytest.raises(ModelError, match="cannot be adapted: Llama4TextExperts: they take tokens multiplied by their routers' scores"):
        shared.layout(JOBS["a"])
    assert not shared.experts.sizes and shared.layout(JOBS["c"]).numel


def test_experts_of_which_some_are_identities_are_refused() -> None:
    """LongCat-Flash: one parameter has rows for them, the other none."""
    experts = nn.Module()
    experts.gate_up_proj, experts.down_proj = nn.Parameter(torch.zeros(6, 8, 4)), nn.Parameter(torch.zeros(4, 4, 4))
    assert why_left(nn.ModuleDict({"experts": experts})) == (
        "Module: gate_up_proj is of 6 experts and down_proj of 4: the others give a token back as it is"
    )


# -- together and alone --------------------------------------------------------------------------------------------------


def check_together(family: str, dtype: torch.dtype, device: str = "cpu") -> None:
    shared = make_shared(family, dtype, device=device)
    together = train(shared, "abc")
    for job_id in "abc":
        assert torch.equal(train(shared, job_id)[job_id], together[job_id]), job_id
    # the third job, which comes first, leaves after the first step, and the second takes its place
    join(shared, "ac")
    for step, others in enumerate(("ca", "ba")):
        shared.forward_backward(batch_of(others, step, device=device))
        shared.optim_step(others)
        if step == 0:
            shared.leave("c")
            join(shared, "b")
    assert torch.equal(shared.leave("a").params, together["a"])
    assert not torch.equal(together["a"], train(shared, "a", steps=1)["a"]), "a step changes nothing, so nothing was compared"
    shared.leave("b")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(pytest.param(family, torch.float32, marks=[] if family == "qwen3-moe" else SLOW) for family in FAMILIES),
        *(pytest.param(family, torch.bfloat16, marks=pytest.mark.soak) for family in FAMILIES),
    ],
    ids=str,
)
def test_together_is_alone_bitwise(family: str, dtype: torch.dtype) -> None:
    check_together(family, dtype)


def test_a_tie_between_experts_falls_alike_together_and_alone() -> None:
    """Experts 0 and 1 have equal scores. Each sample has a router product of its own, so that a row is chosen among the same bits."""
    chosen: list[Tensor] = []

    def noted(chosen_TK: Tensor, ends: Sequence[int], num_experts: int) -> experts.Routing:
        chosen.append(chosen_TK.clone())
        return healthy_route(chosen_TK, ends, num_experts)

    shared, choices = make_shared("qwen3-moe", torch.float32), list[list[Tensor]]()
    with planted((experts, "route", noted)):
        for job_ids in ("abc", "a"):
            join(shared, job_ids)
            chosen.clear()
            shared.forward_backward(batch_of(job_ids, 0))
            choices.append(chosen[: 2 * len(LENGTHS["a"])])  # of two layers; its samples are the first
            for job_id in job_ids:
                shared.leave(job_id)
    together, alone = choices
    assert len(alone) == 6 and all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    ties = sum(int(((rows == 0).any(1) ^ (rows == 1).any(1)).sum()) for rows in alone)
    assert ties > 10, "no row had to choose between the two"


def packed_gradient(shared: SuperModel, neighbour_token: int, job_ids: str = "abc") -> Tensor:
    """Of the first job, in one pass with all others."""
    with torch.no_grad():
        shared.model.get_input_embeddings().weight[130] = torch.nan
    join(shared, job_ids)
    shared.forward_backward(batch_of(job_ids, 0, neighbour_token))
    gradient = shared.gradient(job_ids[0])
    for job_id in job_ids:
        shared.leave(job_id)
    return gradient


def test_what_neighbours_hold_changes_no_bit_of_a_packed_batch() -> None:
    """NaN in theirs, and tokens that go to other experts: as many rows of mine are multiplied at once as before."""
    shared = make_shared("qwen3-moe", torch.float32, deterministic=False)
    clean = packed_gradient(shared, 5)
    assert bool(clean.isfinite().all()) and float(clean.norm()) > 0
    assert torch.equal(packed_gradient(shared, 130), clean)
    assert torch.equal(packed_gradient(shared, 77), clean)


def test_jobs_without_experts_compute_as_before() -> None:
    """Also after one with experts has been there."""
    shared = make_shared("mixtral", torch.float32)
    before = train(shared, "c")["c"]
    train(shared, "a", steps=1)
    assert torch.equal(train(shared, "c")["c"], before)


# -- the operation itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("everyone", [False, True], ids=["spread", "one-expert"])
def test_rows_of_an_expert_and_a_job_keep_their_order(everyone: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, slots, count = 50, 2, 4
    chosen_TK = torch.stack([torch.randperm(count, generator=generator)[:slots] for _ in range(tokens)])
    if everyone:
        chosen_TK[:, 0], chosen_TK[:, 1] = 2, 3
    routing = experts.route(chosen_TK, (20, 41), count)
    assert torch.equal(routing.order_S[routing.inverse_S], torch.arange(tokens * slots))
    seen: list[int] = []
    for run in routing.runs:
        rows = routing.order_S[run.s0 : run.s1]
        assert bool((rows.diff() > 0).all()) and bool((chosen_TK.view(-1)[rows] == run.expert).all())
        assert bool((torch.bucketize(rows // slots, torch.tensor([20, 41]), right=True) == run.run).all())
        seen += rows.tolist()
    assert sorted(seen) == list(range(tokens * slots))
    assert len(routing.runs) == (6 if everyone else 12)
    lone = experts.route(chosen_TK[20:41], (21,), count)
    own = [routing.order_S[run.s0 : run.s1] - 20 * slots for run in routing.runs if run.run == 1]
    assert torch.equal(torch.cat(own), lone.order_S), "a job's rows lie as when it is alone"


def test_slots_are_added_in_their_order() -> None:
    """Of one token with 1e8, 1 and -1e8 in fp32, another order gives another sum."""
    routing = experts.route(torch.tensor([[2, 0, 1]]), (1,), 3)
    y_SH = torch.tensor([[1.0], [-1e8], [1e8]])  # by expert: slot 1, slot 2, slot 0
    assert experts.combine(y_SH, torch.ones(1, 3), routing).item() == 0.0
    x_TH = torch.ones(1, 1, requires_grad=True)
    experts.dispatch(x_TH, routing).backward(y_SH)
    assert x_TH.grad is not None and x_TH.grad.item() == 0.0


# -- planted bugs --------------------------------------------------------------------------------------------------------


def unsorted(chosen_TK: Tensor, ends: Sequence[int], num_experts: int) -> experts.Routing:
    """An unstable sort: rows of an expert and a job in an order that hangs on how many rows there are."""
    healthy = healthy_route(chosen_TK, ends, num_experts)
    order_S, last = healthy.order_S.clone(), len(healthy.order_S)
    for run in healthy.runs:
        if last % 4:
            order_S[run.s0 : run.s1] = order_S[run.s0 : run.s1].flip(0)
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(last)
    return experts.Routing(healthy.slots, order_S, inverse_S, healthy.runs)


def mixed(rows: Any, routing: experts.Routing, count: int, exchanged: bool) -> Any:
    """All jobs' gradients of an expert go to the first job that has it."""
    owners = {run.expert: run.run for run in reversed(routing.runs) if run.run < len(rows.slots) and rows.slots[run.run]} if rows else {}
    runs = tuple(ExpertRun(r.expert, owners.get(r.expert, r.run), r.s0, r.s1) for r in routing.runs)
    return healthy_adapters(rows, experts.Routing(routing.slots, routing.order_S, routing.inverse_S, runs), count, exchanged)


def expert_major(b_RN: Tensor, count: int) -> Tensor:
    """lora_B with an expert's columns together, as A has its rows."""
    return b_RN.view(count, -1, b_RN.shape[1]).permute(2, 0, 1) if count > 1 else b_RN.t()


healthy_route, healthy_adapters = experts.route, blocks._adapters
BUGS: dict[str, tuple[Change, str]] = {
    "unstable sort": ((experts, "route", unsorted), "order"),
    "jobs' expert gradients mixed": ((blocks, "_adapters", mixed), "together"),
    "lora_B expert-major": ((peft_files, "_b_in_files", expert_major), "peft"),
}


@pytest.mark.parametrize(("bug", "caught_by"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(bug: Change, caught_by: str, tmp_path: Path) -> None:
    checks = {
        "order": lambda: test_rows_of_an_expert_and_a_job_keep_their_order(everyone=False),
        "together": test_what_neighbours_hold_changes_no_bit_of_a_packed_batch,
        "peft": lambda: check_against_peft("qwen3-moe", DIVIDED, tmp_path, steps=1),
    }
    with planted(bug), pytest.raises(AssertionError):
        checks[caught_by]()


# -- what is refused, and what a plan knows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"target_parameters": ["experts.w1"]},
            "'experts.w1' is no parameter of experts .*It has: experts.down_proj, experts.gate_up_proj",
        ),
        ({"r": 8, "expert_rank": "divide", "target_parameters": BOTH}, "r 8 is not divisible by the 3 experts"),
        ({"target_parameters": BOTH, "rank_pattern": {"up_proj": 3}}, "'up_proj' in rank_pattern or alpha_pattern"),
    ],
)
def test_targets_that_cannot_be_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make_shared("qwen3-moe", torch.float32).layout(LoraConfig(**changes))


def test_all_linear_takes_attention_that_is_named_as_blocks_of_experts_are() -> None:
    """Nemotron-3-H calls each layer's part a mixer: all but the one with experts are adapted."""
    layout = make_shared("nemotron-3-h", torch.float32).layout(LoraConfig(r=2))
    names = {shape.module.split("layers.")[1] for shape in layout.shapes}
    attention, mamba, dense = ("q_proj", "k_proj", "v_proj", "o_proj"), ("in_proj", "out_proj"), ("up_proj", "down_proj")
    assert names == {f"{layer}.mixer.{end}" for layer, ends in ((0, mamba), (2, attention), (3, dense)) for end in ends}


def test_a_base_without_experts_says_so() -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE))
    with pytest.raises(ModelError, match=r"It has no experts whose parameters can be\. Take target_parameters out"):
        SuperModel(make_base(model, "llama")).layout(LoraConfig(target_parameters=BOTH))


def test_a_family_whose_experts_compute_something_else_is_refused() -> None:
    """The proof runs over real numbers: here the family's own experts are scaled."""
    model = make_model("qwen3-moe", torch.float32)
    kind = type(model.model.layers[0].mlp.experts)
    own = kind.forward.__wrapped__
    scaled = type("Scaled", (kind,), {"forward": lambda self, *args: own(self, *args) * 1.01})
    scaled.forward.__wrapped__ = scaled.forward  # type: ignore[attr-defined]
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = scaled
    found = Experts(model)
    assert found.sizes == {} and found.why_not is not None and "Scaled computes something else" in found.why_not


def test_experts_of_the_oldest_transformers_are_targets_too() -> None:
    """5.17, the oldest that is allowed, says nothing of a norm after experts."""
    model = make_model("qwen3-moe", torch.float32)
    for layer in model.model.layers:
        vars(layer.mlp.experts).pop("has_post_expert_norm", None)
    found = Experts(model)
    assert found.why_not is None and len(found.sizes) == 2 * len(model.model.layers)


def test_the_outline_of_a_base_has_its_experts(tmp_path: Path) -> None:
    FAMILIES["gpt-oss"].save_pretrained(tmp_path)
    sizes = SuperModel(outline(str(tmp_path))).experts.sizes
    assert sizes["model.layers.1.mlp.experts.gate_up_proj"] == (256, 640, 4, 2, False)
    assert sizes["model.layers.0.mlp.experts.down_proj"] == (320, 256, 4, 2, False)
