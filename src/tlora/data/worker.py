"""The process in which users' bytes are parsed: `python -m tlora.data.worker`. Requests on stdin, one event a line on stdout.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tlora import durable
from tlora.data.build import Order, build, hash_file
from tlora.data.encode import ChatSettings, Encoder, open_encoder
from tlora.data.request import DataLimits
from tlora.data.scratch import remove_old
from tlora.data.sources import is_on_hub, open_source
from tlora.data.tokenizer import load_libraries, load_tokenizer, read_stop_tokens
from tlora.errors import DataError, ModelError
from tlora.job import DataConfig, DataSource, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEMORY_LIMIT_BYTES = 8 << 30  # private memory; reading streams, so a large vocabulary and the longest rows stay below 2 GiB
EVENT_SECONDS = 0.25
FETCH_EVENT_SECONDS = 5.0
_Request = dict[str, object]


@dataclass(frozen=True)
class Made:
    """A set: its directory, the commit of each hub source, the damage of an earlier set there, and `notes` on the choice of files."""

    directory: str | None = None
    commits: list[str | None] = dataclasses.field(default_factory=list)
    damage: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


class Worker:
    """State shared by all jobs of this process: tokenizers, file hashes, and the pipe to the parent."""

    def __init__(self, events: BinaryIO) -> None:
        self.events = events
        self.tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self.hashes: dict[Path, str] = {}
        self.sets: dict[str, Made] = {}  # those that are made or checked, by what determines them
        self.last_event = 0.0

    def send(self, event: str, key: str, **fields: object) -> None:
        self.events.write(json.dumps({"event": event, "key": key} | fields).encode() + b"\n")
        self.events.flush()
        self.last_event = time.monotonic()

    def run(self, request: _Request) -> None:
        """Prepare one job: its training set and its evaluation set, if that is another file."""
        key, data = str(request["key"]), DataConfig.model_validate(request["data"])
        self.send("start", key)
        limits = _limits(request)
        if limits is not None:
            limits.enforce()
        try:
            made_sets = {"train": self.make(request, data, data.sources), "eval": self.make(request, data, data.eval_sources)}
            self.send("done", key, **{name: dataclasses.asdict(one_set) for name, one_set in made_sets.items()})
        except (DataError, ModelError) as error:
            self.send("model_error" if isinstance(error, ModelError) else "data_error", key, message=str(error))
        except OSError as error:
            full = durable.is_full(error)
            self.send("data_error", key, message=_trouble(error, Path(str(request["cache_dir"])), limits is not None), disk_full=full)
        except MemoryError:
            most = MEMORY_LIMIT_BYTES if limits is None else limits.memory_bytes
            self.send(
                "data_error",
                key,
                message=f"{data.called}: preparing takes more than {most / 2**30:g} GiB of memory; is one row far too long?",
            )
        except BaseException as error:  # a panic of the Rust tokenizer is a BaseException
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self.send("data_error", key, message=f"{data.called}: {type(error).__name__}: {error}")

    def make(self, request: _Request, data: DataConfig, sources: Sequence[DataSource]) -> Made:
        """The set of `sources`, if there are any; jobs of one set share it."""
        if not sources:
            return Made()
        place, base = Path(str(request["cache_dir"])), Path(str(request["base_dir"]))
        deciding = [str(place), str(base), str(request["tokenizer_path"]), request["vocab_size"]]
        rows = cast("Rows", request["rows"])
        plain = [source.model_dump(exclude={"weight"}) for source in sources]
        decided = [*deciding, plain, data.format, data.max_length, data.train_on, data.chat_template, data.on_bad_rows, rows]
        known = json.dumps([*decided, data.chat_template_kwargs])
        if known in self.sets:
            return dataclasses.replace(self.sets[known], damage=None)
        key = str(request["key"])
        asks_hub = any(is_on_hub(source, base) for source in sources)
        with self.signs_of_life(key) if asks_hub else contextlib.nullcontext():
            opened = tuple(open_source(source, base, place) for source in sources)
        template = _read_template(base / data.chat_template) if data.chat_template else None
        tokenizer = self.tokenizer(str(request["tokenizer_path"]))
        stops = read_stop_tokens(tokenizer, str(request["tokenizer_path"]))
        chats = ChatSettings(data.chat_template_kwargs, stops, data.train_on == "last")
        encoder = open_encoder(tokenizer, template, data.train_on == "all", int(str(request["vocab_size"])), chats)
        drop, keep = data.on_bad_rows == "drop", bool(request["keep_unfinished"])
        order = Order(opened, data.format, data.max_length, place, rows, _limits(request), drop, keep)
        directory, damage = self.build(order, encoder, key)
        self.sets[known] = Made(
            str(directory), [source.commit for source in opened], damage, [note for source in opened for note in source.notes]
        )
        return self.sets[known]

    @contextlib.contextmanager
    def signs_of_life(self, key: str) -> Iterator[None]:
        """Report progress while files are fetched from the hub; its client has its own timeouts."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(FETCH_EVENT_SECONDS):
                self.send("progress", key, rows=0, share=0.0)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def build(self, order: Order, encoder: Encoder, key: str) -> tuple[Path, str | None]:
        """`build` with signs of life for the job `key`."""

        def beat(rows: int, share: float) -> None:
            if time.monotonic() - self.last_event >= EVENT_SECONDS:
                self.send("progress", key, rows=rows, share=share)

        def file_hash(file: Path) -> str:
            if file not in self.hashes:
                self.hashes[file] = hash_file(file, beat)
            return self.hashes[file]

        return build(order, encoder, file_hash, beat)

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        if path not in self.tokenizers:
            self.tokenizers[path] = load_tokenizer(path)
        return self.tokenizers[path]


def _limits(request: _Request) -> DataLimits | None:
    given = request.get("limits")
    return DataLimits(**cast("dict[str, Any]", given)) if given is not None else None


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


def _leave_with_parent(requests: BinaryIO) -> None:
    requests.read()  # returns when the parent ends for any reason
    os._exit(1)


def main() -> None:
    """Serve the requests of one line of JSON from stdin, then exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides, and ends this one
    sys.modules["torch"] = cast("None", None)  # type: ignore[assignment]  # transformers would import it: 1 s and 300 MB for nothing
    _limit_resources()
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library must not look like an event
    line = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library that reads stdin must not consume requests
    load_libraries()  # before the requests are there: the parent has other things to do meanwhile
    requests = cast("list[_Request]", json.loads(line.readline() or b"[]"))
    threading.Thread(target=_leave_with_parent, args=(line,), daemon=True).start()
    worker = Worker(events)
    for cache_dir in {str(request["cache_dir"]) for request in requests}:
        remove_old(Path(cache_dir))
    for request in requests:
        worker.run(request)
    os._exit(0)  # the thread waits on stdin: a normal exit would wait for its lock


if __name__ == "__main__":
    main()
