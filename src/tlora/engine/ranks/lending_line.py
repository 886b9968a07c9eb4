"""The line between a worker that leads a group and one of another host that lends it GPUs: its messages. `link/keyed_listener.py`
has the line itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tlora.engine.messages import Sending, Written
from tlora.link.lines import LONGEST_LINE, Buffer, Line
from tlora.link.tls import CUT_SECONDS
from tlora.link.transfer import PIECE_BYTES
from tlora.message_codec import Codec, message

T = TypeVar("T")
BEAT_SECONDS = CUT_SECONDS / 6  # in which a lender says something
_MOST_BYTES = LONGEST_LINE + PIECE_BYTES


@message
class Lent:
    """Of the worker that lends: its host, its process, and what the leader calls its GPUs. Said first, and again after a silence."""

    host: str
    pid: int
    gpus: tuple[int, ...]


@message
class StartRank:
    """To the lender: start rank `rank` on the GPU that the leader calls `gpu`."""

    rank: int
    gpu: int


@message
class KillRank:
    """To the lender: the rank has nothing to save."""

    rank: int


@message
class RankEnded:
    """Of the lender: the rank's process has ended, as `how` says."""

    rank: int
    how: str


@message
class Frame:
    """`size` bytes follow: a message to or from the rank, with what belongs to it."""

    rank: int
    size: int


LendingMessage = Lent | StartRank | KillRank | RankEnded | Frame
LENDING: Codec[LendingMessage] = Codec(LendingMessage)


def framed(rank: int, parts: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """A message to or from the rank, in parts, with the line that announces them."""
    return LENDING.encode(Frame(rank, sum(map(len, parts)))), *parts


def read_frame(line: Line, frame: Frame, decode: Callable[[bytes], T]) -> T | Sending:
    """The message in a frame. Raises ValueError, OSError."""
    if not 0 < frame.size <= _MOST_BYTES:
        raise ValueError(f"a frame of {frame.size} bytes")
    content = line.read_bytes(frame.size, CUT_SECONDS)
    head = content.find(b"\n") + 1
    said = decode(bytes(content[:head]))
    if not isinstance(said, Written):
        return said
    if said.size != len(content) - head:
        raise ValueError(f"{len(content) - head} bytes, and {said.size} were announced")
    return Sending(said, memoryview(content)[head:])
