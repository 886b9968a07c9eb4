"""`tlora.train` from orders to adapters: jobs that differ in everything, what they leave, where they start, and whom they refuse."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tlora
from tests.engine.tiny_runs import job, rows, sentence, sha256, steps_taken, train
from tests.tolerances import LOGITS, assert_close
from tlora.adapters.peft import load_params
from tlora.adapters.state import AdapterState
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.load import hidden_states
from tlora.supermodel.lora_linear import ActiveBatch

TRAIN_KEYS = {"step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "seconds"}
EVAL_KEYS = {"step", "epoch", "eval_loss", "eval_num_tokens", "seconds"}


def write_formats(directory: Path) -> dict[str, str]:
    """The same kind of sentences in each format of the data room; format -> path."""
    rng = random.Random(5)
    pairs = [(sentence(rng, 1, 3), sentence(rng)) for _ in range(20)]
    made: dict[str, list[dict[str, Any]]] = {
        "chat": [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c in pairs],
        "prompt_completion": [{"prompt": p, "completion": c} for p, c in pairs],
        "text": [{"text": f"{p} {c}"} for p, c in pairs],
        "alpaca": [{"instruction": p, "input": "", "output": c} for p, c in pairs],
        "sharegpt": [{"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": c}]} for p, c in pairs],
        "tokenized": [{"input_ids": (ids := [rng.randrange(10, 200) for _ in range(9)]), "labels": [-100] * 4 + ids[4:]} for _ in pairs],
    }
    for name, found in made.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (directory / "pairs.csv").write_text("prompt,completion\n" + "".join(f"{p},{c}\n" for p, c in pairs))
    return {name: str(directory / f"{name}.jsonl") for name in made} | {"csv": str(directory / "pairs.csv")}


def eight_jobs(path: dict[str, str]) -> list[dict[str, Any]]:
    cosine = {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_rate": 0.3}
    jobs = [
        job("chat", {"path": path["chat"], "eval_size": 0.2}, r=4, eval_steps=2, weight_decay=0.1),
        job("pairs", path["prompt_completion"], r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"], lr_scheduler_type="cosine"),
        job("text", path["text"], r=1, lora_dropout=0.2, batch_size=1, max_steps=None, num_train_epochs=0.5, warmup_steps=0.1),
        job("alpaca", path["alpaca"], r=12, use_rslora=True, batch_size=20, max_steps=None, num_train_epochs=3, learning_rate=3e-3),
        job("sharegpt", path["sharegpt"], r=3, rank_pattern={"down_proj": 17}, alpha_pattern={"q_proj": 4}, logging_steps=2),
        job("tokenized", {"path": path["tokenized"], "train_on": "all"}, r=64, max_grad_norm=0, lr_scheduler_type="constant", weight=3),
        job("csv", {"path": path["csv"], "max_length": 9}, r=5, adam_beta2=0.95, lr_scheduler_type="polynomial", seed=7, save_steps=2),
        job("whole", {"path": path["text"], "eval_path": path["chat"]}, batch_size=7, max_steps=None, num_train_epochs=2, **cosine),
    ]
    return [{key: value for key, value in fields.items() if value is not None} for fields in jobs]


def our_logits(base: Path, directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = tlora.SuperModel.from_pretrained(str(base))
    spec = JobSpec.model_validate_json((directory / "job.json").read_text())
    layout = model.layout(spec)
    params = load_params(directory, layout, torch.float32)
    model.join("it", spec, spec, 1, AdapterState(layout, params, torch.zeros_like(params), torch.zeros_like(params)))
    batch = collate([BatchRow("it", ids.numpy(), np.ones(len(ids), np.float32))])
    with torch.no_grad(), model.context.enter(ActiveBatch(batch, model.passes.weights, model.bank, {}, torch.zeros(()))):
        return model.base.head.logits(hidden_states(model.base, batch.input_ids_T, batch.position_ids_T, batch.lengths))


@torch.no_grad()
def peft_logits(base: Path, directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
    return model(input_ids=ids[None]).logits[0]


def test_eight_jobs_that_differ_in_everything(base: Path, tmp_path: Path) -> None:
    jobs = eight_jobs(write_formats(tmp_path))
    seen: list[RunProgress] = []
    results = train(base, tmp_path / "out", jobs, watcher=Watcher(seen.append))
    assert list(results) == [fields["name"] for fields in jobs]
    steps = {name: result.steps for name, result in results.items()}
    assert steps == {"chat": 6, "pairs": 6, "text": 10, "alpaca": 3, "sharegpt": 6, "tokenized": 6, "csv": 6, "whole": 6}
    ids = torch.arange(10, 40)
    plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids[None]).logits[0].detach()
    for name, result in results.items():
        directory = tmp_path / "out" / name
        assert (result.status, result.reason, result.steps, result.path) == ("done", "", result.total_steps, str(directory)), name
        assert result.num_tokens > 0 and result.seconds > 0 and result.train_loss is not None
        on_disk = json.loads((directory / "result.json").read_text())
        assert on_disk["name"] == name and on_disk["train_loss"] == result.train_loss and on_disk["settings"] == {}
        assert {path.name for path in directory.iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
            "base.json",
            "job.json",
            "metrics.jsonl",
        }
        logits = our_logits(base, directory, ids)
        assert_close(logits, peft_logits(base, directory, ids), LOGITS[torch.float32], name)
        assert float((logits - plain).abs().max()) > 1e-3, f"{name} changes nothing"
        written = [row for row in rows(directory / "metrics.jsonl") if "loss" in row]
        assert all(set(row) == TRAIN_KEYS for row in written)
        assert written[-1]["num_tokens"] == result.num_tokens
    check_steps_and_evaluations(tmp_path / "out")
    check_run_files(tmp_path / "out", jobs)
    assert seen[0].stage.startswith(("tokenizing", "loading"))  # the former where it takes long enough to be told
    assert {job.status for job in seen[-1].jobs} == {"done"}
    assert 0 <= seen[-1].padding < 0.2


def check_steps_and_evaluations(out: Path) -> None:
    assert steps_taken(out / "chat") == [1, 2, 3, 4, 5, 6]
    assert steps_taken(out / "sharegpt") == [2, 4, 6]
    assert sorted(path.name for path in (out / "csv").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]  # save_total_limit 2
    evaluations = [row for row in rows(out / "chat" / "metrics.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6] and all(set(row) == EVAL_KEYS for row in evaluations)
    whole = [row for row in rows(out / "whole" / "metrics.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in whole] == [0, 6]  # before the first step and after the last
    result = json.loads((out / "whole" / "result.json").read_text())
    assert (result["eval_loss_first"], result["eval_loss"]) == (whole[0]["eval_loss"], whole[1]["eval_loss"])
    assert rows(out / "text" / "metrics.jsonl")[0]["learning_rate"] == 0  # the first step of a warm-up


def check_run_files(out: Path, jobs: list[dict[str, Any]]) -> None:
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "done" and [j["name"] for j in run["jobs"]] == [fields["name"] for fields in jobs]
    assert {"versions", "device", "token_budget"} <= set(run)
    written = rows(out / "run.jsonl")
    packing = {"padding", "fill", "micro_batches", "tokens", "computed", "offered"}
    assert all({"seconds", "tokens_per_second", "jobs"} | packing | {f"tail_{key}" for key in packing} == set(row) for row in written)
    assert sum(row["jobs"].get("text", 0) for row in written) == rows(out / "text" / "metrics.jsonl")[-1]["num_tokens"]
    page = (out / "report.html").read_text()
    assert all(fields["name"] in page for fields in jobs)


def test_a_jobs_file_with_a_sweep(base: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(
        f"base_model: {base}\noutput_dir: {tmp_path / 'out'}\ndefaults: {{max_steps: 3, batch_size: 4}}\n"
        f"jobs:\n  - {{name: s, data: {{path: {data / 'a.jsonl'}, eval_size: 4}}, sweep: {{r: [2, 6], max_length: [8, 64]}}}}\n"
    )
    results = tlora.train(str(tmp_path / "jobs.yaml"), device="cpu", token_budget=64)
    assert [(r.status, r.sweep_of) for r in results.values()] == [("done", "s")] * 4
    assert [r.settings for r in results.values()] == [{"r": r, "max_length": n} for r in (2, 6) for n in (8, 64)]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["token_budget"] == 64
    for name, result in results.items():  # written once, by whoever ends the job
        assert json.loads((tmp_path / "out" / name / "result.json").read_text()) == asdict(result)


def test_early_stopping_and_the_best_model(base: Path, data: Path, tmp_path: Path) -> None:
    """A learning rate that soon does harm: the job ends early, and its adapter is the one of its best evaluation."""
    orders = {"learning_rate": 0.3, "lr_scheduler_type": "constant", "eval_steps": 1, "max_steps": 40, "save_total_limit": 1}
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    early = job("early", own, early_stopping_patience=3, load_best_model_at_end=True, **orders)
    results = train(base, tmp_path / "out", [early, job("free", str(data / "b.jsonl"))])
    result = results["early"]
    losses = {row["step"]: row["eval_loss"] for row in rows(tmp_path / "out" / "early" / "metrics.jsonl") if "eval_loss" in row}
    assert result.status == "done" and result.steps < 40 and max(losses) == result.steps
    best = min(losses, key=losses.__getitem__)
    assert result.best_step == best == result.steps - 3
    assert result.eval_loss == result.eval_loss_best == losses[best] < losses[result.steps]
    assert sha256(tmp_path / "out" / "early") == sha256(tmp_path / "out" / "early" / f"checkpoint-{best}")
    assert sha256(tmp_path / "out" / "early") != sha256(tmp_path / "out" / "early" / f"checkpoint-{result.steps}")
    assert results["free"].steps == 6


@pytest.fixture(scope="module")
def made_by_peft(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 5}, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    directory = tmp_path_factory.mktemp("peft") / "adapter"
    adapted.save_pretrained(str(directory))
    return directory


def test_an_adapter_of_peft_or_of_our_own_as_a_start(base: Path, data: Path, made_by_peft: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 the adapter that comes out is the one that went in; its shape is adopted."""
    still = {"name": "still", "data": str(data / "a.jsonl"), "adapter_path": str(made_by_peft), "learning_rate": 0, "max_steps": 1}
    moving = {**still, "name": "moving", "learning_rate": 1e-2}
    results = train(base, tmp_path / "one", [still, moving])
    assert [(r.status, r.rank) for r in results.values()] == [("done", 3)] * 2
    before, after, moved = (
        load_file(d / "adapter_model.safetensors") for d in (made_by_peft, tmp_path / "one/still", tmp_path / "one/moving")
    )
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not any(torch.equal(before[key], moved[key]) for key in before)
    on = {**still, "name": "on", "adapter_path": str(tmp_path / "one" / "moving")}
    assert train(base, tmp_path / "two", [on])["on"].status == "done"
    again = load_file(tmp_path / "two" / "on" / "adapter_model.safetensors")
    assert all(torch.equal(moved[key], again[key]) for key in moved)
    ids = torch.arange(10, 30)
    assert_close(peft_logits(base, tmp_path / "two" / "on", ids), our_logits_of(base, tmp_path / "two" / "on", ids), LOGITS[torch.float32])


