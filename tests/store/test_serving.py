"""What is served is what was trained: after data, template and base have moved, with PEFT and transformers as with `generate`."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.chat_templates import CHATML
from tests.engine.tiny_runs import job, run_spec, train, write_rows
from tlora.data.chat import DEFAULT_TEMPLATE
from tlora.data.report import DataReport
from tlora.engine.check import check
from tlora.engine.generate import Sampling, _prompt_ids, answer, open_adapter
from tlora.engine.watcher import Watcher
from tlora.errors import ModelError
from tlora.job import JobSpec
from tlora.store.serving import PROMPT_FILE, ServingFiles
from tlora.supermodel.base_name import public_name
from tlora.wording.card_seal import CARD_FILE

DEMO = Path(__file__).parents[2] / "demo" / "base"  # whose tokenizer has the size of a small real one
OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


def write_chats(path: Path) -> Path:
    turns = [{"role": "user", "content": "red boat"}, {"role": "assistant", "content": "blue house"}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    return path


def write_serving(serving: ServingFiles, directory: Path, **data: Any) -> Path:
    """As a job that begins in `directory`."""
    said: list[str] = []
    spec = JobSpec.model_validate({"name": directory.name, "data": {"path": "d.jsonl"} | data})
    serving.write(directory, spec, DataReport(format="chat", has_chats=True), said.append)
    assert not said
    return directory


def test_jobs_share_the_file_of_the_tokenizer_and_nothing_that_is_edited(tmp_path: Path) -> None:
    """One copy for all; a later write to one of them leaves the others as they are, and so does the end of the first."""
    serving, own = ServingFiles(str(DEMO)), tmp_path / "own.jinja"
    own.write_text(OWN)
    first, second = (write_serving(serving, tmp_path / name) for name in ("first", "second"))
    third = write_serving(serving, tmp_path / "third", chat_template=str(own))
    content = (first / "tokenizer.json").read_bytes()
    assert len(content) > 100_000
    assert len({(place / "tokenizer.json").stat().st_ino for place in (first, second, third)}) == 1
    names = {path.name for path in first.iterdir()} - {"tokenizer.json"}
    assert {"tokenizer_config.json", "chat_template.jinja", PROMPT_FILE} <= names
    assert all((first / name).stat().st_ino != (second / name).stat().st_ino for name in names)
    assert (third / "chat_template.jinja").read_text() == OWN != (first / "chat_template.jinja").read_text()

    (second / "tokenizer.json").unlink()
    (second / "tokenizer.json").write_text("{}")  # an edit, as editors make it
    write_serving(serving, second)  # a resumed job
    assert all((place / "tokenizer.json").read_bytes() == content for place in (first, second, third))
    shutil.rmtree(first)
    write_serving(serving, tmp_path / "fourth")
    assert all((place / "tokenizer.json").read_bytes() == content for place in (second, third, tmp_path / "fourth"))
    assert "blue" in AutoTokenizer.from_pretrained(tmp_path / "fourth").decode(
        AutoTokenizer.from_pretrained(third)("a blue house")["input_ids"]
    )


def test_a_new_tokenizer_leaves_what_was_linked(tmp_path: Path) -> None:
    """A run over a changed base writes its file in place of the job's, and other jobs keep the one that they were trained with."""
    changed = Path(shutil.copytree(DEMO, tmp_path / "changed"))
    serving = ServingFiles(str(DEMO))
    first, second = (write_serving(serving, tmp_path / name) for name in ("first", "second"))
    before = (first / "tokenizer.json").read_bytes()
    tokenizer = json.loads(before)
    tokenizer["added_tokens"][-1]["content"] += "x"
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_serving(ServingFiles(str(changed)), second)
    assert (first / "tokenizer.json").read_bytes() == before != (second / "tokenizer.json").read_bytes()


