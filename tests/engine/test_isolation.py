"""One job's trouble stays its own: whatever happens to it, its neighbours' adapters keep their bytes (deterministic mode)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_runs import light_job as job
from tests.engine.tiny_runs import rows, sha256, train
from tlora import durable
from tlora.adapters.bank import AdapterBank
from tlora.batching.pack import MicroBatch
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import CheckpointError
from tlora.group.stream import Stream
from tlora.store import checkpoint
from tlora.supermodel import job_by_job, plain_path

POISON = 260  # a token that stands in the victim's data alone


def neighbours(data: Path) -> list[dict[str, Any]]:
    return [
        job("left", {"path": str(data / "a.jsonl"), "eval_size": 0.2}, lora_dropout=0.1, eval_steps=2, max_steps=6),
        job("right", str(data / "c.jsonl"), r=9, batch_size=6, max_steps=4),
    ]


@pytest.fixture(scope="module")
def untouched(wide_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("untouched")
    return {name: sha256(Path(r.path)) for name, r in train(wide_base, out, neighbours(data), deterministic=True).items()}


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """24 samples, the poison in the 20th."""
    samples = [[10 + i, 11, 12, 13, POISON if i == 19 else 14, 15] for i in range(24)]
    (tmp_path / "poisoned.jsonl").write_text("".join(json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in samples))
    return tmp_path / "poisoned.jsonl"


class Neighbourhood:
    """Trains a victim between its neighbours and says what became of it; the neighbours must be as without it."""

    def __init__(self, base: Path, data: Path, out: Path, untouched: dict[str, str]) -> None:
        self.base, self.data, self.out, self.untouched = base, data, out, untouched
        self.notes: list[str] = []
        self.seen: list[RunProgress] = []

    def train(self, *victims: dict[str, Any], **settings: Any) -> dict[str, Any]:
        left, right = neighbours(self.data)
        watcher = Watcher(self.seen.append, self.notes.append)
        results = train(self.base, self.out, [left, *victims, right], watcher=watcher, **{"deterministic": True, **settings})
        for name, sha in self.untouched.items():
            assert results[name].status == "done", results[name]
            assert sha256(self.out / name) == sha, f"{name} has other bytes"
        for name, result in results.items():
            assert json.loads((self.out / name / "result.json").read_text())["status"] == result.status
            assert {j.name: j.status for j in self.seen[-1].jobs}[name] == result.status
        assert (self.out / "report.html").exists()
        return {fields["name"]: results[fields["name"]] for fields in victims}


@pytest.fixture
def neighbourhood(wide_base: Path, data: Path, tmp_path: Path, untouched: dict[str, str]) -> Neighbourhood:
    return Neighbourhood(wide_base, data, tmp_path / "out", untouched)


def run_hooked(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the tokens of each forward of the super-model, before it."""
    forward = plain_path.hidden_states

    def hooked(base: Any, input_ids_T: Tensor, *args: Any) -> Tensor:
        if input_ids_T.device.type != "meta":
            hook(input_ids_T)
        return forward(base, input_ids_T, *args)

    monkeypatch.setattr(plain_path, "hidden_states", hooked)


def test_a_learning_rate_of_a_billion(neighbourhood: Neighbourhood) -> None:
    wild = job("wild", str(neighbourhood.data / "b.jsonl"), learning_rate=1e9, lr_scheduler_type="constant", max_grad_norm=0, max_steps=30)
    too_wild = {**wild, "name": "too-wild", "learning_rate": 1e38}  # the first step, ten times that, is no fp32 number
    results = neighbourhood.train(wild, too_wild)
    assert results["too-wild"].status == "failed" and "no finite gradient in 3 steps in a row" in results["too-wild"].reason
    for result in results.values():  # whatever became of it, no weight in a file is NaN
        for file in Path(result.path).rglob("adapter_model.safetensors"):
            assert all(bool(t.isfinite().all()) for t in load_file(file).values())


