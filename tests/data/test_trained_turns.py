"""What is trained under the templates of well-known families, against the same templates with generation marks, as TRL ships them."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import pytest
import trl
from chat_templates import make_tokenizer

from tlora.data.chat import Rendered, open_template, render
from tlora.data.formats import Chat
from tlora.errors import DataError

DIRECTORY = Path(trl.__file__).parent / "chat_templates"
PAIRS = sorted(file.name.removesuffix("_training.jinja") for file in DIRECTORY.glob("*_training.jinja"))
ALL = sorted(file.stem for file in DIRECTORY.glob("*.jinja") if not file.stem.endswith("_training"))
USUAL = (
    "cohere2",
    "deepseekv3",
    "gemma3",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "llama3",
    "llama3_1",
    "phi3",
    "qwen3",
    "qwen3_5_think",
)  # in every run
OF_IMAGES = ("idefics3", "llava_next", "smolvlm")  # their templates write no plain text


def usual(names: list[str]) -> list[Any]:
    """Parameters: the other templates are tried in `make test-slow`."""
    return [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in names]


TOOL = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "Switches a lamp",
        "parameters": {"type": "object", "properties": {"room": {"type": "string", "description": "Where"}}, "required": ["room"]},
    },
}


def call(room: str, number: int = 1, **more: Any) -> dict[str, Any]:
    return {"id": f"lamp{number:05d}", "type": "function", "function": {"name": "set_lamp", "arguments": {"room": room, **more}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str, *calls: dict[str, Any], thought: str = "") -> dict[str, Any]:
    extra: dict[str, Any] = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": text} | extra | ({"reasoning_content": thought} if thought else {})


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "set_lamp", "tool_call_id": f"lamp{number:05d}", "content": text}


CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("Ask one"), bot("Answer one.")],
    "turns": [user("Ask one"), bot("Answer one."), user("Ask two"), bot("Answer two."), user("Ask three"), bot("Answer three.")],
    "system": [{"role": "system", "content": "Be brief."}, user("Ask one"), bot("Answer one."), user("Ask two"), bot("Answer two.")],
    "thought": [user("Ask one"), bot("Answer one.", thought="Thinking of one.")],
    "thoughts": [user("Ask one"), bot("Answer one.", thought="Thinking of one."), user("Ask two"), bot("Two.", thought="Thinking of two.")],
    "think in text": [user("Ask one"), bot("<think>\nThinking of one.\n</think>\n\nAnswer one."), user("Ask two"), bot("Answer two.")],
    "call": [user("Lamp on"), bot("", call("attic")), result("it is on"), bot("Done.")],
    "call and text": [user("Lamp on"), bot("One moment.", call("attic")), result("it is on"), bot("Done.")],
    "call and thought": [
        user("Lamp on"),
        bot("", call("attic"), thought="Which lamp?"),
        result("it is on"),
        bot("Done.", thought="It is."),
    ],
    "two calls": [user("Lamps on"), bot("", call("attic", 1), call("hall", 2)), result("it is on", 1), result("also on", 2), bot("Done.")],
    "call after call": [
        user("Lamps on"),
        bot("", call("attic", 1)),
        result("it is on", 1),
        bot("", call("hall", 2, level=3, soft=True)),
        result("also on", 2),
        bot("Done."),
        user("Off again"),
        bot("", call("attic", 3)),
        result("it is off", 3),
        bot("All done."),
    ],
    "call at the end": [user("Lamp on"), bot("", call("attic"))],
    "no arguments": [
        user("Lamp on"),
        bot("", {"id": "lamp00001", "type": "function", "function": {"name": "set_lamp", "arguments": {}}}),
        result("it is on"),
        bot("Done."),
    ],
}


def with_tokens(source: str) -> Any:
    """A tokenizer in which the tokens that frame the template's turns are tokens."""
    tokenizer = make_tokenizer(source)
    found = dict.fromkeys(
        re.findall(r"<[|\uff5c][^<>\s{}'\"]{1,40}>|<(?:end|start)_of_\w+>|<turn\|>|<\w+\|>|</?think>|</?tool_call>", source)
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(found)})
    return tokenizer


