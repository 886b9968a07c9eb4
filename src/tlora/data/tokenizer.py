"""Loads a tokenizer. Code that comes with one is never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tlora.data.base_files import located
from tlora.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_libraries() -> None:
    """What `load_tokenizer` imports, which takes a second or two."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory, or of a hub id (`org/name@revision` too). Raises ModelError."""
    from transformers import AutoTokenizer

    name, revision = located(path)
    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False))
    except Exception as error:  # transformers raises anything for a broken file
        why = " ".join(str(error).split())
        if "trust_remote_code" in why:
            raise ModelError(
                f"{path}: the tokenizer brings Python code of its own (auto_map in tokenizer_config.json), which is never run here. "
                "Use a base with a plain tokenizer.json, or remove auto_map and tokenizer_class where tokenizer.json is complete"
            ) from None
        raise ModelError(f"{path}: the tokenizer cannot be loaded ({why}); give a directory with tokenizer.json") from error