def test_resume_needs_no_adapter_that_a_checkpoint_stands_for(base: Path, data: Path, made_by_peft: Path, tmp_path: Path) -> None:
    """The adapter that a job started from is gone. One with a checkpoint ends as it would have; one without says what it lacks, and
    begins as soon as the adapter is back, though the first run wrote down an order without the adapter's shape.
    """
    start, out = tmp_path / "start", tmp_path / "out"
    own = {"data": str(data / "a.jsonl"), "adapter_path": str(start), "max_steps": 4, "save_steps": 2, "batch_size": 4}
    begun, new = {"name": "begun", **own}, {"name": "new", **own}
    shutil.copytree(made_by_peft, start)
    whole = train(base, tmp_path / "whole", [begun])
    train(base, out, [begun])
    shutil.rmtree(out / "begun" / "checkpoint-4")
    (out / "begun" / "checkpoint-2").rename(out / "begun" / "checkpoint-2.replaced")  # as a kill between two renames leaves it
    start.rename(tmp_path / "away")
    results = train(base, out, [begun, new], resume=True)
    assert (results["begun"].status, results["begun"].rank) == ("done", whole["begun"].rank) == ("done", 3), results["begun"].reason
    assert sha256(out / "begun") == sha256(tmp_path / "whole" / "begun")
    assert results["new"].status == "failed" and "adapter_config.json: not found" in results["new"].reason
    (tmp_path / "away").rename(start)
    results = train(base, out, [begun, new], resume=True)
    assert [(r.status, r.rank) for r in results.values()] == [("done", 3)] * 2, results
    assert sha256(out / "new") == sha256(out / "begun")


