"""A run whose `run.json` is lost or damaged goes on from what stands beside its jobs, or says why it cannot, and deletes nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cases import in_every_run
from tests.engine.tiny_runs import job, sha256, train
from tests.store.test_fingerprint import change_tensor, flip_first_bit_of, hashed
from tlora.base_digest import quick_digest
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError, ModelError

DAMAGES = {
    "gone": None,
    "empty": b"",
    "truncated": b'{"base_model": "ba',
    "deep": b"[" * 200_000,
    "list": b"[1]",
    "another object": b"{}",
    "no base": b'{"base_files": {"quick": 3}, "base_model": "x", "jobs": [{"name": "a", "data": "a.jsonl"}]}',
}
KEPT = ("base_model", "dtype", "base_precision", "deterministic", "cpu_threads", "base_files", "jobs")


@pytest.fixture(scope="module")
def own_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose hash no other test has put into the cache."""
    directory = Path(shutil.copytree(base, tmp_path_factory.mktemp("own") / "base"))
    change_tensor(directory, "model.norm.weight")
    return directory


@pytest.fixture(scope="module")
def whole(own_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run of two jobs, with all its checkpoints."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert train(own_base, out, orders(data), deterministic=True, cpu_threads=1, watcher=hashed()).status == "done"
    return out


def orders(data: Path) -> list[dict[str, Any]]:
    return [
        job("a", str(data / "a.jsonl"), max_steps=4, save_steps=1, save_total_limit=None, lora_dropout=0.1),
        job("b", str(data / "b.jsonl"), max_steps=3, save_steps=1, save_total_limit=None, r=2),
    ]


@pytest.fixture
def begun(whole: Path, tmp_path: Path) -> Path:
    """The same run as it stood after the second step of each job."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    for path in [*out.glob("*/checkpoint-[34]"), *out.glob("*/adapter_*"), *out.glob("*/result.json")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return out


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def put(path: Path, content: bytes | None) -> None:
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("damage", in_every_run(DAMAGES, 0, 2))
def test_the_run_goes_on_with_the_same_bytes(own_base: Path, data: Path, whole: Path, begun: Path, damage: str) -> None:
    before = json.loads((begun / "run.json").read_text())
    put(begun / "run.json", DAMAGES[damage])
    lines: list[str] = []
    results = train(own_base, begun, orders(data), deterministic=True, resume=True, watcher=Watcher(note=lines.append))
    assert results.status == "done" and [result.steps for result in results.values()] == [4, 3]
    for name in ("a", "b"):
        assert sha256(begun / name) == sha256(whole / name)
        assert any(f"{name}: goes on from {begun / name / 'checkpoint-2'}" in line for line in lines)
    (said,) = [line for line in lines if "run.json" in line]
    assert str(begun / "run.json") in said and "made again from a/base.json, b/base.json" in said
    assert ("is lost" in said) == (damage == "gone")
    after = json.loads((begun / "run.json").read_text())
    assert {key: after[key] for key in KEPT} == {key: before[key] for key in KEPT}
    content = DAMAGES[damage]
    assert content is None or (begun / "bad-run.json").read_bytes() == content


def test_jobs_that_are_left_out_stay_in_the_list(own_base: Path, data: Path, begun: Path) -> None:
    (begun / "run.json").unlink()
    train(own_base, begun, orders(data)[:1], deterministic=True, resume=True)
    assert [entry["name"] for entry in json.loads((begun / "run.json").read_text())["jobs"]] == ["a", "b"]


def test_what_a_whole_run_file_refuses_is_refused(own_base: Path, data: Path, begun: Path, tmp_path: Path) -> None:
    """Another base, also where only the whole hash shows it; another precision, mode or number of threads."""
    other, rotten = (Path(shutil.copytree(own_base, tmp_path / name)) for name in ("other", "rotten"))
    change_tensor(other, "model.norm.weight")
    flip_first_bit_of(rotten, "lm_head.weight")
    assert quick_digest(rotten) == quick_digest(own_base)
    away = own_base.rename(tmp_path / "away")
    try:
        for copy, why in ((other, "sizes, headers or sampled blocks differ"), (rotten, "model.safetensors has another sha256")):
            (begun / "run.json").unlink()
            copy.rename(own_base)
            with pytest.raises(ModelError, match=rf"not the base .*{why}"):
                train(own_base, begun, orders(data), deterministic=True, resume=True)
            own_base.rename(copy)
    finally:
        away.rename(own_base)
    for settings, why in (
        ({"deterministic": False}, "deterministic was True and is False"),
        ({"deterministic": True, "dtype": "bfloat16"}, "dtype was 'auto' and is 'bfloat16'"),
    ):
        (begun / "run.json").unlink()
        with pytest.raises(ConfigError, match=f"not the run that was interrupted: {why}"):
            train(own_base, begun, orders(data), resume=True, **settings)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "bfloat16"}, r"jobs disagree: dtype is 'auto' in a/base.json and 'bfloat16' in b/base.json\."),
        ({"cpu_threads": 2}, r"jobs disagree: cpu_threads is 1 in a/base.json and 2 in b/base.json\."),
        ({"base_files": {"quick": "0" * 64, "sha256": {}}}, r"jobs disagree: base_files.quick is .* in a/base.json and '000"),
        ({"deterministic": "perhaps"}, r"b/base.json is damaged \(deterministic: Input should be a valid boolean"),
        ({"base_files": {"quick": 3}}, r"b/base.json is damaged \(no 'sha256'\): over which base and how b was trained is unknown"),
        (None, r"b/base.json is not there \(earlier versions did not write it\): over which base"),
    ],
)
def test_what_cannot_be_known_is_refused_and_nothing_changes(
    own_base: Path, data: Path, begun: Path, change: dict[str, Any] | None, why: str
) -> None:
    (begun / "run.json").write_bytes(b"{")
    path = begun / "b" / "base.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (change or {})))
    if change is None:
        path.unlink()
    before = files(begun)
    with pytest.raises(ConfigError, match=why) as refused:
        train(own_base, begun, orders(data), deterministic=True, resume=True)
    assert "Expecting property name" in str(refused.value) and re.search("[Pp]ut run.json back", str(refused.value))
    assert files(begun) == before
    (begun / "b").rename(begun.parent / "b")  # as the message says
    assert train(own_base, begun, orders(data), deterministic=True, resume=True).status == "done"


def test_a_job_that_ended_before_the_base_was_hashed_agrees(own_base: Path, data: Path, whole: Path, begun: Path) -> None:
    path = begun / "a" / "base.json"
    facts = json.loads(path.read_text())
    recorded = facts["base_files"]
    assert recorded["sha256"] and recorded == json.loads((begun / "run.json").read_text())["base_files"]
    path.write_text(json.dumps(facts | {"base_files": {**recorded, "sha256": {}}}))
    (begun / "run.json").unlink()
    assert train(own_base, begun, orders(data), deterministic=True, resume=True).status == "done"
    assert json.loads((begun / "run.json").read_text())["base_files"] == recorded
    assert json.loads(path.read_text())["base_files"] == recorded


def test_a_run_of_an_earlier_version_resumes_while_its_run_file_is_whole(own_base: Path, data: Path, whole: Path, begun: Path) -> None:
    for path in begun.glob("*/base.json"):
        path.unlink()
    assert train(own_base, begun, orders(data), deterministic=True, resume=True).status == "done"
    assert sha256(begun / "a") == sha256(whole / "a")


def test_without_resume_a_lost_run_is_named(own_base: Path, data: Path, begun: Path) -> None:
    (begun / "run.json").unlink()
    before = files(begun)
    with pytest.raises(ConfigError, match=r"run.json is lost.*--resume"):
        train(own_base, begun, orders(data), deterministic=True)
    assert files(begun) == before
