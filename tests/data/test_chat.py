"""Loss falls on what the model has to write itself, under every kind of template, and never on a user's turn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, GENERATION, LLAMA3, TEMPLATES, THINKING
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tlora.data.chat import DEFAULT_TEMPLATE, open_template, render
from tlora.data.dataset import Sample
from tlora.data.encode import encode, open_encoder
from tlora.data.formats import Chat
from tlora.errors import DataError, ModelError

END = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "generation": "<|im_end|>",
    "thinking": "<|im_end|>",
    "unclosed": "\n",
}
NO_THOUGHT = "<think>\n\n</think>\n\n"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


def chat(*turns: tuple[str, str], tools: list[object] | None = None) -> Chat:
    messages: list[dict[str, object]] = [{"role": role, "content": content} for role, content in turns]
    return Chat(messages, [1.0 if role == "assistant" else 0.0 for role, _ in turns], tools)


def conversation(talk: Callable[[int], str], seed: int, system: bool) -> Chat:
    """User and assistant in turn; users' words are marked U, the assistant's A, so that any leak shows."""
    turns = [("system", f"S{talk(seed)}")] if system else []
    for i in range(1 + seed % 4):
        turns += [("user", f"U{talk(seed * 31 + i)}U"), ("assistant", f"A{talk(seed * 37 + i)}A")]
    return chat(*turns)


def encoded(tokenizer: Any, example: Chat, template: str | None = None, train_all: bool = False) -> Sample:
    return encode(open_encoder(tokenizer, template, train_all, 10**6), [example], ["row"])[0].sample


def runs(tokenizer: Any, sample: Sample) -> list[tuple[str, float]]:
    pairs = zip(sample.input_ids.tolist(), sample.loss_weights.tolist(), strict=True)
    return [(tokenizer.decode([token for token, _ in part]), weight) for weight, part in groupby(pairs, key=lambda pair: pair[1])]


def trained(tokenizer: Any, sample: Sample) -> list[str]:
    return [text for text, weight in runs(tokenizer, sample) if weight]


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_assistants_words_and_their_end_are_trained(
    name: str, metaspace: bool, tokenizers: Any, chatter: Callable[[int], str]
) -> None:
    tokenizer = tokenizers(TEMPLATES[name], metaspace=metaspace)
    for seed in range(12):
        example = conversation(chatter, seed, system=seed % 3 == 0)
        expected = [f"{message['content']}{END[name]}" for message in example.messages if message["role"] == "assistant"]
        found = trained(tokenizer, encoded(tokenizer, example))
        if name == "thinking":  # the model begins its answer with an empty thought
            expected[-1] = NO_THOUGHT + expected[-1]
        if name == "unclosed":  # its newline may be one token with the next turn's "Q": that is not trained
            found, expected = [text.strip() for text in found], [text.strip() for text in expected]
        assert [text.strip(" ") for text in found] == expected


def test_trained_tokens_to_the_id(tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML)
    sample = encoded(tokenizer, chat(("user", "What is the capital of France?"), ("assistant", "Paris.")))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, "Paris.<|im_end|>", "\n")]
    assert sample.input_ids.tolist() == parts[0] + parts[1] + parts[2]
    assert sample.loss_weights.tolist() == [0.0] * len(parts[0]) + [1.0] * len(parts[1]) + [0.0] * len(parts[2])
    assert sample.input_ids.dtype == np.int32 and sample.loss_weights.dtype == np.float32


@pytest.mark.parametrize("answer", ["🙂🎉", "你好世界", "é", "e\u0301 ", "\u00a0x", "a\r\nb", "👩‍👩‍👧"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_characters_of_several_tokens(name: str, answer: str, tokenizers: Any) -> None:
    """A token may be a part of a character: all parts are trained, none of the user's same characters is."""
    tokenizer = tokenizers(TEMPLATES[name])
    found = trained(tokenizer, encoded(tokenizer, chat(("user", answer), ("assistant", answer), ("user", answer), ("assistant", answer))))
    written = answer.strip() if name == "llama3" else answer
    assert [text.strip(" ") for text in found] == [(written + END[name]).strip(" ")] * 2


