"""The durable protocol under kills, power cuts, full disks and rot."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.durable_files import FILES, content, holds, names, writer
from tests.small_disks import mounted
from tlora import durable, manifest
from tlora.durable import (
    clean,
    find_verified,
    is_full,
    link_file,
    make_directory,
    newest_verified,
    prune,
    truncate_rows,
    verify,
    write_directory,
    write_file,
)
from tlora.errors import CheckpointError
from tlora.manifest import MANIFEST

# --- what it does when nothing goes wrong ---------------------------------------------------------------------------


def test_a_directory_is_written_with_its_manifest_and_verifies(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-10"
    write_directory(final, writer("a"))
    assert names(tmp_path) == ["checkpoint-10"]
    assert names(final) == sorted([*FILES, MANIFEST])
    entries = json.loads((final / MANIFEST).read_text())["files"]
    assert {name: entry["bytes"] for name, entry in entries.items()} == {name: 900 + len(name) for name in FILES}
    verify(final)
    (final / "notes.txt").write_text("mine")
    verify(final)  # what the manifest does not name is nobody's business
    assert newest_verified(tmp_path) == (final, [])


@pytest.mark.parametrize("old", ["same", "other", "damaged", "no manifest"])
def test_an_existing_directory_is_replaced(tmp_path: Path, old: str) -> None:
    final = tmp_path / "checkpoint-10"
    write_directory(final, writer("new" if old == "same" else "old"))
    if old == "damaged":
        (final / FILES[0]).write_bytes(b"rot")
    if old == "no manifest":
        (final / MANIFEST).unlink()
    inode = final.stat().st_ino
    write_directory(final, writer("new"))
    verify(final)
    assert holds(final, "new")
    assert (final.stat().st_ino == inode) == (old == "same")
    assert names(tmp_path) == (["bad-checkpoint-10", "checkpoint-10"] if old in ("damaged", "no manifest") else ["checkpoint-10"])


def test_the_newest_that_verifies_is_found_by_number(tmp_path: Path) -> None:
    assert newest_verified(tmp_path / "absent") == (None, [])
    assert newest_verified(tmp_path) == (None, [])
    for step in (5, 40, 100, 1000):
        write_directory(tmp_path / f"checkpoint-{step}", writer(str(step)))
    (tmp_path / "checkpoint-9999").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "bad-checkpoint-100").mkdir()  # an earlier one of that name
    (tmp_path / "checkpoint-1000" / FILES[1]).unlink()
    (tmp_path / "checkpoint-100" / FILES[2]).write_bytes(b"")
    path, notes = newest_verified(tmp_path)
    assert path == tmp_path / "checkpoint-40"
    assert [note.split()[0] for note in notes] == ["checkpoint-1000", "checkpoint-100"]
    assert FILES[1] in notes[0] and "found no file" in notes[0] and "bad-checkpoint-1000" in notes[0]
    assert FILES[2] in notes[1] and "expected 910 bytes, found 0" in notes[1]
    assert not (tmp_path / "checkpoint-1000").exists() and (tmp_path / "bad-checkpoint-1000").is_dir()
    assert newest_verified(tmp_path) == (path, [])


def test_prune_keeps_the_newest_the_protected_and_the_last_that_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> None:
        for step in (1, 2, 3, 4, 10):
            write_directory(tmp_path / f"checkpoint-{step}", writer(str(step)))

    make()
    prune(tmp_path, None, set())
    assert len(names(tmp_path)) == 5
    prune(tmp_path, 2, {"checkpoint-1"})
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-10", "checkpoint-4"]
    make()
    for step in (4, 10):
        (tmp_path / f"checkpoint-{step}" / FILES[0]).write_bytes(b"rot")
    prune(tmp_path, 1, set())
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-3"]
    make()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "verify", refuse)
        prune(tmp_path, 1, {"checkpoint-2"}, whole="checkpoint-10")  # known, so nothing is read
    assert names(tmp_path) == ["bad-checkpoint-10", "checkpoint-10", "checkpoint-2"]
    with pytest.raises(AssertionError, match="keep 0"):
        prune(tmp_path, 0, set())


def test_clean_removes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    leftover = tmp_path / f"tmp-{'0a' * 16}"
    (leftover / "deep").mkdir(parents=True)
    (leftover / "deep" / "file").write_text("x")
    (leftover / "link").symlink_to(tmp_path / "tmp-mine")
    (tmp_path / f"tmp-{'0b' * 16}").write_text("a file's leftover")
    (tmp_path / "tmp-mine").mkdir()
    write_directory(tmp_path / "checkpoint-1", writer("a"))
    clean(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "tmp-mine"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_file(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_file(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01" and names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("error", [None, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK], ids=str)
def test_a_file_gets_a_second_name_or_a_copy_where_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(error, "no links here")

    if error is not None:
        monkeypatch.setattr(os, "link", no_links)
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_bytes(b"new")
    path.write_bytes(b"old")
    for _ in range(2):  # the second time they are the same file already
        link_file(source, path)
        assert path.read_bytes() == b"new" and names(tmp_path) == ["path", "source"]
        assert path.samefile(source) == (error is None)


def test_digests_that_are_known_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(durable, "sha256", lambda path: read.append(path.name) or "0" * 64)

    def write(directory: Path) -> dict[str, str]:
        writer("a")(directory)
        return {FILES[0]: hashlib.sha256(content("a", FILES[0])).hexdigest()}

    write_directory(tmp_path / "checkpoint-1", write)
    assert sorted(read) == sorted(FILES[1:])
    verify(tmp_path / "checkpoint-1", {FILES[0]})
    with pytest.raises(CheckpointError, match=FILES[1]):
        verify(tmp_path / "checkpoint-1", {FILES[1]})


def test_a_directory_that_another_thread_makes_meanwhile_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that are opened at once make their run's directory."""
    is_dir = Path.is_dir

    def just_before(path: Path) -> bool:
        there = is_dir(path)
        if not there:
            path.mkdir()
        return there

    monkeypatch.setattr(Path, "is_dir", just_before)
    make_directory(tmp_path / "out")


