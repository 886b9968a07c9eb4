"""Adapters and files of earlier runs that are damaged or made to hurt: each costs its own job, and the neighbour's bytes are the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_runs import job, sha256, train
from tlora.json_file import read_object

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
DAMAGES = {"empty": b"", "list": b"[]", "deep": DEEP, "binary": b"\xff\0", "object": b"{}", "long-number": b'{"r":' + b"9" * 5000 + b"}"}


def good(data: Path) -> dict[str, Any]:
    return job("good", str(data / "a.jsonl"), max_steps=3)


@pytest.fixture(scope="module")
def alone(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("alone")
    train(base, out, [good(data)], deterministic=True)
    return sha256(out / "good")


class Adapters:
    """Makes copies of a sound adapter with one thing wrong."""

    def __init__(self, sound: Path, directory: Path) -> None:
        self._sound, self._directory = sound, directory

    def config(self, name: str, content: bytes | None = None, **changes: Any) -> Path:
        directory = Path(shutil.copytree(self._sound, self._directory / name))
        file = directory / "adapter_config.json"
        file.write_bytes(content if content is not None else json.dumps(json.loads(file.read_text()) | changes).encode())
        return directory

    def weights(self, name: str, dtype: torch.dtype) -> Path:
        directory = Path(shutil.copytree(self._sound, self._directory / name))
        file = directory / "adapter_model.safetensors"
        save_file({key: value.to(dtype) for key, value in load_file(file).items()}, file)
        return directory

    def other(self, name: str, file: str, put: Callable[[Path], object]) -> Path:
        directory = Path(shutil.copytree(self._sound, self._directory / name))
        (directory / file).unlink()
        put(directory / file)
        return directory


def test_each_hostile_adapter_fails_its_job_alone(base: Path, data: Path, tmp_path: Path, alone: str) -> None:
    train(base, tmp_path / "first", [job("sound", str(data / "b.jsonl"), target_modules=["q_proj", "v_proj"], max_steps=1)])
    make = Adapters(tmp_path / "first" / "sound", tmp_path / "adapters")
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    starts = {
        "mixed": (make.config("mixed", target_modules=["q_proj", 5]), "must be a list of names, and is ['q_proj', 5]"),
        "null": (make.config("null", target_modules=None), "must be a list of names, and is None"),
        "nested": (make.config("nested", target_modules=[["q_proj"], ["v_proj"]]), "must be a list of names"),
        "half": (make.config("half", target_modules=["\ud800", "q_proj"]), "a name that is no text"),
        "infinite": (make.config("infinite", r=float("inf")), "r: inf is not a whole number"),
        **{f"raw-{name}": (make.config(f"raw-{name}", content), config) for name, content in DAMAGES.items()},
        "config-directory": (make.other("config-directory", config, Path.mkdir), "is not a plain file"),
        "config-pipe": (make.other("config-pipe", config, os.mkfifo), "is not a plain file"),
        "config-endless": (make.other("config-endless", config, lambda path: path.symlink_to("/dev/zero")), "is not a plain file"),
        "weights-directory": (make.other("weights-directory", weights, Path.mkdir), "is not a plain file"),
        "weights-pipe": (make.other("weights-pipe", weights, os.mkfifo), "is not a plain file"),
        "weights-loop": (make.other("weights-loop", weights, lambda path: path.symlink_to(path.name)), weights),
        "float8": (make.weights("float8", torch.float8_e4m3fn), "is float8_e4m3fn. Weights must be float32"),
        "whole": (make.weights("whole", torch.int64), "is int64. Weights must be"),
        "complex": (make.weights("complex", torch.complex64), "is complex64. Weights must be"),
    }  # fmt: skip
    victims = [job(name, str(data / "b.jsonl"), adapter_path=str(path), max_steps=1) for name, (path, _) in starts.items()]
    results = train(base, tmp_path / "out", [*victims[:9], good(data), *victims[9:]], deterministic=True)
    for name, (path, reason) in starts.items():
        assert results[name].status == "failed" and str(path) in results[name].reason and reason in results[name].reason, results[name]
        assert json.loads((tmp_path / "out" / name / "result.json").read_text())["status"] == "failed"
    assert results["good"].status == "done" and sha256(tmp_path / "out" / "good") == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_adapters_in_other_floats_are_taken(base: Path, data: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    train(base, tmp_path / "first", [job("sound", str(data / "b.jsonl"), max_steps=1)])
    start = Adapters(tmp_path / "first" / "sound", tmp_path / "adapters").weights("other", dtype)
    assert train(base, tmp_path / "out", [job("a", str(data / "b.jsonl"), adapter_path=str(start), max_steps=1)])["a"].status == "done"


def seal(checkpoint: Path) -> None:
    """A manifest that agrees with what lies there, as a forger would write it."""
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != "MANIFEST.json")
    contents = {name: (checkpoint / name).read_bytes() for name in names}
    files = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in contents.items()}
    (checkpoint / "MANIFEST.json").write_text(json.dumps({"files": files}, indent=2, sort_keys=True) + "\n")


def test_each_damaged_file_of_an_earlier_run_costs_its_job_alone(base: Path, data: Path, tmp_path: Path, alone: str) -> None:
    """A resume of 17 jobs of which one is whole: the files of the others are damaged, each in a way of its own."""
    out = tmp_path / "out"
    names = [f"{kind}-{name}" for kind in ("job", "moments") for name in DAMAGES] + ["job-gone", "job-directory", "file", "result", "link"]
    jobs = [good(data), *(job(name, str(data / "b.jsonl"), max_steps=2) for name in names)]
    train(base, out, jobs, deterministic=True)
    for name in ("good", *names):
        (out / name / "adapter_model.safetensors").unlink()
    for name, content in DAMAGES.items():
        (out / f"job-{name}" / "job.json").write_bytes(content)
        (out / f"moments-{name}" / "checkpoint-2" / "optimizer.safetensors").write_bytes(content)
        seal(out / f"moments-{name}" / "checkpoint-2")
    (out / "job-gone" / "job.json").unlink()
    (out / "job-directory" / "job.json").unlink()
    (out / "job-directory" / "job.json").mkdir()
    (out / "result" / "result.json").unlink()
    (out / "result" / "result.json").mkdir()
    shutil.rmtree(out / "result" / "checkpoint-2")
    for name in ("file", "link"):
        shutil.rmtree(out / name)
    (out / "file").write_text("in the way")
    (out / "link").symlink_to("nowhere")
    (out / "run.jsonl").write_bytes(DEEP)
    results = train(base, out, jobs, deterministic=True, resume=True)
    reasons = {
        **{f"job-{name}": "job.json is damaged" for name in [*DAMAGES, "directory"]},
        **{f"moments-{name}": "optimizer.safetensors: is no whole safetensors file" for name in DAMAGES},
        "file": f"cannot write {out / 'file'}", "link": f"cannot write {out / 'link'}", "result": "result.json",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert results[name].status == "failed" and reason in results[name].reason, results[name]
    assert results["job-gone"].status == "done", "nothing says that its checkpoint is another order's"
    assert results["good"].status == "done" and sha256(out / "good") == alone
    assert (out / "file").read_text() == "in the way" and (out / "link").is_symlink()


def test_a_damaged_job_file_is_mended_by_removing_it(base: Path, data: Path, tmp_path: Path, alone: str) -> None:
    """As its message says; and an order that did change is refused for all, as it was before."""
    out = tmp_path / "out"
    train(base, out, [good(data)], deterministic=True)
    (out / "good" / "job.json").write_text("{")
    assert train(base, out, [good(data)], deterministic=True, resume=True)["good"].status == "failed"
    (out / "good" / "job.json").unlink()
    assert train(base, out, [good(data)], deterministic=True, resume=True)["good"].status == "done"
    assert sha256(out / "good") == alone
    with pytest.raises(ValueError, match="good: seed was 42 and is 7"):
        train(base, out, [{**good(data), "seed": 7}], deterministic=True, resume=True)


def test_an_order_that_an_older_version_wrote_lacks_newer_keys(base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(base, out, [good(data)])
    file = out / "good" / "job.json"
    content = json.loads(file.read_text())
    del content["use_rslora"]
    file.write_text(json.dumps(content))
    assert train(base, out, [good(data)], resume=True)["good"].status == "done"


@pytest.mark.parametrize(
    ("content", "why"), [(b"[1]", "holds a list"), (DEEP, "nested too deeply"), (b"{", "Expecting"), (b"\xff", "utf-8")]
)
def test_what_is_no_object_is_a_value_error(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_object(tmp_path / "file")


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)  # sparse: a tebibyte that takes no space
    with pytest.raises(ValueError, match="more than 64 MiB"):
        read_object(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "nothing")
