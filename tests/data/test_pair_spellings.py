"""Pairs as other trainers and OpenAI write them; pairs and labels that teach nothing are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from test_build import source, write

from tlora.data.build import SetSpec, build, hash_file
from tlora.data.columns import format_of, unused_columns
from tlora.data.dataset import Dataset
from tlora.data.encode import open_encoder
from tlora.data.formats import Chat, Pair, Text, read_pair
from tlora.data.report import DataReport
from tlora.data.rows import Row
from tlora.errors import DataError

SYSTEM = {"role": "system", "content": "s"}
USER, GOOD, BAD = cast(
    "list[dict[str, Any]]", [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))]
)
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def expected(*asked: dict[str, Any], tools: Any = None) -> Pair:
    weights = [0.0] * len(asked) + [1.0]
    return Pair(Chat([*asked, GOOD], weights, tools), Chat([*asked, BAD], weights, tools))


def row_of(value: dict[str, Any]) -> Row:
    return Row("x.jsonl, line 3", value, 0)


SPELLINGS: dict[str, tuple[dict[str, Any], Pair]] = {
    "openai": (
        {
            "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        expected(USER),
    ),
    "openai with tools": (
        {"input": {"messages": [SYSTEM, USER], "tools": TOOLS}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        expected(SYSTEM, USER, tools=TOOLS),
    ),
    "openai in a string": (
        {"input": '{"messages": [{"role": "user", "content": "q"}]}', "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        expected(USER),
    ),
    "swift": ({"messages": [USER, GOOD], "rejected_response": "bad"}, expected(USER)),
    "swift with rounds": ({"messages": [USER, BAD, USER, GOOD], "rejected_response": "bad"}, expected(USER, BAD, USER)),
    "swift with messages": ({"messages": [SYSTEM, USER, GOOD], "rejected_response": [BAD]}, expected(SYSTEM, USER)),
    "swift with a chat": ({"messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, expected(USER)),
    "swift queries": ({"system": "s", "query": "q", "response": "good", "rejected_response": "bad"}, expected(SYSTEM, USER)),
    "swift of sharegpt": ({"conversations": [HUMAN, GPT], "rejected_response": "bad", "tools": TOOLS}, expected(USER, tools=TOOLS)),
    "factory alpaca": ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, expected(USER)),
    "factory alpaca with all": (
        {"instruction": "q", "system": "s", "history": [["q", "bad"]], "chosen": "good", "rejected": "bad"},
        expected(SYSTEM, USER, BAD, USER),
    ),
    "factory sharegpt": ({"conversations": [HUMAN], "system": "s", "chosen": GPT, "rejected": BAD}, expected(SYSTEM, USER)),
    "factory v1": ({"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, expected(USER)),
    "axolotl default": ({"messages": [USER], "chosen": GOOD, "rejected": BAD}, expected(USER)),
    "axolotl intel": ({"system": "s", "question": "q", "chosen": "good", "rejected": "bad"}, expected(SYSTEM, USER)),
    "axolotl argilla": ({"instruction": "q", "chosen_response": "good", "rejected_response": "bad"}, expected(USER)),
    "trl with a system column": ({"prompt": [USER], "system": "s", "chosen": [USER, GOOD], "rejected": [BAD]}, expected(SYSTEM, USER)),
    "trl with the wanted chat again": (
        {"prompt": "q", "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD], "system": "s"},
        expected(SYSTEM, USER),
    ),
    "texts": ({"prompt": "q", "completion": "good", "rejected_response": "bad"}, Pair(Text("q", "good"), Text("q", "bad"))),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_pair_in_the_spellings_of_others(name: str) -> None:
    value, pair = SPELLINGS[name]
    row = row_of(value | {"note": "x"})
    assert format_of(row, "auto", "pairs") == "preference" and read_pair(row) == pair
    unread = ["messages", "note"] if name == "trl with the wanted chat again" else ["note"]
    assert unused_columns(row, "preference", "pairs") == unread


def test_an_empty_answer_is_not_said_to_have_no_column() -> None:
    row = row_of({"prompt": "q", "chosen": "a", "rejected": None})
    with pytest.raises(DataError, match="^x.jsonl, line 3: column 'rejected' is None .*expected an answer, as column 'chosen' has one"):
        format_of(row, "auto", "pairs")


@pytest.mark.parametrize("name", SPELLINGS)
def test_none_of_them_is_imitated(name: str) -> None:
    with pytest.raises(DataError, match="line 3: columns? '.*preference data.* objective: dpo"):
        format_of(row_of(SPELLINGS[name][0]), "auto")


def test_answers_of_earlier_rounds_are_the_prompts() -> None:
    tool = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "r"},
    ]
    pair = read_pair(row_of({"messages": [USER, BAD, USER, *tool, GOOD], "rejected_response": [*tool, BAD]}))
    assert isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat)
    assert pair.chosen.weights == pair.rejected.weights == [0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"input": [USER], "preferred_output": [GOOD], "non_preferred_output": [BAD]}, "column 'input' is .*a mapping with the prompt's"),
        ({"input": {"tools": []}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, "column 'input' is .*a mapping"),
        ({"input": {"messages": [5]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, r"input.messages\[0\] is 5"),
        ({"input": {"messages": [USER], "tools": 5}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, "input.tools is 5"),
        ({"input": {"messages": [USER]}, "preferred_output": [USER], "non_preferred_output": [BAD]}, "column 'preferred_output' is"),
        ({"messages": [USER], "rejected_response": "bad"}, "column 'rejected_response' is 'bad' .*ends in the wanted answer"),
        ({"messages": [USER, GOOD], "rejected_messages": [BAD]}, "column 'rejected_messages' is .*the same prompt"),
        ({"messages": [USER, GOOD], "rejected_messages": [USER, USER]}, "column 'rejected_messages' is .*an answer of the assistant"),
        ({"messages": [USER, GOOD | {"loss": False}], "rejected_response": "bad"}, "the row's own answer is .*an answer of the assistant"),
        ({"input_ids": [1, 2], "rejected_response": "bad"}, "column 'rejected_response' is 'bad' .*a chat next to it"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "column 'rejected' is '' .*an answer, as column 'chosen' has one"),
        ({"prompt": "q", "preferred_output": [], "non_preferred_output": [BAD]}, "column 'preferred_output' is .*an answer, as column"),
        ({"prompt": "q", "system": "s", "chosen": "a", "rejected": "b"}, "the system prompt is 's' .*write it into 'prompt'"),
    ],
)
def test_what_is_no_pair(value: dict[str, Any], pattern: str) -> None:
    with pytest.raises(DataError, match=f"^x.jsonl, line 3: .*{pattern}"):
        read_pair(row_of(value))


def warnings(path: Path, rows: Any, tokenizer: Any, max_length: int = 64) -> list[str]:
    order = SetSpec((source(path),), "auto", max_length, path.parent / "cache", rows)
    made, _ = build(order, open_encoder(tokenizer, None, False, 10**6), lambda file: hash_file(file, lambda *_: None), lambda *_: None)
    return DataReport.from_meta(Dataset(made).meta, ["x"]).warnings()


def test_equal_pairs_are_said(tmp_path: Path, tokenizers: Any) -> None:
    pairs = [
        {"prompt": "one two", "chosen": " three", "rejected": " four"},
        {"prompt": "one", "chosen": " two", "rejected": " two"},
        {"prompt": "a", "chosen": " b" * 20 + " c", "rejected": " b" * 20 + " d"},
    ]
    said = "of 3 pairs have equal answers"
    path = write(tmp_path / "x.jsonl", pairs)
    assert warnings(path, "pairs", tokenizers()) == [f"1 {said}: they cannot teach which is better; remove them (x)"]
    assert warnings(path, "pairs", tokenizers(), 16)[1:] == [
        f"2 {said}, 1 of them because max_length cuts what differs: they cannot teach which is better; raise max_length or remove them (x)"
    ]
    assert warnings(write(tmp_path / "y.jsonl", pairs[:1]), "pairs", tokenizers()) == []
    chats = write(tmp_path / "z.jsonl", [{"chosen": [USER, GOOD], "rejected": [USER, GOOD]}])
    assert warnings(chats, "pairs", tokenizers()) == ["1 of 1 pairs have equal answers: they cannot teach which is better; remove them (x)"]


def test_labels_of_one_kind_are_said(tmp_path: Path, tokenizers: Any) -> None:
    for labels, said in (
        ([True, True], ["all 2 answers are labelled wanted: kto learns from both kinds; add unwanted answers, or use objective: sft (x)"]),
        ([False, False], ["all 2 answers are labelled unwanted: kto learns from both kinds; add wanted answers (x)"]),
        ([True, False], []),
    ):
        rows = [{"query": "q", "response": f"answer {i}", "label": label} for i, label in enumerate(labels)]
        assert warnings(write(tmp_path / "x.jsonl", rows), "labelled", tokenizers()) == said


def test_a_message_of_a_tree_is_no_text() -> None:
    row = row_of({"text": "Hi", "role": "prompter", "message_id": "1", "parent_id": None})
    with pytest.raises(DataError, match="line 3: one message of a tree .*'messages', or set format: text"):
        format_of(row, "auto")
    assert format_of(row, "text") == "text"