def test_one_bos_where_template_and_tokenizer_both_add_it(tokenizers: Any) -> None:
    tokenizer = tokenizers(LLAMA3, adds_bos=True)
    ids = encoded(tokenizer, chat(("user", "Hello!"), ("assistant", "Hello!"))).input_ids.tolist()
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_user_text_that_repeats_the_answer_or_the_header_is_not_trained(tokenizers: Any) -> None:
    """Searching for the answer in the text would find it in the question."""
    for name, template in TEMPLATES.items():
        tokenizer = tokenizers(template)
        example = chat(("user", "assistant Paris. A:"), ("assistant", "Paris."), ("user", "Paris."), ("assistant", "user"))
        sample = encoded(tokenizer, example)
        thought = NO_THOUGHT if name == "thinking" else ""
        assert [text.strip() for text in trained(tokenizer, sample)] == [
            ("Paris." + END[name]).strip(),
            (thought + "user" + END[name]).strip(),
        ]


def test_generation_marks_change_nothing(tokenizers: Any, chatter: Callable[[int], str]) -> None:
    marked, plain = tokenizers(GENERATION), tokenizers(CHATML)
    for seed in range(5):
        example = conversation(chatter, seed, system=True)
        a, b = encoded(marked, example), encoded(plain, example)
        assert a.input_ids.tolist() == b.input_ids.tolist() and a.loss_weights.tolist() == b.loss_weights.tolist()


def test_per_message_weights(tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML)
    example = Chat(
        chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")).messages,
        [0, 0.25, 0, 0, 0, 2],
    )
    assert [run for run in runs(tokenizer, encoded(tokenizer, example)) if run[1]] == [("b<|im_end|>", 0.25), ("f<|im_end|>", 2.0)]


def test_a_users_turn_is_trained_only_if_the_data_says_so(tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML)
    example = Chat(chat(("user", "Hello!"), ("assistant", "b")).messages, [0.5, 1])
    assert [run for run in runs(tokenizer, encoded(tokenizer, example)) if run[1]] == [("Hello!", 0.5), ("b<|im_end|>", 1.0)]


def test_train_all(tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML)
    assert set(encoded(tokenizer, chat(("user", "a"), ("assistant", "b")), train_all=True).loss_weights.tolist()) == {1.0}


def test_chat_without_an_assistant_has_no_weight(tokenizers: Any) -> None:
    assert not encoded(tokenizers(CHATML), chat(("user", "a"))).loss_weights.any()


# --- thinking and tools ---


def test_thinking_of_earlier_turns_is_dropped_and_the_last_is_kept(tokenizers: Any) -> None:
    tokenizer = tokenizers(THINKING)
    example = chat(
        ("user", "one"), ("assistant", "<think>x1</think>\n\nfirst"), ("user", "two"), ("assistant", "<think>x2</think>\n\nsecond")
    )
    assert trained(tokenizer, encoded(tokenizer, example)) == ["first<|im_end|>", "<think>\nx2\n</think>\n\nsecond<|im_end|>"]


def test_tool_calls_are_trained_and_results_are_not(tokenizers: Any) -> None:
    tokenizer = tokenizers(THINKING)
    example = chat(("user", "Hello!"), ("assistant", ""), ("tool", "sunny"), ("assistant", "It is sunny."), tools=[*TOOLS])
    example.messages[1]["tool_calls"] = [CALL]
    assert trained(tokenizer, encoded(tokenizer, example)) == [
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call><|im_end|>',
        NO_THOUGHT + "It is sunny.<|im_end|>",
    ]


@pytest.mark.parametrize("system", [False, True])
def test_template_that_knows_no_tools_gets_them_as_text(system: bool, tokenizers: Any) -> None:
    tokenizer = tokenizers(LLAMA3)
    turns = [("system", "Be brief.")] if system else []
    example = chat(
        *turns, ("user", "Hello!"), ("assistant", "Let me see."), ("tool", "sunny"), ("assistant", "It is sunny."), tools=[*TOOLS]
    )
    example.messages[len(turns) + 1]["tool_calls"] = [CALL]
    sample = encoded(tokenizer, example)
    text = tokenizer.decode(sample.input_ids.tolist())
    assert "system<|end_header_id|>\n\n" + ("Be brief.\n" if system else "") + 'Tools: [{"type": "function"' in text
    assert "user<|end_header_id|>\n\nsunny<|eot_id|>" in text
    assert trained(tokenizer, sample) == [
        'Let me see.\n{"name": "weather", "arguments": {"city": "Köln"}}<|eot_id|>',
        "It is sunny.<|eot_id|>",
    ]


