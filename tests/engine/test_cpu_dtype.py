"""`dtype: auto` over a base in 16 bits on a CPU that has no instructions for them, and on one that has."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tlora
from tests.engine.test_worker import Orders, of, work
from tests.engine.test_worker import report_each_step as report_each_step
from tests.engine.tiny_runs import job, run_spec, same_bytes, save_base, sha256, train, write_rows
from tlora.engine.check import check
from tlora.engine.generate import open_adapter
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.planning.base_outline import describe_base
from tlora.supermodel import cpu_dtype
from tlora.worker_protocol import Finished

CPU, NAMES = torch.device("cpu"), ("bfloat16", "float16")


def line(base: Path, name: str) -> str:
    return (
        f"{base} is in {name}, for which this CPU has no instructions: dtype auto computes in float32, many times faster, and holds "
        f"the base in twice the bytes of its files. To keep its own, set dtype: {name}"
    )


def in_16_bits(directory: Path, name: str = "bfloat16") -> Path:
    base = save_base(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model.to(getattr(torch, name)).save_pretrained(base)
    return base


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Whichever this one is."""
    monkeypatch.setattr(cpu_dtype, "is_slow", lambda dtype, _: slow and dtype.itemsize == 2)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_16_bits(tmp_path_factory.mktemp("half") / "base")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_rows(tmp_path_factory.mktemp("data") / "a.jsonl", 12))


def orders(file: str, **fields: Any) -> list[dict[str, Any]]:
    return [job("a", file, max_steps=3, save_steps=1, save_total_limit=None, **fields)]


def dtype_of(out: Path, name: str = "run.json") -> str:
    return json.loads((out / name).read_text())["dtype"]


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_is_asked_for_its_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch tells them, on x86 alone: what other processors do in 16 bits was not measured."""
    dtype = getattr(torch, name)
    for machine in ("x86_64", "AMD64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        has = torch.ops.mkldnn._is_mkldnn_bf16_supported if name == "bfloat16" else torch.ops.mkldnn._is_mkldnn_fp16_supported
        assert cpu_dtype.is_slow(dtype, CPU) == (not has())
        assert not cpu_dtype.is_slow(dtype, torch.device("cuda:0"))
        assert not cpu_dtype.is_slow(torch.float32, CPU) and not cpu_dtype.is_slow(torch.float64, CPU)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not cpu_dtype.is_slow(dtype, CPU)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if number else []) for number, name in enumerate(NAMES)])
def test_auto_is_float32_and_says_so(name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, said = in_16_bits(tmp_path / "base", name), list[str]()
    on_a_cpu(monkeypatch, slow=True)
    train(base, tmp_path / "auto", orders(file), deterministic=True, watcher=Watcher(note=said.append))
    assert [note for note in said if "dtype" in note] == [line(base, name)]
    train(base, tmp_path / "set", orders(file), deterministic=True, dtype="float32")
    same_bytes(tmp_path / "auto", tmp_path / "set", ["a"])
    assert dtype_of(tmp_path / "auto") == dtype_of(tmp_path / "auto" / "a", "base.json") == "float32"

    kept: list[str] = []
    train(base, tmp_path / "kept", orders(file), deterministic=True, dtype=name, watcher=Watcher(note=kept.append))
    assert not [note for note in kept if "dtype" in note] and dtype_of(tmp_path / "kept") == name
    assert sha256(tmp_path / "kept" / "a") != sha256(tmp_path / "auto" / "a")


def test_a_cpu_with_instructions_keeps_what_the_files_hold(half: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, slow=False)
    said: list[str] = []
    train(half, tmp_path / "auto", orders(file), deterministic=True, watcher=Watcher(note=said.append))
    train(half, tmp_path / "set", orders(file), deterministic=True, dtype="bfloat16")
    same_bytes(tmp_path / "auto", tmp_path / "set", ["a"])
    assert not [note for note in said if "dtype" in note] and dtype_of(tmp_path / "auto") == "auto"


@pytest.mark.parametrize("slow_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resume_goes_on_in_the_dtype_in_which_the_run_began(
    slow_first: bool, half: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu(monkeypatch, slow=slow_first)
    train(half, tmp_path / "whole", orders(file), deterministic=True)
    train(half, tmp_path / "out", [orders(file)[0] | {"max_steps": 1}], deterministic=True)

    on_a_cpu(monkeypatch, slow=not slow_first)
    said: list[str] = []
    train(half, tmp_path / "out", orders(file), deterministic=True, resume=True, watcher=Watcher(note=said.append))
    same_bytes(tmp_path / "out", tmp_path / "whole", ["a"])
    (told,) = (note for note in said if "dtype" in note)
    assert told.startswith("dtype auto: this run began in " + ("float32" if slow_first else "the dtype of the base's files"))
    with pytest.raises(ConfigError, match=f"dtype was '{'float32' if slow_first else 'auto'}' and is 'float16'"):
        train(half, tmp_path / "out", orders(file), deterministic=True, resume=True, dtype="float16")


def test_check_counts_the_bytes_of_float32(half: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for slow in (True, False):
        on_a_cpu(monkeypatch, slow=slow)
        found[slow] = check(run_spec(half, tmp_path / "out", orders(file)), device="cpu")
        assert (line(half, "bfloat16") in found[slow].warnings) == slow
    assert found[True].base_bytes == 2 * found[False].base_bytes
    on_a_cpu(monkeypatch, slow=True)
    assert describe_base(str(half), "auto", None, "cpu").bytes == found[True].base_bytes
    assert describe_base(str(half), "auto", None, "cuda").bytes == found[False].base_bytes


def test_a_server_says_it_with_each_job(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes of a base's outline are among the job's warnings; a tenant does not see where the base lies."""
    on_a_cpu(monkeypatch, slow=True)
    told = line(half, "bfloat16").replace(str(half), "the base")
    assert describe_base(str(half), "auto", None, "cpu").notes == (f"{told} in the server's settings",)
    assert describe_base(str(half), "bfloat16", None, "cpu").notes == (), "the remedy"
    assert describe_base(str(half), "auto", None, "cuda").notes == ()
    on_a_cpu(monkeypatch, slow=False)
    assert describe_base(str(half), "auto", None, "cpu").notes == ()


