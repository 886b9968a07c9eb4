"""The process in which users' bytes are parsed: `python -m tlora.data.worker`. An order comes over the line to its parent,
and an event goes back for each thing that becomes of it (`request.py`).

Imports no torch, and limits what one bad file can take. A Python error fails its job alone; the parent (`prepare.py`) handles a death or
hang of this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tlora import durable
from tlora.data.build import SetSpec, build, hash_file
from tlora.data.encode import ChatSettings, Encoder, open_encoder
from tlora.data.request import (
    PREPARE_MESSAGES,
    MadeSet,
    PrepareBatch,
    PrepareEvent,
    PrepareFailed,
    PrepareProgress,
    PrepareRequest,
    SetsMade,
)
from tlora.data.scratch import remove_old
from tlora.data.sources import is_on_hub, open_source
from tlora.data.tokenizer import load_libraries, load_tokenizer, read_stop_tokens
from tlora.errors import DataError, ModelError
from tlora.job import DataSource
from tlora.link.lines import Line
from tlora.link.supervisor import line_to_parent
from tlora.wording.numbers import gib

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEMORY_LIMIT_BYTES = 8 << 30  # private memory; reading streams, so a large vocabulary and the longest rows stay below 2 GiB
EVENT_SECONDS = 0.25
FETCH_EVENT_SECONDS = 5.0


class Worker:
    """State shared by all jobs of this process: tokenizers, file hashes, and what tells the parent, in any thread."""

    def __init__(self, tell: Callable[[PrepareEvent], None]) -> None:
        self._tell = tell
        self.tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self.hashes: dict[Path, str] = {}
        self.sets: dict[str, MadeSet] = {}  # those that are made or checked, by what determines them
        self.last_event = 0.0

    def send(self, event: PrepareEvent) -> None:
        self._tell(event)
        self.last_event = time.monotonic()

    def run(self, request: PrepareRequest) -> bool:
        """Prepare one job: its training set and its evaluation set, if that is another file. Whether this process can take another one.

        It cannot after one that took memory until there was no more: Arrow's pool may keep it, and the next one would be refused for it.
        """
        key, data, limits = request.key, request.data, request.limits
        self.send(PrepareProgress(key, 0, 0.0))
        if limits is not None:
            limits.enforce()
        try:
            self.send(SetsMade(key, self.make(request, data.sources), self.make(request, data.eval_sources)))
        except (DataError, ModelError) as error:
            self.send(PrepareFailed(key, str(error), of_tokenizer=isinstance(error, ModelError)))
        except OSError as error:
            self.send(PrepareFailed(key, _trouble(error, request.cache_dir, limits is not None), durable.is_full(error)))
        except MemoryError:
            most = MEMORY_LIMIT_BYTES if limits is None else limits.memory_bytes
            reason = f"{data.display_name}: preparing takes more than {gib(most)} of memory; is one row far too long?"
            self.send(PrepareFailed(key, reason))
            return False
        except BaseException as error:  # a panic of the Rust tokenizer is a BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self.send(PrepareFailed(key, f"{data.display_name}: {type(error).__name__}: {error}"))
        return True

    def make(self, request: PrepareRequest, sources: Sequence[DataSource]) -> MadeSet:
        """The set of `sources`, if there are any; jobs of one set share it."""
        if not sources:
            return MadeSet()
        place, base, data = request.cache_dir, request.base_dir, request.data
        deciding = [str(place), str(base), request.tokenizer_path, request.vocab_size]
        plain = [source.model_dump(exclude={"weight"}) for source in sources]
        decided = [*deciding, plain, data.format, data.max_length, data.train_on, data.chat_template, data.on_bad_rows, request.rows]
        known = json.dumps([*decided, data.chat_template_kwargs])
        if known in self.sets:
            return dataclasses.replace(self.sets[known], damage=None)
        key = request.key
        asks_hub = any(is_on_hub(source, base) for source in sources)
        with self.signs_of_life(key) if asks_hub else contextlib.nullcontext():
            opened = tuple(open_source(source, base, place) for source in sources)
        template = _read_template(base / data.chat_template) if data.chat_template else None
        tokenizer = self.tokenizer(request.tokenizer_path)
        stops = read_stop_tokens(tokenizer, request.tokenizer_path)
        chats = ChatSettings(data.chat_template_kwargs, stops, data.train_on == "last")
        encoder = open_encoder(tokenizer, template, data.train_on == "all", request.vocab_size, chats)
        drop, keep = data.on_bad_rows == "drop", request.keep_unfinished
        order = SetSpec(opened, data.format, data.max_length, place, request.rows, request.limits, drop, keep)
        directory, damage = self.build(order, encoder, key)
        notes = tuple(note for source in opened for note in source.notes)
        self.sets[known] = MadeSet(str(directory), tuple(source.commit for source in opened), damage, notes)
        return self.sets[known]

    @contextlib.contextmanager
    def signs_of_life(self, key: str) -> Iterator[None]:
        """Report progress while files are fetched from the hub; its client has its own timeouts."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(FETCH_EVENT_SECONDS):
                self.send(PrepareProgress(key, 0, 0.0))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def build(self, order: SetSpec, encoder: Encoder, key: str) -> tuple[Path, str | None]:
        """`build` with signs of life for the job `key`."""

        def beat(rows: int, share: float) -> None:
            if time.monotonic() - self.last_event >= EVENT_SECONDS:
                self.send(PrepareProgress(key, rows, share))

        def file_hash(file: Path) -> str:
            if file not in self.hashes:
                self.hashes[file] = hash_file(file, beat)
            return self.hashes[file]

        return build(order, encoder, file_hash, beat)

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        if path not in self.tokenizers:
            self.tokenizers[path] = load_tokenizer(path)
        return self.tokenizers[path]


