"""The six formats, what each row becomes, and what is said of a row that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tlora.data.formats import Chat, Text, Tokens, detect, read_example
from tlora.data.rows import Row
from tlora.errors import DataError

ASKED = {"role": "user", "content": "a"}
ANSWERED = {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def read(value: dict[str, Any], data_format: str | None = None) -> Any:
    row = Row("x.jsonl, line 3", value, 0)
    return read_example(row, data_format or detect(row))  # type: ignore[arg-type]


def refused(value: dict[str, Any], pattern: str, data_format: str | None = None) -> None:
    with pytest.raises(DataError, match=pattern) as caught:
        read(value, data_format)
    assert str(caught.value).startswith("x.jsonl, line 3: ")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("messages tools", "chat"),
        ("conversations system", "sharegpt"),
        ("prompt completion", "prompt_completion"),
        ("instruction input output text", "alpaca"),
        ("text meta", "text"),
        ("input_ids labels attention_mask", "tokenized"),
        ("prompt messages prompt_id", "chat"),
    ],
)
def test_detection_by_columns(columns: str, expected: str) -> None:
    assert detect(Row("x", dict.fromkeys(columns.split(), ""), 0)) == expected


def test_unknown_columns_list_what_is_known() -> None:
    refused(
        {"question": "a", "answer": "b"},
        "no data format has the columns question, answer; rename .*prompt_completion: prompt \\+ completion",
    )
    refused({}, "the row has no columns; write those of one format")
    refused(
        {"version": 1, "data": [{"prompt": "a", "completion": "b"}]}, "'data' holds a list of objects: if those are the rows, the file must"
    )


def test_a_later_row_without_the_columns_is_told() -> None:
    refused({"text": "a"}, r"column 'completion' is missing|column 'prompt' is missing \(found: text\)", "prompt_completion")


# --- chats ---


def test_chat() -> None:
    assert read({"messages": [ASKED, ANSWERED]}) == Chat([ASKED, ANSWERED], [0, 1])


def test_parts() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "text", "value": "b"},
        {"type": "reasoning", "value": "hm"},
        {"type": "tool_call", "value": json.dumps(CALL["function"])},
    ]
    found = read({"messages": [ASKED, {"role": "assistant", "content": content}]})
    assert found.messages[1] == {"role": "assistant", "content": "ab", "reasoning_content": "hm", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("loss_weight", 0.5, 0.5), ("weight", 0, 0.0), ("train", False, 0.0), ("train", True, 1.0), ("weight", None, 1.0)],
)
def test_message_weights(field: str, value: object, expected: float) -> None:
    found = read({"messages": [ASKED, ANSWERED | {field: value}]})
    assert found.weights == [0, expected] and field not in found.messages[1]


def test_openai_tool_call_and_absent_fields() -> None:
    """Arguments as JSON in a string, content absent, and null for a message's own keys; null in arguments and schemas is a value."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": null}'}}
    tools = [{"name": "f", "parameters": {"properties": {"x": {"type": "int", "default": None}}}}]
    found = read({"messages": [ASKED | {"tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools})
    call["function"] = {"name": "f", "arguments": {"x": 1, "y": None}}
    assert found.messages == [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert found.tools == [{"type": "function", "function": tools[0]}]


@pytest.mark.parametrize("as_text", [False, True])
def test_sharegpt(as_text: bool) -> None:
    turns = [
        ("system", "s"),
        ("human", "a"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "o"),
        ("gpt", "b"),
        ("function_call", "no call"),
    ]
    value: Any = [{"from": role, "value": text} for role, text in turns]
    found = read({"conversations": json.dumps(value) if as_text else value, "tools": '[{"name": "f"}]'})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert found.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]} and found.messages[5]["content"] == "no call"
    assert found.weights == [0, 0, 1, 0, 1, 1]
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("tools", [None, "", [], "[]", " "])
def test_no_tools(tools: object) -> None:
    assert read({"messages": [ASKED], "tools": tools}).tools is None


def test_alpaca() -> None:
    row = {"instruction": "i", "input": "n", "output": "o", "system": "s", "history": [["q", "r"]]}
    found = read(row)
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "r"),
        ("user", "i\nn"),
        ("assistant", "o"),
    ]
    assert found.weights == [0, 0, 1, 0, 1]  # the history's answers too, as LLaMA-Factory trains them
    assert read({"instruction": "i", "input": None, "output": "o"}).messages[0]["content"] == "i"


def test_prompt_and_completion() -> None:
    assert read({"prompt": "p", "completion": "c"}) == Text("p", "c")
    assert read({"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]}) == Chat([ASKED, ANSWERED, ASKED, ANSWERED], [0, 0, 0, 1])
    assert read({"text": "t"}) == Text("", "t")


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        ({"text": 42}, r"column 'text' is 42 \(int\); expected text \(a string\)"),
        ({"text": None}, r"column 'text' is None \(NoneType\); expected text"),
        ({"instruction": "i", "output": 1.5}, r"column 'output' is 1.5 \(float\); expected text"),
        ({"instruction": "i", "output": "o", "input": 3}, r"column 'input' is 3"),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, r"history\[0\] is \['q'\] \(list\); expected a pair"),
        ({"instruction": "i", "output": "o", "history": 5}, "column 'history' is 5 .*expected a list"),
        ({"prompt": 1, "completion": "c"}, "column 'prompt' is 1"),
        ({"prompt": [ASKED], "completion": "c"}, "column 'completion' is 'c' .*expected a list of messages like the prompt"),
        ({"prompt": "p", "completion": [ANSWERED]}, "column 'completion' is .*expected a string like the prompt"),
        ({"messages": "hi"}, r"column 'messages' is 'hi' \(str\); expected a list"),
        ({"messages": []}, "column 'messages' is .*expected at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] is 'hi' \(str\); expected a message like"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role is None .*expected a role"),
        ({"messages": [{"role": 3, "content": "a"}]}, r"messages\[0\].role is 3 "),
        ({"messages": [ASKED, {"role": "assistant"}]}, r"messages\[1\].content is None .*expected text, or a list of parts"),
        ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content is 7 \(int\)"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "value": "x"}]}]},
            r"messages\[0\].content\[0\] is .*expected a part",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\].content\[0\] is 'x'"),
        ({"messages": [ANSWERED | {"loss_weight": -1}]}, r"messages\[0\].loss_weight is -1 .*at least 0"),
        ({"messages": [ANSWERED | {"weight": "1"}]}, r"messages\[0\].weight is '1' "),
        ({"messages": [ANSWERED | {"weight": float("nan")}]}, r"messages\[0\].weight is nan "),
        ({"messages": [ASKED], "tools": "no json"}, "column 'tools' is 'no json' .*expected a list of tools"),
        ({"messages": [ASKED], "tools": ["x"]}, r"column 'tools' is \['x'\]"),
        ({"conversations": [{"from": "human", "value": 3}]}, r"conversations\[0\].content is 3"),
    ],
)
def test_wrong_values_name_the_column_the_value_and_what_was_expected(row: dict[str, Any], pattern: str) -> None:
    refused(row, pattern)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(DataError) as caught:
        read({"text": ["word"] * 10_000})
    assert len(str(caught.value)) < 200


