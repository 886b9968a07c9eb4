"""Turns examples into token ids, each with a loss weight.

Owns special tokens (exactly one BOS where the tokenizer adds one, EOS after plain text) and the step from trained characters to trained
tokens. Does not cut to a length and writes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from tlora.data.chat import Rendered, WeightedRange, open_template, render
from tlora.data.chat_template import Template
from tlora.data.dataset import Sample
from tlora.data.formats import Chat, Example, Labelled, Message, Pair, Segments, Text, Tokens
from tlora.data.messages import check_roles
from tlora.data.template_changes import Change, find_changes
from tlora.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ChatSettings:
    """How chats are rendered and trained: values for the template, the base's stop tokens, and whether only the last answer is trained."""

    kwargs: Mapping[str, object] = field(default_factory=dict)
    stops: frozenset[str] = frozenset()
    last_turn: bool = False


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, a template and which tokens count."""

    tokenizer: PreTrainedTokenizerBase
    template: Template
    prefix_ids: tuple[int, ...]  # what the tokenizer puts before every text: BOS, or nothing
    train_all: bool
    vocab_size: int  # of the model: rows of its embedding
    last_turn: bool = False  # of chats only the last answer is trained


@dataclass(frozen=True)
class Encoded:
    """One example as a sample, uncut; how many characters of its text are trained, and how its chat template changed it."""

    sample: Sample
    trained_characters: int = 0  # 0 for token ids
    changes: tuple[Change, ...] = ()
    unstopped: str | None = None  # what ends a trained turn without a stop token: "" for nothing; None if all turns have one
    unended: bool = False  # a text behind which no end token stands, as the tokenizer has none
    empty_answers: tuple[bool, ...] = ()  # of each part that is trained, whether it is empty; none for token ids


def open_encoder(
    tokenizer: PreTrainedTokenizerBase,
    template_source: str | None,
    train_all: bool,
    vocab_size: int,
    chats: ChatSettings | None = None,
) -> Encoder:
    """Make an Encoder: everything that does not depend on the data is computed once here."""
    chats = chats or ChatSettings()
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} gives no character offsets, which loss weights need; use a fast tokenizer (tokenizer.json)"
        )
    plain = next(iter(_ids(tokenizer, ["x"])), [])
    if not plain:
        raise ModelError(
            f"{type(tokenizer).__name__} makes no token of the text 'x': its vocabulary is empty, or tokenizer.json is of another kind "
            "than its class reads; give the base's own tokenizer.json"
        )
    special = cast("list[int]", tokenizer("x")["input_ids"])
    start = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), 0)
    template = open_template(tokenizer, template_source, chats.kwargs, chats.stops)
    return Encoder(tokenizer, template, tuple(special[:start]), train_all, vocab_size, chats.last_turn)


def encode(encoder: Encoder, examples: Sequence[Example], places: Sequence[str]) -> list[Encoded]:
    """One sample per example, in order. Raises DataError with the place of the first that cannot be encoded."""
    encoded_examples: list[Encoded | None] = [None] * len(examples)
    if encoder.last_turn:
        examples = [_last_turn(example, place) for example, place in zip(examples, places, strict=True)]
    chats = [i for i, example in enumerate(examples) if isinstance(example, Chat)]
    texts = [i for i, example in enumerate(examples) if isinstance(example, Text)]
    for i in chats:
        check_roles(cast("Chat", examples[i]).messages, encoder.template.text(), places[i])
    rendered = [render(encoder.template, cast("Chat", examples[i]), places[i]) for i in chats]
    for i, chat in zip(chats, rendered, strict=True):
        _check_text(chat.text, places[i])
    for i, chat, sample in zip(chats, rendered, _encode_rendered(encoder, rendered), strict=True):
        characters = len(chat.text) if encoder.train_all else sum(end - start for start, end, _ in chat.spans)
        changes = tuple(find_changes(encoder.template, cast("Chat", examples[i]), chat.text))
        encoded_examples[i] = Encoded(sample, characters, changes, chat.unstopped)
    for i in texts:
        _check_text(cast("Text", examples[i]).prompt + cast("Text", examples[i]).completion, places[i])
    for i, sample in zip(texts, _encode_texts(encoder, [cast("Text", examples[i]) for i in texts]), strict=True):
        example = cast("Text", examples[i])
        characters = len(example.completion) + (len(example.prompt) if encoder.train_all else 0)
        encoded_examples[i] = Encoded(sample, characters, unended=not isinstance(encoder.tokenizer.eos_token_id, int))
    for i, example in enumerate(examples):
        if isinstance(example, Segments):
            _check_text("".join(example.texts), places[i])
            encoded_examples[i] = encoded = _encode_segments(encoder, example)
            _check_vocabulary(encoder, encoded.sample.input_ids, places[i])
        if isinstance(example, Tokens):
            _check_vocabulary(encoder, example.input_ids, places[i])
            encoded_examples[i] = Encoded(_sample(encoder, example.input_ids, np.array(example.weights, dtype=np.float32)))
    for i in chats + texts:
        _check_vocabulary(encoder, cast("Encoded", encoded_examples[i]).sample.input_ids, places[i])
    return [
        replace(encoded, empty_answers=_empty_answers(encoder, example))
        for encoded, example in zip(cast("list[Encoded]", encoded_examples), examples, strict=True)
    ]


def _empty_answers(encoder: Encoder, example: Example) -> tuple[bool, ...]:
    """Whether each answer of `example` is empty: white space alone, and no tool call. With `train_all`, all of it is one answer."""
    if isinstance(example, Tokens):
        return ()
    if isinstance(example, Text):
        empty, weights = [not example.prompt.strip(), not example.completion.strip()], [0.0, 1.0]
    elif isinstance(example, Segments):
        empty, weights = [not text.strip() for text in example.texts], example.weights
        empty, weights = [all(itertools.compress(empty, weights))], [1.0]  # the pieces are one answer
    else:
        empty, weights = [_is_empty(message, encoder.template) for message in example.messages], example.weights
    return (all(empty),) if encoder.train_all else tuple(itertools.compress(empty, weights))


def _is_empty(message: Message, template: Template) -> bool:
    """Whether the template has nothing to render of the message, such as text, reasoning or tool calls."""
    return not any(
        str(value or "").strip() and (key in ("content", "tool_calls") or key in template.text())
        for key, value in message.items()
        if key not in ("role", "name")
    )


def _last_turn(example: Example, place: str) -> Example:
    """The example with the last answer as its only trained turn."""
    if isinstance(example, Tokens):
        raise DataError(f"{place}: train_on: last needs turns, and token ids have none; set train_on: completions, and give labels")
    if not isinstance(example, Chat):
        return example
    last = max((i for i, message in enumerate(example.messages) if message["role"] == "assistant"), default=-1)
    return replace(example, weights=[weight if i == last else 0.0 for i, weight in enumerate(example.weights)])


def encode_pairs(encoder: Encoder, pairs: Sequence[Pair], places: Sequence[str]) -> list[tuple[Encoded, Encoded]]:
    """The chosen and the rejected answer of each pair, with its prompt, as `encode` makes them."""
    answers = encode(encoder, [answer for pair in pairs for answer in (pair.chosen, pair.rejected)], [p for p in places for _ in range(2)])
    return list(zip(answers[0::2], answers[1::2], strict=True))


def encode_labelled(encoder: Encoder, answers: Sequence[Labelled], places: Sequence[str]) -> list[Encoded]:
    """As `encode`; an unwanted answer has the negative of its weights."""
    encoded_answers = encode(encoder, [answer.example for answer in answers], places)
    return [
        encoded if answer.wanted else replace(encoded, sample=Sample(encoded.sample.input_ids, -encoded.sample.loss_weights))
        for encoded, answer in zip(encoded_answers, answers, strict=True)
    ]


def _check_vocabulary(encoder: Encoder, ids: Sequence[int] | npt.NDArray[np.int32], place: str) -> None:
    if len(ids) and (largest := int(max(ids) if isinstance(ids, list) else np.max(ids))) >= encoder.vocab_size:
        raise DataError(
            f"{place}: token id {largest} is beyond the base model's vocabulary of {encoder.vocab_size}; "
            "tokenize with this model's own tokenizer"
        )


def _sample(encoder: Encoder, ids: Sequence[int], weights: Floats) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.float32) if encoder.train_all else weights)


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: text with a lone surrogate (\\u{ord(text[error.start]):04x}), which is no character; remove it"
        ) from error


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return cast("list[list[int]]", tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []


def _encode_rendered(encoder: Encoder, rendered: list[Rendered]) -> list[Sample]:
    if not rendered:
        return []
    batch = encoder.tokenizer([chat.text for chat in rendered], add_special_tokens=False, return_offsets_mapping=True)
    all_ids, all_offsets = cast("list[list[int]]", batch["input_ids"]), cast("list[list[tuple[int, int]]]", batch["offset_mapping"])
    return [
        _sample(encoder, ids, token_weights(chat.text, chat.spans, np.array(offsets, dtype=np.int64).reshape(-1, 2)))
        for chat, ids, offsets in zip(rendered, all_ids, all_offsets, strict=True)
    ]


def token_weights(text: str, spans: Sequence[WeightedRange], offsets: npt.NDArray[np.int64]) -> Floats:
    """Weight of each token: that of the span in which its last character lies.

    The last and not the first: " Hello" may begin with the template's space, and "\\n#" may end in the next turn's header. A token that
    joins visible characters before a span with the span's first ones is not trained: they may be a user's.
    """
    by_character = np.zeros(len(text) + 1, dtype=np.float32)  # by_character[end] for the character before `end`; 0 for an empty token at 0
    for start, end, weight in spans:
        by_character[start + 1 : end + 1] = weight
    weights = by_character[offsets[:, 1]]
    for start, _, _ in spans:
        for i in np.flatnonzero((offsets[:, 0] < start) & (offsets[:, 1] > start)):
            if text[offsets[i, 0] : start].strip():
                weights[i] = 0
    return weights


def _encode_segments(encoder: Encoder, segments: Segments) -> Encoded:
    """Each piece's own tokens one after another, as axolotl's `input_output` has them: what lies on both sides of a border stays apart."""
    parts = _ids(encoder.tokenizer, segments.texts)
    weights = [weight for part, weight in zip(parts, segments.weights, strict=True) for _ in part]
    characters = sum(len(text) for text, weight in zip(segments.texts, segments.weights, strict=True) if weight or encoder.train_all)
    return Encoded(_sample(encoder, [token for part in parts for token in part], np.array(weights, dtype=np.float32)), characters)


def _encode_texts(encoder: Encoder, texts: list[Text]) -> list[Sample]:
    """The prompt's tokens are those the model will see at inference: the joint text's where they begin with them, else its own."""
    prompts = _ids(encoder.tokenizer, [text.prompt for text in texts])
    wholes = _ids(encoder.tokenizer, [text.prompt + text.completion for text in texts])
    samples: list[Sample] = []
    for text, prompt, whole in zip(texts, prompts, wholes, strict=True):
        exact = whole[: len(prompt)] == prompt
        completion = whole[len(prompt) :] if exact else _ids(encoder.tokenizer, [text.completion])[0]
        eos = encoder.tokenizer.eos_token_id
        if isinstance(eos, int) and completion[-1:] != [eos]:
            completion = [*completion, eos]
        head = [*encoder.prefix_ids, *prompt]
        if (prompt or completion)[: len(encoder.prefix_ids)] == [*encoder.prefix_ids]:  # the text brings its own BOS
            head = prompt
        samples.append(_sample(encoder, head + completion, np.array([0.0] * len(head) + [1.0] * len(completion), dtype=np.float32)))
    return samples
