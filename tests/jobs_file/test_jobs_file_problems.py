"""What a jobs file gets wrong: one message with file, line, value, rule and remedy for each, all at once."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml

from tlora.errors import ConfigError
from tlora.job import DataConfig, JobSpec, RunSpec, TrainConfig
from tlora.jobs_file import located, read_jobs_file, suggest
from tlora.jobs_file.spelling import meant


def problems_of(directory: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The problems, without the file's directory."""
    file = directory / "jobs.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_jobs_file(file, overrides)
    message = str(caught.value)
    assert "pydantic" not in message and "Traceback" not in message
    lines = message.splitlines()
    listed = lines[1:] if len(lines) > 1 else lines
    assert len(lines) == 1 or lines[0] == f"{len(listed)} problems:"
    return [line.strip().replace(f"{directory}/", "") for line in listed]


def one_problem(directory: Path, text: str | bytes, *overrides: str) -> str:
    problems = problems_of(directory, text, *overrides)
    assert len(problems) == 1, problems
    return problems[0]


def has(text: str, *facts: object) -> bool:
    """Whether a message states all facts: the place, the key, the value, the rule's numbers or names, the remedy."""
    assert all(str(fact) in text for fact in facts), (text, facts)
    return True


def test_all_problems_at_once_sorted_by_line(tmp_path: Path):
    text = """base_model: b
deterministic: 3
defaults:
  rank: 16
jobs:
  - {name: ../x, data: a.jsonl, r: 0}
  - name: sql
    data: {path: s.json, max_length: 1, epochs: 4}
    eval_steps: never
  - {name: q, data: a, learning_rate: fast}
"""
    facts: list[tuple[object, ...]] = [
        ("--set oops:", "key=value", "--set defaults.r=8"),
        ("jobs.yaml:2: deterministic:", 3, "true or false", "false"),
        ("jobs.yaml:4: rank:", "unknown key", "'r'"),
        ("jobs.yaml:6: ", "'../x'", "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"),
        ("jobs.yaml:6: r:", 0, "1 to 256", 16),
        ("jobs.yaml:8: data.epochs:", "unknown key", "max_length, name, on_bad_rows, packing, path, revision, split, train_on"),
        ("jobs.yaml:8: data.max_length:", 1, "2 to 1000000000", 1024),
        ("jobs.yaml:9: eval_steps:", "'never'", "1 to 1000000000 or 'epoch' or null"),
        ("jobs.yaml:10: learning_rate:", "'fast'", "0.0002"),
    ]
    for problem, expected in zip(problems_of(tmp_path, text, "oops"), facts, strict=True):
        assert problem.startswith(str(expected[0])) and has(problem, *expected)


