"""Answers of an adapter: the same tokens as PEFT's, the template of its training, clear refusals of what does not fit."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from tests.cases import in_every_run
from tests.tiny import make_model
from tests.tolerances import LOGITS, assert_close
from tlora.base_digest import quick_digest
from tlora.engine.generate import Sampling, _attach, _prompt_ids, answer, generate, open_adapter
from tlora.errors import ConfigError, ModelError

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
WORDS = ["what is the capital of france", "hello there, who are you", "select * from users where id = 3"]
CONFIGS = [
    {},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    {"target_modules": "all-linear"},
    {"trainable_token_indices": [20, 30, 31]},
]


def save_base(directory: Path, template: str | None = TEMPLATE, family: str = "llama", seed: int = 0) -> Path:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["<pad>", "<bos>", "<eos>", "<s>", "<e>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(WORDS * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    make_model(family, vocab_size=300, seed=seed).save_pretrained(directory)
    return directory


def save_adapter(directory: Path, base: Path, **config: Any) -> Path:
    """An adapter as PEFT makes one, with a B that is not zero."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    lora = PeftLora(**({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | config))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    return directory


def peft_answer(base: Path, adapter: Path | None, text: str, new_tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=[2, 4]
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return save_adapter(tmp_path / "adapter", base)


def prompted(text: str) -> str:
    return f"<s>user\n{text}<e>\n<s>assistant\n"


@pytest.mark.parametrize("config", CONFIGS[2:3])
def test_the_same_answer_as_peft(tmp_path: Path, base: Path, config: dict[str, Any]):
    adapter = save_adapter(tmp_path / "adapter", base, **config)
    mine = generate(adapter, WORDS[:1], sampling=Sampling(max_new_tokens=12))
    assert mine == [peft_answer(base, adapter, prompted(WORDS[0]), 12)]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_same_logits_as_peft(tmp_path: Path, base: Path, config: dict[str, Any]):
    from transformers import AutoModelForCausalLM

    adapter = save_adapter(tmp_path / "adapter", base, **config)
    ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(input_ids=ids).logits
    model = open_adapter(adapter)
    alone = model.model(ids).logits
    with ExitStack() as stack, torch.no_grad():
        _attach(model, stack)
        assert_close(model.model(ids).logits, expected, LOGITS[torch.float32])
    assert (alone - expected).norm() > 0.05 * expected.norm(), "the adapter makes a difference"
    assert torch.equal(model.model(ids).logits, alone)


def test_a_tied_head_keeps_its_embedding(tmp_path: Path):
    base = save_base(tmp_path / "base", family="llama-tied")
    adapter = save_adapter(tmp_path / "adapter", base)
    assert generate(adapter, WORDS[:1], sampling=Sampling(12)) == [peft_answer(base, adapter, prompted(WORDS[0]), 12)]


def test_the_base_alone_is_the_base_before_and_after_the_adapter(adapter: Path, base: Path):
    model = open_adapter(adapter)
    expected = [peft_answer(base, None, prompted(WORDS[1]), 8)]
    assert answer(model, WORDS[1:2], Sampling(8), adapted=False) == expected
    assert answer(model, WORDS[1:2], Sampling(8)) != expected
    assert answer(model, WORDS[1:2], Sampling(8), adapted=False) == expected


def test_a_batch_gets_the_answers_that_each_prompt_gets_alone(adapter: Path):
    model = open_adapter(adapter)
    assert answer(model, WORDS, Sampling(10)) == [answer(model, [prompt], Sampling(10))[0] for prompt in WORDS]


def test_what_is_streamed_is_the_answer(adapter: Path):
    model = open_adapter(adapter)
    for seed in range(5):  # random bytes: characters come in halves
        pieces: list[str] = []
        sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=seed)
        whole = answer(model, WORDS[:1], sampling, on_text=pieces.append)
        assert "".join(pieces) == whole[0] and len(pieces) > 3
        assert whole == answer(model, WORDS[:1], sampling), "the same seed, the same answer"
    assert whole != answer(model, WORDS[:1], Sampling(24, 1.0, seed=99))


def test_several_answers_cannot_be_streamed(adapter: Path):
    with pytest.raises(AssertionError, match="cannot be streamed"):
        answer(open_adapter(adapter), WORDS, Sampling(4), on_text=print)


def write_job(directory: Path, **data: Any) -> None:
    (directory / "job.json").write_text(json.dumps({"name": "a", "data": {"path": "/nowhere.jsonl"} | data}))


@pytest.mark.parametrize("nested", [False, True])
def test_the_template_of_the_training_is_used(adapter: Path, base: Path, tmp_path: Path, nested: bool):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}->{% endif %}")
    write_job(adapter.parent if nested else adapter, chat_template=str(file))
    assert generate(adapter, ["hello"], sampling=Sampling(8)) == [peft_answer(base, adapter, "[hello]->", 8)]


