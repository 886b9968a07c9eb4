"""What ends an assistant's turn in generation is trained in each of its turns, or `check` and `train` say that it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import make_tokenizer
from test_build import make, report_of, write
from test_trained_turns import CHATS, bot, call, ours, read, result, texts, user, with_tokens
from transformers import AutoTokenizer

from tlora.data.encode import ChatSettings
from tlora.data.tokenizer import read_stop_tokens

TURNS = CHATS["turns"]
PHI3 = (
    "{# tokens: <|user|> <|assistant|> <|end|> #}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
OPEN = (  # as GLM 4: no mark closes a turn
    "{# tokens: <|user|> <|assistant|> <|observation|> #}"
    "{% for m in messages %}{{ '<|' + ('observation' if m['role'] == 'tool' else m['role']) + '|>\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '\n<tool_call>' + c['function']['name'] }}"
    "{{ c['function']['arguments'] | tojson + '</tool_call>' }}"
    "{% endfor %}{% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
BARE = "{% for m in messages %}{{ ('Q: ' if m['role'] == 'user' else 'A: ') + m['content'] + '\n' }}{% endfor %}"


def test_every_turn_ends_in_its_mark_and_not_only_the_last() -> None:
    found = ours(PHI3, TURNS, stops=frozenset({"<|end|>"}))
    assert texts(found) == ["Answer one.<|end|>", "Answer two.<|end|>", "Answer three.<|end|>\n</s>"] and found.unstopped is None


@pytest.mark.parametrize("stops", [frozenset({"<|user|>", "<|observation|>"}), frozenset()])
def test_a_turn_that_the_next_header_ends(stops: frozenset[str]) -> None:
    """The last turn too, behind which the template writes nothing. Without a word of the base's, it is trained and said."""
    source = OPEN.replace("{{ tools | tojson if tools }}", "")
    found = ours(source, TURNS, stops=stops)
    assert texts(found) == ["Answer one.<|user|>", "Answer two.<|user|>", "Answer three.<|user|>"]
    assert found.text.endswith("Answer three.<|user|>") and found.unstopped == (None if stops else "<|user|>")


def test_a_call_ends_in_the_header_of_its_result() -> None:
    source = "{{ tools | tojson if tools }}" + OPEN.replace("{{ tools | tojson if tools }}", "")
    stops = frozenset({"<|user|>", "<|observation|>"})
    rows = [user("Lamp on"), bot("", call("attic")), result("it is on"), bot("", call("hall"))]
    found = ours(source, rows, stops=stops)
    assert len(found.spans) == 2 and all(text.endswith("}</tool_call><|observation|>") for text in texts(found)) and found.unstopped is None


def test_glm_4_as_trl_trains_it() -> None:
    found = ours(read("glm4moe"), CHATS["call"], stops=frozenset({"<|user|>", "<|observation|>", "<|endoftext|>"}))
    first, last = texts(found)
    assert first.endswith("</tool_call><|observation|>") and last.endswith("Done.<|user|>") and found.unstopped is None


def test_the_base_says_what_ends_generation(tmp_path: Path) -> None:
    """generation_config.json, else config.json, and always the tokenizer's EOS; one id or several."""
    tokenizer = with_tokens(PHI3)
    eos, end, other = (tokenizer.convert_tokens_to_ids(token) for token in ("</s>", "<|end|>", "<|im_end|>"))
    assert read_stop_tokens(tokenizer, str(tmp_path)) == {"</s>"}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
    assert read_stop_tokens(tokenizer, str(tmp_path)) == {"</s>", "<|end|>"}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, other, 10**9]}), encoding="utf-8")
    assert read_stop_tokens(tokenizer, str(tmp_path)) == {"</s>", "<|im_end|>"}
    assert read_stop_tokens(tokenizer, "some/model-that-is-nowhere") == {"</s>"}


def warnings(template: str | None, tmp_path: Path, tokenizers: Any, eos: str | None = "</s>") -> list[str]:
    report = report_of(make(write(tmp_path / "x.jsonl", [{"messages": TURNS}] * 3), tokenizers(template, eos=eos)))
    report.files = ["x.jsonl"]
    return report.warnings()


def test_nothing_is_said_where_turns_end_in_the_end_token(tmp_path: Path, tokenizers: Any) -> None:
    ended = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    assert warnings(ended, tmp_path, tokenizers) == warnings(None, tmp_path, tokenizers) == []


def test_a_template_without_any_stop_token(tmp_path: Path, tokenizers: Any) -> None:
    said = [
        "in 3 of 3 rows the chat template ends an assistant's turn with no stop token (the base's: '</s>'), so the model does not learn to "
        "stop. Give the job a chat_template that writes eos_token after each answer (x.jsonl)"
    ]
    assert warnings(BARE, tmp_path, tokenizers) == said
    remedied = BARE.replace("m['content'] +", "m['content'] + (eos_token if m['role'] == 'assistant' else '') +")
    assert warnings(remedied, tmp_path, tokenizers) == []


def test_a_tokenizer_without_an_end_token(tmp_path: Path, tokenizers: Any) -> None:
    (said,) = warnings(None, tmp_path, tokenizers, eos=None)
    assert "no stop token (the base's: none)" in said


@pytest.mark.parametrize("row", [{"prompt": "Hello ", "completion": "world"}, {"text": "Hello world"}])
def test_plain_text_of_a_tokenizer_without_an_end_token(tmp_path: Path, row: dict[str, str], tokenizers: Any) -> None:
    """Said once for all rows; with the remedy, `eos_token` in tokenizer_config.json, the end is trained and nothing is said."""
    file, saved = write(tmp_path / "x.jsonl", [row] * 3), tmp_path / "tokenizer"
    make_tokenizer(None, eos=None).save_pretrained(saved)
    bare = AutoTokenizer.from_pretrained(saved)
    report = report_of(make(file, bare))
    report.files = [str(file)]
    said = (
        "3 of 3 rows of plain text get no end token, as the base's tokenizer has none, so the model does not learn to stop. "
        f"Set eos_token in the base's tokenizer_config.json ({file})"
    )
    assert bare.eos_token is None and report.warnings() == [said]
    config = saved / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"eos_token": "</s>"}), encoding="utf-8")
    ended = report_of(make(file, AutoTokenizer.from_pretrained(saved)))
    ended.files = [str(file)]
    assert ended.warnings() == [] and ended.trained_tokens == report.trained_tokens + 3


def test_an_end_of_turn_at_which_the_base_does_not_stop(tmp_path: Path, tokenizers: Any) -> None:
    """As ChatML over a base whose end token is another: it is trained, but generation runs on."""
    chatml = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    (said,) = warnings(chatml, tmp_path, tokenizers)
    assert "'<|im_end|>', which is trained but is no stop token of the base ('</s>')" in said
    assert "add it to eos_token_id in the base's generation_config.json" in said
    report = report_of(make(tmp_path / "x.jsonl", tokenizers(chatml), chats=ChatSettings(stops=frozenset({"<|im_end|>"}))))
    assert not report.unstopped