def test_rows_beyond_the_checkpoint_and_a_torn_one_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_rows(path, lambda row: True)
    assert not path.exists()
    rows = [b'{"step":1, "loss": NaN}\n', b'{"step": 2}\n', b'{"step": 3}\n', b'{"step": 4, "lo']
    path.write_bytes(b"".join(rows))
    truncate_rows(path, lambda row: int(str(row["step"])) <= 2)
    assert path.read_bytes() == rows[0] + rows[1]
    inode = path.stat().st_ino
    truncate_rows(path, lambda row: True)
    assert path.stat().st_ino == inode  # nothing to change, nothing written
    path.write_bytes(rows[1] + b'\xff\xfe\n[1]\n{"step": 3}')  # bytes of no encoding, no object, a newline lost
    assert truncate_rows(path, lambda row: True) == (2, 2)
    assert path.read_bytes() == rows[1] + rows[2]
    path.write_bytes(rows[1] + rows[3])
    assert truncate_rows(path, lambda row: True) == (1, 0), "a torn last line is what a kill leaves, no damage"


# --- disk full, no permission ---------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        yield disk


def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(tiny_disk: Path) -> None:
    write_directory(tiny_disk / "checkpoint-1", lambda d: (d / "weights").write_bytes(bytes(2_000_000)) and None)
    write_file(tiny_disk / "result.json", "old")
    before = names(tiny_disk)
    for size in [1_000_000 + 100_000 * k for k in range(20)] + [2_000_000_0]:
        with contextlib.suppress(CheckpointError):
            write_directory(tiny_disk / "checkpoint-1", lambda d, size=size: (d / "weights").write_bytes(bytes(size)) and None)
        verify(tiny_disk / "checkpoint-1")
        assert names(tiny_disk) == before
    with pytest.raises(CheckpointError, match=r"checkpoint-2: No space left.*free"):
        write_directory(tiny_disk / "checkpoint-2", lambda d: (d / "weights").write_bytes(bytes(4_000_000)) and None)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_file(tiny_disk / "result.json", bytes(4_000_000))
    assert names(tiny_disk) == before and (tiny_disk / "result.json").read_text() == "old"


class OddError(Exception):
    """As safetensors reports its own trouble: no OSError."""


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Remedy: free some space there$"),
        (OddError("I/O error: No space left on device (os error 28)"), "No space left on device. Remedy: free some space there$"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system. Remedy: make the directory writable for this user$"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error. Remedy: check the path and its file system$"),
        (OSError("no number"), "no number. Remedy: check the path"),
    ],
)
def test_an_error_of_the_writer_becomes_one_message_and_leaves_nothing(tmp_path: Path, error: Exception, match: str) -> None:
    def write(directory: Path) -> None:
        (directory / "weights").write_bytes(b"half")
        raise error

    with pytest.raises(CheckpointError, match=match):
        write_directory(tmp_path / "checkpoint-1", write)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OddError("I/O error: No space left on device (os error 28)"), True),
        (OddError("I/O error: Disk quota exceeded (os error 122)"), True),
        (OSError(errno.EFBIG, "File too large"), False),
        (OSError(errno.EIO, "Input/output error"), False),
    ],
)
def test_a_full_disk_is_known_from_other_trouble(tmp_path: Path, error: Exception, full: bool) -> None:
    def write(_: Path) -> None:
        raise error

    with pytest.raises(CheckpointError) as caught:
        write_directory(tmp_path / "checkpoint-1", write)
    assert is_full(caught.value) == full and not str(caught.value).startswith("[Errno")


