"""Reading a jobs file: every key, defaults, sweeps, paths, settings of the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tlora.cli.commands import _read
from tlora.errors import ConfigError
from tlora.job import SCHEDULED, DataConfig, JobSpec, LoraConfig, RunSpec, TrainConfig
from tlora.jobs_file import read_jobs_file

JOBS = """
base_model: some/base
output_dir: out
defaults: {r: 16, lora_alpha: 32, learning_rate: 2.0e-4, batch_size: 8, max_length: 77}
jobs:
  - {name: polite, data: polite.jsonl}
  - {name: sql, data: {path: sql.json, format: alpaca, eval_size: 0.05}, r: 64, use_rslora: true, max_length: 2048}
  - {name: sweep, data: support.jsonl, sweep: {r: [8, 32], learning_rate: [1.0e-4, 3e-4]}}
"""
OTHER_VALUES: dict[str, Any] = {  # a value of each key that is not its default
    "r": 7,
    "lora_alpha": 5.5,
    "lora_dropout": 0.25,
    "target_modules": ["q_proj"],
    "exclude_modules": ["o_proj"],
    "layers_to_transform": [0, 2],
    "layers_pattern": "layers",
    "use_rslora": True,
    "target_parameters": ["experts.down_proj"],
    "expert_rank": "divide",
    "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"q_proj": 3.5},
    "trainable_token_indices": [7, 9],
    "adapter_path": "/adapters/a",
    "objective": "dpo",
    "beta": 0.3,
    "reference": "base",
    "desirable_weight": 1.25,
    "undesirable_weight": 0.5,
    "learning_rate": 0.5,
    "lr_scheduler_type": "cosine",
    "min_lr_rate": 0.75,
    "warmup_steps": 0.125,
    "weight_decay": 0.01,
    "adam_beta1": 0.5,
    "adam_beta2": 0.75,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.0,
    "batch_size": 3,
    "num_train_epochs": 2.5,
    "max_steps": 11,
    "seed": 1,
    "weight": 3.0,
    "arrival_seconds": 20.0,
    "priority": 2.0,
    "max_slowdown": 4.0,
    "deadline_seconds": 60.0,
    "logging_steps": 2,
    "eval_steps": "epoch",
    "early_stopping_patience": 4,
    "load_best_model_at_end": True,
    "save_steps": "epoch",
    "save_total_limit": None,
    "gpus": 2,
    "path": "/data/x.jsonl",
    "format": "chat",
    "eval_path": "/data/eval.jsonl",
    "eval_size": 12.0,
    "eval_seed": 7,
    "max_length": 99,
    "train_on": "all",
    "packing": True,
    "on_bad_rows": "drop",
    "chat_template": "/data/chat.jinja",
    "chat_template_kwargs": {"enable_thinking": False},
    "base_model": "other/base",
    "output_dir": "elsewhere",
    "dtype": "float64",
    "base_precision": "fp8",
    "layout": "streamed",
    "links": "host",
    "unused_weights": "ignore",
    "deterministic": True,
    "token_budget": 4096,
    "recompute": "all",
    "memory_limit": 123456789,
    "cpu_threads": 3,
    "report_to": ["wandb", "trackio"],
}
JOB_KEYS = [*LoraConfig.model_fields, *TrainConfig.model_fields, "gpus", *SCHEDULED]
DATA_KEYS = [key for key in DataConfig.model_fields if key != "path"]


def write(directory: Path, text: str) -> Path:
    file = directory / "jobs.yaml"
    file.write_text(text)
    return file


def one_job(directory: Path, **keys: Any) -> JobSpec:
    job = {"name": "a", "data": {"path": "d.jsonl", "eval_size": 0.1}} | keys
    return read_jobs_file(write(directory, json.dumps({"base_model": "b", "jobs": [job]}))).jobs[0]


def test_the_example_becomes_six_jobs_with_defaults_under_them(tmp_path: Path):
    run = read_jobs_file(write(tmp_path, JOBS))
    assert [job.name for job in run.jobs] == [
        "polite",
        "sql",
        *(f"sweep-r{r}-lr{lr}" for r, lr in itertools.product((8, 32), ("1e-4", "3e-4"))),
    ]
    polite, sql, first = run.jobs[:3]
    assert (polite.r, polite.data.max_length, polite.learning_rate) == (16, 77, 2e-4)
    assert (sql.r, sql.data.max_length, sql.data.format, sql.data.eval_size) == (64, 2048, "alpaca", 0.05)
    assert [job.sweep_of for job in run.jobs] == [None, None, "sweep", "sweep", "sweep", "sweep"]
    assert [(job.r, job.learning_rate) for job in run.jobs[2:]] == [(8, 1e-4), (8, 3e-4), (32, 1e-4), (32, 3e-4)]
    assert first.lora_alpha == 32 and first.data.max_length == 77


def test_the_models_have_the_keys_tried_here():
    keys = {*JOB_KEYS, *DataConfig.model_fields, *(key for key in RunSpec.model_fields if key != "jobs")}
    assert keys == set(OTHER_VALUES)
    assert set(JobSpec.model_fields) == {*JOB_KEYS, "name", "data", "sweep_of"}


@pytest.mark.parametrize("key", JOB_KEYS)
def test_each_key_of_a_job_works_on_the_job_in_the_defaults_and_by_set(tmp_path: Path, key: str):
    value = OTHER_VALUES[key]
    needs = {
        "early_stopping_patience": {"eval_steps": 5},
        "layers_pattern": {"layers_to_transform": 1},
        "expert_rank": {"target_parameters": ["w"]},
    }.get(key, {})
    assert getattr(one_job(tmp_path), key) != value, "the default proves nothing"
    assert getattr(one_job(tmp_path, **{key: value}, **needs), key) == value
    base = {"base_model": "b", "jobs": [{"name": "a", "data": {"path": "d", "eval_size": 1}} | needs]}
    assert getattr(read_jobs_file(write(tmp_path, json.dumps(base | {"defaults": {key: value}}))).jobs[0], key) == value
    file = write(tmp_path, json.dumps(base))
    assert getattr(read_jobs_file(file, [f"jobs.a.{key}={json.dumps(value)}"]).jobs[0], key) == value
    assert getattr(read_jobs_file(file, [f"defaults.{key}={json.dumps(value)}"]).jobs[0], key) == value


@pytest.mark.parametrize("key", DATA_KEYS)
def test_each_key_of_the_data_works_inside_it_beside_it_and_in_the_defaults(tmp_path: Path, key: str):
    value = OTHER_VALUES[key]
    jobs = [
        one_job(tmp_path, data={"path": "d", key: value}),
        one_job(tmp_path, data="d", **{key: value}),
        read_jobs_file(
            write(tmp_path, json.dumps({"base_model": "b", "defaults": {key: value}, "jobs": [{"name": "a", "data": "d"}]}))
        ).jobs[0],
        read_jobs_file(write(tmp_path, "base_model: b\njobs: [{name: a, data: d}]"), [f"jobs.a.{key}={json.dumps(value)}"]).jobs[0],
    ]
    assert [getattr(job.data, key) for job in jobs] == [value] * 4


@pytest.mark.parametrize("key", [key for key in RunSpec.model_fields if key != "jobs"])
def test_each_key_of_the_run_works_in_the_file_and_by_set(tmp_path: Path, key: str):
    value = OTHER_VALUES[key]
    base = {"base_model": "b", "jobs": [{"name": "a", "data": "d"}]}
    assert getattr(read_jobs_file(write(tmp_path, json.dumps(base | {key: value}))), key) == value
    assert getattr(read_jobs_file(write(tmp_path, json.dumps(base)), [f"{key}={json.dumps(value)}"]), key) == value


@pytest.mark.parametrize(("text", "number"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("2e+0", 2.0), (".5e-1", 0.05), ("1.0e-4", 1e-4), ("3", 3.0)])
def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path, text: str, number: float):
    run = read_jobs_file(write(tmp_path, f"base_model: b\njobs: [{{name: a, data: d, learning_rate: {text}, r: 1e1}}]"))
    assert run.jobs[0].learning_rate == number and run.jobs[0].r == 10


def test_a_quoted_number_stays_text(tmp_path: Path):
    run = read_jobs_file(write(tmp_path, 'base_model: b\njobs: [{name: "1e4", data: d}, {name: 2024-01-01, data: d}]'))
    assert [job.name for job in run.jobs] == ["1e4", "2024-01-01"]


def test_a_key_of_the_job_wins_over_the_defaults_wherever_each_stands(tmp_path: Path):
    text = "base_model: b\ndefaults: {data: {path: all.jsonl, max_length: 10, format: chat}}\njobs: [{name: a, max_length: 20}, {name: b}]"
    first, second = read_jobs_file(write(tmp_path, text)).jobs
    assert (first.data.max_length, first.data.format, Path(first.data.path).name) == (20, "chat", "all.jsonl")
    assert second.data.max_length == 10


def test_paths_stand_beside_the_file_and_output_dir_does_not(tmp_path: Path):
    (tmp_path / "base").mkdir()
    text = """
