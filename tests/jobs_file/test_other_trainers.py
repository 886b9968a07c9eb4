"""Files of axolotl and LLaMA-Factory in the place of ours: the answer is a jobs file, and reading that one gives the same training."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tlora.data.sources import open_source
from tlora.errors import ConfigError, DataError
from tlora.job import DataSource, JobSpec, RunSpec
from tlora.jobs_file import read_jobs_file

AXOLOTL = """base_model: org/base
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 4
learning_rate: 2e-4
lr_scheduler: cosine
optimizer: adamw_bnb_8bit
val_set_size: 0.05
sequence_len: 2048
train_on_inputs: true
datasets:
  - {path: rows.jsonl, type: alpaca}
"""
LLAMA_FACTORY = """model_name_or_path: org/base
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: identity
dataset_dir: DIRECTORY
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine_with_restarts
"""
INFO = {
    "identity": {"file_name": "identity.json"},
    "talk 2": {
        "file_name": "talk.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "said"},
    },
    "hub": {"hf_hub_url": "org/talk", "subset": "en", "columns": {"prompt": "question", "query": "input", "response": "output"}},
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "instruction", "chosen": "better", "rejected": "rejected"}},
    "words": {"file_name": "words.json", "columns": {"prompt": "text"}},
    "script": {"script_url": "made.py"},
}


def remedied(file: Path, text: str) -> tuple[RunSpec, str]:
    """The run that the answer's jobs file describes, and the answer."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_jobs_file(file)
    head, _, remedy = str(caught.value).partition("\n")
    assert "not a jobs file; write one such as this" in head
    file.write_text(textwrap.dedent(remedy), encoding="utf-8")
    return read_jobs_file(file), str(caught.value)


def folder(directory: Path) -> Path:
    directory.mkdir()
    (directory / "dataset_info.json").write_text(json.dumps(INFO), encoding="utf-8")
    (directory / "identity.json").write_text('[{"instruction": "Say hi.", "output": "Hi."}]', encoding="utf-8")
    return directory


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    run, answer = remedied(tmp_path / "axolotl.yaml", AXOLOTL)
    (job,) = run.jobs
    assert "of axolotl" in answer and "# not taken over: optimizer" in answer and run.base_model == "org/base"
    assert (job.r, job.lora_alpha, job.batch_size, job.num_train_epochs, job.learning_rate) == (32, 64, 8, 4, 2e-4)
    assert (job.lr_scheduler_type, job.target_modules) == ("cosine", ["q_proj", "v_proj"])
    assert (job.data.format, job.data.eval_size, job.data.max_length, job.data.train_on) == ("alpaca", 0.05, 2048, "all")
    assert job.data.sources == (DataSource(path=str(tmp_path / "rows.jsonl")),)


def test_a_training_file_of_llama_factory(tmp_path: Path) -> None:
    """What is left out has its defaults there: rank 8, alpha twice the rank, 3 epochs, 2,048 tokens."""
    directory = folder(tmp_path / "data")
    run, answer = remedied(tmp_path / "sft.yaml", LLAMA_FACTORY.replace("DIRECTORY", str(directory)))
    (job,) = run.jobs
    assert "of LLaMA-Factory" in answer and "lr_scheduler_type 'cosine_with_restarts' has no counterpart here" in answer
    assert (job.r, job.lora_alpha, job.batch_size, job.num_train_epochs, job.learning_rate) == (8, 16, 8, 3, 1e-4)
    assert (job.data.format, job.data.max_length, job.target_modules) == ("alpaca", 2048, "all-linear")
    assert job.data.sources == (DataSource(path=str(directory / "identity.json")),)


@pytest.mark.parametrize("sets", ["3", "[{path: rows.jsonl, type: chat_template, field_messages: conversations}]"])
def test_a_file_of_axolotl_for_pairs_or_without_sets(sets: str, tmp_path: Path) -> None:
    run, _ = remedied(tmp_path / "dpo.yaml", f"base_model: b\nrl: dpo\nmicro_batch_size: 2\ndatasets: {sets}\n")
    assert (run.jobs[0].objective, run.jobs[0].data.format) == ("dpo", "auto")


@pytest.mark.parametrize("dataset", ["3", "identity", "[identity, pairs]"])
def test_a_training_file_of_llama_factory_for_pairs(dataset: str, tmp_path: Path) -> None:
    text = f"model_name_or_path: b\nstage: dpo\ndataset: {dataset}\ndataset_dir: {folder(tmp_path / 'data')}\n"
    run, _ = remedied(tmp_path / "dpo.yaml", text)
    assert (run.jobs[0].objective, run.jobs[0].data.format) == ("dpo", "auto")


def test_a_data_folder_of_llama_factory(tmp_path: Path) -> None:
    directory = folder(tmp_path / "data")
    with pytest.raises(DataError) as caught:
        open_source(DataSource(path="data"), tmp_path, tmp_path / "cache")
    head, _, lines = str(caught.value).partition("\n")
    assert "a data folder of LLaMA-Factory (dataset_info.json names 6 sets)" in head
    assert "# script: it is made by a script" in lines
    assert "# talk 2: rename 'said' of each message to 'content'" in lines
    assert "# hub: rename column 'question' to 'instruction'" in lines and "# pairs: rename column 'better' to 'chosen'" in lines
    file = tmp_path / "jobs.yaml"
    file.write_text(f"base_model: org/base\njobs:\n{lines}\n", encoding="utf-8")
    jobs: dict[str, JobSpec] = {job.name: job for job in read_jobs_file(file).jobs}
    assert {name: (job.data.format, job.objective) for name, job in jobs.items()} == {
        "identity": ("alpaca", "sft"),
        "talk-2": ("chat", "sft"),
        "hub": ("alpaca", "sft"),
        "pairs": ("preference", "dpo"),
        "words": ("text", "sft"),
    }
    assert jobs["hub"].data.sources == (DataSource(path="org/talk", name="en"),)
    (source,) = jobs["identity"].data.sources
    assert open_source(source, tmp_path, tmp_path / "cache").files == (directory / "identity.json",)


def test_other_files_are_no_data_folder(tmp_path: Path) -> None:
    """`datasets` writes a dataset_info.json of its own."""
    (tmp_path / "dataset_info.json").write_text('{"builder_name": "json", "features": {}}', encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    source = DataSource(path=str(tmp_path / "rows.jsonl"))
    assert open_source(source, tmp_path, tmp_path / "cache").files == (tmp_path / "rows.jsonl",)
    assert tmp_path / "rows.jsonl" in open_source(DataSource(path=str(tmp_path)), tmp_path, tmp_path / "cache").files
