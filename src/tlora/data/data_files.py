"""Which local files are behind a path: itself, those of a directory, or those of a set saved with `save_to_disk`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlora.data_directory import SUFFIX_LIST, check_link, data_suffix, files_below, nearest_name
from tlora.errors import DataError
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
            raise DataError(f"{path}: unknown file type {path.suffix!r}; rename or convert it to one of {SUFFIX_LIST}")
        return [path]
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


def choose_splits(called: str, names: Sequence[str], split: str | None) -> list[str]:
    """`split`, or else "train", or else the only one of `names`; each of them for "all", as `datasets` has it. Raises DataError."""
    if split == ALL_SPLITS and names:
        return list(names)
    chosen = split or ("train" if "train" in names else names[0] if len(names) == 1 else None)
    if chosen is not None and chosen in names:
        return [chosen]
    known = f"its splits are {', '.join(names) or 'none'}"
    wrong = f"{split!r} is no split of it, {known}" if split else known
    raise DataError(f"{called}: {wrong}; name one of them: `split: {names[0] if names else 'train'}`, whole, without a slice")


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
