"""gpt-oss with its experts in MXFP4 as they are: transformers' values, adapters over them, what a plan counts, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import job, run_spec, same_bytes, train, write_rows
from tests.numerics import checks, poisons
from tests.numerics.poisons import Poison
from tests.numerics.two_jobs import samples
from tests.numerics.world import Job
from tests.planted import Change, planted
from tests.supermodel import test_expert_targets as targets
from tests.supermodel.mxfp4_bases import pack
from tests.supermodel.packed_bases import edit
from tests.tolerances import relative_error
from tlora.engine.check import check
from tlora.engine.generate import generate
from tlora.errors import ConfigError, ModelError
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels import packed_weight
from tlora.planning.memory import measure, takes_fast_path
from tlora.supermodel import fast_path, mxfp4_format
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.load import load_base, outline
from tlora.supermodel.packed_format import PackedTensor
from tlora.supermodel.stage_base import why_no_stages
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.tensor_files import find_tensors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """Plain, in MXFP4, and what its experts are."""
    directory = tmp_path_factory.mktemp("bases")
    widened = pack(targets.make_model("gpt-oss", torch.float32), directory / "plain", directory / "packed")
    return directory / "plain", directory / "packed", widened


Bases = tuple[Path, Path, dict[str, Tensor]]


def load(path: Path, dtype: str = "float32", deterministic: bool = True) -> SuperModel:
    return SuperModel(load_base(str(path), dtype), deterministic)


# -- values and bytes ----------------------------------------------------------------------------------------------------


def test_experts_stay_packed_and_have_transformers_values(bases: Bases) -> None:
    plain, packed, widened = bases
    loaded, counted = load_base(str(packed)), outline(str(packed))
    held = {name: module for name, module in loaded.model.named_modules() if isinstance(module, HeldExperts)}
    assert held.keys() == widened.keys() and len(held) == 4
    for name, experts in held.items():
        for expert, value in enumerate(widened[name]):
            assert torch.equal(experts[expert], value) and experts[expert].stride() == value.stride(), name
        assert torch.equal(experts.dense(), widened[name]) and experts.dense().stride() == widened[name].stride(), name
        assert {p.dtype for p in experts.parameters()} == {torch.uint8}
        assert sum(p.numel() for p in experts.parameters()) * 32 == 17 * widened[name].numel()
    whole = load_base(str(plain))
    assert (counted.num_bytes, counted.num_parameters) == (loaded.num_bytes, whole.num_parameters)
    assert whole.num_bytes - loaded.num_bytes == sum(value.numel() for value in widened.values()) * 2 * 47 // 64
    assert measure(SuperModel(counted), counted.num_bytes, CPU).base_bytes == loaded.num_bytes


def check_every_code(directory: Path) -> None:
    """With every scale but 255, by which OCP's format says that a group holds no numbers: it is refused."""
    codes, scales = torch.arange(256).to(torch.uint8).view(16, 16), torch.arange(255).to(torch.uint8)
    tensors = {"x_blocks": codes[None, :, None].repeat(2, 1, 255, 1), "x_scales": scales.repeat(2, 16, 1)}
    save_file(tensors, directory / "x.safetensors")
    stored = mxfp4_format.find_experts("x", find_tensors([directory / "x.safetensors"]))
    theirs = convert_moe_packed_tensors(*tensors.values())
    assert stored.shape == tuple(theirs.shape) == (2, 8160, 16)
    held = HeldExperts(stored.read(torch.bfloat16), stored.shape, transposed=True)
    for ours, true in ((held[expert], theirs[expert]) for expert in range(2)):
        assert torch.equal(ours, true) and torch.equal(ours.signbit(), true.signbit())
    single = HeldExperts(stored.read(torch.float32), stored.shape, transposed=True)[1]
    assert single.dtype == torch.float32 and torch.equal(single, theirs[1].float())


def test_every_code_with_every_scale(tmp_path: Path) -> None:
    check_every_code(tmp_path)


def test_a_layer_that_is_kept_plain_runs_beside_packed_ones(bases: Bases, tmp_path: Path) -> None:
    _, packed, widened = bases
    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    tensors, kept = load_file(packed / "model.safetensors"), "model.layers.1.mlp.experts"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales")) or kept not in name}
    save_file(tensors | {n: v for n, v in widened.items() if kept in n}, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [kept]})
    mixed, counted = load(tmp_path), outline(str(tmp_path), "float32")
    assert mixed.base.num_bytes == counted.num_bytes
    assert torch.equal(targets.train(mixed, "a", steps=1)["a"], targets.train(load(packed), "a", steps=1)["a"])
    assert bool(targets.train(mixed, "c", steps=1)["c"].isfinite().all())


# -- adapters ------------------------------------------------------------------------------------------------------------


