"""Which adapters PEFT finds no place for, as it renames them like a family's files: PEFT itself is asked."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from bench.families import VOCABULARY, families, tiny
from tests.engine.tiny_runs import CHATML, job, make_tokenizer, run_spec, write_rows
from tlora.engine.check import check
from tlora.supermodel.assembly import lost_by_peft
from tlora.supermodel.text_model import auto_class

LOST = {"deepseek_ocr2": 14, "unlimited_ocr": 14, "mistral_large4": 3, "laguna": 3, "inkling2_text": 2}
FOUND = ("llama", "qwen3_5", "shieldgemma2", "step3p7", "gemma4", "mistral3")
EVERY_RUN = ("laguna", "llama", "inkling2_text")


def made(family: str, vocabulary: int = VOCABULARY) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = tiny(families()[family])
    text = config.get_text_config()
    text.vocab_size = vocabulary
    if hasattr(text, "unpadded_vocab_size"):
        text.unpadded_vocab_size = vocabulary
    return auto_class(config).from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("family", [pytest.param(each, marks=[] if each in EVERY_RUN else pytest.mark.slow) for each in (*LOST, *FOUND)])
@pytest.mark.filterwarnings("ignore")  # of transformers, about configs as tiny as these, and PEFT's own
def test_peft_loads_what_it_is_said_to_load(family: str, tmp_path: Path) -> None:
    """All linears of the text model, saved by PEFT."""
    if family not in families():
        pytest.skip("not in this transformers")
    model = made(family)
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and re.search(r"\blayers\.\d", name)]
    linears = [name for name in linears if not re.search("vision|audio|tower|experts\\.\\d", name)]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=f"({'|'.join(map(re.escape, linears))})"))
    adapted.save_pretrained(tmp_path)
    base = adapted.unload()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peft.PeftModel.from_pretrained(base, tmp_path)
    said = [str(each.message) for each in caught if "missing adapter keys" in str(each.message)]
    missing = set(re.findall(r"base_model\.model\.([\w.]+)\.lora_A", " ".join(said)))
    assert {*lost_by_peft(base, linears)} == missing
    assert len(missing) == LOST.get(family, 0)


@pytest.mark.filterwarnings("ignore")
def test_check_says_it_with_a_remedy_that_works(passing_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    for family in ("inkling2_text", "unlimited_ocr"):
        made(family, len(tokenizer) + 3).save_pretrained(passing_path / family)
        tokenizer.save_pretrained(passing_path / family)
    rows = str(write_rows(passing_path / "rows.jsonl", 4))

    def said(family: str, **keys: Any) -> list[str]:
        order = job("a", rows, target_modules="all-linear", **keys)
        (planned,) = check(run_spec(passing_path / family, passing_path / "out", [order]), device="cpu").jobs
        assert planned.problems == ()
        return [line for line in planned.warnings if "PEFT" in line]

    (line,) = said("inkling2_text")
    assert line.startswith("PEFT leaves out 2 of the")
    assert line.endswith("Write exclude_modules: [k_sconv.weight_proj, v_sconv.weight_proj] for one that it loads whole")
    assert said("inkling2_text", exclude_modules=["k_sconv.weight_proj", "v_sconv.weight_proj"]) == []
    (line,) = said("unlimited_ocr")
    assert line.startswith("PEFT finds no place for an adapter over unlimited_ocr: transformers changes the names of its modules")
    assert line.endswith("Use tlora generate, which reads it")
