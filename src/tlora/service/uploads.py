"""A file on its way from a request to its place: streamed, hashed and bounded as it comes, durable before it has a row.

Bytes are counted and compared here, never parsed: that is intake's, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tlora import durable
from tlora.job import DATA_SUFFIXES
from tlora.service.config import Limits
from tlora.service.database.file_rows import Upload, content_path
from tlora.service.problems import RefusedError

PURPOSES = ("fine-tune", "evals", "user_data")
_FLUSH_BYTES = 1 << 20
_MOST_FIELD_BYTES = 1024
_MOST_PARTS = 16
_LINES = (".jsonl", ".ndjson", ".txt", ".csv", ".tsv")  # a row ends where a line does, or later
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
SCRATCH = "tmp-"


def check_filename(name: str) -> str:
    """The suffix, lower case. Raises RefusedError for a name that is none, or of no data file. It is kept as text, never as a path."""
    shown = ascii(name[:100])
    plain = all(
        character.isalnum() or character in " ._-()[]+,@=~!#" or unicodedata.category(character) in ("Mn", "Mc") for character in name
    )
    if not 1 <= len(name) <= 200 or not plain or not name[0].isalnum() or ".." in name or name[-1] == " ":
        message = f"filename {shown}: must be a plain name of at most 200 letters, digits and ' ._-()[]+,@=~!#'; rename the file"
        raise RefusedError(400, "bad_filename", message, "file")
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  the name is no path
    if suffix not in DATA_SUFFIXES:
        raise RefusedError(
            400, "unknown_file_type", f"filename {shown}: must end in one of {', '.join(DATA_SUFFIXES)}; convert the file", "file"
        )
    return suffix


@dataclass
class _Lines:
    """Lines of a text as its bytes come: how many there are, and whether one is too long."""

    limits: Limits
    count: int = 1
    length: int = 0

    def see(self, chunk: bytes) -> None:
        """Raises RefusedError for a line, or a number of lines, beyond the limits."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._check(self.length + end - start)
            self.count, self.length, start = self.count + 1, 0, end + 1
            if self.count > self.limits.file_rows + 1:
                raise RefusedError(413, "too_many_rows", f"the file has more than {self.limits.file_rows:,} rows; split it", "file")
        self.length += len(chunk) - start
        self._check(self.length)

    def _check(self, length: int) -> None:
        most = self.limits.line_bytes
        if length > most:
            raise RefusedError(413, "line_too_long", f"line {self.count} has more than {most:,} bytes; a row is a sample: split it", "file")


@dataclass
class _Part:
    name: str = ""
    filename: str | None = None
    value: bytearray = field(default_factory=bytearray)