def test_template_that_insists_on_ids_of_calls(tokenizers: Any) -> None:
    """Data without ids gets them, in the order of the calls; those in the data stay."""
    strict = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m['tool_calls'] %}{% for call in m['tool_calls'] %}"
        "{{ '<s>' + call['function']['name'] + '#' + call['id'] }}{% endfor %}{{ eos_token }}{% elif m['role'] == 'tool' %}"
        "{{ '<s>' + m['tool_call_id'] + ':' + m['content'] | tojson + '</s>' }}"
        "{% else %}{{ '<s>' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizers(strict)
    example = chat(("user", "a"), ("assistant", ""), ("tool", 'x"y'), ("tool", "z"), ("assistant", ""), ("tool", "w"), ("assistant", "b"))
    example.messages[1]["tool_calls"] = [CALL, CALL]
    example.messages[4]["tool_calls"] = [CALL | {"id": "own"}]
    sample = encoded(tokenizer, example)
    text = tokenizer.decode(sample.input_ids.tolist())
    assert text == (
        '<s>a</s><s>weather#000000000<s>weather#000000001</s><s>000000000:"x\\"y"</s><s>000000001:"z"</s><s>weather#own</s><s>own:"w"</s><s>b</s>'
    )
    assert trained(tokenizer, sample) == ["weather#000000000<s>weather#000000001</s>", "weather#own</s>", "b</s>"]


@pytest.mark.parametrize("drops", ["tools", "calls"])
def test_template_that_drops_tools_silently_gets_them_as_text(drops: str, tokenizers: Any) -> None:
    dropping = {
        "tools": CHATML.replace("m['content']", "(m['content'] or m['tool_calls'] | tojson)"),
        "calls": "{{ tools | tojson if tools }}" + CHATML,
    }
    tokenizer = tokenizers(dropping[drops])
    example = chat(("user", "a"), ("assistant", ""), ("tool", "sunny"), ("assistant", "b"), tools=[*TOOLS])
    example.messages[1]["tool_calls"] = [CALL]
    sample = encoded(tokenizer, example)
    assert 'Tools: [{"type": "function"' in tokenizer.decode(sample.input_ids.tolist())
    assert trained(tokenizer, sample) == ['{"name": "weather", "arguments": {"city": "Köln"}}<|im_end|>', "b<|im_end|>"]


def test_system_goes_into_the_first_question_where_there_is_no_system_turn(tokenizers: Any) -> None:
    tokenizer = tokenizers(TEMPLATES["gemma"])
    text = tokenizer.decode(encoded(tokenizer, chat(("system", "Be brief."), ("user", "Hello!"), ("assistant", "Hi"))).input_ids.tolist())
    assert text.startswith("<s><start_of_turn>user\nBe brief.\n\nHello!<end_of_turn>\n")


# --- whose template ---


@pytest.mark.parametrize("eos", ["</s>", None])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_default_template(eos: str | None, adds_bos: bool, tokenizers: Any) -> None:
    tokenizer = tokenizers(None, adds_bos=adds_bos, eos=eos)
    example = chat(("system", "Be brief."), ("user", "Hello!"), ("assistant", "Hi"), ("user", "Sure"), ("assistant", "you"))
    sample = encoded(tokenizer, example)
    end = eos or ""
    expected = f"### System:\nBe brief.\n\n### User:\nHello!\n\n### Assistant:\nHi{end}\n\n### User:\nSure\n\n### Assistant:\nyou{end}\n\n"
    assert tokenizer.decode(sample.input_ids.tolist()) == ("<s>" if adds_bos else "") + expected
    assert [text.rstrip("\n") for text in trained(tokenizer, sample)] == ["Hi" + end, "you" + end]


