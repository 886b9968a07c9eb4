"""Tokenizers and text for the tests of the data room."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, SENTENCES, make_tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> Callable[..., Any]:
    """`make_tokenizer`, each kind made once."""
    made: dict[tuple[Any, ...], Any] = {}

    def find(template: str | None = None, adds_bos: bool = False, metaspace: bool = False, eos: str | None = "</s>") -> Any:
        key = (template, adds_bos, metaspace, eos)
        if key not in made:
            made[key] = make_tokenizer(*key)
        return made[key]

    return find


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved ChatML tokenizer, for what runs in a process of its own."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(path)
    end = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    (path / "generation_config.json").write_text(json.dumps(end), encoding="utf-8")
    return path


@pytest.fixture
def chatter() -> Callable[[int], str]:
    """Short random text; the same for the same number."""

    def talk(number: int) -> str:
        generator = random.Random(number)
        words = " ".join(SENTENCES).split()
        return " ".join(generator.choice(words) for _ in range(generator.randint(1, 9)))

    return talk