def test_a_prompt_is_answered_in_float32(half: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, slow=True)
    train(half, tmp_path / "out", orders(file))
    model = open_adapter(tmp_path / "out" / "a", device="cpu")
    assert model.model.dtype == torch.float32 and line(half, "bfloat16") in model.notes


@pytest.mark.slow
def test_a_worker_computes_in_what_auto_means_on_its_device(
    made: Orders, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    [order] = [fields for fields in made.run.jobs if fields.name == "stays"]
    fields = order.model_dump(exclude_unset=True)
    on_a_cpu(monkeypatch, slow=True)
    whole = train(half, tmp_path / "whole", [fields], deterministic=True, dtype="float32")["stays"]
    told = work(replace(made.load(tmp_path / "worker"), base_model=str(half)), [made.join("stays")])
    assert of(told, Finished, "stays") and sha256(tmp_path / "worker" / "stays") == sha256(Path(whole.path))
    assert line(half, "bfloat16") in capfd.readouterr().err


def test_all_ranks_of_a_run_compute_in_one_dtype(half: Path, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, slow=True)
    two = [orders(file)[0], orders(file, seed=3)[0] | {"name": "b"}]
    said: list[str] = []
    spec = run_spec(half, tmp_path / "ranks", two, deterministic=True)
    assert tlora.train(spec, device="cpu", gpus=2, watcher=Watcher(note=said.append)).status == "done"
    assert said.count(line(half, "bfloat16")) == 1
    train(half, tmp_path / "one", two, deterministic=True, dtype="float32")
    same_bytes(tmp_path / "ranks", tmp_path / "one", ["a", "b"])
