"""A base comes from anywhere: code that it brings is never run, nothing is asked, and a config that makes no model is one message."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.tiny_runs import job, run_spec, train
from tlora.engine.check import check
from tlora.engine.generate import open_adapter
from tlora.errors import ModelError
from tlora.supermodel.load import load_weights

CONFIG_CODE = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.EvilModel"}}
TOKENIZER_CODE = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_code(base: Path, directory: Path, where: str) -> tuple[Path, Path]:
    """A copy of the base that brings code, and the file that exists once that has been run."""
    marker = directory / "ran"
    evil = Path(shutil.copytree(base, directory / "evil"))
    classes = "class Evil(PretrainedConfig):\n    model_type = 'evil'\nclass EvilModel: pass\n"
    classes += "class EvilTokenizer(PreTrainedTokenizerFast): pass\n"
    (evil / "evil.py").write_text(f"from pathlib import Path\nfrom transformers import *\nPath({str(marker)!r}).write_text('x')\n{classes}")
    edit(evil / where, **(CONFIG_CODE if where == "config.json" else TOKENIZER_CODE))
    return evil, marker


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A stdin that agrees to everything."""
    stream = io.StringIO("y\n" * 1000)
    monkeypatch.setattr(sys, "stdin", stream)
    return stream


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_of_a_base_is_never_run_and_nothing_is_asked(base: Path, data: Path, tmp_path: Path, yes: io.StringIO, where: str) -> None:
    evil, marker = with_code(base, tmp_path, where)
    jobs = [job("a", str(data / "b.jsonl"), max_steps=1)]
    train(base, tmp_path / "good", jobs)
    for name in ("prompt.json", "tokenizer_config.json"):  # else the adapter's own tokenizer is taken, and not the base's
        (tmp_path / "good" / "a" / name).unlink()
    said = list(check(run_spec(evil, tmp_path / "out", jobs), device="cpu").problems)
    for action in (lambda: train(evil, tmp_path / "out", jobs), lambda: open_adapter(tmp_path / "good" / "a", base_model=str(evil))):
        with pytest.raises(ModelError) as caught:
            action()
        said.append(str(caught.value))
    assert len(said) == 3
    for message in said:
        assert "code of its own" in message and where in message and "never run" in message and "Use " in message, message
        assert "trust_remote_code" not in message and "\n" not in message, message
    assert not marker.exists() and yes.tell() == 0 and not (tmp_path / "out").exists()


def test_the_command_asks_nothing_either(base: Path, data: Path, tmp_path: Path) -> None:
    evil, marker = with_code(base, tmp_path, "config.json")
    (tmp_path / "jobs.yaml").write_text(f"base_model: {evil}\njobs:\n  - {{name: a, data: {data / 'b.jsonl'}}}\n")
    line = [sys.executable, "-m", "tlora", "check", "jobs.yaml", "--device", "cpu"]
    done = subprocess.run(line, check=False, cwd=tmp_path, input="y\n" * 1000, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.startswith("error: base_model") and done.stderr.count("\n") == 1, done.stderr
    assert "code of its own" in done.stderr and "[y/N]" not in done.stdout + done.stderr
    assert not marker.exists()


def test_attention_code_from_the_hub_is_refused(base: Path, tmp_path: Path) -> None:
    asking = Path(shutil.copytree(base, tmp_path / "asking"))
    edit(asking / "config.json", attn_implementation="kernels-community/flash-attn")
    with pytest.raises(ModelError, match=r"\(kernels-community/flash-attn\)"):
        load_weights(str(asking))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_act": "nope"}, "'nope'"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "'nope'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
        ({"dtype": "int8"}, "dtype int8"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"hidden_size": 0}, "embed_tokens.weight has no numbers"),
        ({"hidden_size": "wide"}, "'wide'"),
        ({"vocab_size": 0}, "config.json"),
        ({"num_attention_heads": 0}, "zero"),
        ({"num_hidden_layers": 0}, "9 tensors of its files are not used"),
        ({"num_key_value_heads": 3}, "of another shape"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quantised (eetq)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ has packed it with group_size None"),
    ],
)
def test_a_config_that_makes_no_model_is_one_message(base: Path, data: Path, tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    odd = Path(shutil.copytree(base, tmp_path / "odd"))
    edit(odd / "config.json", **changes)
    jobs = [job("a", str(data / "b.jsonl"))]
    with pytest.raises(ModelError) as caught:
        train(odd, tmp_path / "out", jobs)
    assert part in str(caught.value) and "\n" not in str(caught.value), caught.value
    found = check(run_spec(odd, tmp_path / "out", jobs), device="cpu")
    assert len(found.problems) == 1 and "\n" not in found.problems[0], found.problems
    assert not (tmp_path / "out").exists()


def test_a_base_whose_files_agree_and_whose_layers_do_not(base: Path, data: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(base, tmp_path / "odd"))
    edit(odd / "config.json", num_key_value_heads=3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(odd)).save_pretrained(odd)
    jobs = [job("a", str(data / "b.jsonl"))]
    with pytest.raises(ModelError, match="do not fit together"):
        train(odd, tmp_path / "out", jobs)
    edit(odd / "config.json", num_key_value_heads=2, num_hidden_layers=0)
    with pytest.raises(ModelError, match="linear layer"):
        train(odd, tmp_path / "out", jobs, unused_weights="ignore")