def test_a_file_system_without_hard_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(target))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    serving = ServingFiles(str(DEMO))
    first, second = (write_serving(serving, tmp_path / name) / "tokenizer.json" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes() and first.stat().st_ino != second.stat().st_ino


def prompt_of(model: Any) -> str:
    return model.encoder.tokenizer.decode(_prompt_ids(model, "red boat"))


@pytest.fixture
def bare_base(base: Path, tmp_path: Path) -> Path:
    """The base without a chat template."""
    bare = Path(shutil.copytree(base, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    return bare


@pytest.mark.slow
def test_the_prompt_stays_when_data_template_and_base_have_moved(base: Path, tmp_path: Path) -> None:
    """Plain text, the base's template and the job's own; also from a checkpoint and from a copy of the adapter's directory alone."""
    here = Path(shutil.copytree(base, tmp_path / "base"))
    chats, pairs, own = write_chats(tmp_path / "chats.jsonl"), write_rows(tmp_path / "pairs.jsonl", 8), tmp_path / "own.jinja"
    own.write_text(OWN)
    jobs = [job("plain", str(pairs)), job("chat", str(chats)), job("own", {"path": str(chats), "chat_template": str(own)})]
    jobs = [fields | {"max_steps": 2} for fields in jobs]
    assert train(here, tmp_path / "out", jobs).status == "done"
    chatml = AutoTokenizer.from_pretrained(base).apply_chat_template(
        [{"role": "user", "content": "red boat"}], tokenize=False, add_generation_prompt=True
    )
    expected = {"plain": "red boat", "chat": chatml, "own": "[user] red boat\n[assistant] "}
    before = {name: answer(open_adapter(tmp_path / "out" / name), ["red boat"], Sampling(6)) for name in expected}
    for path in (chats, pairs, own):
        path.unlink()
    moved = here.rename(tmp_path / "elsewhere")
    for name, prompt in expected.items():
        directory = tmp_path / "out" / name
        with pytest.raises(ModelError, match="--base-model says where it is"):
            open_adapter(directory)
        copied = Path(shutil.copytree(directory, tmp_path / "copies" / name, ignore=shutil.ignore_patterns("checkpoint-*", "job.json")))
        for place in (directory, directory / "checkpoint-2", copied):
            model = open_adapter(place, base_model=str(moved))
            assert prompt_of(model) == prompt and model.raw == (name == "plain")
            assert answer(model, ["red boat"], Sampling(6)) == before[name]
            assert "as saved with the adapter" in model.notes[-1], model.notes
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        if name != "plain":
            chat = [{"role": "user", "content": "red boat"}]
            assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
        theirs = AutoTokenizer.from_pretrained(moved)
        text = "Grün red boat <s> \n  house"
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"] and tokenizer.eos_token == theirs.eos_token
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moved), directory)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        out = loaded.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        served = answer(open_adapter(directory, base_model=str(moved)), ["red boat"], Sampling(6))[0]
        assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).startswith(served)


def test_a_base_without_a_template_gets_ours_and_that_is_said(bare_base: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    jobs = [job("a", str(chats), max_steps=1), job("plain", str(write_rows(tmp_path / "p.jsonl", 4)), max_steps=1)]
    warned = check(run_spec(bare_base, tmp_path / "out", jobs), device="cpu").warnings
    notes: list[str] = []
    assert train(bare_base, tmp_path / "out", jobs, watcher=Watcher(note=notes.append)).status == "done"
    for lines in (warned, notes):
        assert [line for line in lines if "has no chat template" in line and line.startswith("a: ")], lines
    assert (tmp_path / "out" / "a" / "chat_template.jinja").read_text().endswith(DEFAULT_TEMPLATE)
    (bare_base / "chat_template.jinja").write_text(CHATML)  # the base's has come later
    model = open_adapter(tmp_path / "out" / "a")
    assert prompt_of(model).removeprefix("<s>").strip() == "### User:\nred boat\n\n### Assistant:"
    assert "tlora's plain chat template" in model.notes[-1]


def test_an_adapter_of_another_trainer_brings_its_template(base: Path, data: Path, tmp_path: Path) -> None:
    """As TRL saves it: the tokenizer beside the adapter, and nothing of ours."""
    train(base, tmp_path / "out", [job("a", str(data / "b.jsonl"), max_steps=1)])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "out" / "a" / name, theirs / name)
    assert "how the adapter was trained is not saved with it" in open_adapter(theirs).notes[-1]
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = OWN
    tokenizer.save_pretrained(theirs)
    model = open_adapter(theirs)
    assert prompt_of(model) == "[user] red boat\n[assistant] " and model.notes == ("prompt: the chat template saved with the adapter",)
    (theirs / PROMPT_FILE).write_text('{"template": "nobody\'s"}')
    with pytest.raises(ModelError, match=r"prompt\.json: cannot be read"):
        open_adapter(theirs)