def test_a_base_without_a_template_gets_the_default_one(tmp_path: Path):
    base = save_base(tmp_path / "base", template=None)
    adapter = save_adapter(tmp_path / "adapter", base)
    assert generate(adapter, ["hello"], sampling=Sampling(8)) == [peft_answer(base, adapter, "### User:\nhello\n\n### Assistant:\n", 8)]


@pytest.mark.parametrize(
    ("data", "row", "raw"),
    in_every_run(
        [
            ({"format": "text"}, None, True),
            ({"format": "tokenized"}, None, True),
            ({"format": "alpaca"}, None, False),
            ({"format": "auto"}, {"prompt": "a", "completion": "b"}, True),
            ({"format": "prompt_completion"}, {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, False),
            ({"format": "auto"}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, False),
            ({"format": "auto"}, {"x": 1}, False),
            ({"format": "auto"}, None, False),
        ],
        0,
        5,
    ),
)
def test_an_adapter_of_plain_text_gets_the_prompt_as_it_is(
    adapter: Path, base: Path, tmp_path: Path, data: dict[str, Any], row: Any, raw: bool
):
    file = tmp_path / "d.jsonl"
    if row is not None:
        file.write_text(json.dumps(row) + "\n")
    write_job(adapter, path=str(file), **data)
    assert open_adapter(adapter).raw == raw
    text = "hello" if raw else prompted("hello")
    assert generate(adapter, ["hello"], sampling=Sampling(6)) == [peft_answer(base, adapter, text, 6)]


def test_an_answer_ends_where_the_template_ends_its_turns_also_by_several_tokens(adapter: Path, tmp_path: Path):
    model = open_adapter(adapter)
    tokenizer: Any = model.encoder.tokenizer
    wholes = ((seed, answer(model, WORDS[:1], Sampling(32, 0.7, seed))[0]) for seed in range(100))
    found = ((seed, whole, match[0]) for seed, whole in wholes for match in re.finditer(r"[a-z]{3}(?=.)", whole))
    seed, whole, stop = next(item for item in found if len(tokenizer(item[2])["input_ids"]) > 1 and item[1].index(item[2]) > 3)
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE.replace("<e>", "{{ '<e>' if m.role == 'user' else '" + stop + "' }}"))
    write_job(adapter, chat_template=str(file))
    pieces: list[str] = []
    ended = answer(open_adapter(adapter), WORDS[:1], Sampling(32, 0.7, seed), on_text=pieces.append)
    assert ended == [whole.partition(stop)[0]] and "".join(pieces) == ended[0]


def test_an_adapter_that_does_not_fit_is_refused_with_its_first_wrong_tensor(adapter: Path, tmp_path: Path, base: Path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(ModelError, match=r"q_proj\.lora_A\.weight .*\[4, 64\].*\[8, 64\]"):
        open_adapter(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(ModelError, match=r"has a tensor for a layer .*down_proj"):
        open_adapter(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 999}))
    with pytest.raises(ModelError, match=r"r[\s\S]*256"):
        open_adapter(adapter)


def test_an_adapter_of_another_base_is_refused(adapter: Path, tmp_path: Path):
    other = save_base(tmp_path / "other", family="phi3")
    with pytest.raises(ModelError, match=r"q_proj.*is not in this base model\. An adapter's layers are fixed.*and use that alone$"):
        open_adapter(adapter, base_model=str(other))


def test_an_adapter_leads_to_the_base_that_it_was_trained_over_alone(adapter: Path, base: Path, tmp_path: Path):
    """Another model of the same shape is refused, and said of where `--base-model` gives it: it may be the same in another format."""
    facts: dict[str, Any] = {"base_model": str(base), "base_files": {"quick": quick_digest(base), "sha256": {}}}
    (adapter / "base.json").write_text(json.dumps(facts))
    other = save_base(tmp_path / "other", seed=1)
    copied = Path(shutil.copytree(base, tmp_path / "copied"))
    words = f"the adapter was trained over {base}, and {other} "
    for same in (open_adapter(adapter), open_adapter(adapter, base_model=str(copied))):
        assert not any("was trained over" in line for line in same.notes)
    assert any(line.startswith(f"{words}has other files") for line in open_adapter(adapter, base_model=str(other)).notes)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    checkpoint = Path(shutil.copytree(adapter, adapter / "checkpoint-2", ignore=shutil.ignore_patterns("base.json")))
    for place in (adapter, checkpoint):
        with pytest.raises(ModelError, match=re.escape(f"{words}is another model") + ".*Give --base-model DIRECTORY"):
            open_adapter(place)
    (adapter / "base.json").write_text('{"base_model": "x", "base_files": {}}')
    with pytest.raises(ModelError, match=r"base\.json: cannot be read \(no 'quick'\)"):
        open_adapter(adapter)


