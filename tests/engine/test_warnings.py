"""What training will not see, or sees otherwise than the file has it, is said once and before the first step; so is changed data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, train, write_rows
from tests.tiny import make_model
from tlora import durable
from tlora.data.prepare import prepare
from tlora.engine.check import check
from tlora.engine.watcher import Watcher
from tlora.errors import DataError
from tlora.json_file import fields_of, value_of
from tlora.planning import job_plan
from tlora.planning.base_outline import describe_base
from tlora.shape.base_shape import BaseShape
from tlora.shape.length_limits import check_length


def write_chats(path: Path, count: int, **columns: Any) -> str:
    answer = {"role": "assistant", "content": "boat", "reasoning_content": "red or green"}
    rows = [{"messages": [{"role": "user", "content": "red"}, answer], **columns} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_sweep_over_one_file_says_everything_once(base: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 9, source="web")
    jobs = [job(f"s{i}", path, seed=i, max_steps=1) for i in range(6)]
    notes: list[str] = []
    assert train(base, tmp_path / "out", jobs, watcher=Watcher(note=notes.append)).status == "done"
    unused = f"s0, s1, s2, s3 and 2 more: columns that format chat does not use: 'source' ({path})"
    assert notes.count(unused) == 1 and sum("source" in note for note in notes) == 1
    (changed,) = (note for note in notes if "chat template" in note)
    assert changed.splitlines()[1] == "  reasoning is dropped: 108 characters in 9 of 9 rows, such as 'red or green'"
    found = check(run_spec(base, tmp_path / "checked", jobs), device="cpu")
    assert {warning for one in found.jobs for warning in one.warnings} == {unused.split(": ", 1)[1]}
    assert found.jobs[0].data and found.jobs[0].data.template_changes() == changed.split(": ", 1)[1].splitlines()


def test_samples_beyond_the_bases_positions_are_said(data: Path, tmp_path: Path) -> None:
    """By `check` and `train`, with their number; what fits is nothing to speak of."""
    base = save_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 32}
    (base / "config.json").write_text(json.dumps(config))
    jobs = [job("long", str(data / "c.jsonl"), max_steps=1), job("fits", {"path": str(data / "c.jsonl"), "max_length": 32}, max_steps=1)]
    found = check(run_spec(base, tmp_path / "out", jobs), device="cpu")
    assert not any("max_position_embeddings" in warning for warning in found.jobs[1].warnings)
    (warning,) = (warning for warning in found.jobs[0].warnings if "max_position_embeddings" in warning)
    unlimited = job_plan.prepare(job_plan.prepare_requests(run_spec(base, tmp_path, jobs[:1]), 10**6))["long"]
    lengths = unlimited.train.lengths  # type: ignore[union-attr]
    beyond = int((lengths > 32).sum())
    assert 0 < beyond < len(lengths)
    assert warning.startswith(f"{beyond} of {len(lengths)} samples (up to {lengths.max()} tokens) are longer than the base's")
    assert "Set max_length: 32" in warning
    notes: list[str] = []
    assert train(base, tmp_path / "out", jobs, watcher=Watcher(note=notes.append)).status == "done"
    assert notes.count(f"long: {warning}") == 1


def test_samples_beyond_a_table_of_positions_fail_their_job_alone(data: Path, tmp_path: Path) -> None:
    """There is no row to look up: on a GPU that would end the whole run."""
    base, tokenizer = tmp_path / "opt", make_tokenizer(CHATML)
    tokenizer.save_pretrained(base)
    shape = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    OPTForCausalLM(OPTConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **shape)).save_pretrained(base)
    jobs = [job("long", str(data / "c.jsonl")), job("fits", {"path": str(data / "c.jsonl"), "max_length": 32}, max_steps=2)]
    results = train(base, tmp_path / "out", jobs)
    assert results["fits"].status == "done"
    assert results["long"].status == "failed" and "32 learned positions. Set max_length: 32" in results["long"].reason


def test_samples_beyond_what_an_indexer_sees_whole_fail_their_job_alone(data: Path, tmp_path: Path) -> None:
    """By `check`, `train` and a server's outline, in the same words."""
    base, tokenizer = tmp_path / "indexed", make_tokenizer(CHATML)
    tokenizer.save_pretrained(base)
    make_model("deepseek-v3.2", vocab_size=len(tokenizer), index_topk=32).save_pretrained(base)
    jobs = [job("long", str(data / "c.jsonl")), job("fits", {"path": str(data / "c.jsonl"), "max_length": 32}, max_steps=2)]
    words = "tokens, and past 32 this base's attention is sparse, which is not trained. Set max_length: 32"
    found = check(run_spec(base, tmp_path / "out", jobs), device="cpu")
    assert [words in "".join(one.problems) for one in found.jobs] == [True, False]
    results = train(base, tmp_path / "out", jobs)
    assert results["fits"].status == "done"
    assert results["long"].status == "failed" and words in results["long"].reason
    shape = value_of(BaseShape, json.loads(json.dumps(fields_of(describe_base(str(base), "float32", None, "cpu")))))
    check_length(shape.limits, 32)
    with pytest.raises(DataError, match=f"has 33 {words}"):
        check_length(shape.limits, 33)


@pytest.fixture
def interrupted(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run with a checkpoint at step 2 of 4, on an evaluation file that can be replaced."""
    monkeypatch.setattr(job_plan, "prepare", prepare)  # files change here, so each run looks at them
    held_out = tmp_path / "held-out.jsonl"
    shutil.copy(data / "held-out.jsonl", held_out)
    own = job("a", {"path": str(data / "a.jsonl"), "eval_path": str(held_out)}, eval_steps=2, save_steps=2, max_steps=4)
    train(base, tmp_path / "out", [own])
    shutil.rmtree(tmp_path / "out" / "a" / "checkpoint-4")
    (tmp_path / "out" / "a" / "result.json").unlink()
    assert (tmp_path / "out" / "a" / "checkpoint-2").is_dir()
    return own


def test_another_evaluation_file_is_not_mixed_in_on_resume(base: Path, tmp_path: Path, interrupted: dict[str, Any]) -> None:
    held_out, out = tmp_path / "held-out.jsonl", tmp_path / "out"
    before = held_out.read_bytes()
    write_rows(held_out, 7, seed=99)
    result = train(base, out, [interrupted], resume=True)["a"]
    assert result.status == "failed" and f"{held_out}: is not the data that" in result.reason and "was evaluated on" in result.reason
    held_out.write_bytes(before)
    assert train(base, out, [interrupted], resume=True)["a"].status == "done"


def test_a_checkpoint_of_an_earlier_version_goes_on(base: Path, tmp_path: Path, interrupted: dict[str, Any]) -> None:
    """It does not say what it was evaluated on; from then on that is known."""
    checkpoint = tmp_path / "out" / "a" / "checkpoint-2"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state.pop("eval_data")
    (checkpoint / "state.json").write_text(json.dumps(state) + "\n")
    (checkpoint / durable.MANIFEST).unlink()
    durable.write_manifest(checkpoint)
    assert train(base, tmp_path / "out", [interrupted], resume=True)["a"].status == "done"
    assert json.loads((tmp_path / "out" / "a" / "checkpoint-4" / "state.json").read_text())["eval_data"]
