"""Jobs over text, lists of files, mixtures, splits and data sets of a hub, from the jobs file to the adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import tlora
from tests.data.small_hub import small_hub
from tests.engine.tiny_runs import job, sha256, write_rows
from tlora import durable
from tlora.cache_directory import cache_dir
from tlora.data.dataset import FORMAT_VERSION
from tlora.data.prepare import prepare
from tlora.engine.check import check
from tlora.engine.train import Results
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.jobs_file import read_jobs_file
from tlora.planning import job_plan

MIXTURE = [{"path": "a.jsonl", "weight": 3}, {"path": "notes.txt", "weight": 1}]


def write_jobs(directory: Path, base: Path, jobs: list[dict[str, Any]], **settings: Any) -> Path:
    """A jobs file beside a.jsonl (24 rows), b.parquet (9), notes.txt (12 lines) and the directory `splits`."""
    write_rows(directory / "a.jsonl", 24, 0)
    rows = [json.loads(line) for line in write_rows(directory / "b.jsonl", 9, 1).read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), directory / "b.parquet")
    (directory / "notes.txt").write_text("".join(f"The river number {i} is green.\n" for i in range(12)))
    (directory / "splits").mkdir(exist_ok=True)
    write_rows(directory / "splits" / "train.jsonl", 8, 2)
    write_rows(directory / "splits" / "test.jsonl", 5, 3)
    file = directory / "jobs.yaml"
    file.write_text(yaml.safe_dump({"base_model": str(base), "output_dir": str(directory / "out"), "jobs": jobs, **settings}))
    return file


def train(file: Path, **options: Any) -> Results:
    return tlora.train(file, device="cpu", **options)


def card(directory: Path, name: str) -> str:
    return (directory / "out" / name / "README.md").read_text()


@pytest.mark.slow
def test_each_form_is_checked_and_trained(base: Path, tmp_path: Path) -> None:
    jobs = [
        job("text", "notes.txt", max_steps=2),
        job("list", ["a.jsonl", "b.parquet", "notes.txt"], max_steps=None),
        job("mixed", {"path": MIXTURE, "eval_size": 6}, max_steps=None),
        job("splits", {"path": "splits", "split": "train", "eval_path": [{"path": "splits", "split": "test"}]}, max_steps=2),
    ]
    file = write_jobs(tmp_path, base, jobs)
    found = check(read_jobs_file(file), device="cpu")
    assert found.problems == () and all(each.problems == () for each in found.jobs)
    formats = [each.data.format for each in found.jobs if each.data]
    assert formats == ["text", "prompt_completion, text", "prompt_completion, text", "prompt_completion"]
    assert [each.data.rows for each in found.jobs if each.data] == [12, 45, 36, 8]
    text, several, mixed, splits = found.jobs
    assert several.total_steps == 12 and text.data and text.data.files == [str(tmp_path / "notes.txt")]
    assert splits.eval_data and splits.eval_data.rows == 5
    assert text.sources == splits.sources == ()
    assert [(each.name.split("/")[-1], each.samples, each.per_epoch) for each in several.sources] == [
        ("a.jsonl", 24, None),
        ("b.parquet", 9, None),
        ("notes.txt", 12, None),
    ]
    assert [each.samples for each in mixed.sources] == [24, 12]
    long, short = (each.per_epoch or 0 for each in mixed.sources)
    assert long + short > 0 and abs(long - 3 * short) <= 3
    results = train(file)
    assert results.status == "done" and {name: result.steps for name, result in results.items()} == {
        "text": 2,
        "list": 12,
        "mixed": mixed.total_steps,
        "splits": 2,
    }
    assert "Trained on `a.jsonl`, `b.parquet`, `notes.txt`:" in card(tmp_path, "list")
    assert "Trained on `a.jsonl` (weight 3), `notes.txt` (weight 1), evaluated on 6 rows of it:" in card(tmp_path, "mixed")
    assert "Trained on `splits` (split train), evaluated on `splits` (split test):" in card(tmp_path, "splits")


@pytest.mark.parametrize("eval_seed", [pytest.param({}, marks=pytest.mark.slow), {"eval_seed": 7}])
def test_a_resumed_run_keeps_splits_and_eval_seed_that_its_file_leaves_open(base: Path, tmp_path: Path, eval_seed: dict[str, int]) -> None:
    """The rest of it has the same bytes."""
    meant = {"path": "splits", "split": "all", "eval_size": 3, "eval_seed": 7}
    settings = {"lr_scheduler_type": "constant", "seed": 7}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for directory in (whole, resumed):
        directory.mkdir()
    options = {"deterministic": True, "cpu_threads": 1}
    assert train(write_jobs(whole, base, [job("a", meant, max_steps=6, **settings)], **options)).status == "done"
    assert train(write_jobs(resumed, base, [job("a", meant, max_steps=3, **settings)], **options)).status == "done"
    again = job("a", {"path": "splits", "eval_size": 3, **eval_seed}, **settings)
    for steps in (5, 6):  # the second finds the order as the first has written it
        results = train(write_jobs(resumed, base, [again | {"max_steps": steps}], **options), resume=True)
        assert results.status == "done", results["a"].reason
    assert sha256(resumed / "out" / "a") == sha256(whole / "out" / "a")


def test_a_mixture_is_the_same_beside_other_jobs_and_after_a_resume(base: Path, tmp_path: Path) -> None:
    mixed = job("mixed", {"path": MIXTURE, "eval_size": 6}, lr_scheduler_type="constant", max_steps=13)
    settings = {"deterministic": True, "cpu_threads": 1}
    alone, beside, resumed = (tmp_path / name for name in ("alone", "beside", "resumed"))
    for directory in (alone, beside, resumed):
        directory.mkdir()
    assert train(write_jobs(alone, base, [mixed], **settings)).status == "done"
    other = job("other", ["b.parquet", "a.jsonl"], seed=7)
    assert train(write_jobs(beside, base, [other, mixed], **settings)).status == "done"
    assert train(write_jobs(resumed, base, [mixed | {"max_steps": 5}], **settings)).status == "done"
    assert train(write_jobs(resumed, base, [mixed], **settings), resume=True).status == "done"
    assert len({sha256(directory / "out" / "mixed") for directory in (alone, beside, resumed)}) == 1


def test_another_mixture_is_another_job(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of the first, and its adapter is not."""
    mixed = job("mixed", MIXTURE, max_steps=3)
    even = job("even", [source | {"weight": 1} for source in MIXTURE], max_steps=3)
    assert train(write_jobs(tmp_path, base, [mixed, even])).status == "done"
    assert sha256(tmp_path / "out" / "mixed") != sha256(tmp_path / "out" / "even")
    changed = write_jobs(tmp_path, base, [mixed | {"data": even["data"]}])
    with pytest.raises(ConfigError, match=r"mixed: data.path .*'weight': 3.0.*'weight': 1.0"):
        train(changed, resume=True)
    longer = write_jobs(tmp_path, base, [mixed | {"max_steps": 5}])
    (tmp_path / "notes.txt").write_text("Another text.\n" * 12)
    monkeypatch.setattr(job_plan, "prepare", prepare)  # what was prepared once for this room's tests is of the text before
    assert "notes.txt: is not the data that" in train(longer, resume=True)["mixed"].reason


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([{"path": "a.jsonl", "weight": 3}, "notes.txt"], "notes.txt' has no weight, and '.*a.jsonl' has one; give each a weight, or none"),
        ([{"path": "a.jsonl", "weight": 0}], "data.path: .* is not text or a list, each a path, or a mapping of path, name, split"),
        ([{"path": "a.jsonl", "wieght": 3}], "data.path.wieght: unknown key; did you mean 'weight'"),
        ([{"weight": 3}], "data.path: a source without `path`; write {path: polite.jsonl}"),
        ([], "data.path: .* is not text or a list"),
        ({"path": ["a.jsonl"], "split": "train"}, "data.split: it is about one path, and there is a list; write it beside the path"),
        ({"path": "a.jsonl", "eval_path": MIXTURE}, "eval_path: sources have weights, and an evaluation takes each row once"),
    ],
)
def test_what_the_jobs_file_refuses(data: Any, said: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"jobs.yaml:\d+: .*{said}"):
        read_jobs_file(write_jobs(tmp_path, base, [job("x", data)]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (["a.jsonl", "gone.jsonl"], "gone.jsonl: no such file or directory; "),
        (["a.jsonl", "empty.txt"], "empty.txt: the file is empty; at least one row is needed"),
        ({"path": "splits", "split": "dev"}, "'dev' is no split of it, its splits are train, test; name one of them: `split: train`"),
        (
            {"path": "org/none", "split": "train"},
            "org/none: no such file or directory, and the hub cannot be asked for a data set of this name",
        ),
        ({"path": [{"path": "a.jsonl", "weight": 1}, {"path": "one.txt", "weight": 1}], "eval_size": 24}, "eval_size takes all samples of"),
    ],
)
def test_what_check_says_of_sources(data: Any, said: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "one.txt").write_text("One line.\n")
    (problem,) = check(read_jobs_file(write_jobs(tmp_path, base, [job("x", data, seed=1)])), device="cpu").jobs[0].problems
    assert said in problem


