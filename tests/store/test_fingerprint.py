"""A run keeps to the base that it began with: what a digest sees, and what a resume over other weights, or another revision, comes to."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, sha256, train
from tests.tiny import make_model
from tlora import file_identity
from tlora.base_digest import Fingerprint, quick_digest, weight_files
from tlora.cache_directory import cache_dir
from tlora.engine.generate import open_adapter
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import ConfigError, ModelError
from tlora.job import split_revision
from tlora.store.fingerprint import BaseGuard

WEIGHTS = "model.safetensors"


def join_hashing(_: RunProgress) -> None:
    for thread in threading.enumerate():
        if thread.name == "fingerprint":
            thread.join()


def hashed() -> Watcher:
    """Of a run that does not end before its base is hashed."""
    return Watcher(join_hashing)


@pytest.fixture
def own_base(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "base"))


def change_tensor(directory: Path, name: str) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors[name] = tensors[name] + 1
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def flip_first_bit_of(directory: Path, name: str) -> None:
    """Of a large tensor: far from its middle, where the quick digest looks. In place, so that only content and times change."""
    with (directory / WEIGHTS).open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        assert end - begin > 4 * 4096, f"{name} has {end - begin} bytes, and its first must lie outside its middle block"
        file.seek(8 + length + begin)
        byte = file.read(1)[0]
        file.seek(8 + length + begin)
        file.write(bytes([byte ^ 1]))


# -- digests -----------------------------------------------------------------------------------------------------------


def test_the_quick_digest_sees_each_tensor_sizes_and_config(own_base: Path) -> None:
    before = quick_digest(own_base)
    original = (own_base / WEIGHTS).read_bytes()
    seen = {before}
    for name in load_file(own_base / WEIGHTS):
        change_tensor(own_base, name)
        seen.add(quick_digest(own_base))
        (own_base / WEIGHTS).write_bytes(original)
    assert len(seen) == 1 + len(load_file(own_base / WEIGHTS)) and None not in seen
    (own_base / WEIGHTS).write_bytes(original + b"\0")
    assert quick_digest(own_base) not in seen
    (own_base / WEIGHTS).write_bytes(original)
    config = json.loads((own_base / "config.json").read_text())
    (own_base / "config.json").write_text(json.dumps(config | {"transformers_version": "5.99", "_name_or_path": "elsewhere"}))
    assert quick_digest(own_base) == before, "what says nothing about the function counts"
    (own_base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert quick_digest(own_base) not in seen


def test_the_files_are_those_that_transformers_loads(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and weight_files(tmp_path) == shards
    (tmp_path / "consolidated.safetensors").write_bytes(b"not loaded")
    assert weight_files(tmp_path) == shards
    digest = quick_digest(tmp_path)
    shards[1].rename(tmp_path / "away")
    assert weight_files(tmp_path) == [] and quick_digest(tmp_path) is None
    (tmp_path / "away").rename(shards[1])
    assert quick_digest(tmp_path) == digest
    for shard in shards:
        shard.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(range(256)) * 40)
    assert weight_files(tmp_path) == [tmp_path / "pytorch_model.bin"] and quick_digest(tmp_path) is not None


def test_a_file_is_hashed_once_and_again_when_it_has_changed(own_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashes() -> dict[str, str]:
        guard = BaseGuard("base", own_base, None)
        guard.start()
        guard.wait_for_verdict()
        join_hashing(RunProgress(0.0, ()))
        assert guard.check() and not guard.check()
        return guard.facts()["base_files"]["sha256"]

    place = cache_dir() / "weights"
    monkeypatch.setattr(file_identity, "_SETTLED_SECONDS", 1e9)
    inode = format((own_base / WEIGHTS).stat().st_ino, "x")
    first = hashes()
    assert not list(place.glob(f"*-{inode}-*")), "a change within the same tick would not be seen"
    monkeypatch.setattr(file_identity, "_SETTLED_SECONDS", 0.0)
    before = set(place.iterdir()) if place.is_dir() else set()  # other tests' copies of the same base have entries of their own
    assert hashes() == first and len(first[WEIGHTS]) == 64
    cached = {path for path in set(place.iterdir()) - before if path.read_text().strip() == first[WEIGHTS]}
    (entry,) = cached
    entry.write_text("0" * 64)  # seen only by whom the cache answers
    assert hashes() == {WEIGHTS: "0" * 64}
    entry.write_text("torn")
    assert hashes() == first
    flip_first_bit_of(own_base, "lm_head.weight")
    assert hashes() != first


def test_a_file_that_is_replaced_after_the_launch_is_not_taken_for_the_one_that_was_loaded(own_base: Path) -> None:
    guards = [BaseGuard("base", own_base, earlier) for earlier in (None, Fingerprint(quick_digest(own_base) or "", {WEIGHTS: "0" * 64}))]
    flip_first_bit_of(own_base, "lm_head.weight")
    for guard in guards:
        guard.start()
        join_hashing(RunProgress(0.0, ()))
    assert not guards[0].check() and guards[0].facts()["base_files"]["sha256"] == {}
    with pytest.raises(ModelError, match=rf"base_model base: .*{WEIGHTS} was replaced"):
        guards[1].check()


def test_a_save_does_not_wait_for_the_background(own_base: Path) -> None:
    """Here the thread never gets a turn at all."""
    quick = quick_digest(own_base) or ""
    guard = BaseGuard("base", own_base, Fingerprint(quick, {WEIGHTS: "0" * 64}))
    with pytest.raises(ModelError, match=f"{WEIGHTS} has another sha256"):
        guard.wait_for_verdict()
    BaseGuard("base", own_base, Fingerprint(quick, {})).wait_for_verdict()  # nothing to compare


# -- runs --------------------------------------------------------------------------------------------------------------


def begun_run(base: Path, data: Path, out: Path, **settings: Any) -> list[dict[str, Any]]:
    """A run that stopped after its second step, with its base hashed; its jobs."""
    jobs = [job("a", str(data / "a.jsonl"), max_steps=4, save_steps=1)]
    assert train(base, out, jobs, watcher=hashed(), **settings).status == "done"
    for step in (3, 4):
        shutil.rmtree(out / "a" / f"checkpoint-{step}", ignore_errors=True)
    (out / "a" / "result.json").unlink()
    return jobs


def saved(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted((out / "a").rglob("*/*")) if path.is_file()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_resume_over_other_weights_is_refused_at_launch(own_base: Path, data: Path, tmp_path: Path, deterministic: bool) -> None:
    out = tmp_path / "out"
    jobs = begun_run(own_base, data, out, deterministic=deterministic)
    before = saved(out)
    change_tensor(own_base, "model.norm.weight")
    with pytest.raises(ModelError, match=r"\(sizes, headers .*--overwrite.*output_dir"):
        train(own_base, out, jobs, deterministic=deterministic, resume=True)
    assert saved(out) == before
    assert train(own_base, out, jobs, deterministic=deterministic, overwrite=True).status == "done"


def test_a_difference_that_only_the_whole_hash_sees_stops_the_run_before_its_next_checkpoint(
    own_base: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    jobs = begun_run(own_base, data, out, deterministic=True)
    whole, before = sha256(out / "a"), saved(out)
    recorded = json.loads((out / "run.json").read_text())["base_files"]
    assert list(recorded["sha256"]) == [WEIGHTS]
    flip_first_bit_of(own_base, "lm_head.weight")
    assert quick_digest(own_base) == recorded["quick"]
    for _ in range(2):  # in the middle of the run, and then, the hash being known, at launch
        with pytest.raises(ModelError, match=rf"{WEIGHTS} has another sha256"):
            train(own_base, out, jobs, deterministic=True, resume=True)
        assert saved(out) == before
        assert json.loads((out / "run.json").read_text())["base_files"] == recorded
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    flip_first_bit_of(own_base, "lm_head.weight")
    assert train(own_base, out, jobs, deterministic=True, resume=True)["a"].steps == 4
    assert sha256(out / "a") == whole


# -- the hub -----------------------------------------------------------------------------------------------------------


def add_snapshot(hub: Path, commit: str, seed: int = 0) -> Path:
    """A base in a cache as huggingface_hub lays it out, and `main` naming it."""
    repository = hub / "models--org--name"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    made = save_base(hub / f"made-{commit[0]}", seed=seed)
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for file in made.iterdir():
        file.rename(blobs / f"{commit[0]}-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{commit[0]}-{file.name}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_revision_is_what_follows_the_name_of_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/name@home").mkdir(parents=True)
    assert split_revision("org/name@home") == ("org/name@home", None)
    assert split_revision("/some/where@home") == ("/some/where@home", None)
    assert split_revision("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    assert split_revision("org/name") == ("org/name", None)


@pytest.mark.slow
@pytest.mark.usefixtures("real_start")  # the process that tokenizes reads HF_HUB_CACHE as it loads its libraries
def test_a_hub_revision_that_moves_is_pinned(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, out = tmp_path / "hub", tmp_path / "out"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name, old, new = Path("org/name"), "a" * 40, "b" * 40
    add_snapshot(hub, old)
    jobs = begun_run(name, data, out, deterministic=True)
    whole = sha256(out / "a")
    assert json.loads((out / "run.json").read_text())["base_model"] == f"org/name@{old}"
    config = json.loads((out / "a" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", old)
    add_snapshot(hub, new, seed=7)
    assert train(name, out, jobs, deterministic=True, resume=True).status == "done"
    assert sha256(out / "a") == whole and json.loads((out / "run.json").read_text())["base_model"] == f"org/name@{old}"
    asked = open_adapter(out / "a", device="cpu").model.state_dict()["lm_head.weight"]
    assert torch.equal(asked, load_file(hub / "models--org--name" / "snapshots" / old / WEIGHTS)["lm_head.weight"])
    with pytest.raises(ConfigError, match=f"base_model .*name@{old}.*name@{new}"):
        train(Path("org/name@main"), out, jobs, deterministic=True, resume=True)
    content = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(content | {"base_model": "org/name", "base_files": None}))  # of an older version
    assert train(Path(f"org/name@{old}"), out, jobs, deterministic=True, resume=True).status == "done"
    shutil.rmtree(hub / "models--org--name" / "snapshots" / old)
    with pytest.raises(ModelError, match=f"base_model org/name@{old}: .*cannot be read"):
        train(name, out, jobs, deterministic=True, resume=True)