JOB = "base_model: b\njobs:\n  - {{name: a, data: d, {}}}\n"


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ("r: -3", ("r: -3", "1 to 256", "default is 16")),
        ("r: 2.5", ("r: 2.5", "whole number", "1 to 256")),
        ("r: true", ("r: true", "1 to 256")),
        ("r: null", ("r: null", "1 to 256")),
        ("save_steps: true", ("save_steps: true", "'epoch'", "default is 500")),
        ("max_length: true", ("data.max_length: true", "2 to 1000000000", "default is 1024")),
        ("lora_alpha: 0", ("lora_alpha: 0", "from 1e-06 to 1000000", "default is 32")),
        ("lora_dropout: 1", ("lora_dropout: 1", "0 to below 1", "default is 0")),
        ("weight: .inf", ("weight: inf", "at most 1000000", "default is 1")),
        ("learning_rate: .nan", ("learning_rate: nan", "from 0 to 1e+38", "default is 0.0002")),
        ("lora_alpha: 1e308", ("lora_alpha: 1e+308", "to 1000000")),
        ("lora_alpha: .inf", ("lora_alpha: inf", "to 1000000")),
        ("alpha_pattern: {q_proj: .inf}", ("alpha_pattern", "inf", "each to a number from 1e-06 to 1000000")),
        ("alpha_pattern: {q_proj: 1e308}", ("alpha_pattern", "1e+308", "to 1000000")),
        ("learning_rate: 1e308", ("learning_rate: 1e+308", "to 1e+38")),
        ("weight_decay: .inf", ("weight_decay: inf", "to 1e+38")),
        ("adam_epsilon: 1e-50", ("adam_epsilon: 1e-50", "from 1e-37")),
        ("warmup_steps: -.inf", ("warmup_steps: -inf", "from 0")),
        ("r: 010", ("010: YAML reads", "here 8", "write 10", '"010" in quotes')),
        ("max_steps: 1:30", ("1:30: YAML reads", "base of 60", '"1:30" in quotes')),
        ("r: 0o10", ("r: '0o10'", "a whole number from 1 to 256")),
        ("target_modules: q_proj", ("target_modules: 'q_proj'", "'all-linear'", "write `target_modules: [q_proj]`")),
        ("target_modules: []", ("target_modules: [] adapts no linear layer", "or set target_parameters")),
        ("train_on: none", ("data.train_on: 'none'", "one of 'completions', 'last', 'all'")),
        ("use_rslora: maybe", ("use_rslora: 'maybe'", "true or false")),
        ("rank_pattern: {q: 0}", ("rank_pattern: {'q': 0}", "1 to 256", "default is {}")),
        ("gpus: 0", ("gpus: 0", "whole number from 1", "default is 1")),
        ("gpus: all", ("gpus: 'all'", "whole number from 1")),
        ("gpus: 9", ("gpus 9", "batch_size 8", "at most 8", "raise batch_size")),
        ("batch_size: 4, sweep: {gpus: [4, 5]}", ("gpus 5", "batch_size 4", "at most 4")),
        ("r: 4, r: 5", ("r: given twice", "line 3")),
        ("chat_template: ''", ("data.chat_template: ''", "give a file")),
        (r'adapter_path: "a\0b"', (r"adapter_path: 'a\x00b'", "give a file")),
        ("early_stopping_patience: 2", ("early_stopping_patience", "eval_size", "eval_path")),
        ("eval_size: 0.1, early_stopping_patience: 2", ("early_stopping_patience 2", "set eval_steps")),
        ("eval_size: 0.1, eval_path: e.jsonl", ("eval_size 0.1", "e.jsonl", "eval_size: 0")),
        ("eval_size: 2.5", ("eval_size 2.5", "write 2", "below 1")),
        ("eval_size: -1", ("data.eval_size: -1", "from 0 up")),
        ("num_train_epochs: 1e308", ("num_train_epochs: 1e+308", "at most 1000000")),
        ("output_dir: x", ("output_dir: unknown key", "top of the file")),
        ("model: x", ("model: unknown key", "'base_model' at the top of the file")),
        ("learning_rat: 1", ("learning_rat: unknown key", "'learning_rate'")),
        ("Learning-Rate: 1", ("Learning-Rate: unknown key", "'learning_rate'")),
        ("sweep: 3", ("sweep:", "write `sweep: {r: [8, 32]}`")),
        ("sweep: {r: 3}", ("sweep.r:", "list", "write `r: [...]`")),
        ("sweep: {lr: [1]}", ("sweep.lr: unknown key", "'learning_rate'")),
        ("sweep: {r: [8, 8]}", ("sweep.r:", "8", "keep one")),
        ("sweep: {r: [8, 999]}", ("r: 999", "1 to 256")),
        (f"sweep: {{seed: {list(range(50))}, r: {list(range(1, 50))}}}", ("sweep: 2450", "1000", "fewer values")),
    ],
)
def test_one_wrong_key_of_a_job(tmp_path: Path, keys: str, facts: tuple[str, ...]):
    problem = one_problem(tmp_path, JOB.format(keys))
    assert problem.startswith(f"jobs.yaml:3: {facts[0]}") and has(problem, *facts)


@pytest.mark.parametrize(
    "name",
    ["tmp-x", "TMP-x", "tmp-0123456789abcdef0123456789abcdef", "bad-sql", "Bad-", "sql.replaced", "run.json", "Run.JSONL", "report.html"],
)
def test_names_that_the_run_itself_uses_are_refused(tmp_path: Path, name: str):
    problem = one_problem(tmp_path, f"base_model: b\njobs: [{{name: {name}, data: d}}]")
    assert has(problem, "jobs.yaml:2: ", repr(name), "'tmp-'", "'bad-'", "'.replaced'", "report.html", "choose another")


