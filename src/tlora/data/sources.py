"""Finds the files of the sources that a job names: local ones if the path exists, else those of a hub data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tlora.data.data_files import ALL_SPLITS, list_files
from tlora.data.hub import fetch, files_of_directory
from tlora.data_directory import files_below, may_have_splits, nearest_name
from tlora.errors import DataError
from tlora.job import DataSource, may_be_hub_data
from tlora.jobs_file.llama_factory import explain_folder


@dataclass(frozen=True)
class Source:
    """The files of one source in reading order. `called` is its name in messages, `commit` that of a hub data set, `notes` what a user
    should know of how its files were chosen.
    """

    called: str
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
        return Source(source.called, fetched.files, fetched.commit)
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
        return Source(source.called if given else str(path), tuple(files), notes=_notes(path, source, split, files))
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
        return [source.called]
    if has_layout(source, base_dir):
        return [source.called if source.split or source.name else str(path)]
    return [str(file) for file in list_files(path, source.split)]
