"""Files and directories that survive a kill or a power cut whole or not at all; standard library only.

Owns the protocol: write under a temporary name, fsync, manifest, rename, fsync the parent, only then acknowledge, only then delete old
ones. What a checkpoint holds, and when one is due, is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TypeGuard, cast

from tlora.errors import CheckpointError
from tlora.manifest import MANIFEST, Files, find_damage, manifest_of, sha256, verify

Failpoint = Callable[
    [str], None
]  # called with a name between any two steps; what it raises ends the write, and tests kill the process in it

_LEFTOVER = re.compile(r"tmp-[0-9a-f]{32}")
_PREFIX = "checkpoint-"
_REPLACED = ".replaced"  # the old directory while a new one takes its name
_OS_ERROR = re.compile(r"os error ([0-9]{1,4})")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def no_failpoint(name: str) -> None:
    """A failpoint that does nothing."""


def make_directory(path: Path) -> None:
    """Make `path` and its missing parents so that they survive a power cut; fine if it exists, or another thread makes it meanwhile."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
        sync(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def write_directory(final: Path, write: Callable[[Path], Mapping[str, str] | None], *, failpoint: Failpoint = no_failpoint) -> None:
    """Make the directory `final` hold the plain files that `write(temporary)` writes, and a manifest of them.

    `write` may return sha256 digests by file name (`write_pieces` computes them on the way); the other files are read again for
    theirs. When this returns, it survives a power cut. At every moment before, `final` is what it was: absent, or its old self,
    which `newest_verified` and `clean` put back if the end comes between the two renames. On an error (disk full, no
    permission) the temporary directory is gone and CheckpointError says what to do.
    """
    temporary = _beside(final)
    try:
        _settle(final)
        temporary.mkdir()
        failpoint("made the temporary directory")
        digests = write(temporary) or {}
        failpoint("wrote the files")
        write_manifest(temporary, digests, failpoint)
        failpoint("synced the temporary directory")
        _put_in_place(temporary, final, failpoint)
    except BaseException as error:
        _give_up(temporary, final)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise write_error(final, error) from error
        code = _OS_ERROR.search(str(error))  # safetensors reports a full disk in an exception of its own
        if code and int(code[1]) in _NO_SPACE:
            raise write_error(final, OSError(int(code[1]), os.strerror(int(code[1])))) from error
        raise


def link_file(source: Path, path: Path, *, failpoint: Failpoint = no_failpoint) -> None:
    """Make `path` the same file as `source`, atomically, and a copy where the file system has no hard links."""
    temporary = _beside(path)
    try:
        try:
            temporary.hardlink_to(source)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise
            shutil.copyfile(source, temporary)
        sync(temporary)
        failpoint(f"linked {path.name}")
        temporary.replace(path)
        failpoint("renamed")
        _remove(temporary)  # a rename onto the same file does nothing
        sync(path.parent)
    except OSError as error:
        _give_up(temporary, path)
        raise write_error(path, error) from error


def write_manifest(directory: Path, digests: Mapping[str, str] | None = None, failpoint: Failpoint = no_failpoint) -> None:
    """Fsync the plain files in `directory` and write a manifest of their sizes and hashes, for `find_damage` and `verify`. `digests`: the
    sha256 of those files that need not be read for it.
    """
    known, files = digests or {}, Files()
    for path in sorted(directory.iterdir()):
        assert path.is_file() and path.name != MANIFEST, f"{path}: only plain files belong into a durable directory"
        sync(path)
        failpoint(f"synced {path.name}")
        files[path.name] = {"bytes": path.stat().st_size, "sha256": known.get(path.name) or sha256(path)}
    _write_synced(directory / MANIFEST, manifest_of(files), failpoint)
    sync(directory)


def _put_in_place(temporary: Path, final: Path, failpoint: Failpoint) -> None:
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        try:
            verify(final)
        except CheckpointError:
            set_aside(final)
            failpoint("set the damaged one aside")
        else:
            if (final / MANIFEST).read_bytes() == (temporary / MANIFEST).read_bytes():
                sync(final.parent)  # the process that renamed it may have been killed before this
                failpoint("kept the equal one")
                _remove(temporary)
                return
            final.rename(replaced)
            failpoint("moved the old one")
    temporary.rename(final)
    failpoint("renamed")
    sync(final.parent)
    failpoint("synced the parent")
    if replaced.exists():
        _remove(replaced)
        failpoint("removed the old one")


def _give_up(temporary: Path, final: Path) -> None:
    """Undo as far as the file system allows; the first error is the one to report."""
    with contextlib.suppress(OSError):
        _remove(temporary)
    with contextlib.suppress(OSError):
        _settle(final)


def newest_verified(parent: Path) -> tuple[Path | None, list[str]]:
    """The directory `parent/checkpoint-<step>` of the highest step that verifies, or None, and notes on those that do not.

    Directories that fail are renamed `bad-…`: they are not tried again, and stay for inspection.
    """
    notes: list[str] = []
    try:
        _settle_all(parent)
        paths = _by_step(parent)
    except OSError as error:
        raise write_error(parent, error) from error
    for path in paths:
        try:
            verify(path)
        except CheckpointError as error:
            try:
                notes.append(f"{path.name} is damaged and set aside as {set_aside(path).name}: {error}")
            except OSError as cannot:
                notes.append(f"{path.name} is damaged and skipped (it cannot be renamed: {cannot.strerror}): {error}")
        else:
            return path, notes
    return None, notes


def older_verified(parent: Path, newest: Path) -> Generator[Path]:
    """The directories that verify below the step of `newest`, highest first. Nothing is renamed."""
    paths = _by_step(parent)
    for path in paths[paths.index(newest) + 1 :] if newest in paths else []:
        if find_damage(path) is None:
            yield path


def find_verified(parent: Path) -> Path | None:
    """As `newest_verified`, but nothing is renamed, for a look at a directory that another run may hold.

    A replacement that was cut short counts by its old directory, whose name then still ends with `.replaced`.
    """
    try:
        checkpoints = _by_step(parent, suffix=f"(?:{re.escape(_REPLACED)})?")
        return next((path for path in checkpoints if find_damage(path) is None), None)
    except OSError:
        return None


def prune(parent: Path, keep: int | None, protect: set[str], *, whole: str | None = None, failpoint: Failpoint = no_failpoint) -> None:
    """Delete all but the newest `keep` checkpoints (None: all stay) and those named in `protect`.

    Call it after the newest is acknowledged, and with its name as `whole`: it stays. Without a name, they are read to find the newest
    that verifies.
    """
    assert keep is None or keep >= 1, f"keep {keep} checkpoints"
    if keep is None:
        return
    paths = _by_step(parent)
    kept = whole or next((path.name for path in paths if find_damage(path) is None), "")
    remove_checkpoints(parent, {*protect, kept, *(path.name for path in paths[:keep])}, failpoint=failpoint)


def remove_checkpoints(parent: Path, keep: set[str], *, failpoint: Failpoint = no_failpoint) -> bool:
    """Delete all checkpoints but those named in `keep`; False when there are no others. Each is renamed before it is emptied, so no
    half-deleted one is ever taken for a checkpoint.
    """
    doomed = [path for path in _by_step(parent) if path.name not in keep]
    if not doomed:
        return False
    try:
        leftovers = [_beside(path) for path in doomed]
        for path, leftover in zip(doomed, leftovers, strict=True):
            path.rename(leftover)
            failpoint(f"renamed {path.name}")
        sync(parent)
        failpoint("synced the parent")
        for leftover in leftovers:
            _remove(leftover)
            failpoint("removed one")
    except OSError as error:
        raise write_error(parent, error) from error
    return True


def is_full(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether an error, or the cause of this module's CheckpointError, is a full disk or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def scratch_path(directory: Path) -> Path:
    """A name in `directory` that `is_leftover` knows."""
    return directory / f"tmp-{uuid.uuid4().hex}"


@contextlib.contextmanager
def scratch_directory(directory: Path) -> Generator[Path]:
    """A temporary directory in `directory`, removed at the end. Raises CheckpointError for errors of the file system in the block."""
    scratch = scratch_path(directory)
    try:
        scratch.mkdir()
        yield scratch
    except OSError as error:
        raise error if isinstance(error, CheckpointError) else write_error(directory, error) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(scratch)


def is_leftover(path: Path) -> bool:
    """Whether `path` has the name of a temporary file or directory that a killed process leaves behind."""
    return _LEFTOVER.fullmatch(path.name) is not None


def clean(parent: Path) -> None:
    """Remove what a killed process left behind in `parent`: temporary files and directories, unfinished replacements."""
    try:
        _settle_all(parent)
        for path in sorted(parent.iterdir()):
            if is_leftover(path):
                _remove(path)
    except OSError as error:
        raise write_error(parent, error) from error


def write_file(path: Path, content: bytes | str, *, mode: int = 0o666, failpoint: Failpoint = no_failpoint) -> None:
    """Make the file `path` hold `content` (text as UTF-8): the old or the new content at every moment, the new on return. It has the
    permissions `mode`, without those that the umask takes away, from its first byte on.
    """
    temporary = _beside(path)
    try:
        _write_synced(temporary, content.encode() if isinstance(content, str) else content, failpoint, mode)
        temporary.replace(path)
        failpoint("renamed")
        sync(path.parent)
    except OSError as error:
        _give_up(temporary, path)
        raise write_error(path, error) from error


def truncate_rows(path: Path, keep: Callable[[dict[str, object]], bool]) -> tuple[int, int]:
    """Rewrite a file of JSON lines with the rows that `keep` accepts, without a last line torn by a kill.

    No file is no rows. Rows that stay keep their bytes. Returns how many stay, and how many others were damaged: a torn last line, which
    a kill leaves, is not one of them.
    """
    if not path.exists():
        return 0, 0
    try:
        old = path.read_bytes()
    except OSError as error:
        raise write_error(path, error) from error
    *lines, torn = old.split(b"\n")
    rows = [(line, _row(line)) for line in lines if line.strip()]
    kept = [line for line, row in [*rows, (torn, _row(torn))] if row is not None and keep(row)]
    new = b"".join(line + b"\n" for line in kept)
    if new != old:
        write_file(path, new)
    return len(kept), sum(row is None for _, row in rows)


def _row(line: bytes) -> dict[str, object] | None:
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, object], row) if isinstance(row, dict) else None


