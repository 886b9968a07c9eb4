"""The durable protocol under kill -9 at every step and at random moments, and under every power cut that a model allows."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases import in_every_run
from tests.durable_files import FILES, content, holds, names, writer
from tlora import durable
from tlora.durable import clean, find_damage, link_file, newest_verified, prune, write_directory, write_file

# --- kill -9 --------------------------------------------------------------------------------------------------------


def in_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked child and return its wait status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the test runner, which the child does not use
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            action()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def killer(at: int) -> Callable[[str], None]:
    """A failpoint that kills its process at the call number `at`."""
    count = itertools.count()

    def failpoint(name: str) -> None:
        if next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return failpoint


def save(parent: Path, mark: str, step: int, failpoint: Callable[[str], None]) -> None:
    """What a run does at a checkpoint: files of its own, the protocol, then pruning."""

    def write(directory: Path) -> None:
        for name in FILES:
            (directory / name).write_bytes(content(mark, name)[:400])
            failpoint(f"half of {name}")
            (directory / name).write_bytes(content(mark, name))

    write_directory(parent / f"checkpoint-{step}", write, failpoint=failpoint)
    failpoint("acknowledged")
    prune(parent, 1, set(), whole=f"checkpoint-{step}", failpoint=failpoint)
    link_file(parent / f"checkpoint-{step}" / FILES[0], parent / "adapter", failpoint=failpoint)
    write_file(parent / "result.json", mark * 100, failpoint=failpoint)


def prepare(parent: Path, scenario: str) -> None:
    """A directory as a run may find it when it saves step 20."""
    write_directory(parent / "checkpoint-10", writer("10"))
    write_file(parent / "result.json", "old")
    write_file(parent / "adapter", content("10", FILES[0]))
    if scenario != "new step":
        write_directory(parent / "checkpoint-20", writer("20" if scenario == "same again" else "20 before"))
    if scenario == "damaged before":
        (parent / "checkpoint-20" / FILES[0]).write_bytes(b"rot")


@pytest.mark.parametrize(
    "scenario",
    [
        "new step",
        pytest.param("damaged before", marks=pytest.mark.slow),
        *(pytest.param(s, marks=pytest.mark.soak) for s in ("same again", "other before")),
    ],
)
def test_kill_at_every_failpoint_leaves_the_old_or_the_new(tmp_path: Path, scenario: str) -> None:
    seen: list[str] = []
    (tmp_path / "before").mkdir()
    prepare(tmp_path / "before", scenario)
    shutil.copytree(tmp_path / "before", tmp_path / "alive")
    save(tmp_path / "alive", "20", 20, seen.append)
    assert len(seen) > 15 and "acknowledged" in seen
    for at, name in enumerate(seen):
        parent = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", parent)
        assert in_child(lambda at=at, parent=parent: save(parent, "20", 20, killer(at))) == signal.SIGKILL
        newest, notes = newest_verified(parent)
        assert newest is not None, name
        old = {"new step": ("checkpoint-10", "10"), "damaged before": ("checkpoint-10", "10"), "same again": ("checkpoint-20", "20")}
        allowed = {("checkpoint-20", "20")}
        if at <= seen.index("acknowledged") - 1:
            allowed.add(old.get(scenario, ("checkpoint-20", "20 before")))
        assert any(newest.name == final and holds(newest, mark) for final, mark in allowed), (name, newest)
        assert len(notes) <= (scenario == "damaged before"), (name, notes)
        assert (parent / "result.json").read_text() in ("old", "20" * 100)
        assert (parent / "adapter").read_bytes() in (content("10", FILES[0]), content("20", FILES[0])), name
        clean(parent)
        assert all(not path.startswith("tmp-") and not path.endswith(".replaced") for path in names(parent))
        save(parent, "20", 20, lambda _: None)  # and the run goes on
        assert newest_verified(parent)[0] == parent / "checkpoint-20" and holds(parent / "checkpoint-20", "20")
    print(f"{scenario}: killed at {len(seen)} failpoints")


def endless_saves(parent: Path, pipe: int) -> None:
    for step in itertools.count(1):
        for again in ("", "again"):  # every step is written twice, with other content: after a resume it may be
            save(parent, f"{step}{again}", step, lambda _: None)
        os.write(pipe, f"{step}\n".encode())


def kill_at_random(parent: Path, saves: int, seconds: float) -> None:
    """`seconds` after so many saves: on a busy machine too most kills come between two checkpoints."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            endless_saves(parent, writing)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = ["0", *(pipe.readline() for _ in range(saves))]
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        acknowledged = int([*told, *pipe.read().split()][-1])
    newest, notes = newest_verified(parent)
    assert notes == []
    if newest is None:
        assert acknowledged == 0
        return
    step = int(newest.name.removeprefix("checkpoint-"))
    assert step in (acknowledged, acknowledged + 1)
    assert holds(newest, f"{step}again") or (step > acknowledged and holds(newest, str(step)))


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.soak)])
def test_kill_at_random_moments_loses_nothing_acknowledged(tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    for number in range(count):
        parent = tmp_path / str(number)
        parent.mkdir()
        kill_at_random(parent, rng.randrange(4), rng.uniform(0.0, 0.01))


def test_kill_in_every_step_of_a_recovery_only_delays_it(tmp_path: Path) -> None:
    """What a kill left behind is settled by `newest_verified` and `clean`, which may be killed too, at every call."""
    seen: list[str] = []
    before = tmp_path / "before"
    before.mkdir()
    prepare(before, "other before")
    shutil.copytree(before, tmp_path / "alive")
    save(tmp_path / "alive", "20", 20, seen.append)
    for name in ("moved the old one", "renamed", "synced the parent"):
        broken = tmp_path / name
        shutil.copytree(before, broken)
        in_child(lambda broken=broken, name=name: save(broken, "20", 20, killer(seen.index(name))))
        assert (broken / "checkpoint-20.replaced").is_dir()
        if name == "renamed":  # and rot besides: the old one must come back
            (broken / "checkpoint-20" / FILES[0]).write_bytes(b"rot")
        for at in itertools.count():
            parent = tmp_path / f"{name} {at}"
            shutil.copytree(broken, parent)
            status = in_child(lambda parent=parent, at=at: recover(parent, killer(at)))
            newest, _ = newest_verified(parent)
            assert newest == parent / "checkpoint-20"
            assert holds(newest, "20" if name == "synced the parent" else "20 before")
            clean(parent)
            assert not any(path.startswith("tmp-") or path.endswith(".replaced") for path in names(parent))
            if status == 0:
                break
            assert status == signal.SIGKILL
        assert at >= 2


def recover(parent: Path, failpoint: Callable[[str], None]) -> None:
    """In a child: recovery with a failpoint before every call that changes the disk."""

    def guarded(real: Callable[..., None], call: str) -> Callable[..., None]:
        def wrapped(*args: object, **kwargs: object) -> None:
            failpoint(call)
            real(*args, **kwargs)

        return wrapped

    for call in ("rename", "unlink", "rmdir", "fsync"):
        setattr(os, call, guarded(getattr(os, call), call))
    newest_verified(parent)
    clean(parent)


# --- power loss -----------------------------------------------------------------------------------------------------


class Disk:
    """What reached the disk, by a model that allows more than any file system does.

    Every change of a directory entry waits until that directory is synced, and each waiting one may or may not survive by
    itself. A file's bytes wait until the file is synced: before, the file may be whole, cut in half or empty.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.log: list[tuple[str, int, object]] = []  # ("entry", directory, change) | ("data", file, bytes) | ("sync", inode, None)
        self.live: dict[Path, int] = {root: 0}
        self.inode: dict[int, int] = {root.stat().st_ino: 0}
        self.count = 0
        self.observe()
        for call in ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync"):
            monkeypatch.setattr(os, call, self.wrap(getattr(os, call), call))

    def wrap(self, real: Callable[..., None], call: str) -> Callable[..., None]:
        def wrapped(*args: object, **kwargs: object) -> None:
            self.observe()
            if call == "fsync":
                self.log.append(("sync", self.inode[os.fstat(int(str(args[0]))).st_ino], None))
            real(*args, **kwargs)
            paths = [Path(str(arg)) for arg in args[:2]]
            if call in ("rename", "replace"):
                for old in [path for path in self.live if path == paths[0] or paths[0] in path.parents]:
                    self.live[paths[1] / old.relative_to(paths[0])] = self.live.pop(old)
                self.log.append(("entry", self.live[paths[0].parent], (paths[0].name, paths[1].name, self.live[paths[1]])))
            if call == "link":
                self.live[paths[1]] = self.live[paths[0]]
                self.log.append(("entry", self.live[paths[1].parent], (None, paths[1].name, self.live[paths[1]])))
            if call in ("unlink", "rmdir"):
                gone = self.live.pop(paths[0])
                if gone not in self.live.values():
                    self.inode = {real_number: number for real_number, number in self.inode.items() if number != gone}
                self.log.append(("entry", self.live[paths[0].parent], (paths[0].name, None, gone)))
            self.observe()

        return wrapped

    def observe(self) -> None:
        """Note new files and directories and new bytes."""
        for path in sorted(self.root.rglob("*")):
            if path not in self.live:
                self.count += 1
                self.live[path] = self.inode[path.stat().st_ino] = self.count
                self.log.append(("entry", self.live[path.parent], (None, path.name, self.count)))
            if path.is_file() and path.read_bytes() != self.bytes_of(self.live[path]):
                self.log.append(("data", self.live[path], path.read_bytes()))

    def bytes_of(self, file: int) -> bytes:
        return next((bytes(what) for kind, inode, what in reversed(self.log) if kind == "data" and inode == file), b"")  # type: ignore[arg-type]

    def crash_states(self, length: int) -> Iterator[dict[str, bytes | None]]:
        """All trees (path to bytes, None for a directory) that may be found after a power cut behind `length` operations."""
        log = self.log[:length]
        synced = [
            max((at for at, (kind, i, _) in enumerate(log) if kind == "sync" and i == inode), default=-1) for inode in range(self.count + 1)
        ]
        waiting = [at for at, (kind, inode, _) in enumerate(log) if kind != "sync" and at > synced[inode]]
        fates = [("whole", "half", "empty", "old") if log[at][0] == "data" else ("whole", "old") for at in waiting]
        for fate in itertools.product(*fates):
            entries: dict[int, dict[str, int]] = {}
            data: dict[int, bytes] = {}
            lost = dict(zip(waiting, fate, strict=True))
            for at, (kind, inode, what) in enumerate(log):
                if kind == "sync" or lost.get(at) == "old":
                    continue
                if kind == "data":
                    assert isinstance(what, bytes)
                    data[inode] = {"half": what[: len(what) // 2], "empty": b""}.get(lost.get(at, "whole"), what)
                    continue
                assert isinstance(what, tuple)
                old, new, number = what
                here = entries.setdefault(inode, {})
                if old is not None and here.get(old) == number:
                    del here[old]
                if new is not None:
                    here[new] = number
            yield dict(self.tree(0, "", entries, data))

    def tree(self, inode: int, path: str, entries: dict[int, dict[str, int]], data: dict[int, bytes]) -> Iterator[tuple[str, bytes | None]]:
        for name, number in entries.get(inode, {}).items():
            is_file = any(kind == "data" and i == number for kind, i, _ in self.log)
            yield path + name, data.get(number, b"") if is_file else None
            yield from self.tree(number, path + name + "/", entries, data)


def restore(parent: Path, tree: dict[str, bytes | None]) -> None:
    for name, data in sorted(tree.items()):
        (parent / name).mkdir() if data is None else (parent / name).write_bytes(data)


def power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, forget: Callable[[Path], bool]) -> tuple[int, int, int]:
    """Enumerate the power cuts during one save whose `sync` forgets some paths.

    Return how many cuts there are, how many different trees they leave, and in how many of those something promised is lost.
    """
    parent = tmp_path / "disk"
    parent.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(parent, patch)
        prepare_small(parent, scenario)
        begin, real = len(disk.log), durable.sync
        patch.setattr(durable, "sync", lambda path: None if forget(path) else real(path))
        write_directory(parent / "checkpoint-20", small("20"))
        acknowledged = len(disk.log)
        prune(parent, 1, set(), whole="checkpoint-20")
        link_file(parent / "checkpoint-20" / "weights", parent / "adapter")
        write_file(parent / "result", "new")
    olds = {"new step": ("checkpoint-10", "10"), "same again": ("checkpoint-20", "20"), "other before": ("checkpoint-20", "20 before")}
    cuts = 0
    states: dict[tuple[tuple[str, bytes | None], ...], bool] = {}  # tree -> some cut that leaves it comes after the promise
    for length in range(begin, len(disk.log) + 1):
        for state in disk.crash_states(length):
            key = tuple(sorted(state.items()))
            states[key] = states.get(key, False) or length >= acknowledged
            cuts += 1
    lost = 0
    for number, (key, was_acknowledged) in enumerate(states.items()):
        found = tmp_path / f"found-{number}"
        found.mkdir()
        restore(found, dict(key))
        newest, notes = newest_verified(found)
        allowed = [("checkpoint-20", "20")] + ([] if was_acknowledged else [olds[scenario]])
        whole = any(newest == found / final and (newest / "weights").read_bytes() == mark.encode() for final, mark in allowed)
        # also what is being deleted is whole or has another name
        older_notes = [str(old) for old in found.glob("checkpoint-1?") if find_damage(old) is not None]
        lost += not whole or bool(notes + older_notes) or (found / "result").read_text() not in ("old", "new")
        lost += (found / "adapter").read_text() not in ("10", "20")
    return cuts, len(states), lost


def small(mark: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "weights").write_bytes(mark.encode())
        (directory / "state").write_bytes(b"state of " + mark.encode())

    return write


def prepare_small(parent: Path, scenario: str) -> None:
    write_file(parent / "result", "old")
    write_file(parent / "adapter", "10")
    write_directory(parent / "checkpoint-10", small("10"))
    if scenario != "new step":
        write_directory(parent / "checkpoint-20", small("20" if scenario == "same again" else "20 before"))


@pytest.mark.parametrize("scenario", in_every_run(["new step", "same again", "other before"], 0))
def test_no_power_cut_loses_what_was_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    cuts, states, lost = power_cuts(tmp_path, monkeypatch, scenario, lambda path: False)
    print(f"{scenario}: {cuts} power cuts leave {states} states, {lost} of them lose something")
    assert cuts > 200 and states > 30 and lost == 0


FORGOTTEN = {
    "a file": lambda path: path.name == "weights",
    "the temporary directory": lambda path: path.name.startswith("tmp-") and path.is_dir(),
    "the parent": lambda path: path.name == "disk",
}


@pytest.mark.parametrize("forgotten", in_every_run(FORGOTTEN, 0))
def test_the_enumeration_sees_a_forgotten_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    cuts, states, lost = power_cuts(tmp_path, monkeypatch, "new step", FORGOTTEN[forgotten])
    print(f"without syncing {forgotten}: {cuts} power cuts leave {states} states, {lost} of them lose something")
    assert lost > 0