@pytest.mark.parametrize(
    "name", ["tmp", "tmp.x", "a-tmp-x", "badger", "replaced", "a.replaced.b", "run", "run.jsonx", "report.htm", "xrun.json"]
)
def test_names_that_only_look_alike_are_free(name: str):
    assert JobSpec(name=name, data=DataConfig(path="d")).name == name


def test_a_defaults_eval_size_can_be_undone_beside_an_eval_path(tmp_path: Path):
    text = "base_model: b\ndefaults: {eval_size: 50}\njobs:\n"
    text += "- {name: a, data: d, eval_path: e}\n- {name: b, data: d, eval_path: e, eval_size: 0}"
    assert one_problem(tmp_path, text).startswith("jobs.yaml:2: eval_size 50 and eval_path")


def test_the_most_epochs_give_a_number_of_steps():
    assert TrainConfig(num_train_epochs=1e6, batch_size=1).total_steps(10**9) == 10**15


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "base_model: b\njobs: [{name: no, data: d}]",
            "name: false is not text; YAML reads it as a number or a truth value: write it in quotes",
        ),
        ("base_model: b\njobs: [{name: a}]", "jobs.yaml:2: data: missing; it must be a path, or a mapping of path, format,"),
        ("base_model: b\njobs: [{name: a, data: {format: chat}}]", "jobs.yaml:2: data: missing; it must be a path"),
        ("base_model: b\njobs: [{name: a, data: 3}]", "jobs.yaml:2: data: 3 is not a path, or a mapping of path"),
        ("base_model: b\njobs: [{name: a, data: ''}]", "jobs.yaml:2: data.path: '' is not a path"),
        ("base_model: ''\njobs: [{name: a, data: d}]", "jobs.yaml:1: base_model: '' is not a path"),
        (
            "base_model: ~nobody.x/b\njobs: [{name: a, data: d}]",
            "jobs.yaml:1: base_model: '~nobody.x/b': there is no such home directory here; write it out",
        ),
        (
            "base_model: b\njobs: [{name: a, data: ~nobody.x/d}]",
            "jobs.yaml:2: data.path: '~nobody.x/d': there is no such home directory here; write it out",
        ),
        (
            "base_model: b\noutput_dir: ~nobody.x/o\njobs: [{name: a, data: d}]",
            "jobs.yaml:2: output_dir: '~nobody.x/o': there is no such home directory here; write it out",
        ),
        (f"base_model: {'n' * 300}\njobs: [{{name: a, data: d}}]", f"'{'n' * 300}' is not a path: File name too long; give a shorter one"),
        (f"base_model: b\njobs: [{{name: a, data: {'n' * 300}}}]", f"'{'n' * 300}' is not a path: File name too long; give a shorter one"),
        (
            "base_model: b\njobs: [{name: a, data: {pth: d, split: train}}]",
            "jobs.yaml:2: data.pth: unknown key; did you mean 'path'?",
        ),
        ("base_model: b\njobs: [{name: a, data: {path: [{paht: a}]}}]", "jobs.yaml:2: data.path.paht: unknown key; did you mean 'path'?"),
        ("base_modle: b\njobs: [{name: a, data: d}]", "jobs.yaml:1: base_modle: unknown key; did you mean 'base_model'?"),
        ("base_model: b\njobs: [{name: a, dta: d}]", "jobs.yaml:2: dta: unknown key; did you mean 'data'?"),
        ("base_model: b\njobs: [{data: a}]", "jobs.yaml:2: name: missing; it must be text; add `name: ...`"),
        ("jobs: [{name: a, data: d}]", "jobs.yaml:1: base_model: missing; it must be text; add `base_model: ...`"),
        ("base_model: b", "jobs.yaml:1: jobs: none; write `jobs:`"),
        ("base_model: b\njobs: []", "jobs.yaml:2: jobs: none; write `jobs:`"),
        ("base_model: b\njobs: {a: 1}", "jobs.yaml:2: jobs: must be a list; write `jobs:`"),
        ("base_model: b\njobs:\n- {name: a, data: d}\n- foo", "jobs.yaml:4: jobs: 'foo' is not a mapping"),
        ("base_model: b\ndefaults: 3\njobs: [{name: a, data: d}]", "jobs.yaml:2: defaults: must be a mapping"),
        ("base_model: b\ndefaults: {sweep: {}}\njobs: [{name: a, data: d}]", "jobs.yaml:2: sweep: unknown key; 'sweep' belongs on a job"),
        ("base_model: b\nr: 3\njobs: [{name: a, data: d}]", "jobs.yaml:2: r: unknown key; 'r' belongs in `defaults` or on a job"),
        ("base_model: b\nlr: 3\njobs: [{name: a, data: d}]", "jobs.yaml:2: lr: unknown key; did you mean 'learning_rate' in `defaults`"),
        (
            "base_model: b\nreport_to: [x]\njobs: [{name: a, data: d}]",
            "jobs.yaml:2: report_to: ['x'] is not a list, each one of 'tensorboard'",
        ),
        (
            "base_model: b\ntoken_budget: 3\njobs: [{name: a, data: d}]",
            "token_budget: 3 is not 'auto' or a whole number from 16 to 1000000000",
        ),
        ("base_model: b\n? [x, y]\n: 1\njobs: [{name: a, data: d}]", "jobs.yaml:2: a key must be a word"),
        ("base_model: !!binary aGk=\njobs: [{name: a, data: d}]", "jobs.yaml:1: tag:yaml.org,2002:binary: YAML tags are not supported"),
        ("base_model: b\njobs: [{name: a, data: !x {path: d}}]", "jobs.yaml:2: !x: YAML tags are not supported"),
        (
            "base_model: b\njobs:\n- name: a\n  max_length: 9\n  data:\n    path: d\n    max_length: 8",
            "jobs.yaml:4: max_length: given twice, on the job and in its data",
        ),
    ],
)
def test_one_wrong_thing_in_the_file(tmp_path: Path, text: str, expected: str):
    assert expected in one_problem(tmp_path, text)


