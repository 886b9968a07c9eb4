"""Messages in the spellings of other trainers and APIs: what is trained, who speaks, and what tools are called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML, TEMPLATES
from test_build import make, report_of, write

from tlora.data.chat import open_template
from tlora.data.encode import encode, open_encoder
from tlora.data.formats import Chat, detect, read_example
from tlora.data.rows import Row, read_rows
from tlora.errors import DataError

USER = {"role": "user", "content": "Lamp on in the attic"}
ARGUMENTS = {"room": "attic", "until": None}
CALL = {"type": "function", "function": {"name": "set_lamp", "arguments": ARGUMENTS}}
TOOLS = [{"type": "function", "function": {"name": "set_lamp", "description": "Switches a lamp", "parameters": {"type": "object"}}}]
BY_OBJECT = (  # as Qwen 2.5 and Llama 3.1 write calls
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<call>' + c['function']['name'] + ' ' + c['function']['arguments'] | tojson + '</call>' }}{% endfor %}{{ '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
BY_ITEMS = BY_OBJECT.replace(  # as GLM 4.5 and Qwen 3.5 do
    "+ c['function']['arguments'] | tojson +",
    "}}{% for k, v in c['function']['arguments'].items() %}{{ k + '=' + v | tojson + ';' }}{% endfor %}{{",
)
BY_TEXT = BY_OBJECT.replace("c['function']['arguments'] | tojson", "c['function']['arguments']")  # fails for an object
BY_WORDS = BY_OBJECT.replace("c['function']['arguments'] | tojson", "(c['function']['arguments'] | string)")  # Python's spelling of it


def read(messages: list[Any], **columns: Any) -> Chat:
    row = Row("x.jsonl, line 3", {"messages": messages, **columns}, 0)
    found = read_example(row, detect(row))
    assert isinstance(found, Chat)
    return found


def refused(messages: list[Any], pattern: str, **columns: Any) -> None:
    with pytest.raises(DataError, match=rf"^x.jsonl, line 3: .*{pattern}"):
        read(messages, **columns)


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


# --- tool calls ---


@pytest.mark.parametrize(
    "more",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"type": "function", "function": {"name": "set_lamp", "arguments": json.dumps(ARGUMENTS)}}]},
        {"tool_calls": [{"name": "set_lamp", "arguments": ARGUMENTS}]},
        {"tool_calls": [{"name": "set_lamp", "args": ARGUMENTS}]},
        {"tool_calls": [{"type": "function", "function": {"name": "set_lamp", "parameters": ARGUMENTS}}]},
        {"tool_calls": CALL},
        {"tool_calls": json.dumps([CALL])},
        {"function_call": {"name": "set_lamp", "arguments": json.dumps(ARGUMENTS)}},
        {"function_call": json.dumps({"name": "set_lamp", "arguments": ARGUMENTS})},
        {"function_call": {"name": "set_lamp", "arguments": ARGUMENTS}, "tool_calls": []},
        {"function_call": {"name": "set_lamp", "arguments": ARGUMENTS}, "tool_calls": None},
    ],
)
def test_one_call_in_all_its_spellings(more: dict[str, Any]) -> None:
    """`null` in the arguments stays, and the keys keep their order."""
    found = read([USER, assistant(None, **more)])
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]} and found.weights == [0, 1]
    assert json.dumps(found.messages[1]["tool_calls"]) == json.dumps([CALL])


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
@pytest.mark.parametrize(
    ("content", "before"),
    [
        (json.dumps(CALL["function"]), ""),
        (CALL["function"], ""),
        ("<think>\nThe attic has one.\n</think>\n" + json.dumps(CALL["function"]), "<think>\nThe attic has one.\n</think>"),
        ("I use {this}: " + json.dumps([CALL["function"]]) + "\n", "I use {this}:"),
        ("On it.\n<tool_call>\n" + json.dumps(CALL["function"]) + "\n</tool_call>", "On it."),
    ],
)
def test_a_call_as_a_turn(role: str, content: object, before: str) -> None:
    found = read([USER, {"role": role, "content": content}, {"role": "tool_response", "content": "on"}, assistant("Done.")])
    assert found.messages[1] == {"role": "assistant", "content": before, "tool_calls": [CALL]}
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.weights == [0, 1, 0, 1] and found.notes == ()


def test_several_calls_in_one_turn() -> None:
    one, two = (json.dumps({"name": "f", "arguments": {"x": x}}) for x in (1, 2))
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"x": x}}} for x in (1, 2)]
    for content in (f"[{one}, {two}]", f"{one}\n{two}", f"<tool_call>{one}</tool_call>\n<tool_call>{two}</tool_call>"):
        assert read([USER, {"role": "function_call", "content": content}]).messages[1]["tool_calls"] == expected
    turns = [assistant("<think>hm</think>"), {"role": "tool_call", "content": one}, {"role": "tool_call", "content": two}]
    found = read([USER, *turns, {"role": "tool_response", "content": "a"}, {"role": "tool_response", "content": "b"}])
    assert found.messages[1] == {"role": "assistant", "content": "<think>hm</think>", "tool_calls": expected}
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "tool"] and found.weights == [0, 1, 0, 0]
    refused([USER, turns[0], turns[1] | {"loss": False}], r"loss weight of messages\[2\] is 0.0 .*expected 1, as of the message before")
    assert read([USER, turns[1] | {"loss": False}, turns[2] | {"loss": False}]).weights == [0, 0]


def test_a_call_turn_without_a_call_is_text_and_said(tmp_path: Path, tokenizers: Any) -> None:
    rows = [{"messages": [USER, {"role": "function_call", "content": f"set_lamp{'!' * i}"}]} for i in range(2)]
    report = report_of(make(write(tmp_path / "x.jsonl", rows), tokenizers(CHATML)))
    report.files = ["x.jsonl"]
    assert report.warnings()[0] == (
        "messages of role function_call without a call in JSON are read as text: 2 of 2 rows, such as 'set_lamp' (x.jsonl)"
    )
    assert "".join(text for text, weight in report.rendered if weight) == "set_lamp<|im_end|>"


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"tool_calls": 5}, r"messages\[1\].tool_calls is 5 \(int\); expected a list of calls like \{'type': 'function'"),
        ({"tool_calls": "set_lamp"}, r"messages\[1\].tool_calls is 'set_lamp' \(str\); expected a list of calls"),
        ({"tool_calls": [5]}, r"messages\[1\].tool_calls\[0\] is 5 \(int\); expected a call like"),
        ({"tool_calls": [{"type": "function"}]}, r"messages\[1\].tool_calls\[0\] is .*expected a call like"),
        ({"tool_calls": [{"function": {"name": None, "arguments": {}}}]}, r"messages\[1\].tool_calls\[0\] is .*expected a call like"),
        ({"tool_calls": '[{"name": "f", "name": "g"}]'}, r"messages\[1\].tool_calls: the key 'name' stands twice in one object; keep one"),
        ({"function_call": "auto"}, r"messages\[1\].function_call is None .*expected a call like"),
        ({"function_call": {"name": "f"}, "tool_calls": [CALL]}, r"messages\[1\].function_call is .*write all calls into tool_calls"),
    ],
)
def test_what_is_no_call(more: dict[str, Any], pattern: str) -> None:
    refused([USER, assistant("a", **more)], pattern)


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=1)])
@pytest.mark.parametrize(("template", "written"), [
    (BY_OBJECT, '{"room": "attic", "until": null}'),
    (BY_ITEMS, 'room="attic";until=null;'),
    (BY_TEXT, '{"room": "attic", "until": null}'),
    (BY_WORDS, '{"room": "attic", "until": null}'),
])  # fmt: skip
def test_a_template_gets_arguments_as_it_wants_them(arguments: object, template: str, written: str, tokenizers: Any) -> None:
    called = assistant(None, tool_calls=[{"type": "function", "function": {"name": "set_lamp", "arguments": arguments}}])
    chat = read([USER, called, {"role": "tool", "content": "it is on"}, assistant("Done.")], tools=TOOLS)
    opened = open_template(tokenizers(None), template)
    assert opened.knows_tools and opened.text_arguments == (template in (BY_TEXT, BY_WORDS))
    encoder = open_encoder(tokenizers(None), template, False, 1000)
    [encoded] = encode(encoder, [chat], ["row"])
    text = tokenizers(None).decode(encoded.sample.input_ids)
    assert f"<call>set_lamp {written}</call>" in text
    trained = tokenizers(None).decode(encoded.sample.input_ids[encoded.sample.loss_weights > 0])
    assert written in trained and "it is on" not in trained


def test_arguments_that_are_no_object_are_named(tmp_path: Path, tokenizers: Any) -> None:
    called = assistant(None, tool_calls=[{"function": {"name": "set_lamp", "arguments": "room=attic"}}])
    path = write(tmp_path / "x.jsonl", [{"messages": [USER, called]}])
    report = report_of(make(path, tokenizers(None), template=BY_OBJECT))
    report.files = ["x.jsonl"]
    said = "arguments of tool calls that are no JSON object are left as text: 1 of 1 row, such as 'room=attic' (x.jsonl)"
    assert report.warnings()[0] == said
    with pytest.raises(DataError, match=r"x.jsonl, line 1: the arguments of a tool call are 'room=attic', which is no JSON object"):
        make(path, tokenizers(None), template=BY_ITEMS)
    for empty in ("", " ", None):
        assert read([USER, assistant(None, tool_calls=[{"function": {"name": "f", "arguments": empty}}])]).messages[1]["tool_calls"] == [
            {"function": {"name": "f", "arguments": {}}}
        ]


def test_null_in_parquet_is_an_absent_key(tmp_path: Path) -> None:
    """Arrow writes null for a key that a record does not have, so that null and absent cannot be told apart; JSON in a string can."""
    calls: list[dict[str, Any]] = [{"name": "f", "arguments": {"x": 1, "y": None}}, {"name": "g", "arguments": {"z": 2}}]
    rows = [{"messages": [USER, assistant(None, tool_calls=[{"function": call}])]} for call in calls]
    as_text = [{"function": call | {"arguments": json.dumps(call["arguments"])}} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist([{"messages": [assistant("a", tool_calls=[call])]} for call in as_text]), tmp_path / "text.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(name: str) -> list[Any]:
        found = [read_example(row, "chat") for row in read_rows(tmp_path / name)]
        return [chat.messages[-1]["tool_calls"][0]["function"]["arguments"] for chat in found]  # type: ignore[union-attr, index]

    assert arguments("x.parquet") == [{"x": 1}, {"z": 2}]
    assert arguments("x.jsonl") == arguments("text.parquet") == [{"x": 1, "y": None}, {"z": 2}]


# --- roles ---


@pytest.mark.parametrize(
    ("spelling", "role"),
    [
        *(
            ("human", "user"),
            ("prompter", "user"),
            ("User", "user"),
            ("gpt", "assistant"),
            ("bot", "assistant"),
            ("ASSISTANT", "assistant"),
        ),
        *(("developer", "system"), ("observation", "tool"), ("tool_response", "tool"), ("function", "tool"), ("tool", "tool")),
    ],
)
def test_roles_in_other_spellings(spelling: str, role: str) -> None:
    found = read([{"from": spelling, "value": "a"}, {"role": spelling, "text": "b"}])
    assert [(message["role"], message["content"]) for message in found.messages] == [(role, "a"), (role, "b")]
    assert found.weights == [float(role == "assistant")] * 2


@pytest.mark.parametrize("template", [*TEMPLATES, None])
def test_a_role_that_nothing_knows_is_refused(template: str | None, tmp_path: Path, tokenizers: Any) -> None:
    source = TEMPLATES[template] if template else None
    path = write(tmp_path / "x.jsonl", [{"messages": [USER, {"role": "asistant", "content": "a"}, assistant("b")]}])
    with pytest.raises(
        DataError, match=r"x.jsonl, line 1: messages\[1\] has the role 'asistant', which is none of user, .*rename the role"
    ):
        make(path, tokenizers(source), template=source)


def test_a_role_that_the_template_names_is_written(tmp_path: Path, tokenizers: Any) -> None:
    template = "{#- also: 'critic' -#}" + CHATML
    path = write(tmp_path / "x.jsonl", [{"messages": [USER, {"role": "critic", "content": "a"}, assistant("b")]}])
    report = report_of(make(path, tokenizers(None), template=template))
    assert "<|im_start|>critic\na<|im_end|>" in "".join(text for text, _ in report.rendered)


# --- what is trained ---


@pytest.mark.parametrize("key", ["loss", "training", "trainable", "loss_mask", "train", "weight", "loss_weight", "loss_scale"])
@pytest.mark.parametrize("off", [False, 0, 0.0])
def test_a_turn_that_is_switched_off_is_not_trained(key: str, off: object, tokenizers: Any) -> None:
    chat = read([USER, assistant("WRONG oak", **{key: off}), USER, assistant("right oak"), USER, assistant("also", **{key: True})])
    assert chat.weights == [0, 0, 0, 1, 0, 1] and key not in chat.messages[1]
    [encoded] = encode(open_encoder(tokenizers(CHATML), None, False, 1000), [chat], ["row"])
    trained = tokenizers(CHATML).decode(encoded.sample.input_ids[np.flatnonzero(encoded.sample.loss_weights)])
    assert trained == "right oak<|im_end|>also<|im_end|>"
    called = read([USER, assistant(None, tool_calls=[CALL], **{key: off}), USER, assistant("Done.")])
    assert called.weights == [0, 0, 0, 1]


def test_what_a_message_says_of_its_loss_multiplies() -> None:
    more = [{"weight": 0.5, "train": True}, {"weight": 0, "loss": True}, {"loss_weight": 0.5, "weight": 0.5}, {"weight": None}]
    assert read([assistant("a", **each) for each in more]).weights == [0.5, 0, 0.25, 1]
    assert read([USER | {"training": True}, USER | {"weight": 0.5}, USER | {"loss": True}]).weights == [1, 0.5, 0], (
        "`loss` is of the assistant's messages only, as in MS-SWIFT"
    )


@pytest.mark.parametrize(("key", "value"), [("loss", 0.5), ("loss", "false"), ("training", [True]), ("loss_mask", 2), ("trainable", -1)])
def test_a_switch_is_true_or_false(key: str, value: object) -> None:
    refused([USER, assistant("a", **{key: value})], rf"messages\[1\].{key} is .*expected true, false, 1 or 0")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("masked", True), ("is_masked", 0), ("mask", 1), ("ignoreLoss", True), ("no_loss", False), ("train_on_this", "false")),
        *(("trained", 0.0), ("untrained", True), ("token_loss_mask", [0, 1]), ("train_detail", [{"begin_offset": 0, "train": False}])),
    ],
)
def test_an_unknown_switch_of_training_is_refused(key: str, value: object) -> None:
    refused([USER, assistant("a", **{key: value})], rf"messages\[1\].{key} is .*only loss_weight, weight, .*Rename or remove it")
    assert read([USER | {key: value}, assistant("a")]).weights == [0, 1]


@pytest.mark.parametrize(
    ("key", "value"), [("train_loss", 2.31), ("constraint", True), ("glossary", 1), ("mask_token", "<m>"), ("turn", 1)]
)
def test_other_keys_say_nothing_of_training(key: str, value: object) -> None:
    assert read([USER, assistant("a", **{key: value})]).messages[1][key] == value


# --- columns beside the messages ---


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "value",
    [
        {"messages": [USER, assistant("a")]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": [USER], "completion": [assistant("a")]},
        {"instruction": "q", "output": "a"},
        {"query": "q", "response": "a"},
    ],
)
def test_the_system_prompt_in_a_column(value: dict[str, Any], column: str) -> None:
    row = Row("x.jsonl, line 3", {**value, column: "Answer as a sailor."}, 0)
    found = read_example(row, detect(row))
    assert isinstance(found, Chat) and found.messages[0] == {"role": "system", "content": "Answer as a sailor."}
    assert found.weights == [0, 0, 1] and len(found.messages) == 3


def test_two_system_prompts() -> None:
    own = [{"role": "system", "content": "Be brief."}, USER, assistant("a")]
    refused(
        own,
        "the system prompt is 'Answer as a sailor.' .*'Be brief.', as there can be one only: remove either",
        system="Answer as a sailor.",
    )
    assert read(own, system="Be brief.").messages == own and read(own, system="").messages == own
    refused(own[1:], "column 'system_prompt' is 'b' .*the text of column 'system'", system="a", system_prompt="b")
    refused(own[1:], r"column 'system' is 5 \(int\); expected text", system=5)
    row = Row("x", {"prompt": "p", "completion": "c", "system": "s"}, 0)
    with pytest.raises(DataError, match="the system prompt is 's' .*Write it into 'prompt', or give prompt and completion as messages"):
        read_example(row, "prompt_completion")


def test_parameters_without_a_schema_are_said(tmp_path: Path, tokenizers: Any) -> None:
    """As `to_json` of a set that was read from Parquet writes them; a null that is a value says nothing."""
    schema = {"type": "object", "properties": {"room": {"type": "string", "default": None}}}
    padded = schema | {"properties": {**schema["properties"], "city": None}}  # type: ignore[dict-item]
    rows = [{"messages": [USER, assistant("a")], "tools": [{"name": "f", "parameters": each}]} for each in (schema, padded)]
    report = report_of(make(write(tmp_path / "x.jsonl", rows), tokenizers(None)))
    assert [(note.what.split(" (")[0], note.rows, note.example) for note in report.notes] == [
        ("parameters of tools without a schema", 1, "city")
    ]


def test_rounds_of_two_texts() -> None:
    row = Row("x", {"conversations": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}], "system": "s"}, 0)
    found = read_example(row, detect(row))
    assert isinstance(found, Chat) and [message["content"] for message in found.messages] == ["s", "q", "a", "r", "b"]
    assert found.weights == [0, 0, 1, 0, 1]


def test_functions_are_tools() -> None:
    assert read([USER, assistant("a")], functions=[TOOLS[0]["function"]]).tools == TOOLS
