"""`check` tells every problem that can be known, also when the base model itself is missing."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.engine.tiny_runs import job, run_spec, train
from tests.tiny import FAMILIES, SHAPE, make_model
from tlora.cli.check_view import print_check
from tlora.engine.check import check
from tlora.engine.watcher import Watcher
from tlora.errors import ModelError
from tlora.job import JobSpec, RunSpec
from tlora.supermodel.load import load_config, load_weights
from tlora.supermodel.weight_files import check_weights


def test_a_missing_base_hides_no_missing_file(data: Path) -> None:
    jobs = [JobSpec(name=name, data={"path": str(data / file)}) for name, file in (("here", "a.jsonl"), ("gone", "none.jsonl"))]  # type: ignore[arg-type]
    found = check(RunSpec(base_model="/no/such/base", jobs=jobs), device="cpu")
    assert len(found.problems) == 1 and "/no/such/base" in found.problems[0]
    here, gone = found.jobs
    assert here.problems == () and len(gone.problems) == 1 and "none.jsonl" in gone.problems[0]


def test_a_budget_below_the_longest_sample_is_kept_and_said(base: Path, data: Path, tmp_path: Path) -> None:
    """Once, by `check` and by `train`, with the job whose sample it is; a budget that fits is nothing to speak of. Memory is planned for
    that sample.
    """
    jobs = [job("short", str(data / "b.jsonl")), job("long", str(data / "c.jsonl"), max_steps=1)]
    found = check(run_spec(base, tmp_path / "out", jobs, token_budget=16), device="cpu")
    (warning,) = found.warnings
    assert found.token_budget == 16 and "token_budget 16 is less than the longest sample, of 170 tokens in long" in warning
    notes: list[str] = []
    assert train(base, tmp_path / "out", jobs, token_budget=16, watcher=Watcher(note=notes.append)).status == "done"
    assert notes.count(warning) == 1
    enough = check(run_spec(base, tmp_path / "other", jobs, token_budget=170), device="cpu")
    assert enough.warnings == () and enough.token_budget == 170
    assert enough.activation_bytes <= found.activation_bytes


def test_the_file_of_the_evaluation_is_reported(base: Path, data: Path, tmp_path: Path) -> None:
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    both, split = check(
        run_spec(base, tmp_path, [job("both", own), job("split", {"path": own["path"], "eval_size": 3})]), device="cpu"
    ).jobs
    assert both.data and both.eval_data and (both.data.rows, both.eval_data.rows) == (24, 7)
    assert both.eval_data.files == [own["eval_path"]] and split.eval_data is None


def broken_bases(base: Path, directory: Path) -> dict[str, Path]:
    """What the refusal must say -> a copy of the base that is wrong in one way."""
    tensors, name = load_file(base / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"

    def copy(number: int) -> Path:
        return Path(shutil.copytree(base, directory / str(number)))

    def save(number: int, changed: dict[str, torch.Tensor]) -> Path:
        made = copy(number)
        save_file(changed, made / "model.safetensors", metadata={"format": "pt"})
        return made

    gone, cut = copy(0), copy(1)
    (gone / "model.safetensors").unlink()
    (cut / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-100])
    sharded = copy(5)
    (sharded / "model.safetensors").unlink()
    make_model("llama", vocab_size=400, max_position_embeddings=2048).save_pretrained(sharded, max_shard_size="60KB")
    lost = sorted(sharded.glob("model-*.safetensors"))[2]
    lost.unlink()
    return {
        "has no weights": gone,
        "model.safetensors is cut off": cut,
        f"1 tensor is missing or of another shape, {name} first": save(2, {key: t for key, t in tensors.items() if key != name}),
        f"another shape, {name}": save(3, tensors | {name: tensors[name][:-1].contiguous()}),
        f"no plain numbers of 16 bits or more, {name} first": save(4, tensors | {name: tensors[name].to(torch.int8)}),
        f"weight files are missing, {lost.name} first": sharded,
    }


def test_weights_that_training_would_refuse_are_refused_by_their_headers(base: Path, data: Path, tmp_path: Path) -> None:
    jobs = [job("a", str(data / "b.jsonl"))]
    for part, wrong in broken_bases(base, tmp_path).items():
        found = check(run_spec(wrong, tmp_path / "out", jobs), device="cpu")
        assert len(found.problems) == 1 and part in found.problems[0], (part, found.problems)
        with pytest.raises(ModelError, match=re.escape(part)):
            load_weights(str(wrong))
    assert check(run_spec(base, tmp_path / "out", jobs), device="cpu").problems == ()


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow if number % 3 else []) for number, name in enumerate(FAMILIES)), "experts"]
)
def test_the_headers_of_every_family_are_what_is_loaded(tmp_path: Path, family: str) -> None:
    """Also of families whose tensors transformers ties, renames or fuses as it loads them, in shards."""
    if family == "experts":
        shape = SHAPE | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape)).save_pretrained(tmp_path, max_shard_size="60KB")
    else:
        make_model(family).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert check_weights(str(tmp_path), load_config(str(tmp_path))) is None
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        check_weights(str(tmp_path), load_config(str(tmp_path)))


def test_pickled_weights_are_compared_too(base: Path, tmp_path: Path) -> None:
    pickled, config = Path(shutil.copytree(base, tmp_path / "pickled")), load_config(str(base))
    tensors, path = load_file(base / "model.safetensors"), pickled / "pytorch_model.bin"
    (pickled / "model.safetensors").unlink()
    name, *names = tensors
    torch.save(tensors, path)
    assert check_weights(str(pickled), config) is None
    torch.save({name: tensors[name] for name in names}, path)
    with pytest.raises(ModelError, match=f"1 tensor is missing or of another shape, {re.escape(name)} first"):
        check_weights(str(pickled), config)
    torch.save(tensors | {name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(ModelError, match=f"1 tensor is no plain numbers of 16 bits or more, {re.escape(name)} first"):
        check_weights(str(pickled), config)
    torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is cut off"):
        check_weights(str(pickled), config)
    torch.save({name: Path("code")}, path)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is cut off or damaged"):
        check_weights(str(pickled), config)


def test_an_output_directory_that_training_would_refuse(base: Path, data: Path, tmp_path: Path) -> None:
    jobs = [job("a", str(data / "b.jsonl"), max_steps=1)]
    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    for name, part in (("file", "is a file"), ("file/out", "is a file"), ("thesis", "is no run of tlora")):
        (problem,) = check(run_spec(base, tmp_path / name, jobs), device="cpu").problems
        assert f"output_dir {tmp_path / name}" in problem and part in problem
    train(base, tmp_path / "out", jobs)
    found = check(run_spec(base, tmp_path / "out", jobs), device="cpu")
    assert found.problems == () and any("holds an earlier run" in line and "--resume" in line for line in found.warnings)


def test_each_of_several_gpus_is_told_what_it_would_do(base: Path, data: Path, tmp_path: Path) -> None:
    orders = [job(name, str(data / "a.jsonl"), max_steps=steps) for name, steps in (("long", 9), ("short", 3), ("middle", 6))]
    found = check(run_spec(base, tmp_path / "out", orders), device="cpu", gpus=2)
    assert [gpu.jobs for gpu in found.gpus] == [("long",), ("short", "middle")]
    assert all(0 < gpu.predicted_bytes <= found.limit_bytes and gpu.seconds > 0 and gpu.tokens_per_second > 0 for gpu in found.gpus)
    assert "whole base" in found.form
    shown = io.StringIO()
    print_check(Console(file=shown, width=100), found)
    text = shown.getvalue()
    assert "2 processes" in text and "short, middle" in text


def test_a_job_that_spans_is_shown_where_its_parts_are(base: Path, data: Path, tmp_path: Path) -> None:
    orders = [job("wide", str(data / "a.jsonl"), gpus=2), job("narrow", str(data / "a.jsonl"), max_steps=1)]
    found = check(run_spec(base, tmp_path / "out", orders), device="cpu", gpus=2)
    assert [(gpu.jobs, gpu.parts) for gpu in found.gpus] == [(("wide", "narrow"), ()), ((), ("wide",))]
    assert all(gpu.predicted_bytes and gpu.seconds and gpu.tokens_per_second for gpu in found.gpus)
    sums = found.adapter_bytes + found.mailbox_bytes + found.activation_bytes
    assert 0 < found.mailbox_bytes < found.adapter_bytes and sums < found.predicted_bytes < found.base_bytes + 2 * sums
    alone, fixed = (check(run_spec(base, tmp_path / "out", orders, deterministic=own), device="cpu") for own in (False, True))
    assert (alone.mailbox_bytes, fixed.mailbox_bytes) == (0, found.mailbox_bytes), "on one GPU nobody reads them; bytes must be the same"
    shown = io.StringIO()
    print_check(Console(file=shown, width=1000), fixed)
    assert "gradients that other GPUs read" in shown.getvalue()


def test_a_base_that_fits_on_no_number_of_gpus_is_a_problem(base: Path, data: Path, tmp_path: Path) -> None:
    found = check(run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"), gpus=3)], memory_limit=1000), device="cpu", gpus=2)
    assert "a orders 3: on 2 GPUs replicas take turns" in found.warnings[-1] and "or train with `tlora cluster`" in found.problems[-1]
    assert len(found.problems) == 1
    assert "the limit is" in found.problems[0] and found.gpus == ()


def test_modules_that_a_start_overrides_are_said(base: Path, data: Path, tmp_path: Path) -> None:
    """A job that starts from an adapter adapts that one's modules; whatever else it means by any of its keys is said, and no more."""
    rows = str(data / "b.jsonl")
    trained = train(base, tmp_path / "first", [job("start", rows, max_steps=1, target_modules=["q_proj", "v_proj"])])
    start = str(trained["start"].path)
    said: dict[str, dict[str, object]] = {
        "nothing": {},
        "the-same": {"target_modules": ["v_proj", "q_proj"]},
        "the-same-by-a-pattern": {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"},
        "all": {"target_modules": "all-linear"},
        "fewer": {"target_modules": ["q_proj"]},
        "without-one": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
        "the-only-layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]},
        "unknown": {"target_modules": ["c_attn"]},
    }
    jobs = [job(name, rows, adapter_path=start, **fields) for name, fields in said.items()]
    found = check(run_spec(base, tmp_path / "out", jobs), device="cpu")
    warned = {each.name: [line for line in each.warnings if "the adapted modules are those of" in line] for each in found.jobs}
    assert {name for name, lines in warned.items() if lines} == said.keys() - {
        "nothing",
        "the-same",
        "the-same-by-a-pattern",
        "the-only-layer",
    }
    assert all(start in line and f"{key} {value}" in line for name, (line,) in ((n, w) for n, w in warned.items() if w)
               for key, value in said[name].items())  # fmt: skip
    assert not any(each.problems for each in found.jobs)