# --- token ids ---


def test_tokens() -> None:
    assert read({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}) == Tokens([5, 6, 7], [0, 1, 1])
    assert read({"input_ids": [5, 6], "labels": None}) == Tokens([5, 6], [1, 1])
    assert read({"input_ids": "[5, 6]"}) == Tokens([5, 6], [1, 1])
    assert read({"input_ids": [0, 5, 6, 0], "labels": [-100, 5, 6, -100], "attention_mask": [0, 1, 1, 0]}) == Tokens([5, 6], [1, 1])


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        ({"input_ids": []}, "column 'input_ids' is .*at least one token id"),
        ({"input_ids": "abc"}, "column 'input_ids' is 'abc' .*expected a list"),
        ({"input_ids": [1, 2.0]}, r"input_ids\[1\] is 2.0 \(float\); expected an integer"),
        ({"input_ids": [1, True]}, r"input_ids\[1\] is True \(bool\)"),
        ({"input_ids": [1, "2"]}, r"input_ids\[1\] is '2' \(str\)"),
        ({"input_ids": [1, -1]}, r"input_ids\[1\] is -1 .*at least 0"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values where input_ids has 2; expected one a token"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 values where input_ids has 2"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, r"labels\[1\] is 3 .*expected -100 \(no loss\) or input_ids\[1\] = 2"),
    ],
)
def test_wrong_tokens(row: dict[str, Any], pattern: str) -> None:
    refused(row, pattern)