def test_adapters_are_those_over_the_plain_checkpoint_and_together_is_alone(bases: Bases) -> None:
    """Byte for byte where experts are adapted. Where attention alone is, a plain base's experts are transformers' own products."""
    plain, packed, _ = bases
    over_packed, over_plain = load(packed), load(plain)
    together = targets.train(over_packed, "abc")
    expected = targets.train(over_plain, "abc")
    assert torch.equal(together["a"], expected["a"]) and torch.equal(together["b"], expected["b"])
    assert relative_error(together["c"], expected["c"]) < 1e-5
    for job_id in "abc":
        assert torch.equal(targets.train(over_packed, job_id)[job_id], together[job_id]), job_id
    join, batch = targets.join, targets.batch_of
    join(over_packed, "ac")  # the third job, which comes first, leaves after the first step, and the second takes its place
    for step, others in enumerate(("ca", "ba")):
        over_packed.forward_backward(batch(others, step))
        over_packed.optim_step(others)
        if step == 0:
            over_packed.leave("c")
            join(over_packed, "b")
    assert torch.equal(over_packed.leave("a").params, together["a"])
    over_packed.leave("b")


def test_what_neighbours_hold_changes_no_bit_of_a_packed_batch(bases: Bases) -> None:
    """Also of a job at attention alone: its experts run on our path as well."""
    shared = load(bases[1], deterministic=False)
    for order in ("abc", "cab"):
        clean = targets.packed_gradient(shared, 5, order)
        assert bool(clean.isfinite().all()) and float(clean.norm()) > 0
        assert torch.equal(targets.packed_gradient(shared, 130, order), clean)
        assert torch.equal(targets.packed_gradient(shared, 77, order), clean)


def check_peft(bases: Bases, directory: Path, steps: int) -> None:
    """PEFT over transformers' own widened model in fp64."""

    def theirs(family: str, dtype: torch.dtype, device: str = "cpu") -> Any:
        model = AutoModelForCausalLM.from_pretrained(bases[0], dtype=dtype)
        model.set_experts_implementation("eager")
        return model.eval()

    def ours(family: str, dtype: torch.dtype, device: str = "cpu") -> SuperModel:
        return load(bases[1], "float64")

    with planted((targets, "make_model", theirs), (targets, "make_shared", ours)):
        lora = LoraConfig(r=4, lora_alpha=8, target_parameters=targets.BOTH, target_modules=["q_proj", "o_proj"], expert_rank="divide")
        targets.check_against_peft("gpt-oss", lora, directory, steps)


def test_gradients_and_steps_are_pefts(bases: Bases, tmp_path: Path) -> None:
    check_peft(bases, tmp_path, steps=2)


JOBS = [
    Job(
        "experts",
        LoraConfig(r=4, target_parameters=targets.BOTH, target_modules=[]),
        TrainConfig(learning_rate=3e-3, batch_size=3, seed=1, max_grad_norm=0.3),
        samples(1, (1, 19, 33)),
        steps=2,
    ),
    Job(
        "attention",
        LoraConfig(r=8, target_modules=["q_proj", "o_proj"], lora_dropout=0.1),
        TrainConfig(learning_rate=5e-3, batch_size=2, seed=2, weight_decay=0.1, lr_scheduler_type="constant"),
        samples(2, (7, 24, 65, 2)),
        steps=2,
        join_at=1,
    ),
]


def at_experts(poison: Poison) -> Poison:
    """Its neighbour adapts the same experts."""
    lora = {"lora": LoraConfig(r=6, lora_alpha=12, target_parameters=targets.BOTH, target_modules=["q_proj"])}
    return replace(poison, shape=lambda job: replace(poison.shape(job), **lora))


def test_default_mode_is_alone_up_to_rounding(bases: Bases) -> None:
    shared = load(bases[1])
    checks.check_l0(shared, JOBS[0])
    checks.check_l3(shared, JOBS, packing_seed=13)


@pytest.mark.slow
def test_every_poison_of_a_neighbour(bases: Bases) -> None:
    shared = load(bases[1])
    alone = checks.all_alone(shared, JOBS)
    for poison in poisons.POISONS:
        checks.check_l2(shared, JOBS, at_experts(poison), alone)