def write_error(path: Path, error: OSError) -> CheckpointError:
    """What could not be written, why, and what helps; with the error's number, by which `is_full` knows a full disk."""
    if error.errno in _NO_SPACE:
        remedy = "free some space there"
    elif error.errno in _NO_PERMISSION:
        remedy = "make the directory writable for this user"
    else:
        remedy = "check the path and its file system"
    failure = CheckpointError(f"cannot write {path}: {error.strerror or error}. Remedy: {remedy}")
    failure.errno = error.errno
    return failure


def newest_step(parent: Path) -> int:
    """The step of the newest checkpoint in `parent`, which is not verified; 0 without one."""
    return next((int(path.name.removeprefix(_PREFIX)) for path in _by_step(parent)), 0)


def _by_step(parent: Path, suffix: str = "") -> list[Path]:
    """Directories `checkpoint-<step><suffix>` (a pattern), highest step first."""
    pattern = re.compile(_PREFIX + r"([0-9]{1,18})" + suffix, re.ASCII)
    matches = [(int(match[1]), path) for path in _entries(parent) if (match := pattern.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(matches, reverse=True)]


def _entries(parent: Path) -> Iterable[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else ()


def _settle_all(parent: Path) -> None:
    for path in _entries(parent):
        if path.name.endswith(_REPLACED):
            _settle(path.with_name(path.name.removesuffix(_REPLACED)))


def _settle(final: Path) -> None:
    """End a replacement that was cut short: with the new directory if it is in place and whole, else with the old one."""
    replaced = final.with_name(final.name + _REPLACED)
    if not replaced.exists():
        return
    if final.exists() and find_damage(final) is not None:
        set_aside(final)
    if final.exists():
        sync(final.parent)
        _remove(replaced)
    else:
        replaced.rename(final)
        sync(final.parent)


def set_aside(path: Path, mark: str = "bad") -> Path:
    """Rename `path` to `<mark>-…` in the same directory, for inspection; returns the new path."""
    aside = path.with_name(f"{mark}-{path.name}")
    if aside.exists():
        aside = path.with_name(f"{mark}-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(aside)
    return aside


def _beside(path: Path) -> Path:
    return scratch_path(path.parent)


def _write_synced(path: Path, content: bytes, failpoint: Failpoint, mode: int = 0o666) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        failpoint(f"created {path.name}")
        file.write(content)
        file.flush()
        failpoint(f"wrote {path.name}")
        os.fsync(file.fileno())
    failpoint(f"synced {path.name}")


def sync(path: Path) -> None:
    """Put the file, or the names in the directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or a directory with all it holds; fine if it is not there."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for entry in path.iterdir():
        _remove(entry)
    path.rmdir()