def test_default_template_spells_out_tools(tokenizers: Any) -> None:
    tokenizer = tokenizers(None)
    example = chat(("user", "Hello!"), ("assistant", ""), ("tool", "sunny"), ("assistant", "It is sunny."), tools=[*TOOLS])
    example.messages[1]["tool_calls"] = [CALL]
    sample = encoded(tokenizer, example)
    text = tokenizer.decode(sample.input_ids.tolist())
    assert text.startswith('### System:\nTools: [{"type": "function", "function": {"name": "weather"') and "### Tool:\nsunny\n\n" in text
    assert trained(tokenizer, sample) == ['{"name": "weather", "arguments": {"city": "Köln"}}</s>', "It is sunny.</s>"]


def test_default_template_puts_tools_into_a_given_system_turn(tokenizers: Any) -> None:
    tokenizer = tokenizers(None)
    text = render(open_template(tokenizer), chat(("system", "Be brief."), ("user", "a"), ("assistant", "b"), tools=[*TOOLS]), "row").text
    assert text.startswith('### System:\nBe brief.\nTools: [{"type"') and text.count("### System:") == 1


def test_the_jobs_template_wins(tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML)
    template = open_template(tokenizer, LLAMA3)
    assert template.text() == LLAMA3 and open_template(tokenizer).text() == CHATML
    assert "<|eot_id|>" in render(template, chat(("user", "a"), ("assistant", "b")), "row").text
    assert DEFAULT_TEMPLATE in open_template(tokenizers(None)).text()


# --- what cannot be followed ---


def test_refusal_of_the_template_names_row_and_roles(tokenizers: Any) -> None:
    example = chat(("user", "a"), ("user", "b"), ("assistant", "c"))
    with pytest.raises(DataError, match=r"x.json, row 3: .*user, user, assistant"):
        encode(open_encoder(tokenizers(TEMPLATES["gemma"]), None, False, 1000), [example], ["x.json, row 3"])


def test_template_with_broken_syntax(tokenizers: Any) -> None:
    with pytest.raises(DataError, match=r"two turns: .*refuses .*endfor"):
        open_template(tokenizers(None), "{% for m in messages %}")


def test_template_that_looks_into_contents_is_followed_by_prefixes(tokenizers: Any) -> None:
    shouting = CHATML.replace("m['content']", "(m['content'] | upper)")
    tokenizer = tokenizers(shouting)
    sample = encoded(tokenizer, chat(("user", "aa"), ("assistant", "bb"), ("user", "cc"), ("assistant", "dd")))
    assert trained(tokenizer, sample) == ["BB<|im_end|>", "DD<|im_end|>"]


def test_weights_given_to_a_user_under_such_a_template(tokenizers: Any) -> None:
    """By prefixes too, only the content of a user's turn is trained; where the template changes it, the row is refused."""
    odd = CHATML.replace("m['content']", "(m['content'] | replace('o', 'O'))")
    example = Chat(chat(("user", "aa"), ("assistant", "foo")).messages, [1.0, 1.0])
    tokenizer = tokenizers(odd)
    assert trained(tokenizer, encoded(tokenizer, example)) == ["aa", "fOO<|im_end|>"]
    with pytest.raises(DataError, match="row: .*rewrites"):
        encoded(tokenizer, Chat(chat(("user", "oo"), ("assistant", "foo")).messages, [1.0, 1.0]))


def test_template_that_reorders_and_changes_is_refused(tokenizers: Any) -> None:
    backwards = (
        "{% for m in messages | reverse %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | upper + '<|im_end|>\n' }}{% endfor %}"
    )
    with pytest.raises(DataError, match="row: .*rewrites"):
        encoded(tokenizers(backwards), chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")))


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="Slow gives no character offsets"):
        open_encoder(Slow(), None, False, 10)  # type: ignore[arg-type]


def test_a_tokenizer_without_a_vocabulary_is_refused() -> None:
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({}, [])))
    with pytest.raises(ModelError, match=r"makes no token of the text 'x': .* give the base's own tokenizer.json"):
        open_encoder(empty, None, train_all=False, vocab_size=10)