def test_two_jobs_of_one_name_also_when_they_differ_in_case_or_come_from_a_sweep(tmp_path: Path):
    text = "base_model: b\njobs:\n- {name: a-r8, data: d}\n- {name: A, data: d, sweep: {r: [8, 9]}}\n"
    assert has(one_problem(tmp_path, text), "jobs.yaml:4: name:", "'A-r8' and 'a-r8' differ in case alone", "jobs.yaml:3", "must differ")
    text = "base_model: b\njobs:\n- {name: a, data: d}\n- {name: a, data: d}\n"
    assert has(one_problem(tmp_path, text), "jobs.yaml:4: name: two jobs are named 'a', the other on jobs.yaml:3", "must differ")


def test_a_name_that_a_sweep_makes_too_long_is_refused(tmp_path: Path):
    text = f"base_model: b\njobs: [{{name: {'x' * 61}, data: d, sweep: {{r: [8]}}}}]"
    said = one_problem(tmp_path, text)
    assert has(said, "sweep: makes the job name", "of 64 characters, 63 at most", f"shorten `name` '{'x' * 61}' by 1"), said
    modules = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"
    text = f"base_model: b\njobs: [{{name: a, data: d, sweep: {{target_modules: [[{modules}]]}}}}]"
    assert "write its jobs one by one, each with a name" in one_problem(tmp_path, text)


