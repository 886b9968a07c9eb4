"""New tokens from an order to PEFT: files with PEFT's names, equal losses in both programs, continuing, generating, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tlora
from tests.engine.tiny_runs import job, run_spec, save_base, sha256, train, write_rows
from tlora.engine.check import check
from tlora.engine.generate import Sampling, answer, open_adapter
from tlora.errors import ConfigError
from tlora.jobs_file import read_jobs_file
from tlora.planning.start import start_state
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.supermodel import SuperModel

TOKENS = list(range(100, 110))


def peft_loss(base: Path, adapter: Path, ids: torch.Tensor) -> float:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return float(model(input_ids=ids[None], labels=ids[None]).loss.detach())


def our_loss(base: Path, adapter: Path, ids: torch.Tensor) -> float:
    fields = json.loads((adapter / "job.json").read_text()) | {"adapter_path": str(adapter)}
    spec = tlora.JobSpec.model_validate(fields)
    model = SuperModel.from_pretrained(str(base))
    model.join("it", spec, spec, 1, start_state(spec, model.layout(spec), torch.float32))
    batch = collate([BatchRow("it", ids.numpy(), np.ones(len(ids), np.float32))])
    return model.evaluate(batch)["it"].mean


def test_two_jobs_train_their_own_rows_of_a_tied_embedding(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    rows = str(write_rows(tmp_path / "rows.jsonl", 8))
    jobs = [
        job("one", rows, max_steps=3, trainable_token_indices=TOKENS, train_on="all"),
        job("two", rows, max_steps=3, trainable_token_indices={"embed_tokens": TOKENS[5:]}, train_on="all", seed=1),
        job("none", rows, max_steps=3),
    ]
    assert all(result.status == "done" for result in train(base, tmp_path / "out", jobs, deterministic=True).values())
    train(base, tmp_path / "alone", jobs[:1], deterministic=True)
    assert sha256(tmp_path / "out" / "one") == sha256(tmp_path / "alone" / "one")
    ids = torch.tensor([*range(90, 115), *TOKENS])
    plain = float(AutoModelForCausalLM.from_pretrained(base)(input_ids=ids[None], labels=ids[None]).loss.detach())
    for name in ("one", "two"):
        adapter = tmp_path / "out" / name
        keys = set(load_file(adapter / "adapter_model.safetensors"))
        assert "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta" in keys
        given = json.loads((adapter / "adapter_config.json").read_text())
        config = peft.LoraConfig(r=4, target_modules=given["target_modules"], trainable_token_indices=given["trainable_token_indices"])
        made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        assert set(peft.get_peft_model_state_dict(made)) == keys, "PEFT would write other files"
        theirs, ours = peft_loss(base, adapter, ids), our_loss(base, adapter, ids)
        assert ours == pytest.approx(theirs, rel=1e-5) and abs(ours - plain) > 1e-3
    more = job("more", rows, max_steps=1, adapter_path=str(tmp_path / "out" / "one"))
    assert train(base, tmp_path / "more", [more])["more"].status == "done"
    assert len(load_file(tmp_path / "more" / "more" / "adapter_model.safetensors")) == len(keys)
    model = open_adapter(tmp_path / "out" / "one")
    weight = model.model.get_input_embeddings().weight.clone()
    assert answer(model, ["boat"], Sampling(max_new_tokens=4))
    assert torch.equal(weight, model.model.get_input_embeddings().weight)


def test_what_has_no_row_and_whole_modules_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    rows = str(write_rows(tmp_path / "rows.jsonl", 4))
    orders = [job("far", rows, trainable_token_indices=[5000]), job("rows", rows, trainable_token_indices=[5, 6]), job("plain", rows)]
    far, two, plain = check(run_spec(base, tmp_path, orders), device="cpu").jobs
    assert "token 5000 has no row in this base's embedding" in far.problems[0] and not two.problems
    assert two.trainable_parameters == plain.trainable_parameters + 2 * 64 and two.memory_bytes > plain.memory_bytes
    with pytest.raises(ValueError, match="token 5 is listed twice"):
        tlora.JobSpec.model_validate(job("twice", rows, trainable_token_indices=[5, 5]))
    (tmp_path / "jobs.yaml").write_text(f"base_model: {base}\njobs:\n- {{name: a, data: {rows}, modules_to_save: [embed_tokens]}}\n")
    with pytest.raises(ConfigError, match="did you mean 'trainable_token_indices' .whole modules are not trained"):
        read_jobs_file(tmp_path / "jobs.yaml")