base_model: base
jobs:
  - name: a
    data: {path: ../d.jsonl, eval_path: e.jsonl, chat_template: t.jinja}
    adapter_path: old
  - {name: b, data: /abs/d.jsonl}
"""
    run = read_jobs_file(write(tmp_path, text))
    assert run.base_model == str(tmp_path / "base") and run.output_dir == "out"
    data = run.jobs[0].data
    assert data.path == str(tmp_path.parent / "d.jsonl")
    assert (data.eval_path, data.chat_template) == (str(tmp_path / "e.jsonl"), str(tmp_path / "t.jinja"))
    assert run.jobs[0].adapter_path == str(tmp_path / "old")
    assert run.jobs[1].data.path == "/abs/d.jsonl"


def test_a_home_directory_is_meant_by_a_tilde_also_in_output_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write(tmp_path, "base_model: ~/base\noutput_dir: ~/out\njobs: [{name: a, data: ~/a.jsonl}]")
    for run in (read_jobs_file(file), read_jobs_file(file, ["output_dir=~/out"])):
        assert (run.base_model, run.output_dir) == (str(tmp_path / "home" / "base"), str(tmp_path / "home" / "out"))
        assert run.jobs[0].data.path == str(tmp_path / "home" / "a.jsonl")
    assert _read(file, None, Path("~/there")).output_dir == str(tmp_path / "home" / "there")


def test_a_path_by_set_stands_beside_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file = write(tmp_path, JOBS)
    monkeypatch.chdir(elsewhere)
    job = read_jobs_file(file, ["jobs.sql.data=x.json"]).jobs[1]
    assert job.data.path == str(elsewhere / "x.json")
    assert job.data.format == "alpaca", "--set of the path keeps the data's other keys"


@pytest.mark.parametrize(("base", "is_path"), [("./nowhere", True), ("org/name", False), ("gpt2", False), ("~/m", True)])
def test_a_base_that_is_no_directory_there_is_a_hub_id_unless_written_as_a_path(tmp_path: Path, base: str, is_path: bool):
    found = read_jobs_file(write(tmp_path, f"base_model: {base}\njobs: [{{name: a, data: d}}]")).base_model
    assert found.startswith("/") == is_path and (is_path or found == base)


def test_report_to_may_be_one_name(tmp_path: Path):
    text = "base_model: b\nreport_to: {}\njobs: [{{name: a, data: d}}]"
    assert read_jobs_file(write(tmp_path, text.format("trackio"))).report_to == ["trackio"]
    assert read_jobs_file(write(tmp_path, text.format("none"))).report_to == []


def test_anchors_and_merge_keys(tmp_path: Path):
    text = "base_model: b\njobs:\n  - &a {name: a, data: d, r: 3, seed: 5}\n  - {<<: *a, name: b, r: 4}\n"
    first, second = read_jobs_file(write(tmp_path, text)).jobs
    assert (first.r, second.r, second.seed, second.data) == (3, 4, 5, first.data)


def test_the_same_values_as_yaml_safe_load(tmp_path: Path):
    text = JOBS.replace("3e-4", "3.0e-4")
    loaded = yaml.safe_load(text)
    sql = read_jobs_file(write(tmp_path, text)).jobs[1]
    assert sql.r == loaded["jobs"][1]["r"] and sql.data.eval_size == loaded["jobs"][1]["data"]["eval_size"]


@pytest.mark.parametrize(
    ("sweep", "names"),
    [
        ({"learning_rate": [1e-4, 0.00015, 0.05, 0.001]}, ["lr1e-4", "lr1.5e-4", "lr0.05", "lr1e-3"]),
        ({"lora_alpha": [16, 32.0]}, ["alpha16", "alpha32"]),
        ({"batch_size": [4]}, ["bs4"]),
        ({"weight_decay": [0, 0.1]}, ["wd0", "wd0.1"]),
        ({"lora_dropout": [0.05]}, ["drop0.05"]),
        ({"max_length": [512, 1024]}, ["len512", "len1024"]),
        ({"seed": [1, 2]}, ["seed1", "seed2"]),
        ({"num_train_epochs": [1, 2.5]}, ["epochs1", "epochs2.5"]),
        ({"use_rslora": [True, False]}, ["rsloratrue", "rslorafalse"]),
        ({"target_modules": ["all-linear", ["q_proj", "v_proj"]]}, ["modulesall-linear", "modulesq_proj_v_proj"]),
        ({"data": ["x/a b.jsonl", "c.json"]}, ["dataa_b", "datac"]),
        ({"max_steps": [None, 5]}, ["stepsnone", "steps5"]),
        ({"weight": [2e6 / 4, 1e-05]}, ["weight500000", "weight1e-5"]),
    ],
)
def test_names_of_a_sweep(tmp_path: Path, sweep: dict[str, Any], names: list[str]):
    text = json.dumps({"base_model": "b", "jobs": [{"name": "s", "data": "d", "sweep": sweep}]})
    jobs = read_jobs_file(write(tmp_path, text)).jobs
    assert [job.name for job in jobs] == [f"s-{name}" for name in names]
    key = next(iter(sweep))
    found = [getattr(job.data if key == "max_length" else job, key) for job in jobs]
    if key == "data":
        assert [Path(data.path) for data in found] == [tmp_path / value for value in sweep[key]]
    else:
        assert found == sweep[key]


def test_settings_of_the_command_line(tmp_path: Path):
    file = write(tmp_path, JOBS)
    run = read_jobs_file(
        file, ["jobs.polite.r=32", "defaults.lora_alpha=8", "deterministic=true", "jobs.sweep.sweep.r=[4]", "dtype=float32"]
    )
    assert (run.jobs[0].r, run.jobs[0].lora_alpha, run.deterministic, run.dtype) == (32, 8, True, "float32")
    assert [job.r for job in run.jobs[2:]] == [4, 4]
    assert read_jobs_file(file, ["defaults.r=1", "defaults.r=2"]).jobs[0].r == 2, "the last one wins"


def test_a_setting_finds_a_job_whose_name_holds_dots(tmp_path: Path):
    file = write(tmp_path, "base_model: b\njobs: [{name: a, data: d}, {name: a.b, data: d}]")
    run = read_jobs_file(file, ["jobs.a.b.r=5", "jobs.a.r=6"])
    assert [job.r for job in run.jobs] == [6, 5]


def test_the_reference_page_tells_the_models(tmp_path: Path):
    from tlora.jobs_file.rules import default_of, rule_of

    page = Path(__file__).parents[2] / "docs" / "reference" / "jobs-file.md"
    rows = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in page.read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) > 2]  # the table of formats has two columns
    told = {row[0].strip("`"): (row[1], row[2].strip("`")) for row in rows}
    fields = {**RunSpec.model_fields, **JobSpec.model_fields, **DataConfig.model_fields}
    del fields["sweep_of"]
    assert len(rows) == len(told) and set(told) == set(fields)
    for key, field in fields.items():
        rule = "a list of mappings" if key == "jobs" else rule_of(field)
        assert told[key] == (rule, default_of(field) or "required"), key
    assert all(len(row) == 4 and len(row[3]) > 10 for row in rows), "each key has a meaning"
    example = page.read_text().split("```yaml\n")[1].split("```")[0]
    assert len(read_jobs_file(write(tmp_path, example)).jobs) == 6


def test_a_dir_is_no_jobs_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_jobs_file(tmp_path)


@pytest.mark.parametrize("written", ["none", "[none]", "[]"])
def test_no_trackers_as_transformers_writes_it(tmp_path: Path, written: str):
    assert read_jobs_file(write(tmp_path, f"base_model: b\nreport_to: {written}\njobs: [{{name: a, data: d}}]")).report_to == []