def test_a_look_from_outside_changes_nothing(tmp_path: Path) -> None:
    """The damaged one keeps its name, and an old one whose replacement was cut short is found under the name that it has."""
    assert find_verified(tmp_path / "absent") is None and find_verified(tmp_path) is None
    for step in (2, 10, 30):
        write_directory(tmp_path / f"checkpoint-{step}", writer(str(step)))
    (tmp_path / "checkpoint-30" / FILES[1]).unlink()
    (tmp_path / "checkpoint-10").rename(tmp_path / "checkpoint-10.replaced")
    before = names(tmp_path)
    found = find_verified(tmp_path)
    assert found == tmp_path / "checkpoint-10.replaced" and holds(found, "10") and names(tmp_path) == before
    assert newest_verified(tmp_path)[0] == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("error", [OddError("no NaN please"), KeyboardInterrupt(), CheckpointError("its own")])
def test_other_errors_pass_and_leave_nothing(tmp_path: Path, error: BaseException) -> None:
    def write(directory: Path) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        write_directory(tmp_path / "checkpoint-1", write)
    assert caught.value is error and names(tmp_path) == []


def test_an_error_at_every_step_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    """Not a kill but an exception, wherever it comes: memory, a signal, a file system that turned read-only."""

    def failing(at: int) -> Callable[[str], None]:
        count = itertools.count()

        def failpoint(name: str) -> None:
            if next(count) == at:
                raise OSError(errno.EIO, "Input/output error")

        return failpoint

    seen: list[str] = []
    write_directory(tmp_path / "checkpoint-1", writer("old"))
    write_directory(tmp_path / "checkpoint-1", writer("new"), failpoint=seen.append)
    for at, name in enumerate(seen):
        write_directory(tmp_path / "checkpoint-1", writer("old"))
        with pytest.raises(CheckpointError, match="Input/output error"):
            write_directory(tmp_path / "checkpoint-1", writer("new"), failpoint=failing(at))
        assert names(tmp_path) == ["checkpoint-1"], name
        verify(tmp_path / "checkpoint-1")
        assert holds(tmp_path / "checkpoint-1", "new" if at >= seen.index("renamed") else "old")


def test_a_missing_parent_is_reported(tmp_path: Path) -> None:
    for call in (
        lambda: write_directory(tmp_path / "no" / "x", writer("a")),
        lambda: write_file(tmp_path / "no" / "x", "a"),
        lambda: clean(tmp_path / "no"),
    ):
        with pytest.raises(CheckpointError, match=r"No such file or directory.*check the path"):
            call()


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_directory_that_cannot_be_changed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_directory(tmp_path / f"checkpoint-{step}", writer(str(step)))
    (tmp_path / "metrics.jsonl").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(CheckpointError, match=r"Permission denied.*writable"):
            prune(tmp_path, 1, set())
        (tmp_path / "checkpoint-2" / FILES[0]).write_bytes(b"rot")
        newest, notes = newest_verified(tmp_path)
        assert newest == tmp_path / "checkpoint-1"
        assert "checkpoint-2 is damaged and skipped (it cannot be renamed: Permission denied)" in notes[0]
    monkeypatch.setattr(manifest, "sha256", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        verify(tmp_path / "checkpoint-1")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        truncate_rows(tmp_path / "metrics.jsonl", lambda row: True)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        newest_verified(tmp_path)


# --- rot ------------------------------------------------------------------------------------------------------------


def test_flipped_bits_and_truncations_are_found_200_of_200(tmp_path: Path) -> None:
    rng = random.Random(7)
    final = tmp_path / "checkpoint-1"
    write_directory(final, writer("a"))
    found = 0
    for number in range(200):
        path = final / [*FILES, MANIFEST][number % 4]
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        if number % 8 < 5:
            bit = rng.randrange(8 * len(spoilt))
            spoilt[bit // 8] ^= 1 << bit % 8
        else:
            del spoilt[rng.randrange(len(spoilt)) :]
        path.write_bytes(spoilt)
        try:
            verify(final)
        except CheckpointError as error:
            found += str(final) in str(error) and "expected" in str(error) and "found" in str(error)
        path.write_bytes(whole)
    verify(final)
    print(f"{found} of 200 found")
    assert found == 200


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-1"
    write_directory(final, lambda d: (d / "w").write_bytes(b"x") and None)
    whole = (final / MANIFEST).read_bytes()
    for bit in range(0, 8 * len(whole), 5):  # each bit of a byte has its turn
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        (final / MANIFEST).write_bytes(spoilt)
        with pytest.raises(CheckpointError):
            verify(final)


def test_swapped_files_are_found_and_named(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-1"
    write_directory(final, lambda d: (d / "a").write_bytes(b"1") and (d / "b").write_bytes(b"2") and None)
    (final / "a").rename(final / "c")
    (final / "b").rename(final / "a")
    (final / "c").rename(final / "b")
    with pytest.raises(CheckpointError, match=r"/a .*sha256 6b86\w+, found d473\w+"):
        verify(final)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        b'{"files": 3}',
        b'{"files": {"../x": {"bytes": 1, "sha256": ""}}}',
        b'{\n  "files": {\n    "../x": {\n      "bytes": 1,\n      "sha256": ""\n    }\n  }\n}\n',
        b'{\n  "files": {\n    "x": 1\n  }\n}\n',
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, manifest: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(manifest)
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"MANIFEST.json .*\d+ other bytes"):
        verify(tmp_path)