def test_the_line_of_a_default_is_the_defaults_line_told_once(tmp_path: Path):
    text = "base_model: b\ndefaults:\n  r: 999\njobs:\n- {name: a, data: d}\n- {name: b, data: d}\n"
    assert one_problem(tmp_path, text).startswith("jobs.yaml:3: r: 999")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("r=3", "--set r=3: r: unknown key; 'r' belongs in `defaults` or on a job (--set defaults.r=... or jobs.NAME.r=...)"),
        ("jobs.b.r=3", "--set jobs.b.r=3: unknown job; known here: polite"),
        ("jobs.polit.r=3", "--set jobs.polit.r=3: unknown job; did you mean 'polite'?"),
        ("polite.r=3", "--set polite.r=3: 'polite' is a job; write jobs.polite.r=3"),
        ("jobs.polite=3", "--set jobs.polite=3: write jobs.NAME.key=value"),
        ("jobs=3", "--set jobs=3: write jobs.NAME.key=value"),
        ("defaults=3", "--set defaults=3: write defaults.key=value"),
        ("=3", "--set =3: must be key=value; for example --set defaults.r=8"),
        ("defaults..r=3", "--set defaults..r=3: must be key=value; for example --set defaults.r=8"),
        ("defaults.rank=3", "--set defaults.rank=3: rank: unknown key; did you mean 'r'?"),
        ("defaults.r=x", "--set defaults.r=x: r: 'x' is not a whole number from 1 to 256; the default is 16"),
        ("defaults.r=", "--set defaults.r=: r: null is not a whole number from 1 to 256; the default is 16"),
        ("defaults.data.pth=x", "--set defaults.data.pth=x: data.pth: unknown key; did you mean 'path'?"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written(tmp_path: Path, override: str, expected: str):
    assert one_problem(tmp_path, "base_model: b\njobs: [{name: polite, data: d}]", override) == expected


def test_a_setting_that_is_no_yaml(tmp_path: Path):
    assert "--set defaults.r=[: this is not valid YAML" in one_problem(
        tmp_path, "base_model: b\njobs: [{name: a, data: d}]", "defaults.r=["
    )


@pytest.mark.parametrize("loader", [yaml.SafeLoader, located._LOADER])
def test_a_setting_of_bytes_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: type[yaml.SafeLoader]):
    """As Python hands on what a shell gives: a surrogate for each such byte."""
    monkeypatch.setattr(located, "_LOADER", loader)
    found = one_problem(tmp_path, JOB.format("r: 8"), "defaults.lora_alpha=\udcff")
    assert found.startswith("--set defaults.lora_alpha=\udcff: this is not valid YAML: the character U+DCFF is not allowed")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("loader", [yaml.SafeLoader, located._LOADER])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "jobs.yaml: the file is empty"),
        ("# nothing\n", "jobs.yaml: the file is empty"),
        ("- a\n", "jobs.yaml:1: the file is not a mapping"),
        ("hello", "jobs.yaml:1: the file is not a mapping"),
        ('{"a": 1}\n{"b": 2}\n', "jobs.yaml:2: this is not valid YAML"),
        ("a: 1\n---\nb: 1\n", "jobs.yaml:2: this is not valid YAML"),
        ("a:\n\t- b\n", "jobs.yaml:2: the line begins with a tab, and YAML takes spaces alone"),
        ("a: *x\n", "jobs.yaml:1: this is not valid YAML: found undefined alias"),
        ("a: \x00\n", "jobs.yaml:1: this is not valid YAML: the character U+0000 is not allowed; remove it there"),
        ("a: 'größer 大'\n\nb: '\x00'\nc: \x07\n", "jobs.yaml:3: this is not valid YAML: the character U+0000"),
        (b"a: 1\nb: \xff\n", "jobs.yaml:2: byte 8 is not UTF-8"),
        ("a: " + "x" * (1 << 20), "jobs.yaml: longer than 1048576 bytes"),
        ("[" * 500_000, "jobs.yaml:1: nested deeper than 16 levels"),
        ("\n".join(" " * i + "a:" for i in range(900)), "jobs.yaml:17: nested deeper than 16 levels"),
        ("a: &a [*a]\n", "jobs.yaml:1: nested deeper than 16 levels, or an alias"),
        (BOMB, "jobs.yaml:1: the file holds more than 100000 values"),
    ],
)
def test_what_is_no_jobs_file_at_all_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: type[yaml.SafeLoader], text: str | bytes, expected: str
):
    monkeypatch.setattr(located, "_LOADER", loader)
    assert one_problem(tmp_path, text).startswith(expected)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: .*tlora train jobs.yaml"):
        read_jobs_file(tmp_path / "nowhere.yaml")


def test_more_jobs_than_a_run_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tlora.jobs_file.read.MAX_JOBS", 5)
    assert "more than 5 jobs after the sweeps" in one_problem(tmp_path, JOB.format(f"sweep: {{r: {list(range(1, 8))}}}"))


def test_integers_of_thousands_of_digits_are_refused_not_converted(tmp_path: Path):
    assert "is not a whole number from 1 to 256" in one_problem(tmp_path, JOB.format(f"r: {'9' * 5000}"))


JOB_NAMES = [*JobSpec.model_fields, *DataConfig.model_fields]


