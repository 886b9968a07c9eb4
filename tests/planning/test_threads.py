"""The number of CPU threads: what it follows from, what a resume does with it, and what is said where it is not to be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_runs import job, run_spec, train
from tlora.batching.recompute_plan import RecomputePlan
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.planning.plan import RunPlan
from tlora.planning.threads import choose_threads, compute_with, default_threads, threads_before
from tlora.shape.memory import MemoryModel


def llama(hidden: int) -> list[tuple[int, int]]:
    """In and out features of a layer's linears: 16 h² / 7 weights on average."""
    return [(hidden, hidden)] * 4 + [(hidden, 4 * hidden)] * 3


def recorded(out: Path) -> object:
    return json.loads((out / "run.json").read_text())["cpu_threads"]


def test_the_default_follows_from_model_and_budget() -> None:
    for hidden, budget, threads in ((64, 2048, 1), (256, 1024, 1), (512, 2048, 9), (512, 512, 2), (512, 16, 1), (1024, 2048, 36)):
        assert default_threads(llama(hidden), budget) == threads, (hidden, budget)


def test_a_tiny_base_takes_one_thread_and_a_run_leaves_torch_as_it_was(base: Path, data: Path, tmp_path: Path) -> None:
    seen: set[int] = set()
    watcher = Watcher(lambda _: seen.add(torch.get_num_threads()))
    with compute_with(2):
        train(base, tmp_path / "auto", [job("a", str(data / "a.jsonl"))], watcher=watcher)
        assert torch.get_num_threads() == 2
    assert recorded(tmp_path / "auto") == 1 and 1 in seen


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_resume_takes_the_recorded_number_or_says_what_it_took(deterministic: bool, base: Path, data: Path, tmp_path: Path) -> None:
    jobs, out, notes = [job("a", str(data / "a.jsonl"))], tmp_path / "out", list[str]()
    watcher = Watcher(lambda _: None, notes.append)

    def resume(available: int, **settings: object) -> object:
        notes.clear()
        jobs[0] |= {"max_steps": jobs[0]["max_steps"] + 1}  # a job that is done is not trained again
        with compute_with(available):
            train(base, out, jobs, deterministic=deterministic, resume=True, watcher=watcher, **settings)
        return recorded(out)

    with compute_with(2):
        train(base, out, jobs, deterministic=deterministic, cpu_threads=2)
    assert recorded(out) == 2
    assert resume(4) == 2 and not [note for note in notes if "threads" in note], "the recorded number, not the default"
    for available, settings, words in (
        (1, {}, "this run began with 2 CPU threads, and this process may use 1"),
        (4, {"cpu_threads": 3}, "this run began with 2 CPU threads, and cpu_threads is 3"),
    ):
        if deterministic:
            with pytest.raises(ConfigError, match=words):
                resume(available, **settings)
            assert recorded(out) == 2
        else:
            assert resume(available, **settings) == (1 if available == 1 else 3)
            assert len([note for note in notes if words in note]) == 1
            (out / "run.json").write_text((out / "run.json").read_text().replace(f'"cpu_threads": {recorded(out)}', '"cpu_threads": 2'))


def test_an_ordered_number_that_is_not_to_be_had(base: Path, data: Path, tmp_path: Path) -> None:
    jobs, notes = [job("a", str(data / "a.jsonl"))], list[str]()
    words = "cpu_threads is 1000, and this process may use 1"
    with pytest.raises(ConfigError, match=words):
        train(base, tmp_path / "refused", jobs, deterministic=True, cpu_threads=1000)
    assert not (tmp_path / "refused").exists()
    train(base, tmp_path / "said", jobs, cpu_threads=1000, watcher=Watcher(lambda _: None, notes.append))
    assert recorded(tmp_path / "said") == 1 and len([note for note in notes if words in note]) == 1


def test_the_threads_of_a_deterministic_run_do_not_follow_from_its_budget(tmp_path: Path) -> None:
    """Its bytes do not either (docs/explanation/numerics.md), and they would with the threads."""

    def chosen(token_budget: int, deterministic: bool) -> int | None:
        run = run_spec(tmp_path, tmp_path, [job("a", "d")], deterministic=deterministic)
        plan = RunPlan((), token_budget, RecomputePlan(), MemoryModel(0, (), 0, 4, 4), 0, 1, {})
        with compute_with(16):
            return choose_threads(run, plan, llama(512), torch.device("cpu"), False, pytest.fail)

    assert [chosen(budget, False) for budget in (64, 2048)] == [1, 9]
    assert [chosen(budget, True) for budget in (64, 2048)] == [9, 9]


@pytest.mark.parametrize(
    ("content", "threads"),
    [
        ({"cpu_threads": 3, "device": "cpu (3 threads)"}, 3),
        ({"device": "cpu (2 threads)"}, 2),  # written before there was `cpu_threads`
        ({"cpu_threads": "auto", "device": "NVIDIA H200"}, None),
        ({}, None),
    ],
)
def test_what_a_run_file_tells(content: dict[str, object], threads: int | None, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert threads_before(tmp_path / "run.json") == threads


def test_on_a_gpu_the_key_is_said_to_have_no_effect(base: Path, tmp_path: Path) -> None:
    run = run_spec(base, tmp_path, [job("a", "d")], cpu_threads=2)
    plan, notes = RunPlan((), 64, RecomputePlan(), MemoryModel(0, (), 0, 4, 4), 0, 1, {}), list[str]()
    assert choose_threads(run, plan, llama(64), torch.device("cuda"), False, notes.append) is None
    assert notes == ["cpu_threads 2 has no effect here: the run computes on a GPU"]
