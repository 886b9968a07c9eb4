"""A job's directory on a host that does not see the store: fetched whole before the job joins, sent back piece by piece.

Rows and whole checkpoints go while it trains, with all that a resume needs; the adapter and the result at its end. Paths in its small
files are those of the controller's host there, and of this one here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora import durable
from tlora.errors import CheckpointError
from tlora.file_identity import FileIdentity, identity_of
from tlora.link.transfer import (
    PIECE_BYTES,
    Done,
    FileFacts,
    ListTree,
    PutInPlace,
    PutRows,
    Remove,
    StoreClient,
    TransferError,
    TreeFiles,
    facts_of,
    fetch_file,
    stage_file,
)
from tlora.manifest import MANIFEST, read_manifest
from tlora.worker_protocol import Failed, Finished, Left

JOB_FILE, RESULT_FILE = "job.json", "result.json"  # not from `store`: this process imports no model libraries
_WITH_PATHS = (JOB_FILE, RESULT_FILE)
_ROWS = ".jsonl"


class JobCopy:
    """`trains`: what it writes may be sent. One thread fetches, then one sends."""

    def __init__(self, client: StoreClient, name: str, attempt: int, directory: Path, paths: Mapping[str, str]) -> None:
        """`paths`: those here, and what the controller's host calls them."""
        self._client, self._name, self._attempt, self._directory, self._paths = client, name, attempt, directory, paths
        self._files: dict[str, FileIdentity] = {}  # that are there, as they were when they were sent or fetched
        self._directories: dict[str, bytes] = {}  # with their manifests
        self._rows: dict[str, int] = {}  # bytes that are there
        self.trains = False

    def fetch(self, gave_up: Callable[[], bool], beat: Callable[[], object]) -> None:
        """Raises TransferError, ConnectionError, OSError."""
        shutil.rmtree(self._directory, ignore_errors=True)
        tree = f"job:{self._name}"
        durable.make_directory(self._directory)
        for facts in self._client.ask(ListTree(tree), TreeFiles, gave_up=gave_up)[0].files:
            parts = Path(facts.name).parts
            if len(parts) > 2 or ".." in parts or Path(facts.name).is_absolute():
                raise TransferError(f"the controller names a file {facts.name!r}, which is none of a job")
            fetch_file(self._client, tree, facts, self._directory / facts.name, gave_up, beat)
            if len(parts) == 1:
                self._files[facts.name] = identity_of((self._directory / facts.name).stat())
        for name in [name for name in _WITH_PATHS if name in self._files]:
            path = self._directory / name
            path.write_text(_replaced(path.read_text(encoding="utf-8"), {there: here for here, there in self._paths.items()}))
            self._files[name] = identity_of(path.stat())
        self._directories = {path.name: (path / MANIFEST).read_bytes() for path in self._durable_directories()}

    def send(self, *, last: bool) -> None:
        """What has changed since; with `last` also what is only true when the job has ended. Raises as `StoreClient.ask`, and OSError for
        what changes meanwhile.
        """
        plain = sorted(path for path in self._directory.iterdir() if path.is_file() and _is_sent(path))
        plain.sort(key=lambda path: path.name == RESULT_FILE)
        gone = [name for name in self._files if not (self._directory / name).exists()]
        for path in [path for path in plain if path.name == JOB_FILE]:
            self._send_file(path)
        for name in gone:  # such as the result of an earlier order
            self._client.ask(Remove(self._name, self._attempt, name), Done)
            del self._files[name]
        directories = self._durable_directories()
        for path in [path for path in plain if path.suffix == _ROWS]:  # before a checkpoint: who goes on from it has all rows before it
            self._send_rows(path)
        for path in directories:
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile, for a newer one
                self._send_directory(path)
        for path in [path for path in plain if last and path.suffix != _ROWS]:
            self._send_file(path)
        for name in [name for name in self._directories if not (self._directory / name).is_dir()]:
            self._client.ask(Remove(self._name, self._attempt, name), Done)
            del self._directories[name]

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def named_there(self, report: Finished | Failed | Left) -> Finished | Failed | Left:
        """The report with the paths of the controller's host."""
        match report:
            case Finished(_, result):
                replaced: dict[str, Any] = json.loads(_replaced(json.dumps(result), self._paths))
                return replace(report, result=replaced)
            case Failed(_, reason):
                return replace(report, reason=_replaced(reason, self._paths))
            case Left(_, _, checkpoint):
                return replace(report, checkpoint=None if checkpoint is None else _replaced(checkpoint, self._paths))

    def _durable_directories(self) -> list[Path]:
        return sorted(path.parent for path in self._directory.glob(f"*/{MANIFEST}") if _is_sent(path.parent))

    def _send_directory(self, path: Path) -> None:
        manifest = (path / MANIFEST).read_bytes()
        if self._directories.get(path.name) == manifest:
            return
        found = read_manifest(path / MANIFEST)
        if isinstance(found, str):
            raise CheckpointError(found)
        files = tuple(FileFacts(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in found.items())
        for facts in files:
            stage_file(self._client, self._name, facts, path / facts.name)
        self._client.ask(PutInPlace(self._name, self._attempt, files, path.name), Done)
        self._directories[path.name] = manifest

    def _send_file(self, path: Path) -> None:
        identity = identity_of(path.stat())
        if self._files.get(path.name) == identity:
            return
        source = path
        if path.name in _WITH_PATHS:
            source = path.with_name(f".{path.name}")
            source.write_text(_replaced(path.read_text(encoding="utf-8"), self._paths))
        facts = facts_of(source, path.name)
        stage_file(self._client, self._name, facts, source)
        self._client.ask(PutInPlace(self._name, self._attempt, (facts,)), Done)
        self._files[path.name] = identity

    def _send_rows(self, path: Path) -> None:
        """Whole rows alone. The first time all of them: what was fetched may have been cut back to the checkpoint."""
        sent, length = self._rows.get(path.name, 0), path.stat().st_size
        with path.open("rb") as file:
            file.seek(sent if sent <= length else 0)
            while True:
                offset = file.tell()
                content = file.read(PIECE_BYTES)
                content = content[: content.rfind(b"\n") + 1]
                if not content and path.name in self._rows:
                    return
                there = self._client.ask(PutRows(self._name, self._attempt, path.name, offset, len(content)), Done, content)[0].num_bytes
                self._rows[path.name] = there if there == offset + len(content) else 0  # else it has lost some: all once more
                file.seek(self._rows[path.name])


def _is_sent(path: Path) -> bool:
    return not (path.name.startswith((".", "bad-")) or durable.is_leftover(path) or path.name.endswith(".replaced"))


def _replaced(text: str, paths: Mapping[str, str]) -> str:
    for ours, theirs in paths.items():
        text = text.replace(ours, theirs)
    return text