@pytest.mark.slow
@pytest.mark.usefixtures("real_start")  # the hub's clients read HF_ENDPOINT when they are imported
def test_a_run_keeps_the_commit_of_a_hub_data_set(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [write_rows(tmp_path / f"{seed}.jsonl", 9, seed).read_text() for seed in range(3)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    source = {"path": "org/toy", "split": "train"}
    jobs = [job("hub", {**source, "eval_path": [source | {"split": "test"}]}, max_steps=2), job("mixed", [source, "a.jsonl"], max_steps=2)]
    with small_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        first = hub.add("org/toy", {"train.jsonl": rows[0], "test.jsonl": rows[1]})
        results = train(write_jobs(tmp_path, base, jobs))
        assert results.status == "done", [result.reason for result in results.values()]
        for name in ("run.json", "hub/job.json", "mixed/job.json"):
            assert first in (tmp_path / "out" / name).read_text()
        assert f"Trained on `org/toy` (revision {first}) (split train), evaluated on" in card(tmp_path, "hub")
        hub.add("org/toy", {"train.jsonl": rows[2], "test.jsonl": rows[2]})
        longer = write_jobs(tmp_path, base, [each | {"max_steps": 4} for each in jobs])
        results = train(longer, resume=True)
        assert [result.steps for result in results.values()] == [4, 4], [result.reason for result in results.values()]
    results = train(write_jobs(tmp_path, base, [each | {"max_steps": 5} for each in jobs]), resume=True)
    assert [result.steps for result in results.values()] == [5, 5], "what was fetched needs no network"


def test_a_job_that_an_earlier_version_began_goes_on(base: Path, tmp_path: Path) -> None:
    """Its checkpoint names the set by that version's key of the same files; a key of other files is refused."""
    short, longer = job("old", "a.jsonl", eval_path="notes.txt", max_steps=2), job("old", "a.jsonl", eval_path="notes.txt", max_steps=4)
    train(write_jobs(tmp_path, base, [short]))
    checkpoint = tmp_path / "out" / "old" / "checkpoint-2"
    state = json.loads((checkpoint / "state.json").read_text())

    def name_sets(**names: str) -> None:
        (checkpoint / "MANIFEST.json").unlink()
        (checkpoint / "state.json").write_text(json.dumps(state | names))
        durable.write_manifest(checkpoint)

    earlier = {}
    for key in ("data", "eval_data"):
        name, _, samples = state[key].partition("/")
        meta = json.loads((cache_dir() / name / "meta.json").read_text())
        assert len(meta["earlier_keys"]) == FORMAT_VERSION - 1
        earlier[key] = f"{meta['earlier_keys'][0]}/{samples}"
    name_sets(data="0" * 32 + "/24")
    assert "is not the data that" in train(write_jobs(tmp_path, base, [longer]), resume=True)["old"].reason
    name_sets(**earlier)
    notes: list[str] = []
    results = train(write_jobs(tmp_path, base, [longer]), resume=True, watcher=Watcher(note=notes.append))
    assert results.status == "done" and results["old"].steps == 4
    assert any("was trained by an earlier version" in note for note in notes)
    assert json.loads((checkpoint.with_name("checkpoint-4") / "state.json").read_text())["data"] == state["data"]
