"""What a chat template drops or rewrites is found piece by piece, and nothing is reported of a template that writes everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, TEMPLATES, THINKING
from test_build import make, report_of, write

from tlora.data.chat import open_template, render
from tlora.data.formats import Chat, detect, read_example
from tlora.data.report import ChangeCount
from tlora.data.rows import Row
from tlora.data.template_changes import find_changes

TOOL = {"name": "weather", "description": "tells the weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": 'Köln "Süd"\n'}}}
KNOWS_TOOLS = THINKING  # writes definitions and calls, and tool messages as those of any role
ANSWERS_ONLY = (
    "{% for m in messages %}{% if m['role'] in ['user', 'assistant'] %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endif %}{% endfor %}"
)


def changes(template: str | None, tokenizer: Any, *messages: dict[str, Any], **columns: Any) -> list[tuple[str, int]]:
    row = Row("row", {"messages": list(messages), **columns}, 0)
    chat = read_example(row, detect(row))
    assert isinstance(chat, Chat)
    opened = open_template(tokenizer, template)
    return [(change.what, change.characters) for change in find_changes(opened, chat, render(opened, chat, "row").text)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_said_of_what_is_written(name: str, tokenizers: Any) -> None:
    """White space around a text may go; texts may be equal, or one in another."""
    messages = [user("  yes, indeed \n"), assistant("yes"), user("yes"), assistant('She said: "yes"\n\n'), user("no"), assistant("yes")]
    assert changes(TEMPLATES[name], tokenizers(TEMPLATES[name]), *messages) == []


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_template_does_not_know(key: str, tokenizers: Any) -> None:
    thought = "The answer must be Paris, of course."
    assert changes(CHATML, tokenizers(CHATML), user("a"), assistant("Paris", **{key: thought})) == [("reasoning is dropped", len(thought))]
    part = [{"type": "reasoning", "value": thought}, {"type": "text", "value": "Paris"}]
    assert changes(CHATML, tokenizers(CHATML), user("a"), {"role": "assistant", "content": part}) == [
        ("reasoning is dropped", len(thought))
    ]


def test_short_reasoning_that_stands_in_an_answer(tokenizers: Any) -> None:
    """Found in the text, but only as the answer's own words."""
    assert changes(CHATML, tokenizers(CHATML), user("2+2?"), assistant("4", reasoning_content="4")) == [("reasoning is dropped", 1)]
    written = "{% for m in messages %}{{ m['role'] + ':' + (m['reasoning_content'] or '') + ':' + m['content'] + '\n' }}{% endfor %}"
    assert changes(written, tokenizers(None), user("2+2?"), assistant("4", reasoning_content="4")) == []


def test_thinking_of_earlier_turns(tokenizers: Any) -> None:
    """As Qwen3: the last turn keeps its thinking; in other templates it is text like any other."""
    messages = [user("a"), assistant("<think>\nfirst thought\n</think>\n\nb"), user("c"), assistant("<think>\nlast thought\n</think>\n\nd")]
    assert changes(THINKING, tokenizers(THINKING), *messages) == [("reasoning is dropped", len("first thought"))]
    assert changes(CHATML, tokenizers(CHATML), *messages) == []


def test_roles_without_a_turn(tokenizers: Any) -> None:
    messages = [user("a"), assistant("b"), {"role": "developer", "content": "Be brief."}, {"role": "critic", "content": "Good."}, user("c")]
    found = changes(ANSWERS_ONLY, tokenizers(None), *messages, assistant("d"))
    assert found == [("text of system messages is dropped", 9), ("text of critic messages is dropped", 5)]


def test_tools_that_a_template_writes(tokenizers: Any) -> None:
    messages = [user("a"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": '{"sun": true}'}, assistant("b")]
    assert changes(KNOWS_TOOLS, tokenizers(KNOWS_TOOLS), *messages, tools=[TOOL]) == []


def test_tools_for_a_template_without_them(tokenizers: Any) -> None:
    """Written as text instead, which is said; nothing of them is dropped. The default template has a place for them."""
    messages = [user("a"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": '{"sun": true}'}, assistant("b")]
    assert changes(None, tokenizers(None), *messages, tools=[TOOL]) == []
    for template in (CHATML, LLAMA3):
        found = dict(changes(template, tokenizers(template), *messages, tools=[TOOL]))
        assert found.pop("tool messages are written as user turns") == len('{"sun": true}')
        assert list(found) == ["tool definitions are written as text of the system turn", "tool calls are written as text of the assistant"]


def test_tools_that_a_template_writes_only_sometimes(tokenizers: Any) -> None:
    sometimes = KNOWS_TOOLS.replace("{% if tools %}", "{% if tools and messages[0]['role'] != 'system' %}")
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("b")]
    found = changes(sometimes, tokenizers(sometimes), *messages, tools=[TOOL])
    assert found == [("tool definitions are dropped", len("weather tells the weather"))]


@pytest.mark.parametrize("template", [GEMMA, MISTRAL])
def test_a_system_message_without_a_turn_of_its_own(template: str, tokenizers: Any) -> None:
    found = changes(template, tokenizers(template), {"role": "system", "content": "Be brief."}, user("a"), assistant("b"))
    folded = [("system messages are written into the first user turn", 9)]
    assert found == (folded if template is GEMMA else []), "Mistral's own template does it itself"


def test_other_keys_of_messages(tokenizers: Any) -> None:
    named = "{% for m in messages %}{{ m['role'] + (m['name'] or '') + ':' + m['content'] + '\n' }}{% endfor %}"
    messages = [user("a") | {"name": "Zoë", "turn": 1}, assistant("b", timestamp="2026-11-22T10:00", tool_call_id="x")]
    assert changes(named, tokenizers(None), *messages) == [
        ("message key 'timestamp' is not used", len("2026-11-22T10:00")),
        ("message key 'turn' is not used", 0),
    ]


def test_they_are_counted_over_all_rows(tmp_path: Path, tokenizers: Any) -> None:
    rows = [{"messages": [user("a"), assistant(f"answer {i}", reasoning_content="x" * i)]} for i in range(300)]
    report = report_of(make(write(tmp_path / "x.jsonl", rows), tokenizers(CHATML)))
    assert report.changes == [ChangeCount("reasoning is dropped", 299, sum(range(300)), "x")]
    trained = sum(len(f"answer {i}<|im_end|>") for i in range(300))
    assert report.trained_characters == trained
    report.files = ["x.jsonl"]
    assert report.template_changes() == [
        f"changed by the chat template, where {trained:,} characters are trained (x.jsonl):",
        "  reasoning is dropped: 44,850 characters in 299 of 300 rows, such as 'x'",
    ]