@pytest.mark.parametrize(
    ("old", "right"),
    {
        **dict.fromkeys(("lora_r", "lora_rank", "rank"), "r"),
        **dict.fromkeys(("alpha",), "lora_alpha"),
        **dict.fromkeys(("cutoff_len", "sequence_len", "max_seq_length", "max_seq_len"), "max_length"),
        "warmup_ratio": "warmup_steps",
        "lr": "learning_rate",
        **dict.fromkeys(("num_epochs", "epochs"), "num_train_epochs"),
        **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"), "batch_size"),
        **dict.fromkeys(("sample_packing", "neat_packing"), "packing"),
        **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "train_on_inputs"), "train_on"),
        "val_set_size": "eval_size",
        "dataset": "data",
        "lora_target_modules": "target_modules",
    }.items(),
)
def test_old_spellings_of_a_job(tmp_path: Path, old: str, right: str):
    assert f"{old}: unknown key; did you mean {right!r}" in one_problem(tmp_path, JOB.format(f"{old}: 3"))


def test_old_spellings_name_only_what_exists():
    from tlora.jobs_file.spelling import _OLD

    ours = {*JOB_NAMES, *RunSpec.model_fields, "defaults", "sweep"}
    assert {right for right, _ in _OLD.values()} <= ours
    assert not set(_OLD) & (ours - {"path"}), "a key of ours cannot be an old spelling"


@pytest.mark.parametrize(
    "key", ["use_dora", "use_qalora", "optim_target_modules", "ld_alpha", "loss_type", "init_lora_weights", "deepspeed"]
)
def test_a_key_of_peft_or_trl_to_which_nothing_corresponds_is_told_why(tmp_path: Path, key: str):
    """And not that a similar name was meant, such as `use_rslora`."""
    problem = one_problem(tmp_path, JOB.format(f"{key}: 3"))
    assert f"{key}: unknown key; " in problem and problem.endswith("; leave it out") and "did you mean" not in problem


def test_no_field_of_peft_is_taken_for_a_similar_one():
    from peft import LoraConfig

    from tlora.jobs_file.spelling import _OLD

    similar = {field.name: meant(field.name, JOB_NAMES)[0] for field in dataclasses.fields(LoraConfig) if field.name not in JOB_NAMES}
    assert {name: ours for name, ours in similar.items() if ours and name not in _OLD} == {}


@pytest.mark.parametrize("text", ["defaults: {bf16: true}\njobs: [{name: a, data: d}]", "jobs: [{name: a, data: d, bf16: true}]"])
def test_a_spelling_of_a_key_of_the_run_is_told_its_place(tmp_path: Path, text: str):
    problem = one_problem(tmp_path, f"base_model: b\n{text}")
    assert problem.endswith("bf16: unknown key; did you mean 'dtype' ('auto', 'float32', 'bfloat16' or 'float16') at the top of the file?")


def test_suggest():
    assert suggest("q_prj", ["q_proj", "k_proj", "gate"]) == "did you mean 'q_proj'?"
    assert suggest("zzz", ["b", "a"]) == "known here: a, b"
    assert suggest("warmup_ratio", JOB_NAMES) == "did you mean 'warmup_steps' (a value below 1 is a share of all steps)?"
    assert suggest("warmup_ratio", ["b"]) == "known here: b", "an old spelling counts only where the right one is known"


def test_json_is_yaml_too(tmp_path: Path):
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"base_model": "b", "jobs": [{"name": "a", "data": "d"}]}))
    assert read_jobs_file(file).jobs[0].name == "a"


def test_paths_that_are_not_utf8(tmp_path: Path):
    """A file in a directory of another encoding: its path could not be written into job.json. Names of the hub are no paths."""
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9"))
    directory.mkdir()
    (directory / "jobs.yaml").write_text("base_model: org/b\njobs: [{name: a, data: org/set}]")
    assert read_jobs_file(directory / "jobs.yaml").base_model == "org/b"
    (directory / "jobs.yaml").write_text("base_model: ./b\njobs: [{name: a, data: d.jsonl, adapter_path: a, chat_template: t.jinja}]")
    with pytest.raises(ConfigError) as refused:
        read_jobs_file(directory / "jobs.yaml")
    lines, rule = str(refused.value).splitlines(), "has bytes that are not UTF-8, and a run's files are UTF-8; rename it"
    for key, name in (("base_model", "b"), ("data.path", "d.jsonl"), ("adapter_path", "a"), ("data.chat_template", "t.jinja")):
        assert any(line.endswith(f"{key}: {str(directory / name)!a} {rule}") for line in lines), (key, lines)
