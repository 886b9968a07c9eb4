"""Loads a tokenizer and says which tokens end generation. Code that comes with a tokenizer is never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from tlora.data.base_files import located
from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FILES = ("generation_config.json", "config.json")  # the first that names any wins, as with transformers


def read_stop_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> frozenset[str]:
    """The texts of the stop tokens; `path` is a directory, or a hub id, whose files are looked up in the local cache only."""
    eos = tokenizer.eos_token
    stops = {eos} if isinstance(eos, str) else set[str]()
    for name in _FILES:
        file = _file(path, name)
        try:
            named = read_object(file).get("eos_token_id") if file is not None else None
        except (OSError, ValueError):
            continue  # a broken config is the base's error, which is raised where the base is loaded
        ids = [item for item in (named if isinstance(named, list) else [named]) if isinstance(item, int) and 0 <= item < len(tokenizer)]
        if ids:
            return frozenset(stops | set(cast("list[str]", tokenizer.convert_ids_to_tokens(ids))))
    return frozenset(stops)


def _file(path: str, name: str) -> Path | None:
    directory = Path(path)
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = split_revision(path)
    try:
        cached = try_to_load_from_cache(repository, name, revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


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
