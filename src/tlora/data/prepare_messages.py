"""What `prepare.py` and its data worker say to each other: one order, then an event for each thing that becomes of its jobs."""

from __future__ import annotations

from dataclasses import dataclass

from tlora.data.request import PrepareRequest
from tlora.message_codec import Codec, message


@dataclass(frozen=True)
class MadeSet:
    """A set: its directory (None: there is no such set), the commit of each source that is the hub's, what was wrong with an earlier one
    there, and `notes` on which files were chosen.
    """

    directory: str | None = None
    commits: tuple[str | None, ...] = ()
    damage: str | None = None
    notes: tuple[str, ...] = ()


@message
class PrepareOrder:
    """All that the worker shall do."""

    requests: tuple[PrepareRequest, ...]


@message
class PrepareStarted:
    """The worker is on the job `key` from now on."""

    key: str


@message
class PrepareProgress:
    """Progress of the job `key`: rows read, and the fraction of its bytes."""

    key: str
    rows: int
    share: float


@message
class SetsMade:
    """The job `key` is done. `eval`: of `data.eval_path`."""

    key: str
    train: MadeSet
    eval: MadeSet


@message
class PrepareFailed:
    """The job `key` is not: a DataError or, where the tokenizer cannot be loaded, which all jobs share, a ModelError."""

    key: str
    reason: str
    disk_full: bool = False
    of_tokenizer: bool = False


PrepareEvent = PrepareStarted | PrepareProgress | SetsMade | PrepareFailed
PREPARE_MESSAGES: Codec[PrepareOrder | PrepareEvent] = Codec(PrepareOrder | PrepareEvent)
