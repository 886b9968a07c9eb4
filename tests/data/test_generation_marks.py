"""A template with generation marks: what its author marks is trained, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chat_templates import CHATML, GENERATION
from test_trained_turns import CHATS, OF_IMAGES, PAIRS, as_chat, bot, marked, ours, read, texts, user, usual, with_tokens

from tlora.data.chat import Rendered, open_template, render
from tlora.errors import DataError

TURNS, STOPS = CHATS["turns"], frozenset({"<|im_end|>"})
OPENED = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
CLOSED = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
WORDS_ALONE = OPENED + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
WORDS_ALONE += "{% else %}{{ m['content'] }}{% endif %}" + CLOSED


@pytest.mark.parametrize("name", usual(PAIRS))
def test_the_marks_of_training_templates_are_obeyed(name: str) -> None:
    """As transformers' own mask, for each chat that the template writes."""
    source, compared = read(f"{name}_training"), 0
    knows_tools = open_template(with_tokens(source)).knows_tools
    for title, messages in CHATS.items():
        if not knows_tools and any("tool_calls" in message for message in messages):
            continue
        try:
            text, theirs = marked(source, messages)
        except Exception:  # the template refuses this chat
            continue
        if name in OF_IMAGES:  # they write no plain text
            with pytest.raises(DataError, match="is not written"):
                ours(source, messages)
            continue
        rendered = ours(source, messages)
        assert (rendered.text, "".join(texts(rendered))) == (text, "".join(theirs)), title
        compared += 1
    assert compared or name in OF_IMAGES


def weighted(source: str, weights: list[float], messages: list[dict[str, Any]] = TURNS) -> Rendered:
    return render(open_template(with_tokens(source), stops=STOPS), replace(as_chat(messages), weights=weights), "row 7")


def test_each_turn_keeps_its_weight() -> None:
    rendered = weighted(GENERATION, [0, 0.25, 0, 0, 0, 2])
    assert texts(rendered) == ["Answer one.<|im_end|>", "Answer three.<|im_end|>"] and rendered.unstopped is None
    assert [weight for *_, weight in rendered.spans] == [0.25, 2]
    assert texts(weighted(GENERATION, [1, 1, 0, 0, 0, 0])) == ["Ask one", "Answer one.<|im_end|>"]


def test_an_end_of_turn_that_is_not_marked_is_not_trained_and_said() -> None:
    assert "<|im_end|>" in open_template(with_tokens(CHATML)).end_of_turn
    rendered = ours(WORDS_ALONE, TURNS, stops=STOPS)
    assert texts(rendered) == ["Answer one.", "Answer two.", "Answer three."] and rendered.unstopped == ""


def test_a_part_of_an_answer() -> None:
    """What no comparison of renderings could find: the thought is marked and the answer is not."""
    source = OPENED + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['reasoning_content'] + '<|im_end|>' }}{% endgeneration %}"
    source += "{% endif %}{{ m['content'] }}" + CLOSED
    assert texts(ours(source, CHATS["thoughts"])) == ["Thinking of one.<|im_end|>", "Thinking of two.<|im_end|>"]


def test_a_template_that_looks_into_the_texts() -> None:
    source = GENERATION.replace("m['content'] +", "('yes: ' if m['content'] == 'Answer two.' else 'no: ') + m['content'] +")
    assert source != GENERATION
    rendered = weighted(source, [0, 1, 0, 0.5, 0, 0])
    assert texts(rendered) == ["no: Answer one.<|im_end|>", "yes: Answer two.<|im_end|>"]
    assert [weight for *_, weight in rendered.spans] == [1, 0.5]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}",
            "marks 1 block as generated for 3 turns",
        ),
        (GENERATION.replace("m['role'] == 'assistant'", "m['role'] == 'nobody'"), "marks nothing of this chat"),
        (GENERATION.replace("m['content'] +", "'x' +"), "its text is not written"),
    ],
)
def test_marks_that_cannot_be_understood_refuse_the_row(source: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"row 7.*{reason}"):
        weighted(source, [0, 1, 0, 0, 0, 0])


def test_a_system_turn_and_an_empty_answer() -> None:
    chat = [{"role": "system", "content": "Be brief."}, user("Ask"), bot(""), user("Ask again"), bot("Yes.")]
    assert texts(weighted(GENERATION, [0, 0, 1, 0, 1], chat)) == ["<|im_end|>", "Yes.<|im_end|>"]
