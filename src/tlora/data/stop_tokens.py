"""The tokens that end generation with a base: its tokenizer's EOS, and those in generation_config.json and config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

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
