"""Finds and downloads the files of a split of a hub data set, or of a local directory with the layout of one.

`datasets` knows which files belong to a configuration's split, `huggingface_hub` fetches them, and `rows.py` reads them, so that rows
are as in the files. Code that comes with a data set is never run. What was resolved is kept, so that a pinned commit needs no network
once its files are there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tlora import durable
from tlora.data.data_files import choose_splits
from tlora.data_directory import SUFFIX_LIST, data_suffix
from tlora.errors import DataError
from tlora.job import DataSource
from tlora.json_file import read_object

_TIMEOUT_SECONDS = 20.0  # for the first answer of the hub
_NO_SETTING = ("name", "version", "data_dir", "data_files", "description", "features")  # of a configuration: not about reading


@dataclass(frozen=True)
class HubFiles:
    """The files of one split, in reading order, and the commit that they are from."""

    files: tuple[Path, ...]
    commit: str


def fetch(source: DataSource, cache_dir: Path, hint: str = "") -> HubFiles:
    """The files of a data set `org/name`, downloaded into the hub's cache if they are not there.

    Raises DataError, with `hint` if the data set does not exist or the hub cannot be reached.
    """
    deciding = json.dumps([source.path, source.name, source.split])
    record = cache_dir / "hub" / f"{hashlib.sha256(deciding.encode()).hexdigest()[:32]}.json"
    earlier = _read_record(record)
    commit = source.revision if source.revision in earlier else _today(source, list(earlier), hint)
    if commit not in earlier:
        earlier[commit] = _resolve(source, commit)
        durable.make_directory(record.parent)
        durable.write_file(record, json.dumps(earlier))
    return HubFiles(tuple(_download(source, name, commit) for name in earlier[commit]), commit)


def _read_record(record: Path) -> dict[str, list[str]]:
    """The recorded files, by commit."""
    try:
        return cast("dict[str, list[str]]", read_object(record))
    except (OSError, ValueError):
        return {}


def _today(source: DataSource, fetched: list[str], hint: str) -> str:
    """The commit that the revision currently points to."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(HfApi().dataset_info(source.path, revision=source.revision, timeout=_TIMEOUT_SECONDS).sha)
    except GatedRepoError:
        why = "the hub gives this data set only to those who have accepted its terms; accept them there and set HF_TOKEN"
    except RevisionNotFoundError:
        why = f"the data set has no revision {source.revision!r}; give a branch, tag or commit that it has"
    except (RepositoryNotFoundError, HFValidationError):
        why = f"no such file or directory, and no such data set on the hub; correct the path{hint}, or set HF_TOKEN if it is private"
    except Exception as error:  # the client, a proxy or the network raise anything
        more = f", or write `revision: {fetched[-1]}`, which was fetched before" if fetched else ""
        why = (
            f"no such file or directory, and the hub cannot be asked for a data set of this name ({_line(error)}); correct the path{hint}, "
            f"see to the network{more}"
        )
    raise DataError(f"{source.path}: {why}") from None


def _resolve(source: DataSource, commit: str) -> list[str]:
    """Names of the split's files in the data set's repository."""
    start = f"hf://datasets/{source.path}@{commit}/"
    _, names = _files_of_split(source.path, source, commit)
    if outside := [name for name in names if not name.startswith(start)]:
        raise DataError(
            f"{source.called}: its file {outside[0]} is not in the data set itself; download what you need, and give the path of the files"
        )
    return [name.removeprefix(start) for name in names]


def _download(source: DataSource, name: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.path, name, repo_type="dataset", revision=commit))
    except Exception as error:
        raise DataError(
            f"{source.called}: {name} of commit {commit} cannot be fetched ({_line(error)}); see to the network and to free space, and "
            "start again: what has been fetched is kept"
        ) from None


def files_of_directory(directory: Path, source: DataSource) -> tuple[str, list[Path]]:
    """The split of a directory with the layout of a hub data set that `source` means, and its files. Raises DataError."""
    split, files = _files_of_split(str(directory), source, None)
    return split, [Path(name) for name in files]


def _files_of_split(path: str, source: DataSource, commit: str | None) -> tuple[str, list[str]]:
    with _torch_not_looked_for():
        from datasets import load_dataset_builder

        try:
            config = load_dataset_builder(path, source.name, revision=commit).config
        except Exception as error:  # many types, for a missing configuration as for a broken README.md
            raise DataError(
                f"{source.called}: it cannot be seen which files belong to it ({_line(error)}); "
                "check `name` and `split`, or give the paths of files"
            ) from None
    splits = {str(name): list(map(str, files)) for name, files in (config.data_files or {}).items()}
    chosen = choose_splits(source.called, list(splits), source.split)
    files = list(dict.fromkeys(file for split in chosen for file in splits[split]))
    plain = type(config)()
    fields = [field.name for field in dataclasses.fields(config) if field.name not in _NO_SETTING]
    if all(data_suffix(Path(name)) == ".tsv" for name in files) and getattr(config, "sep", None) == "\t":
        fields.remove("sep")  # is what the suffix says
    if settings := [name for name in fields if getattr(config, name) != getattr(plain, name)]:
        raise DataError(
            f"{source.called}: it is to be read with {settings[0]}: {getattr(config, settings[0])!r}, which is not supported; "
            "load it with datasets, save it with save_to_disk, and give that directory"
        )
    if unread := [name for name in files if not data_suffix(Path(name))]:
        raise DataError(
            f"{source.called}: {Path(unread[0]).name} is none of {SUFFIX_LIST}; "
            "load it with datasets, save it with save_to_disk, and give that directory"
        )
    return " and ".join(chosen), files


@contextmanager
def _torch_not_looked_for() -> Iterator[None]:
    """Hide the data worker's entry None for "torch" in sys.modules, which `datasets` would take for the library."""
    hidden = "torch" in sys.modules and sys.modules["torch"] is None
    if hidden:
        del sys.modules["torch"]
    try:
        yield
    finally:
        if hidden:
            sys.modules["torch"] = cast("None", None)  # type: ignore[assignment]


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
