"""The admission of a worker over TCP: the messages before its Hello, and the worker's part of the exchange.

The worker sends token and process identity (`Entry`). The controller has put a file with a random number into the store and names it
(`AuthRequest`); the worker answers with that number and puts one of its own next to it (`AuthResponse`). So both know that they see the
same directory, and that the other may write there: the files' owner is one user. The controller's part is `cluster/listeners.py`.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import field
from pathlib import Path
from typing import TypeVar

from tlora import durable
from tlora.errors import ConfigError
from tlora.link.lines import Line
from tlora.link.process_identity import identify
from tlora.message_codec import Codec, message
from tlora.worker_protocol import Refusal

T = TypeVar("T", "AuthRequest", "AuthOk")
LONGEST_LINE = 4096  # bytes of a line before a worker is admitted
_ANSWER_SECONDS = 30.0
_NAME = re.compile(r"\.proof-[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9a-f]{64}")


class AdmissionError(ConfigError):
    """A controller refuses this worker."""


@message
class Entry:
    """The first line. The process is named as `ProcessIdentity` does."""

    token: str = field(repr=False)
    pid: int
    start_ticks: int
    boot: str


@message
class AuthRequest:
    """The file `path` in the store holds a random number. The answer goes into `path` with "-answer" behind its name."""

    path: str


@message
class AuthResponse:
    """`number` is the content of the challenge's file, `answer` what the worker wrote next to it; else `problem` says why not."""

    number: str = ""
    answer: str = ""
    problem: str = ""


@message
class AuthOk:
    """The worker is admitted; its Hello may follow."""


AdmissionMessage = Entry | AuthRequest | AuthResponse | AuthOk | Refusal
_MESSAGES: Codec[AdmissionMessage] = Codec(AdmissionMessage)
admission_line = _MESSAGES.encode


def read_admission(line: Line, timeout_seconds: float) -> AdmissionMessage:
    """The next message. Raises ConnectionError for the end of the connection and for what is no such message, which is not shown: it may
    hold a token; TimeoutError.
    """
    try:
        received = line.read_line(timeout_seconds, LONGEST_LINE)
        if received is None:
            raise ConnectionResetError("the other end has closed the connection")
        return _MESSAGES.decode(received)
    except ValueError:
        raise ConnectionError("what came is no message of an admission") from None


def enter(line: Line, token: str) -> None:
    """Be admitted. Raises AdmissionError where the controller refuses, OSError where the connection ends."""
    own = identify(os.getpid())
    if own is None:
        raise AdmissionError("this system does not tell when a process has started, which TCP needs. Connect over the unix socket instead")
    line.send(admission_line(Entry(token, own.pid, own.start_ticks, own.boot)))
    challenge = _expect(line, AuthRequest)
    line.send(admission_line(prove(Path(challenge.path))))
    _expect(line, AuthOk)


def _expect(line: Line, kind: type[T]) -> T:
    message = read_admission(line, _ANSWER_SECONDS)
    if isinstance(message, Refusal):
        raise AdmissionError(message.reason)
    if not isinstance(message, kind):
        raise ConnectionError("the controller answers out of turn")
    return message


def prove(path: Path) -> AuthResponse:
    """Nothing is read or written for what is no challenge: its name, its owner and its content say so. Raises OSError where the disk is
    full, which proves nothing and passes.
    """
    if not path.is_absolute() or not _NAME.fullmatch(path.name):
        return AuthResponse(problem="its name is none of a challenge")
    try:
        number, answer = read_number(path), secrets.token_hex(32)
        write_number(answer_path(path), answer)
    except OSError as error:
        if durable.is_full(error):
            raise
        return AuthResponse(problem=error.strerror or str(error))
    return AuthResponse(number, answer)


def answer_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-answer")


def write_number(path: Path, number: str) -> None:
    """A new file that no other user may read. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, number.encode())
    finally:
        os.close(handle)


def read_number(path: Path) -> str:
    """Of this user's own file with a number in it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError("its file is not this user's alone")
        number = os.read(handle, 100).decode("ascii", errors="replace")
    finally:
        os.close(handle)
    if not _NUMBER.fullmatch(number):
        raise PermissionError("its file holds no number")
    return number
