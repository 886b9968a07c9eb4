"""Values for the chat template per job and per row, and loss on the last turn alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from test_build import make, report_of, write
from test_trained_turns import CHATS, read, with_tokens

from tlora.data.encode import ChatSettings, encode, open_encoder
from tlora.data.formats import Chat, Tokens, detect, read_example, read_pair
from tlora.data.rows import Row
from tlora.errors import DataError
from tlora.job import DataConfig, JobSpec

NO_THOUGHT = "<think>\n\n</think>\n\n"
TURNS = CHATS["turns"]


def trained(tokenizer: Any, row: dict[str, Any], **settings: Any) -> list[str]:
    read_row = Row("x.jsonl, row 1", row, 0)
    example = read_example(read_row, detect(read_row))
    encoded = encode(open_encoder(tokenizer, None, False, 10**6, ChatSettings(**settings)), [example], ["x.jsonl, row 1"])[0].sample
    runs, on = list[list[int]](), False
    for token, weight in zip(encoded.input_ids.tolist(), encoded.loss_weights.tolist(), strict=True):
        if weight and not on:
            runs.append([])
        if weight:
            runs[-1].append(token)
        on = bool(weight)
    return [tokenizer.decode(run) for run in runs]


def test_a_thought_that_the_prompt_closes_is_not_trained() -> None:
    """Qwen3's prompt ends in an empty thought with enable_thinking: false; then the model does not write it."""
    tokenizer, row = with_tokens(read("qwen3")), {"messages": CHATS["plain"]}
    assert trained(tokenizer, row) == [NO_THOUGHT + "Answer one.<|im_end|>"]
    assert trained(tokenizer, row, kwargs={"enable_thinking": False}) == ["Answer one.<|im_end|>"]
    assert trained(tokenizer, row | {"chat_template_kwargs": {"enable_thinking": False}}) == ["Answer one.<|im_end|>"]
    own = row | {"chat_template_kwargs": '{"enable_thinking": true}'}
    assert trained(tokenizer, own, kwargs={"enable_thinking": False}) == [NO_THOUGHT + "Answer one.<|im_end|>"], "the row's own wins"


def test_pairs_have_their_rows_values() -> None:
    row = {"prompt": [TURNS[0]], "chosen": [TURNS[1]], "rejected": [TURNS[3]], "chat_template_kwargs": {"a": 1, "b": None}}
    pair = read_pair(Row("row", row, 0))
    assert isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat)
    assert pair.chosen.template_kwargs == pair.rejected.template_kwargs == {"a": 1}


@pytest.mark.parametrize("value", [3, ["enable_thinking"], "no json", {"not a name": 1}])
def test_a_rows_values_are_an_object(value: object) -> None:
    with pytest.raises(DataError, match=r"row 1: column 'chat_template_kwargs' is .*enable_thinking"):
        trained(with_tokens(read("qwen3")), {"messages": TURNS, "chat_template_kwargs": value})


def test_what_is_rendered_is_not_a_users_to_set() -> None:
    with pytest.raises(DataError, match=r"row 1: chat_template_kwargs: 'tools' says what is rendered"):
        trained(with_tokens(read("qwen3")), {"messages": TURNS, "chat_template_kwargs": {"tools": []}})
    with pytest.raises(ValidationError, match="'add_generation_prompt' says what is rendered"):
        DataConfig(path="x", chat_template_kwargs={"add_generation_prompt": True})


def test_the_last_turn_alone() -> None:
    tokenizer = with_tokens(read("llama3"))
    assert trained(tokenizer, {"messages": TURNS}, last_turn=True) == ["Answer three.<|eot_id|>"]
    assert trained(tokenizer, {"messages": TURNS[:-1]}, last_turn=True) == ["Answer two.<|eot_id|>"], "a user's question may follow"
    silenced = [*TURNS[:-1], TURNS[-1] | {"weight": 0}]
    assert trained(tokenizer, {"messages": silenced}, last_turn=True) == []
    assert trained(tokenizer, {"prompt": "a", "completion": "b"}, last_turn=True) == ["b</s>"]


def test_token_ids_have_no_turns() -> None:
    encoder = open_encoder(with_tokens(read("llama3")), None, False, 10**6, ChatSettings(last_turn=True))
    with pytest.raises(DataError, match=r"row: train_on: last needs turns.*set train_on: completions"):
        encode(encoder, [Tokens([5, 6], [1.0, 1.0])], ["row"])


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_objectives_that_learn_from_answers(objective: str) -> None:
    with pytest.raises(ValidationError, match="train_on: last has no meaning"):
        JobSpec(name="a", objective=objective, data=DataConfig(path="x", train_on="last"))


def test_sets_differ_by_them(tmp_path: Path) -> None:
    path, tokenizer = write(tmp_path / "x.jsonl", [{"messages": TURNS}]), with_tokens(read("qwen3"))
    settings = [ChatSettings(), ChatSettings({"enable_thinking": False}), ChatSettings(last_turn=True)]
    sets = [make(path, tokenizer, chats=chats) for chats in settings]
    assert len(set(sets)) == 3 and not report_of(sets[1]).unused_columns
