"""Records which tokenized sets belong to a request, keyed by the identity of its input files: with a warm cache no process has to load a
tokenizer, and no data file has to be hashed.

No record is made of files that are not settled. Hub data sets and splits of directories are not recorded; the worker finds their files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from tlora import durable
from tlora.data.dataset import FORMAT_VERSION, find_damage
from tlora.data.request import PrepareRequest
from tlora.data.sources import has_layout, is_on_hub, list_files
from tlora.errors import DataError
from tlora.file_identity import FileIdentity, identity_of
from tlora.json_file import read_object
from tlora.version import __version__

VERSIONS = ("transformers", "tokenizers", "jinja2")  # of the libraries that make tokens from rows

Sets = tuple[Path, Path | None]


def recall(request: PrepareRequest, beat: Callable[[], None]) -> Sets | None:
    """The directories of the training and the evaluation set that were made for `request`, if nothing has changed since and they are
    whole. `beat` is called every few MiB.
    """
    try:
        record = read_object(_record(request))
        names = [record["train"], *([record["eval"]] if request.data.eval_path else [])]
        sets = [request.cache_dir / Path(str(name)).name for name in names]
        if any(find_damage(directory, request.vocab_size, beat) is not None for directory in sets):
            return None
    except (OSError, ValueError, KeyError, DataError, _UnrecordedError):
        return None
    return sets[0], sets[1] if len(sets) > 1 else None


def remember(request: PrepareRequest, train_set: Path, eval_set: Path | None) -> None:
    """Record the answer. If the cache cannot be written, the next run only takes longer."""
    with suppress(OSError, DataError, _UnrecordedError):
        record = _record(request)
        if not record.exists():
            durable.make_directory(record.parent)
            durable.write_file(record, json.dumps({"train": train_set.name, "eval": eval_set.name if eval_set else None}))


class _UnrecordedError(Exception):
    """The request's answer depends on more than settled local files."""


def _record(request: PrepareRequest) -> Path:
    data = request.data
    files = list(_files(request))
    identities = [identity_of(file.stat()) for file in files]
    if not all(identity.is_settled for identity in identities):
        raise _UnrecordedError
    content = [named(file, identity) for file, identity in zip(files, identities, strict=True)]
    settings = [data.format, data.max_length, data.train_on, data.on_bad_rows, data.chat_template_kwargs, request.rows, request.vocab_size]
    numbers = [[len(list_files(request.base_dir / source.path)) for source in part] for part in (data.sources, data.eval_sources)]
    facts = [__version__, FORMAT_VERSION, [version(name) for name in VERSIONS], settings, numbers, content]
    return request.cache_dir / "known" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"


def _files(request: PrepareRequest) -> Iterator[Path]:
    """All files whose content decides: data, chat template, and all files in the tokenizer's directory."""
    data, tokenizer = request.data, Path(request.tokenizer_path)
    for source in (*data.sources, *data.eval_sources):
        if source.split or source.name or source.revision or is_on_hub(source, request.base_dir) or has_layout(source, request.base_dir):
            raise _UnrecordedError
        yield from list_files(request.base_dir / source.path)
    if data.chat_template:
        yield request.base_dir / data.chat_template
    if not tokenizer.is_dir():
        raise _UnrecordedError
    yield from sorted(path for path in tokenizer.rglob("*") if path.is_file())


def named(file: Path, identity: FileIdentity) -> tuple[str | int, ...]:
    """With the name, which tells the format."""
    return file.name, file.suffix.lower(), *identity