def _trouble(error: OSError, cache_dir: Path, served: bool = False) -> str:
    """A message for an OSError. One without a file name came from writing: read errors are DataErrors that name the file. `served`: the
    data is a tenant's, the disk the server's.
    """
    reason, place = error.strerror or str(error), Path(str(error.filename or cache_dir))
    if served:
        return f"the server's disk: {reason}, so that this data cannot be read and tokenized; ask the server's operator, then clone the job"
    if place == cache_dir or cache_dir in place.parents or place in cache_dir.parents:
        return (
            f"{place}: {reason}; tokenized data is kept in {cache_dir}: "
            "make it writable and free space there, or set the environment variable TLORA_CACHE to another directory"
        )
    return f"{place}: {reason}; the data cannot be read; check the file and who may read it"


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: the chat template cannot be read ({error}); give a text file with a Jinja template") from error


def _limit_resources() -> None:
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _leave_with_parent(line: Line) -> None:
    line.read_line()  # returns when the parent ends for any reason
    os._exit(1)


def main() -> None:
    """Do what one order asks for, then exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides, and ends this one
    sys.modules["torch"] = cast("None", None)  # type: ignore[assignment]  # transformers would import it: 1 s and 300 MB for nothing
    _limit_resources()
    line = line_to_parent()
    load_libraries()  # before the requests are there: the parent has other things to do meanwhile
    received = line.read_line()
    order = PREPARE_MESSAGES.decode(received) if received is not None else PrepareBatch(())
    assert isinstance(order, PrepareBatch), order
    threading.Thread(target=_leave_with_parent, args=(line,), daemon=True).start()
    worker = Worker(lambda event: line.send(PREPARE_MESSAGES.encode(event)))
    for cache_dir in {request.cache_dir for request in order.requests}:
        remove_old(cache_dir)
    for request in order.requests:
        if not worker.run(request):
            break  # the others are for another process
    os._exit(0)  # the thread waits for the parent: a normal exit would wait for its lock


if __name__ == "__main__":
    main()