@pytest.mark.parametrize("known", [True, False])
def test_a_servers_name_of_a_base_is_no_path(adapter: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool):
    """Also where a directory, or an earlier run's base, has that name."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "base"}))
    files = {"base_files": {"quick": quick_digest(base), "sha256": {}}} if known else {}
    (adapter / "base.json").write_text(json.dumps({"base_model": "base", "served": True} | files))
    elsewhere = save_base(tmp_path / "elsewhere" / "base", seed=1)
    monkeypatch.chdir(elsewhere.parent)
    (adapter.parent / "run.json").write_text(json.dumps({"base_model": "base"}))
    with pytest.raises(ModelError, match=r"trained over the server's base 'base'.*Give --base-model DIRECTORY"):
        open_adapter(adapter)
    notes = open_adapter(adapter, base_model=str(base)).notes
    assert any("is not known" in line for line in notes) != known
    said = "the adapter was trained over the server's base 'base', and base has other files"
    assert any(line.startswith(said) for line in open_adapter(adapter, base_model="base").notes) == known


def test_what_is_missing_is_named(adapter: Path, base: Path, tmp_path: Path):
    with pytest.raises(ModelError, match=r"nowhere/adapter_config.json: not found"):
        open_adapter(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no such directory"):
        open_adapter(adapter, base_model=str(tmp_path / "nowhere"))
    broken = shutil.copytree(base, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_adapter(adapter, base_model=str(broken))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match=r"names no base model\. Add --base-model"):
        open_adapter(adapter)


def test_a_lost_template_and_a_broken_job_file_are_named(adapter: Path):
    write_job(adapter, chat_template="/nowhere.jinja")
    with pytest.raises(ModelError, match=r"chat template /nowhere.jinja"):
        open_adapter(adapter)
    (adapter / "job.json").write_text("{")
    with pytest.raises(ModelError, match=r"job.json: cannot be read"):
        open_adapter(adapter)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": 1e-38}, r"temperature 1e-38: must be 0 \(greedy decoding\), or from 1e-30 to 100000\.0\. 0\.7 is usual"),
        ({"temperature": float("inf")}, "temperature inf: must be 0"),
        ({"temperature": float("nan")}, "temperature nan: must be 0"),
        ({"temperature": -1.0}, r"temperature -1\.0: must be 0"),
        ({"seed": 2**64}, "seed 18446744073709551616: must be from 0 to 18446744073709551615"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: must be at least 1"),
    ],
)
def test_settings_that_no_answer_can_be_drawn_with(wrong: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        Sampling(**wrong)


def test_the_lowest_and_highest_temperatures_give_answers(adapter: Path):
    for temperature in (1e-30, 1e5):
        assert generate(adapter, ["hello"], sampling=Sampling(3, temperature, seed=2**64 - 1))


def test_a_prompt_that_is_no_text(adapter: Path):
    """As Python hands on bytes of a command line that are not UTF-8."""
    with pytest.raises(ConfigError, match=r"prompt '\\udcffhi': has bytes that are not UTF-8"):
        generate(adapter, [b"\xffhi".decode(errors="surrogateescape")])


def test_an_answer_ends_at_the_last_of_learned_positions(base: Path, tmp_path: Path):
    shape = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 32}
    learned = shutil.copytree(base, tmp_path / "learned")
    OPTForCausalLM(OPTConfig(vocab_size=300, max_position_embeddings=32, eos_token_id=None, **shape)).save_pretrained(learned)
    adapter = save_adapter(tmp_path / "of-learned", learned, target_modules=["q_proj"])
    model = open_adapter(adapter)
    assert answer(model, ["hello"], Sampling(1000))
    with pytest.raises(ConfigError, match=r"prompt of \d+ tokens: the base has 32 learned positions"):
        answer(model, ["hello " * 40], Sampling(1))


def test_an_answer_beyond_the_positions_of_the_base_is_told(base: Path, tmp_path: Path):
    """A rotary embedding goes on beyond them, and no word of its answer shows it."""
    short = shutil.copytree(base, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32, "eos_token_id": None}))
    (short / "generation_config.json").unlink(missing_ok=True)
    model, notes = open_adapter(save_adapter(tmp_path / "of-short", short, target_modules=["q_proj"])), list[str]()
    prompt = len(_prompt_ids(model, "hello"))
    answer(model, ["hello"], Sampling(32 - prompt), on_note=notes.append)
    assert not notes
    answer(model, ["hello"], Sampling(33 - prompt), on_note=notes.append)
    rule = "the base is made for 32 positions (max_position_embeddings): what it writes beyond them is not to be relied on"
    assert notes == [f"prompt and answer have 33 tokens, and {rule}. Give --max-new-tokens {32 - prompt}"]
    answer(model, ["hello " * 40], Sampling(1), on_note=notes.append)
    assert notes[1].endswith("Shorten the prompt")