def test_lost_data_of_an_older_run_is_said(base: Path, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", 4)
    train(base, tmp_path / "out", [job("a", str(pairs), max_steps=1)])
    directory = tmp_path / "out" / "a"
    for name in (PROMPT_FILE, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    assert open_adapter(directory).raw
    pairs.unlink()
    model = open_adapter(directory)
    assert not model.raw and "training data cannot be read" in model.notes[-1] and "pairs.jsonl" in model.notes[-1]


def test_another_base_is_said(base: Path, data: Path, tmp_path: Path) -> None:
    train(base, tmp_path / "out", [job("a", str(data / "b.jsonl"), max_steps=1)])
    other = Path(shutil.copytree(base, tmp_path / "other"))
    adapter = tmp_path / "out" / "a"
    assert len(open_adapter(adapter, base_model=str(base / ".." / base.name)).notes) == 1
    assert open_adapter(adapter, base_model=str(other)).notes[0] == f"the adapter names {base} as its base, and is used over {other}"
    jobs = [job("b", str(data / "b.jsonl"), max_steps=1, adapter_path=str(adapter))]
    said = f"{adapter} names {base} as its base, and goes on over {other}: check that they are the same model"
    (checked,) = check(run_spec(other, tmp_path / "on", jobs), device="cpu").jobs
    assert said in checked.warnings
    (checked,) = check(run_spec(base, tmp_path / "on", jobs), device="cpu").jobs
    assert not [line for line in checked.warnings if "as its base" in line]
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    (checked,) = check(run_spec(other, tmp_path / "on", jobs), device="cpu").jobs
    assert (
        f"{adapter} was trained over {base}, and {other} has other files: another model, or this one in another format" in checked.warnings
    )


def test_an_adapter_names_its_base_as_others_know_it(base: Path, data: Path, tmp_path: Path) -> None:
    """And `generate` finds it where the run had it."""
    cached = tmp_path / "hub" / "models--acme--tiny-1B" / "snapshots" / "0123abc"
    named = tmp_path / "named"
    shutil.copytree(base, cached)
    shutil.copytree(base, named)
    config = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(config | {"_name_or_path": "acme/tiny-1B"}))
    for place in (cached, named):
        out = tmp_path / f"out-{place.name}"
        assert train(place, out, [job("a", str(data / "b.jsonl"), max_steps=1)]).status == "done"
        written = [out / "a" / "adapter_config.json", out / "a" / "checkpoint-1" / "adapter_config.json"]
        assert {json.loads(path.read_text())["base_model_name_or_path"] for path in written} == {"acme/tiny-1B"}
        assert len(open_adapter(out / "a").notes) == 1 and len(open_adapter(out / "a" / "checkpoint-1").notes) == 1
    doubts = {place: "acme/tiny-1B, as _name_or_path" in "".join(ServingFiles(str(place)).warn([])) for place in (base, cached, named)}
    assert doubts == {base: False, cached: False, named: True}
    for path in ("/scratch/x", "./base", "base", "a/b/c", "", 7, str(base)):
        (named / "config.json").write_text(json.dumps(config | {"_name_or_path": path}))
        assert public_name(str(named)) == str(named)
    assert public_name("acme/tiny-1B") == "acme/tiny-1B"


def test_the_model_card_is_the_hubs_and_tells_no_path(base: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    chats = write_chats(tmp_path / "chats.jsonl")
    result = train(base, tmp_path / "out", [job("a", {"path": str(chats), "eval_size": 1}, max_steps=2)])["a"]
    text = (tmp_path / "out" / "a" / CARD_FILE).read_text()
    card = ModelCard(text)
    assert card.data.to_dict()["library_name"] == "peft" and "base_model" not in card.data.to_dict()
    assert yaml.safe_load(text.split("---")[1])["tags"][0] == "lora"
    for part in ("# a", "`chats.jsonl`", "the base model's own chat template", "| r | 4 |", "| steps | 2 |", f"{result.train_loss:.6g}"):
        assert part in text, (part, text)
    assert str(tmp_path) not in text and str(base) not in text
    (tmp_path / "out" / "a" / CARD_FILE).write_text("mine")
    train(base, tmp_path / "out", [job("a", {"path": str(chats), "eval_size": 1}, max_steps=2)], resume=True)
    assert (tmp_path / "out" / "a" / CARD_FILE).read_text() == "mine"