def test_a_job_without_a_finite_loss_is_not_done(wide_base: Path, data: Path, poisoned: Path, tmp_path: Path) -> None:
    """Two steps, too few for quarantine, on samples that all hold a token whose embedding is NaN."""
    base = Path(shutil.copytree(wide_base, tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    poisoned.write_text(json.dumps({"input_ids": [10, POISON, 12, 13], "labels": [10, POISON, 12, 13]}) + "\n")
    results = train(base, tmp_path / "out", [job("none", str(poisoned), max_steps=2), job("sound", str(data / "a.jsonl"), max_steps=2)])
    assert results["none"].status == "failed" and "none of its last 2 steps had a finite loss" in results["none"].reason
    assert results["sound"].status == "done"


def test_quarantine_after_three_steps_keeps_the_last_finite_state(neighbourhood: Neighbourhood, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its fifth step on the victim's gradient is NaN; what is kept is its adapter of four steps."""
    victim = job("victim", str(neighbourhood.data / "b.jsonl"), lr_scheduler_type="constant", max_steps=20)
    gradient, taken = AdapterBank.gradient, [0]

    def spoiled(bank: AdapterBank, job_id: str) -> Tensor:
        grad = gradient(bank, job_id)
        if job_id == "victim":
            taken[0] += 1
            if taken[0] > 2 * 4:  # a step reads it twice, to measure and to update
                grad[3] = float("nan")
        return grad

    monkeypatch.setattr(AdapterBank, "gradient", spoiled)
    result = neighbourhood.train(victim)["victim"]
    assert (result.status, result.steps) == ("failed", 7)
    kept = neighbourhood.out / "victim" / "checkpoint-7"
    assert "3 steps in a row, up to step 7" in result.reason and str(kept) in result.reason
    assert any("victim failed" in note for note in neighbourhood.notes)
    durable.verify(kept)
    assert not (neighbourhood.out / "victim" / "adapter_model.safetensors").exists()
    norms = [row["grad_norm"] for row in rows(neighbourhood.out / "victim" / "metrics.jsonl")]
    assert None not in norms[:4] and norms[4:] == [None] * 3
    monkeypatch.undo()
    clean = neighbourhood.out.parent / "clean"
    train(neighbourhood.base, clean, [{**victim, "max_steps": 4}], deterministic=True)
    assert sha256(clean / "victim") == sha256(kept)
    again = train(neighbourhood.base, neighbourhood.out, [*neighbours(neighbourhood.data)[:1], victim, *neighbours(neighbourhood.data)[1:]],
                  deterministic=True, resume=True)  # fmt: skip
    assert (again["victim"].status, again["victim"].steps) == ("failed", 7)  # it does not come back to life unhealed


def test_an_exception_in_forward(neighbourhood: Neighbourhood, poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of the victim makes the forward raise, in a micro-batch that holds the neighbours' samples too."""
    raised: list[int] = []

    def hook(ids: Tensor) -> None:
        if bool((ids == POISON).any()):
            raised.append(len(ids))
            raise RuntimeError("shapes do not match in layer 0")

    run_hooked(monkeypatch, hook)
    victim = job("victim", str(poisoned), batch_size=3, max_steps=8)
    result = neighbourhood.train(victim, token_budget=256)["victim"]
    assert result.status == "failed" and "RuntimeError: shapes do not match in layer 0" in result.reason
    assert result.steps < 8
    assert len(raised) == 2  # once together, once alone
    assert (neighbourhood.out / "victim" / f"checkpoint-{result.steps}").is_dir()


def test_two_guilty_jobs_and_a_third_that_waits(neighbourhood: Neighbourhood, poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(ids: Tensor) -> None:
        if bool((ids == POISON).any()):
            raise RuntimeError("no")

    run_hooked(monkeypatch, hook)
    pair = [job(name, str(poisoned), batch_size=24, max_steps=2) for name in ("one", "two")]
    results = neighbourhood.train(*pair, token_budget=1024)
    assert [r.status for r in results.values()] == ["failed", "failed"]


@pytest.mark.parametrize("at", [17, *(pytest.param(at, marks=pytest.mark.soak) for at in (1, 4, 40))])
def test_out_of_memory_once_halves_the_budget(neighbourhood: Neighbourhood, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    count = [0]

    def hook(ids: Tensor) -> None:
        count[0] += 1
        if count[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run_hooked(monkeypatch, hook)
    victim = neighbourhood.train(job("victim", str(neighbourhood.data / "d.jsonl")), token_budget=1024)["victim"]
    assert victim.status == "done"
    assert sum("out of memory: the token budget is now 512" in note for note in neighbourhood.notes) == 1


def test_out_of_memory_again_and_again_goes_down_to_the_longest_sample(
    wide_base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, a micro-batch of more than 300 tokens does not fit: the budget falls until it does, and all finish."""

    def hook(ids: Tensor) -> None:
        if len(ids) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")

    notes: list[str] = []
    run_hooked(monkeypatch, hook)
    results = train(wide_base, tmp_path / "out", neighbours(data), token_budget=2000, watcher=Watcher(note=notes.append))
    assert [r.status for r in results.values()] == ["done", "done"]
    budgets = [int(note.split()[-1]) for note in notes if note.startswith("out of memory")]
    assert budgets and budgets == sorted(set(budgets), reverse=True) and budgets[-1] <= 300


def test_a_sample_that_never_fits_fails_its_job(wide_base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is down to the longest sample, and that still does not fit: the job that owns it fails, the other goes on."""
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"input_ids": [20] * 400, "labels": [20] * 400}) + "\n" for _ in range(3)))

    def hook(ids: Tensor) -> None:
        if len(ids) > 390:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run_hooked(monkeypatch, hook)
    results = train(wide_base, tmp_path / "out", [job("long", str(tmp_path / "long.jsonl")), job("short", str(data / "b.jsonl"))])
    assert results["long"].status == "failed" and "OutOfMemoryError: CUDA out of memory" in results["long"].reason
    assert results["short"].status == "done"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room for the step"), pytest.param(RuntimeError("broken step"), marks=pytest.mark.slow)]
)
def test_an_optimizer_step_that_raises(neighbourhood: Neighbourhood, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    step = job_by_job.adamw_step

    def raising(state: Any, *args: Any) -> Any:
        if state.layout.shapes[0].rank == 5 and state.step == 2:
            raise error
        return step(state, *args)

    monkeypatch.setattr(job_by_job, "adamw_step", raising)
    result = neighbourhood.train(job("victim", str(neighbourhood.data / "b.jsonl"), r=5))["victim"]
    assert (result.status, result.steps) == ("failed", 2) and str(error) in result.reason
    assert (neighbourhood.out / "victim" / "checkpoint-2").is_dir()


def test_a_disk_that_fails_a_checkpoint_costs_a_note_and_one_that_fails_the_result_the_job(
    neighbourhood: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.save

    def failing(directory: Path, *args: Any) -> None:
        if directory.parent.name in ("passing", "lasting") and (directory.name == "checkpoint-2" or directory.parent.name == "lasting"):
            raise CheckpointError(f"cannot write {directory}: No space left on device")
        save(directory, *args)

    monkeypatch.setattr(checkpoint, "save", failing)
    pair = [job(name, str(neighbourhood.data / "b.jsonl"), save_steps=2) for name in ("passing", "lasting")]
    results = neighbourhood.train(*pair)
    assert results["passing"].status == "done" and any("passing: checkpoint at step 2 failed" in note for note in neighbourhood.notes)
    assert results["lasting"].status == "failed" and "No space left" in results["lasting"].reason


def test_an_error_that_is_nobodys_ends_the_run_and_resume_goes_on(
    wide_base: Path, data: Path, tmp_path: Path, untouched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that fails with all jobs and with none alone is a fault of the program: no job is blamed, and nothing is lost."""
    compute = Stream.compute

    def raising(engine: Stream, packed: MicroBatch, *batch: Any) -> Any:
        if packed.kind == "train" and len({row.job_id for row in packed.rows}) > 1:
            raise RuntimeError("together only")
        return compute(engine, packed, *batch)

    monkeypatch.setattr(Stream, "compute", raising)
    with pytest.raises(RuntimeError, match="together only"):
        train(wide_base, tmp_path / "out", neighbours(data), deterministic=True)
    monkeypatch.undo()
    results = train(wide_base, tmp_path / "out", neighbours(data), deterministic=True, resume=True)
    assert {name: sha256(Path(r.path)) for name, r in results.items()} == untouched