@pytest.mark.slow
def test_a_run_with_its_check_and_answers(tmp_path: Path) -> None:
    """The plan counts packed bytes; the card and the files are those of any base."""
    tokenizer = make_tokenizer(CHATML)
    config = transformers.GptOssConfig(**targets.SIZE | {"vocab_size": len(tokenizer) + 3}, head_dim=64, num_local_experts=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pack(transformers.GptOssForCausalLM(config), tmp_path / "plain", tmp_path / "packed")
    for base in ("plain", "packed"):
        tokenizer.save_pretrained(tmp_path / base)
    data, reports = str(write_rows(tmp_path / "d.jsonl", 16)), list[Any]()
    jobs = [job("a", data, max_steps=2, target_parameters=targets.BOTH, target_modules=[]), job("b", data, max_steps=2, lora_dropout=0.1)]
    for base in ("plain", "packed"):
        reports.append(check(run_spec(tmp_path / base, tmp_path / "new", jobs), device="cpu"))
        train(tmp_path / base, tmp_path / f"over {base}", jobs, deterministic=True)
    assert not any(report.problems for report in reports) and reports[1].base_bytes < reports[0].base_bytes
    same_bytes(tmp_path / "over packed", tmp_path / "over plain", ["a"])
    answers = [generate(tmp_path / "over packed" / "a", ["red"], base_model=str(tmp_path / base)) for base in ("plain", "packed")]
    assert answers[0] == answers[1]


# -- planted bugs, and what is refused -----------------------------------------------------------------------------------


def swapped(key: str, stored: Any) -> PackedTensor:
    """The earlier number of a byte taken from its high half, as other formats have it."""
    healthy = healthy_find(key, stored)
    return replace(healthy, parts=lambda: dict(healthy.parts()) | {"weight": stored[f"{key}_blocks"].whole().flatten()})


def next_scale(exponents: Tensor) -> Tensor:
    """A bias of 126."""
    return healthy_powers(exponents) * 2


def neighbours_expert(self: HeldExperts, expert: int | Tensor) -> Tensor:
    return healthy_item(self, (int(expert) + 1) % self.shape[0])


healthy_find, healthy_powers, healthy_item = mxfp4_format.find_experts, packed_weight.powers_of_two, HeldExperts.__getitem__
BUGS: dict[str, tuple[Change, str]] = {
    "nibbles swapped": ((mxfp4_format, "find_experts", swapped), "codes"),
    "scales shifted": ((packed_weight, "powers_of_two", next_scale), "codes"),
    "another expert's rows": ((HeldExperts, "__getitem__", neighbours_expert), "peft"),
}


@pytest.mark.parametrize(("bug", "caught_by"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_caught(bug: Change, caught_by: str, bases: Bases, tmp_path: Path) -> None:
    caught = {"codes": lambda: check_every_code(tmp_path), "peft": lambda: check_peft(bases, tmp_path, steps=1)}
    with planted(bug), pytest.raises(AssertionError):
        caught[caught_by]()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("scales", r"gate_up_proj is packed by MXFP4, and cannot be read: lacks '.*gate_up_proj_scales'"),
        ("blocks", r"down_proj_blocks is \[4, 256, 10, 15\] in torch.uint8, and no blocks of 16 bytes of experts"),
        ("shape", r"scales \[4, 256, 9\] in torch.uint8 for blocks \[4, 256, 10, 16\]"),
        ("experts", r"1 tensor is missing or of another shape, model.layers.0.mlp.experts.down_proj first"),
        ("number", r"down_proj_scales has a scale of 255, which is no number in MXFP4"),
        ("kept", r"modules_to_not_convert of its quantization_config is 'lm_head', and must be a list of names"),
    ],
)
def test_what_does_not_fit_together_is_one_message(damage: str, words: str, bases: Bases, tmp_path: Path) -> None:
    shutil.copytree(bases[1], tmp_path, dirs_exist_ok=True)
    tensors, key = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts."
    match damage:
        case "scales":
            del tensors[f"{key}gate_up_proj_scales"]
        case "blocks":
            tensors[f"{key}down_proj_blocks"] = tensors[f"{key}down_proj_blocks"][..., :15].contiguous()
        case "shape":
            tensors[f"{key}down_proj_scales"] = tensors[f"{key}down_proj_scales"][..., :9].contiguous()
        case "number":
            tensors[f"{key}down_proj_scales"][3, 2, 1] = 255
        case "experts":
            for end in ("blocks", "scales"):
                tensors[f"{key}down_proj_{end}"] = tensors[f"{key}down_proj_{end}"][:3].contiguous()
        case _:
            edit(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"})
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words):
        load_base(str(tmp_path))


def test_no_other_precision_is_made_of_it(bases: Bases) -> None:
    with pytest.raises(ConfigError, match=r"its files are packed already \(MXFP4\), and base_precision nf4 would pack them anew"):
        load_base(str(bases[1]), base_precision="nf4")


def test_it_keeps_off_the_kernels(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = load(bases[1])
    monkeypatch.setattr(fast_path, "why_plain", lambda _: None)
    why = fast_path.why_not_fused(shared.base, {}, shared.experts, CPU, deterministic=False)
    assert why == "experts are packed, shared or streamed, so that layers are not compiled" and not takes_fast_path(shared)
    counted = outline(str(bases[1]))
    assert why_no_stages(counted, CPU) == "" and "its experts are packed" in why_no_stages(counted, torch.device("cuda"))