def our_logits_of(base: Path, directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """As `our_logits`, where job.json must already say what the adapter's shape is."""
    spec = json.loads((directory / "job.json").read_text())
    assert (spec["r"], spec["lora_alpha"], spec["rank_pattern"]) == (3, 7, {"down_proj": 5})
    return our_logits(base, directory, ids)


def test_a_start_that_does_not_fit_fails_alone(base: Path, wide_base: Path, data: Path, made_by_peft: Path, tmp_path: Path) -> None:
    def broken(name: str, **changes: Any) -> str:
        directory = tmp_path / name
        directory.mkdir()
        config = json.loads((made_by_peft / "adapter_config.json").read_text()) | changes
        (directory / "adapter_config.json").write_text(json.dumps(config))
        tensors = load_file(made_by_peft / "adapter_model.safetensors")
        if name == "nan":
            tensors[min(tensors)][0, 0] = float("nan")
        save_file(tensors, directory / "adapter_model.safetensors")
        return str(directory)

    torn = Path(broken("torn"))
    (torn / "adapter_model.safetensors").write_bytes((made_by_peft / "adapter_model.safetensors").read_bytes()[:-5])
    starts = {
        "no-such": (str(tmp_path / "nowhere"), "not found"),
        "nan": (broken("nan"), "NaN or Inf"),
        "torn": (str(torn), "no whole safetensors file"),
        "rank": (broken("rank", r=4), "another rank"),
        "zero": (broken("zero", r=0, lora_alpha=-1), "r: 0 is not a whole number from 1 to 256; the default is 16; lora_alpha: -1 is not"),
        "words": (broken("words", r="three", lora_alpha=None), "r: "),
        "pattern": (broken("pattern", target_modules=".*proj"), "has no tensor"),
        "no-targets": (broken("no-targets", target_modules=None), "target_modules"),
        "elsewhere": (broken("elsewhere", target_modules=["q_proj", "c_attn"]), "'c_attn' is not in this base model"),
        "head": (broken("head", target_modules=["q_proj", "lm_head"]), "cannot be adapted. An adapter's layers are fixed: take the base"),
        "fewer": (broken("fewer", target_modules=["q_proj"], rank_pattern={}), "does not train"),
        "dora": (broken("dora", use_dora=True), "use_dora"),
        "file": (str(made_by_peft / "adapter_config.json"), "adapter_config.json"),
    }
    jobs = [{**job(name, str(data / "b.jsonl"), adapter_path=path)} for name, (path, _) in starts.items()]
    for fields in jobs:
        del fields["r"]
    mine = job("mine", str(data / "b.jsonl"), adapter_path=str(made_by_peft), r=8)
    notes: list[str] = []
    results = train(base, tmp_path / "out", [*jobs, mine, job("good", str(data / "b.jsonl"))], watcher=Watcher(note=notes.append))
    for name, (path, reason) in starts.items():
        assert results[name].status == "failed" and reason in results[name].reason and "Traceback" not in results[name].reason, results[
            name
        ]
        assert Path(path).name in results[name].reason, results[name].reason
        assert "Choose from" not in results[name].reason and "all-linear" not in results[name].reason
        assert not (tmp_path / "out" / name / "adapter_model.safetensors").exists()
    assert (results["mine"].status, results["mine"].rank) == ("done", 3)
    assert any("r is 3, as in" in note and "(the job says 8)" in note for note in notes)
    assert results["good"].status == "done"
    other = train(wide_base, tmp_path / "wide", [{**job("other", str(data / "b.jsonl"), adapter_path=str(made_by_peft))} | {"r": 3}])
    assert other["other"].status == "failed" and "another base model" in other["other"].reason


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_every_number(base: Path, data: Path, tmp_path: Path) -> None:
    train(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], report_to=["tensorboard"])
    assert list((tmp_path / "out" / "a" / "tensorboard").glob("events.*"))


