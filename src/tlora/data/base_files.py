"""Where the files of a base from the hub lie. The hub is asked once in a process, for the commit that a branch or tag names; what lies
whole in its cache is read from there, without a further request.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tlora.job import split_revision
from tlora.json_file import read_object
from tlora.link.log import note

_ASK_SECONDS = 5.0  # for the hub to name a commit: compute nodes often cannot reach it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def snapshot(base_model: str) -> Path | None:
    """The directory in the hub's cache with the config.json of a hub id, at the commit of its revision; None where it is not there, or
    `base_model` is a directory.
    """
    name, revision = split_revision(base_model)
    if Path(name).exists() or name.count("/") != 1:
        return None
    commit = revision if revision and _COMMIT.fullmatch(revision) else _commit(name, revision or "main", _cache_of(name))
    found = _cache_of(name) / "snapshots" / (commit or "")
    return found if commit and (found / "config.json").is_file() else None


def located(base_model: str, *, weights: bool = False) -> tuple[str, str | None]:
    """Name and revision for the libraries' `from_pretrained`: the snapshot's directory, where all is there that it needs; its `weights`,
    or its config and tokenizer.
    """
    found = snapshot(base_model)
    if found is not None and (_has_weights(found) if weights else any((found / name).is_file() for name in _TOKENIZERS)):
        return str(found), None
    return split_revision(base_model)


def _has_weights(directory: Path) -> bool:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return (directory / "model.safetensors").is_file()
    try:
        names = {str(name) for name in read_object(index)["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((directory / name).is_file() for name in names)


def _cache_of(name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


@cache
def _commit(name: str, revision: str, cached: Path) -> str | None:
    """As the hub says, else as it said last; None where neither is known, or the hub refuses."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        known = (cached / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        known = None
    if constants.HF_HUB_OFFLINE:
        return known
    try:
        return str(HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision, timeout=_ASK_SECONDS).sha)
    except (HfHubHTTPError, HFValidationError) as error:
        response = getattr(error, "response", None)
        if response is None or response.status_code < 500:
            return None  # it is gated, or not there: who loads it is told
        why = f"answers {response.status_code}"
    except Exception as error:  # whatever the client, a proxy or the network raises
        why = f"cannot be reached ({type(error).__name__})"
    if known is not None and (cached / "snapshots" / known / "config.json").is_file():
        note(f"the hub {why}: {name} is read from its cache, commit {known}, which {revision} named when it was last asked")
        return known
    return None
