"""A chat template and how it is rendered: one call, its limits and its error.

Owns no knowledge of turns (`turns.py`) and does not change a chat (`chat.py`).
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from tlora.data.examples import Message
from tlora.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tlora.data.turns import Plan

Tools = Sequence[object] | None
# A template is a program. Real ones write the chat, the tools and headings; 64 times that and a MiB leaves room for any of them.
_MOST_GROWTH = 64
_FREE_CHARACTERS = 1 << 20
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MOST_SECONDS = 60.0  # of processor time for one rendering; a row of a million characters takes less than one


@dataclass(frozen=True)
class Template:
    """A chat template and the properties that rendering a short chat has shown."""

    tokenizer: PreTrainedTokenizerBase
    source: str | None  # None: the tokenizer's own
    kwargs: Mapping[str, object] = field(default_factory=dict)  # the job's; a row's win over them
    stops: frozenset[str] = frozenset()  # tokens that end generation with this base
    added_tokens: frozenset[str] = frozenset()  # of the tokenizer: each is one token wherever it stands
    generation_prompt: str = ""  # what opens an assistant turn; "" if the template has no such thing
    end_of_turn: str = ""  # what closes one
    folds_system: bool = False  # it has no system turn: the text goes before the first user turn's
    knows_tools: bool = True  # else tools stand in the system turn, calls and results as text
    marks_generation: bool = False  # its author marks what the model writes
    text_arguments: bool = False  # it writes the arguments of calls as they stand, so they must be JSON in a string
    plans: dict[str, Plan] = field(default_factory=dict, compare=False, repr=False)  # by chat with placeholders: see turns.py

    def text(self) -> str:
        """The template's source, for cache keys and reports."""
        own = self.tokenizer.chat_template
        return self.source or (own if isinstance(own, str) else json.dumps(own, sort_keys=True))


class RenderError(Exception):
    """The template raised, or grew beyond its limits; the text says which."""


def has_generation_marks(source: str) -> bool:
    """Whether a template marks what the model writes: `{% generation %}` ... `{% endgeneration %}`."""
    return _GENERATION.search(source) is not None


def render_messages(
    template: Template, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, object], add_generation_prompt: bool = False
) -> str:
    """The messages as the template writes them. Raises RenderError."""

    def write() -> str:
        return template.tokenizer.apply_chat_template(  # type: ignore[return-value]
            cast("list[dict[str, str]]", messages),
            tools=cast("list[dict[str, object]] | None", tools),  # type: ignore[arg-type]
            chat_template=template.source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **{**template.kwargs, **kwargs},  # type: ignore[arg-type]
        )

    return _within_limits(write, template, messages, tools)


def render_generation(
    template: Template, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, object]
) -> tuple[str, list[tuple[int, int]]]:
    """As `render_messages`, with the blocks of characters that the template marks as written by the model. Raises RenderError."""
    from transformers.utils.chat_template_utils import render_jinja_template

    blocks: list[tuple[int, int]] = []

    def write() -> str:
        source = template.tokenizer.get_chat_template(template.source, cast("list[dict[str, object]] | None", tools))  # type: ignore[arg-type]
        texts, blocks_by_chat = render_jinja_template(
            conversations=[list(messages)],  # type: ignore[list-item]
            tools=cast("list[dict[str, object]] | None", tools),  # type: ignore[arg-type]
            chat_template=source,
            return_assistant_tokens_mask=True,
            **{**template.tokenizer.special_tokens_map, **template.kwargs, **kwargs},
        )
        blocks.extend((start, end) for start, end in blocks_by_chat[0] if end > start)  # type: ignore[misc]
        return texts[0]

    return _within_limits(write, template, messages, tools), blocks


def _within_limits(write: Callable[[], str], template: Template, messages: Sequence[Message], tools: Tools) -> str:
    try:
        with _bounded_time():
            text = write()
    except MemoryError:
        raise RenderError("it needs more memory than there is: a loop in it multiplies its own text") from None
    except Exception as error:  # templates are programs and may raise anything
        raise RenderError(str(error) or type(error).__name__) from error
    assert isinstance(text, str), type(text)
    if len(text) > _FREE_CHARACTERS:
        given = len(template.text()) + _characters(messages) + _characters(tools)
        if len(text) > _FREE_CHARACTERS + _MOST_GROWTH * given:
            raise RenderError(f"it writes {len(text):,} characters for {given:,} of chat, tools and template: a loop in it multiplies text")
    return text


def refusal(place: str, messages: Sequence[Message], error: RenderError) -> DataError:
    """The error of a row whose chat the template does not write."""
    roles = ", ".join(str(message["role"]) for message in messages[:12]) + (", ..." if len(messages) > 12 else "")
    return DataError(f"{place}: the chat template refuses the roles {roles} ({error}); change the row or give the job a chat_template")


class _OverTimeError(Exception):
    """A rendering took more processor time than any honest template needs."""


def _end_rendering(signal_number: int, frame: object) -> None:
    raise _OverTimeError(f"it does not end: stopped after {_MOST_SECONDS:g} s of processor time; look for a loop in it")


@contextlib.contextmanager
def _bounded_time() -> Iterator[None]:
    """Interrupt a rendering that does not end. Counts processor time, which does not depend on the machine's load."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGVTALRM) is not _end_rendering:
        signal.signal(signal.SIGVTALRM, _end_rendering)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _characters(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str)) if value else 0
