"""The real intake process over real files: what is hostile fails its job with file and row, and the next job's data is read."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_runs import write_rows
from tests.service.served import until
from tests.service.test_full_disk import fill
from tests.small_disks import mounted
from tlora.job import JobSpec
from tlora.service.base_shapes import Precision, find_outline
from tlora.service.config import Limits
from tlora.service.intake import MOST_DEATHS, IntakeClient, IntakeRequest, IntakeSettings, request_line

BASE = str(Path(__file__).parents[2] / "demo" / "base")
LIMITS = Limits(intake_memory_bytes=1 << 29, intake_cpu_seconds=120, intake_seconds=300.0, line_bytes=100_000, file_rows=2_000)
SETTINGS = IntakeSettings("", Precision(), LIMITS, 2)


class Asked:
    """An intake, and its answers by key."""

    def __init__(self, directory: Path, settings: IntakeSettings = SETTINGS) -> None:
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        (directory / "bases").mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.found: dict[str, dict[str, Any]] = {}
        self.intake = IntakeClient(replace(settings, bases_dir=str(directory / "bases")), directory / "intake.log", self._answers.put)
        self.intake.start()

    def ask(self, key: str, data: Path, base: str = BASE, tenant: str = "t", **fields: Any) -> None:
        spec = JobSpec.model_validate({"name": key, "data": {"path": str(data)}} | fields)
        self.intake.put(key, request_line(IntakeRequest(key, base, tenant, spec, str(self.directory / "tokens" / tenant))))

    def answer(self, key: str) -> dict[str, Any]:
        while key not in self.found:
            one = self._answers.get()
            if "rows" not in one:
                assert one["key"] not in self.found, f"{one['key']} was answered twice"
                self.found[one["key"]] = one
        return self.found[key]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, forked_children: None) -> Iterator[Asked]:
    directory = tmp_path_factory.mktemp("intake")
    find_outline(directory / "bases", BASE, Precision())  # it has tests of its own
    found = Asked(directory)
    yield found
    found.intake.close()


def bomb(path: Path, characters: int, rows: int) -> Path:
    """A small Parquet file of rows that are huge when they are unpacked."""
    text = pa.array(["x" * characters] * rows, pa.large_string())
    pq.write_table(pa.table({"text": text}), path, compression="zstd", row_group_size=rows)
    assert path.stat().st_size < 1 << 20
    return path


def test_preference_files_of_openai_are_read(asked: Asked, tmp_path: Path) -> None:
    """As its clients upload them for `method: dpo`; an `sft` job is told which objective learns from them."""
    row = {
        "input": {"messages": [{"role": "user", "content": "Hello tern"}], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "Ahoy tern"}],
        "non_preferred_output": [{"role": "assistant", "content": "Hi tern"}],
    }
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"non_preferred_output": row["preferred_output"]}) + "\n"
    )
    asked.ask("pairs", tmp_path / "pairs.jsonl", objective="dpo")
    asked.ask("imitated", tmp_path / "pairs.jsonl")
    found = asked.answer("pairs")
    assert "problem" not in found and found["samples"] == 2
    assert any("1 of 2 pairs have equal answers" in warning for warning in found["warnings"])
    assert "'preferred_output', 'non_preferred_output': " in asked.answer("imitated")["problem"]
    assert "Set objective: dpo" in asked.answer("imitated")["problem"]


def test_hostile_data_fails_its_job_with_file_and_row_and_no_other(asked: Asked, tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", 20)
    lines = good.read_bytes().splitlines(keepends=True)
    cases = {
        "json": (lines[0] + b"{broken\n", ".jsonl", "line 2"),
        "types": (lines[0] + b'{"prompt": 5, "completion": []}\n', ".jsonl", "line 2"),
        "utf8": (lines[0] + b'{"prompt": "\xff", "completion": "x"}\n', ".jsonl", "line 2"),
        "long": (json.dumps([{"text": "x"}, {"text": "y" * 200_000}]).encode(), ".json", "longer than 100,000 characters"),
        "rows": (lines[0] * 3_000, ".jsonl", "more than 2,000 rows"),
        "deep": (b"[" * 100_000, ".json", "json"),
        "text": (b"PAR1 and nothing", ".parquet", "Parquet"),
    }
    for key, (content, suffix, _) in cases.items():
        (tmp_path / f"{key}{suffix}").write_bytes(content)
        asked.ask(key, tmp_path / f"{key}{suffix}")
    asked.ask("parquet", bomb(tmp_path / "bomb.parquet", 20 << 20, 30))
    asked.ask("good", good, r=4, batch_size=5)
    for key, (_, suffix, said) in cases.items():
        problem = asked.answer(key)["problem"]
        assert f"{key}{suffix}" in problem and said in problem, problem
    problem = asked.answer("parquet")["problem"]
    assert "bomb.parquet: preparing takes more than 0.50 GiB of memory" in problem, problem
    found = asked.answer("good")
    assert found["samples"] == 20 and found["profile"]["steps"] == 4 and found["profile"]["adapter_parameters"] > 0
    assert Path(found["train_set"]).is_dir() and found["eval_set"] is None


def test_the_profile_is_the_one_that_the_planner_makes_with_torch(asked: Asked, tmp_path: Path) -> None:
    from tlora.job import RunSpec
    from tlora.planning.job_profile import ProfiledJob, profile_jobs

    data = write_rows(tmp_path / "data.jsonl", 30)
    fields: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 4}, "eval_size": 0.2}
    fields["trainable_token_indices"] = [3, 9]
    asked.ask("profiled", data, **fields)
    run = RunSpec.model_validate({"base_model": BASE, "jobs": [{"name": "profiled", "data": str(data)} | fields]})
    planned = profile_jobs(run)["profiled"]
    assert isinstance(planned, ProfiledJob)
    found = asked.answer("profiled")["profile"]
    assert found == json.loads(json.dumps(planned.profile.__dict__ if hasattr(planned.profile, "__dict__") else _fields(planned.profile)))


def _fields(profile: Any) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in profile.__slots__}


def test_what_is_to_say_of_a_base_is_among_a_jobs_warnings(asked: Asked, tmp_path: Path) -> None:
    base = Path(shutil.copytree(BASE, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}, base / "model.safetensors", {"format": "pt"})
    find_outline(asked.directory / "bases", str(base), Precision())  # the intake would start a process that imports torch
    asked.ask("more", write_rows(tmp_path / "data.jsonl", 5), base=str(base))
    told = "1 tensor of the base is not part of the model that is used, mtp.layers.0.eh_proj.weight first"
    assert told in asked.answer("more")["warnings"]


def test_bases_and_targets_that_there_are_not(asked: Asked, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", 5)
    asked.ask("nowhere", data, base=str(tmp_path / "nothing"))
    asked.ask("targets", data, target_modules=["q_prj"])
    asked.ask("start", data, adapter_path=str(tmp_path))
    assert asked.answer("nowhere")["base_problem"] and "nothing" in asked.answer("nowhere")["problem"]
    assert "Did you mean q_proj" in asked.answer("targets")["problem"]
    assert "start_from" in asked.answer("start")["problem"]


def test_a_shape_that_the_continued_adapter_does_not_have_is_among_a_jobs_warnings(asked: Asked, tmp_path: Path) -> None:
    config = {"r": 4, "lora_alpha": 8, "use_rslora": False, "target_modules": ["q_proj"], "rank_pattern": {}, "alpha_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    data = write_rows(tmp_path / "data.jsonl", 5)
    asked.ask("other", data, adapter_path=str(tmp_path), r=8, lora_alpha=8)
    asked.ask("silent", data, adapter_path=str(tmp_path))
    assert asked.answer("other")["warnings"] == ["r is 4, as in the adapter that it continues (the job says 8)"]
    assert asked.answer("silent")["warnings"] == []
    assert asked.answer("other")["profile"] == asked.answer("silent")["profile"]


@pytest.mark.soak
def test_a_full_disk_for_a_bases_outline_fails_no_job(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", 5)
    with mounted(tmp_path / "bases", "size=64k") as disk:
        ballast = fill(disk)
        asked = Asked(tmp_path)
        try:
            asked.ask("waits", data)
            assert asked.answer("waits")["disk_full"] and "No space left" in asked.answer("waits")["problem"]
            ballast.unlink()
            asked.ask("goes", data)
            assert "profile" in asked.answer("goes")
        finally:
            asked.intake.close()


def test_a_killed_intake_is_started_again_and_asked_again(asked: Asked, tmp_path: Path) -> None:
    before: int = until(lambda: asked.intake.pid)
    asked.ask("killed", write_rows(tmp_path / "data.jsonl", 5, seed=1))
    os.kill(before, signal.SIGKILL)
    assert "profile" in asked.answer("killed")
    assert asked.intake.pid not in (None, before)


def test_intake_imports_no_torch(asked: Asked, tmp_path: Path) -> None:
    asked.ask("warm", write_rows(tmp_path / "data.jsonl", 5, seed=2))
    asked.answer("warm")
    assert asked.intake.pid is not None
    maps = Path(f"/proc/{asked.intake.pid}/maps").read_text()
    assert "libtorch" not in maps and "numpy" in maps
    children = psutil.Process(asked.intake.pid).children()
    assert children and all("libtorch" not in Path(f"/proc/{child.pid}/maps").read_text() for child in children)


def test_data_that_takes_too_long_fails_its_job(tmp_path: Path) -> None:
    find_outline(tmp_path / "intake" / "bases", BASE, Precision())
    slow = Asked(
        tmp_path / "intake",
        replace(SETTINGS, limits=LIMITS.model_copy(update={"intake_cpu_seconds": 1, "file_rows": 10**9, "line_bytes": 10**9})),
    )
    try:
        path = tmp_path / "much.jsonl"
        path.write_bytes(write_rows(tmp_path / "some.jsonl", 2_000).read_bytes() * 200)
        slow.ask("much", path)
        slow.ask("few", write_rows(tmp_path / "few.jsonl", 5), tenant="other")
        assert "used up its CPU seconds" in slow.answer("much")["problem"]
        assert list((tmp_path / "intake" / "tokens" / "t").iterdir()) == [], "of an unfinished set nothing outlives a deleted file"
        assert "profile" in slow.answer("few")
    finally:
        slow.intake.close()


def test_what_kills_the_process_every_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    dying = Asked(tmp_path / "intake")
    try:
        dying.ask("one", tmp_path / "data.jsonl")
        assert f"ended {MOST_DEATHS} times in a row" in until(lambda: dying.answer("one"))["problem"]
    finally:
        dying.intake.close()


def test_an_answer_that_cannot_be_taken_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread that reads them ends, and no job's data is ever read again."""
    script = tmp_path / "answers"
    script.write_text("""#!/bin/sh\necho '{"key": "one", "problem": "x"}'\necho '{"key": "two", "problem": "y"}'\nexec cat >/dev/null\n""")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    taken: list[str] = []

    def take(answer: dict[str, Any]) -> None:
        if answer["key"] == "one":
            raise KeyError("one")
        taken.append(answer["key"])

    intake = IntakeClient(SETTINGS, tmp_path / "intake.log", take)
    for key in ("one", "two"):
        intake.put(key, b"\n")
    intake.start()
    until(lambda: taken)
    intake.close()
    assert taken == ["two"]


def test_an_intake_that_says_nothing_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped by a signal: no line, and no end."""
    script = tmp_path / "silent-once"
    begun = tmp_path / "begun"
    script.write_text(
        f"""#!/bin/sh\nmkdir {begun} 2>/dev/null && exec cat >/dev/null\necho '{{"key": "one", "problem": "x"}}'\nexec cat\n"""
    )
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    taken: list[str] = []
    intake = IntakeClient(SETTINGS, tmp_path / "intake.log", lambda answer: taken.append(answer["key"]), stall_seconds=0.5)
    intake.put("one", b"\n")
    intake.start()
    until(lambda: taken)
    intake.close()
    assert taken == ["one"]