@dataclass
class _Form:
    """What the parser's callbacks gather between two chunks of the body."""

    parts: list[_Part] = field(default_factory=list[_Part])
    header: bytearray = field(default_factory=bytearray)
    text: bytearray = field(default_factory=bytearray)
    disposition: bytes = b""
    waiting: bytearray = field(default_factory=bytearray)  # of the file, not written yet

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self.header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self.text.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
        }

    def _begin(self) -> None:
        if len(self.parts) >= _MOST_PARTS:
            raise _malformed(f"it has more than {_MOST_PARTS} parts")
        self.parts.append(_Part())
        self.disposition = b""

    def _end_header(self) -> None:
        if bytes(self.header).lower() == b"content-disposition":
            self.disposition = bytes(self.text)
        self.header.clear()
        self.text.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self.disposition)
        part = self.parts[-1]
        part.name = options.get(b"name", b"").decode("latin-1")
        if b"filename" in options:
            if b"\\" in self.disposition:  # the parser would leave out directories of another system's paths
                raise RefusedError(400, "bad_filename", f"filename {self.disposition[:100]!a}: has a backslash; rename the file", "file")
            if part.name != "file" or any(other.filename is not None for other in self.parts):
                raise _malformed("it must have one file, in the field `file`")
            part.filename = options[b"filename"].decode("utf-8", "replace")
            check_filename(part.filename)

    def _take(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if part.filename is not None:
            self.waiting.extend(data[start:end])
            return
        part.value.extend(data[start:end])
        if len(part.value) > _MOST_FIELD_BYTES:
            raise _malformed(f"the field {part.name[:40]!a} has more than {_MOST_FIELD_BYTES} bytes")

    def value(self, name: str) -> str | None:
        found = [part for part in self.parts if part.name == name and part.filename is None]
        return bytes(found[0].value).decode("utf-8", "replace") if found else None

    @property
    def filename(self) -> str | None:
        return next((part.filename for part in self.parts if part.filename is not None), None)


def _malformed(why: str) -> RefusedError:
    return RefusedError(400, "bad_form", f"the body is not a form with a file and a purpose ({why}); send multipart/form-data")


class _Scratch:
    """The file while it grows, beside where it will lie."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        durable.make_directory(directory)
        self.path = directory / f"{SCRATCH}{secrets.token_hex(12)}"
        self._file = self.path.open("xb")
        self._limits, self._hash, self.bytes = limits, hashlib.sha256(), 0
        self._lines: _Lines | None = None

    def write(self, chunk: bytes, suffix: str) -> None:
        if not self.bytes:
            kind = next((kind for magic, kind in _COMPRESSED.items() if chunk.startswith(magic)), None)
            if kind is not None:
                raise RefusedError(400, "compressed", f"the file is compressed ({kind}); upload it unpacked", "file")
            self._lines = _Lines(self._limits) if suffix in _LINES else None
        if self._lines is not None:
            self._lines.see(chunk)
        self._file.write(chunk)
        self._hash.update(chunk)
        self.bytes += len(chunk)
        if self.bytes > self._limits.upload_bytes:
            raise RefusedError(413, "too_large", f"the file has more than {self._limits.upload_bytes:,} bytes; split it", "file")

    def finish(self) -> str:
        """On the disk, under its scratch name. The bytes' SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


async def receive_upload(request: Request, directory: Path, tenant: str, limits: Limits) -> Upload:
    """The file of a multipart request, in its place and durable; its row must follow. Raises RefusedError, with nothing kept."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise _malformed(f"its type is {kind.decode('latin-1')[:80]!a}")
    form = _Form()
    try:
        scratch = await asyncio.to_thread(_Scratch, directory / "files" / tenant, limits)
    except OSError as error:
        raise no_room(error) from None
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
        async for chunk in request.stream():
            parser.write(chunk)
            if len(form.waiting) >= _FLUSH_BYTES:
                await _flush(form, scratch)
        parser.finalize()
        await _flush(form, scratch)
        return await asyncio.to_thread(_place, form, scratch, directory, tenant)
    except FormParserError as error:
        raise _malformed(str(error)[:200]) from None
    except OSError as error:
        raise no_room(error) from None
    finally:
        scratch.abandon()


async def _flush(form: _Form, scratch: _Scratch) -> None:
    chunk = bytes(form.waiting)
    form.waiting.clear()
    if chunk:
        await asyncio.to_thread(scratch.write, chunk, check_filename(form.filename or ""))


def _place(form: _Form, scratch: _Scratch, directory: Path, tenant: str) -> Upload:
    filename, purpose = form.filename, form.value("purpose")
    if filename is None:
        raise _malformed("it has no file in the field `file`")
    for part in form.parts:
        if part.name not in ("file", "purpose"):
            name = part.name.partition("[")[0][:80]
            why = "not offered here; a file is kept until it is deleted" if name == "expires_after" else "unknown field of the form"
            raise RefusedError(400, "unknown_field", f"{name.encode('ascii', 'backslashreplace').decode()}: {why}. Leave it out", name)
    if purpose not in PURPOSES:
        raise RefusedError(400, "bad_purpose", f"purpose {ascii(purpose)[:80]}: must be one of {', '.join(PURPOSES)}", "purpose")
    if not scratch.bytes:
        raise RefusedError(400, "empty_file", f"filename {filename!a}: the file is empty; at least one row is needed", "file")
    sha256, suffix = scratch.finish(), check_filename(filename)
    final = content_path(directory, tenant, sha256, suffix)
    scratch.path.replace(final)
    durable.sync(final.parent)
    return Upload(tenant, filename, purpose, scratch.bytes, sha256, suffix)


def no_room(error: OSError) -> RefusedError:
    """The disk is full, or fails."""
    return RefusedError(507 if durable.is_full(error) else 500, "disk", f"the file cannot be kept: {error.strerror}. Tell the operator")