def as_chat(messages: list[dict[str, Any]]) -> Chat:
    messages = copy.deepcopy(messages)
    tools: list[object] | None = [TOOL] if any("tool_calls" in message for message in messages) else None
    return Chat(messages, [1.0 if message["role"] == "assistant" else 0.0 for message in messages], tools)


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> Rendered:
    return render(open_template(with_tokens(source), None, **options), as_chat(messages), "row")


def texts(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end, _ in rendered.spans]


def marked(source: str, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The text of the template with generation marks, and what it marks."""
    tokenizer = with_tokens(source)
    chat = as_chat(messages)
    found = tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    text = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    runs = [
        [offset for offset, _ in run]
        for own, run in groupby(zip(offsets, found["assistant_masks"], strict=True), key=lambda pair: pair[1])
        if own
    ]
    return text, [text[run[0][0] : run[-1][1]] for run in runs]


def read(name: str) -> str:
    return (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")


def prompts(source: str, messages: list[dict[str, Any]]) -> list[str]:
    """How the template can prompt for each assistant turn: with thinking or without."""
    tokenizer, found = with_tokens(source), []
    for i in range(1, len(messages)):
        for mode in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            with suppress(jinja2.TemplateError):  # no user has spoken yet
                found.append(tokenizer.apply_chat_template(messages[:i], tools=[TOOL], add_generation_prompt=True, tokenize=False, **mode))
    return found


@pytest.mark.parametrize("name", usual(PAIRS))
def test_the_same_is_trained_as_between_generation_marks(name: str) -> None:
    """Except, on purpose: what a generation prompt writes already (a header, "<think>"), which the model never has to write; the white
    space behind an end of turn, which comes after the model has stopped; the token that ends a call of Gemma 4, which its own
    generation config names and the marks leave out. Training templates keep thoughts that the real ones drop from earlier turns.
    """
    source, compared = read(name), 0
    knows_tools = open_template(with_tokens(source)).knows_tools
    for title, messages in CHATS.items():
        if not knows_tools and any("tool_calls" in message for message in messages):
            continue  # written as text, which the marks know nothing of: see test_no_word_of_a_tool_is_trained
        try:
            theirs = marked(read(f"{name}_training"), messages)[1]
        except Exception:  # the template refuses this chat
            continue
        if name in OF_IMAGES:
            with pytest.raises(DataError):
                ours(source, messages)
            continue
        rendered = ours(source, messages)
        assert len(rendered.spans) == len(theirs), title
        for (start, end, _), expected in zip(rendered.spans, theirs, strict=True):
            found = rendered.text[start:end].removesuffix("" if expected.endswith("<|tool_response>") else "<|tool_response>").rstrip()
            assert expected.rstrip().endswith(found.lstrip()) and found, title
            before = expected.rstrip().removesuffix(found.lstrip()).rstrip("\n")
            written = rendered.text[:start].rstrip("\n").endswith(before)
            prompted = any(before in text[-len(before) - 8 :] for text in prompts(source, messages))  # at its end: "<think>\n" may follow
            assert not before or not written or prompted, title
            compared += 1
    assert compared or name in OF_IMAGES


@pytest.mark.parametrize("name", usual(ALL))
def test_no_word_of_a_tool_is_trained(name: str) -> None:
    """Of any family: each call whole, each answer and each end of turn, and nothing that a tool or a user says."""
    source, seen = read(name), 0
    for title, messages in CHATS.items():
        try:
            rendered = ours(source, messages)
        except DataError as error:
            assert name in OF_IMAGES or "refuses the roles" in str(error), title
            continue
        seen += 1
        whole = "\0".join(texts(rendered))
        assert not [word for word in ("it is on", "also on", "it is off", "Lamp", "Ask", "brief", "Switches") if word in whole], title
        for message in messages:
            if message["role"] == "assistant":
                last = message["content"].rpartition("</think>")[2].strip()
                dropped = last not in rendered.text  # gpt-oss writes no text beside a call
                assert dropped or last in whole, title
                for order in message.get("tool_calls", []):
                    for value in order["function"]["arguments"].values():
                        assert str(value).lower() in whole.lower() or str(value).lower() not in rendered.text.lower(), title
        for text in texts(rendered) if title != "call and text" else []:  # Gemma 4 goes on behind the result, without an end of turn
            assert re.search(r"(>|])\s*$", text), (title, text)
    assert seen or name in OF_IMAGES
