"""The kinds of examples that rows become: a chat, a text, labelled segments of text, token ids, or a pair of two answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Message = dict[str, object]


@dataclass(frozen=True)
class Note:
    """A note on a row for the user: `what` is the kind, in words; `example` a value of the row."""

    what: str
    example: str


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template takes them (`content` always a string), the loss weight of each, and values for the template."""

    messages: list[Message]
    weights: list[float]
    tools: list[object] | None = None
    notes: tuple[Note, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """Plain text: `completion` is trained, `prompt` is not."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Segments:
    """Pieces of text, each tokenized by itself and with its loss weight; no special token is added."""

    texts: list[str]
    weights: list[float]


@dataclass(frozen=True)
class Tokens:
    """Token ids as given, with a loss weight each."""

    input_ids: list[int]
    weights: list[float]


Example = Chat | Text | Segments | Tokens


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; only the answers are trained."""

    chosen: Chat | Text
    rejected: Chat | Text


@dataclass(frozen=True)
class Labelled:
    """An answer to a prompt, and whether it is wanted; only the answer is trained."""

    example: Chat | Text
    wanted: bool
