"""Locates the files of a base from the hub. The hub is asked once per process, for the commit that a branch or tag names; what is
complete in its cache is read from there, without a further request.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.json_file import read_object
from tlora.link.log import note

_ASK_SECONDS = 5.0  # for the hub to name a commit: compute nodes often cannot reach it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def snapshot(base_model: str) -> Path | None:
    """The directory in the hub's cache with the config.json of a hub id, at the commit of its revision; None if it is not there, or
    `base_model` is a directory.
    """
    name, revision = split_revision(base_model)
    if Path(name).exists() or name.count("/") != 1:
        return None
    from huggingface_hub import constants

    if revision and _COMMIT.fullmatch(revision):
        commit = revision
    else:  # offline nothing is asked, and the file may change
        branch, cached = revision or "main", cache_of(name)
        commit = _known_commit(branch, cached) if constants.HF_HUB_OFFLINE else ask_commit(name, branch, cached).commit
    directory = cache_of(name) / "snapshots" / (commit or "")
    return directory if commit and (directory / "config.json").is_file() else None


def located(base_model: str, *, weights: bool = False) -> tuple[str, str | None]:
    """Name and revision for the libraries' `from_pretrained`: the snapshot's directory if it has all that is needed, which is its
    `weights`, or its config and tokenizer.
    """
    directory = snapshot(base_model)
    if directory is not None and (has_weights(directory) if weights else has_tokenizer(directory)):
        return str(directory), None
    return split_revision(base_model)


def has_tokenizer(directory: Path) -> bool:
    """Whether a snapshot has the files of a tokenizer."""
    return any((directory / name).is_file() for name in _TOKENIZERS)


def has_weights(directory: Path) -> bool:
    """Whether a snapshot has each of its weight files."""
    try:
        names = weight_names({path.name for path in directory.iterdir() if path.is_file()}, directory.joinpath)
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return bool(names) and all((directory / name).is_file() for name in names)


def weight_names(files: Container[str], read: Callable[[str], Path]) -> tuple[str, ...]:
    """The weight files that transformers takes of a base with these `files`, in its order of preference: safetensors before .bin.

    `read`: where an index lies. Raises what an index raises that cannot be read.
    """
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if whole in files:
            return (whole,)
        if (index := f"{whole}.index.json") in files:
            return tuple(sorted({str(name) for name in read_object(read(index))["weight_map"].values()}))
    return ()


def cache_of(base_model: str) -> Path:
    """The directory of a hub id in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{split_revision(base_model)[0].replace('/', '--')}"


def _known_commit(revision: str, cached: Path) -> str | None:
    """The commit that the hub named last."""
    try:
        return (cached / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def refuse_mistyped(base_model: str) -> None:
    """Raise ModelError for a name that lies in a local directory and is not there while the hub does not answer: it may be a mistyped path,
    and a library would ask the hub for half a minute. Where the hub answers, `base_model` may be a hub id.
    """
    from huggingface_hub import constants

    name, revision = split_revision(base_model)
    path = Path(name)
    looks_local = name.count("/") == 1 and path.parent.is_dir() and not path.exists()
    if not looks_local or constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision or "") or snapshot(base_model) is not None:
        return
    if fault := ask_commit(name, revision or "main", cache_of(name)).fault:
        close = difflib.get_close_matches(path.name, [file.parent.name for file in path.parent.glob("*/config.json")], n=1)
        meant = f" (is it {path.parent / close[0]}?)" if close else ""
        raise ModelError(
            f"base_model {base_model}: {path.parent} has no such directory, and the hub {fault}. Correct the path{meant}, or check the "
            "connection if it is a hub id"
        )


@dataclass(frozen=True)
class HubAnswer:
    """`fault`: why the hub gave no answer, as in "the hub cannot be reached"; "" where it did."""

    commit: str | None
    fault: str = ""


@cache
def ask_commit(name: str, revision: str, cached: Path) -> HubAnswer:
    """The commit that the hub names, else the one that it named last; None if neither is known, or the hub refuses."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    known = _known_commit(revision, cached)
    try:
        return HubAnswer(str(HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision, timeout=_ASK_SECONDS).sha))
    except (HfHubHTTPError, HFValidationError) as error:
        response = getattr(error, "response", None)
        if response is None or response.status_code < 500:
            return HubAnswer(None)  # it is gated, or not there: loading it raises the error
        why = f"answers {response.status_code}"
    except Exception as error:  # the client, a proxy or the network raise anything
        why = f"cannot be reached ({type(error).__name__})"
    if known is not None and (cached / "snapshots" / known / "config.json").is_file():
        note(f"the hub {why}: {name} is read from its cache, commit {known}, which {revision} named when it was last asked")
        return HubAnswer(known, why)
    return HubAnswer(None, why)