def test_a_tracker_that_is_not_installed_is_refused(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb.*pip install 'tlora\[wandb\]'"):
        train(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], report_to=["wandb"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("raises", ["init", "log", "finish"])
def test_a_tracker_gets_the_numbers_and_cannot_end_a_job(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: str
) -> None:
    logged: list[tuple[int, dict[str, float]]] = []

    class Client:  # as wandb and trackio look from outside
        def init(self, **settings: Any) -> Client:
            assert settings["name"] == "a" and settings["config"]["r"] == 4
            return self.do("init")

        def log(self, values: dict[str, float], step: int) -> None:
            logged.append((step, values))
            self.do("log")

        def finish(self) -> None:
            self.do("finish")

        def do(self, what: str) -> Client:
            if what == raises:
                raise RuntimeError("no network")
            return self

    monkeypatch.setitem(__import__("sys").modules, "wandb", Client())
    monkeypatch.setattr("tlora.engine.train.check_trackers", lambda names: None)
    notes: list[str] = []
    results = train(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], report_to=["wandb"], watcher=Watcher(note=notes.append))
    assert results["a"].status == "done"
    assert sum("no network" in note and "wandb" in note for note in notes) == 1, notes
    expected = {"init": [], "log": [1], "finish": [1, 2, 3, 4, 5, 6]}[raises]
    assert [step for step, _ in logged] == expected and all({"loss", "learning_rate"} <= set(values) for _, values in logged)


def test_the_example_of_an_own_loop(base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parents[2] / "examples" / "own_loop.py"
    code = [line for line in source.read_text().split('"""')[2].splitlines() if line.strip() and not line.strip().startswith("#")]
    body = [line for line in code if line.startswith(" ")]
    assert len(body) <= 30, f"{len(body)} lines of code"
    found = importlib.util.spec_from_file_location("own_loop", source)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    rng = random.Random(1)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("".join(sentence(rng) + "\n" for _ in range(9)))
    losses = module.main(str(base), str(tmp_path / "out"), str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), steps=8)
    first = float(capsys.readouterr().out.splitlines()[0].split("'one': ")[1].split(",")[0])
    assert losses["one"] < first
    ids = torch.arange(10, 30)
    assert not torch.equal(*(peft_logits(base, tmp_path / "out" / name, ids) for name in ("one", "two")))
