"""A chat template that multiplies its text, needs all memory or never ends costs its own row an error that names the template."""

from __future__ import annotations

from typing import Any

import pytest

from tlora.data import chat_template
from tlora.data.chat import open_template, render
from tlora.data.formats import Chat
from tlora.errors import DataError

CHAT = Chat([{"role": "user", "content": "a" * 200}, {"role": "assistant", "content": "b"}], [0.0, 1.0])
TURN = "{{ m['role'] + ':' + m['content'] + eos_token }}"


def refuse(template: str, tokenizers: Any, chat: Chat = CHAT) -> str:
    with pytest.raises(DataError) as caught:
        render(open_template(tokenizers(None), template), chat, "x.jsonl, row 7")
    return str(caught.value)


def test_text_that_is_multiplied(tokenizers: Any) -> None:
    loop = f"{{% for m in messages %}}{TURN}{{% if 'aa' in m['content'] %}}{{{{ m['content'] * 9000 }}}}{{% endif %}}{{% endfor %}}"
    said = refuse(loop, tokenizers)
    assert (
        said.startswith("x.jsonl, row 7: the chat template refuses")
        and "it writes 1,800," in said
        and "a loop in it multiplies text" in said
    )


def test_a_long_chat_is_no_growth(tokenizers: Any) -> None:
    long = Chat([{"role": "user", "content": "a" * (2 << 20)}, {"role": "assistant", "content": "b"}], [0.0, 1.0])
    template = open_template(tokenizers(None), f"{{% for m in messages %}}{TURN}{{% endfor %}}")
    assert len(render(template, long, "row").text) > 2 << 20


def test_memory(tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data worker's bound on memory ends a rendering."""
    tokenizer = tokenizers(None)
    template = open_template(tokenizer)

    def exhausted(*_args: object, **_options: object) -> str:
        raise MemoryError

    monkeypatch.setattr(tokenizer, "apply_chat_template", exhausted)
    with pytest.raises(DataError, match=r"row 7: the chat template refuses .*needs more memory than there is"):
        render(template, CHAT, "row 7")


def test_a_loop_without_end(tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """10^15 rounds, which the sandbox allows: each range is below its bound."""
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 0.2)
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
    loop = f"{{% for m in messages %}}{TURN}{{% if 'aa' in m['content'] %}}{nested}{{% endif %}}{{% endfor %}}"
    said = refuse(loop, tokenizers)
    assert "it does not end: stopped after 0.2 s of processor time; look for a loop in it" in said
