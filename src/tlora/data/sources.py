"""Finds the files of the sources that a job names: local ones if the path exists, else those of a hub data set."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tlora import durable
from tlora.data_directory import SUFFIX_LIST, check_kind, check_link, data_suffix, files_below, may_have_splits, nearest_name
from tlora.errors import DataError
from tlora.job import DataSource, may_be_hub_data
from tlora.jobs_file.other_trainers import explain_folder
from tlora.json_file import read_object

SUFFIXES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
ALL_SPLITS = "all"  # a split's name in `datasets`, for every one of them


def list_files(path: Path, split: str | None = None) -> list[Path]:
    """The data files behind `path` in reading order: itself, those directly in a directory by name (and below it for the split "all"), or
    the arrow files of a saved set's `split`.

    Text files of a directory are read only if it holds no other data: they are often notes about it. Raises DataError.
    """
    check_link(path)
    if not path.exists():
        near = nearest_name(path)
        hint = f"did you mean {near!r}?" if near else "give a file or directory that exists, or a data set of the hub as org/name"
        raise DataError(f"{path}: no such file or directory; {hint}")
    if path.is_file():
        if not data_suffix(path):
            kind = f"unknown file type {path.suffix!r}" if path.suffix else "its name has no ending that says what it holds"
            raise DataError(f"{path}: {kind}; rename or convert it to one of {SUFFIX_LIST}")
        return [path]
    check_kind(path)
    if (path / "dataset_dict.json").exists():
        return [file for part in _splits_of(path, split) for file in list_files(part)]
    if (path / "state.json").exists():
        return _saved_files(path)
    files = [file for file in files_below(path) if file.name[0] != "_" and (split == ALL_SPLITS or file.parent == path)]
    if not files:
        raise DataError(f"{path}: the directory holds no data file; put files there that end in one of {SUFFIX_LIST}")
    return [file for file in files if SUFFIXES[data_suffix(file)] != "text"] or files


def _splits_of(path: Path, split: str | None) -> list[Path]:
    splits = _saved_json(path / "dataset_dict.json").get("splits")
    return [path / name for name in choose_splits(str(path), [str(name) for name in splits] if isinstance(splits, list) else [], split)]


def choose_splits(display_name: str, names: Sequence[str], split: str | None) -> list[str]:
    """`split`, or else "train", or else the only one of `names`; each of them for "all", as `datasets` has it. Raises DataError."""
    if split == ALL_SPLITS and names:
        return list(names)
    chosen = split or ("train" if "train" in names else names[0] if len(names) == 1 else None)
    if chosen is not None and chosen in names:
        return [chosen]
    known = f"its splits are {', '.join(names) or 'none'}"
    wrong = f"{split!r} is no split of it, {known}" if split else known
    raise DataError(f"{display_name}: {wrong}; name one of them: `split: {names[0] if names else 'train'}`, whole, without a slice")


def _saved_files(path: Path) -> list[Path]:
    entries = _saved_json(path / "state.json").get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    files = [path / Path(str(name)).name for name in names]  # the name only: a saved set never points out of its directory
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        raise DataError(f"{path}: a saved set without {missing or 'data files'}; save it again with save_to_disk")
    return files


def _saved_json(file: Path) -> dict[str, object]:
    try:
        return read_object(file)
    except ValueError as error:
        raise DataError(f"{file}: broken JSON ({error}); save the set again with save_to_disk") from error


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
            f"{source.display_name}: its file {outside[0]} is not in the data set itself; download what you need, "
            "and give the path of the files"
        )
    return [name.removeprefix(start) for name in names]


def _download(source: DataSource, name: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.path, name, repo_type="dataset", revision=commit))
    except Exception as error:
        raise DataError(
            f"{source.display_name}: {name} of commit {commit} cannot be fetched ({_line(error)}); see to the network and to free space, "
            "and start again: what has been fetched is kept"
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
                f"{source.display_name}: it cannot be seen which files belong to it ({_line(error)}); "
                "check `name` and `split`, or give the paths of files"
            ) from None
    splits = {str(name): list(map(str, files)) for name, files in (config.data_files or {}).items()}
    chosen = choose_splits(source.display_name, list(splits), source.split)
    files = list(dict.fromkeys(file for split in chosen for file in splits[split]))
    plain = type(config)()
    fields = [field.name for field in dataclasses.fields(config) if field.name not in _NO_SETTING]
    if all(data_suffix(Path(name)) == ".tsv" for name in files) and getattr(config, "sep", None) == "\t":
        fields.remove("sep")  # is what the suffix says
    if settings := [name for name in fields if getattr(config, name) != getattr(plain, name)]:
        raise DataError(
            f"{source.display_name}: it is to be read with {settings[0]}: {getattr(config, settings[0])!r}, which is not supported; "
            "load it with datasets, save it with save_to_disk, and give that directory"
        )
    if unread := [name for name in files if not data_suffix(Path(name))]:
        raise DataError(
            f"{source.display_name}: {Path(unread[0]).name} is none of {SUFFIX_LIST}; "
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


@dataclass(frozen=True)
class Source:
    """The files of one source in reading order. `display_name` is that of messages, `commit` that of a hub data set, `notes` what a user
    should know of how its files were chosen.
    """

    display_name: str
    files: tuple[Path, ...]
    commit: str | None = None
    notes: tuple[str, ...] = ()


_MOST_NAMED = 5


def is_on_hub(source: DataSource, base_dir: Path) -> bool:
    """Whether the source is a data set of the hub: no file is at its path, and it is written like a hub id."""
    return may_be_hub_data(source.path) and not (base_dir / source.path).exists()


def open_source(source: DataSource, base_dir: Path, cache_dir: Path) -> Source:
    """Find the files of `source`, and fetch those of the hub. Relative paths are under `base_dir`. Raises DataError."""
    if is_on_hub(source, base_dir):
        fetched = fetch(source, cache_dir, _hint(source, base_dir))
        return Source(source.display_name, fetched.files, fetched.commit)
    path = base_dir / source.path
    if answer := explain_folder(path):
        raise DataError(answer)
    has_splits, is_saved = (path / "dataset_dict.json").exists(), (path / "state.json").exists()
    is_layout = path.is_dir() and not has_splits and not is_saved
    meaning = {"revision": False, "name": is_layout, "split": is_layout or has_splits}  # of each key, for such a path
    given = [key for key in meaning if getattr(source, key) is not None]
    if path.exists() and (wrong := [key for key in given if not meaning[key]]):
        kind = "a file" if path.is_file() else "a set saved with save_to_disk" if is_saved or has_splits else "a local directory"
        raise DataError(f"{path}: {wrong[0]} {getattr(source, wrong[0])!r} has no meaning for {kind}; remove {wrong[0]}")
    if has_layout(source, base_dir):
        split, files = files_of_directory(path, source)
        return Source(source.display_name if given else str(path), tuple(files), notes=_notes(path, source, split, files))
    return Source(str(path), tuple(list_files(path, source.split)))


def has_layout(source: DataSource, base_dir: Path) -> bool:
    """Whether a local source is a directory whose files are to be found as those of a hub data set: a configuration or a split is named, or
    the directory may define splits, or all its files lie below it. `datasets`, whose import takes seconds, is asked only then.
    """
    path = base_dir / source.path
    if not path.is_dir() or (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return False
    if source.split == ALL_SPLITS and source.name is None:
        return False
    return bool(source.split or source.name) or may_have_splits(path)


def _notes(directory: Path, source: DataSource, split: str, files: Sequence[Path]) -> tuple[str, ...]:
    """Notes on a directory whose split was not named: what is read of it, and what is not."""
    used = {file.resolve() for file in files}
    unread = [file.relative_to(directory).as_posix() for file in files_below(directory) if file.resolve() not in used]
    if source.split is not None or not unread:
        return ()
    more = f" and {len(unread) - _MOST_NAMED} more" if len(unread) > _MOST_NAMED else ""
    return (
        f"{directory}: split {split} is read, as of a data set of the hub, and not {', '.join(unread[:_MOST_NAMED])}{more}; "
        f"`split` names another, and `split: {ALL_SPLITS}` reads every file",
    )


def _hint(source: DataSource, base_dir: Path) -> str:
    """A hint for a name like a hub data set's whose first part is a local directory: the path of a file may be meant."""
    path = base_dir / source.path
    if not path.parent.is_dir():
        return ""
    near = nearest_name(path)
    return f" (did you mean {str(path.parent / near)!r}?)" if near else f" (the directory {str(path.parent)!r} holds no {path.name!r})"


def shown_files(sources: Sequence[DataSource], base_dir: Path) -> list[str]:
    """The names of the sources' files for messages, without asking the hub. Raises DataError."""
    return [name for source in sources for name in _shown(source, base_dir)]


def _shown(source: DataSource, base_dir: Path) -> list[str]:
    path = base_dir / source.path
    if is_on_hub(source, base_dir):
        return [source.display_name]
    if has_layout(source, base_dir):
        return [source.display_name if source.split or source.name else str(path)]
    return [str(file) for file in list_files(path, source.split)]
