"""A controller's files in its store besides jobs: the lock, and the count of controllers so far."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from tlora import durable
from tlora.directory_lock import try_lock
from tlora.errors import ConfigError
from tlora.json_file import read_object

FILE = "controller.json"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One controller's time over a store. `epoch` counts them. `started_unix_seconds`: where its clock begins, which is an earlier one's
    as long as workers of that time are alive.
    """

    epoch: int
    started_unix_seconds: float


def begin_epoch(directory: Path, *, continues: bool) -> Epoch:
    """Begin the next epoch, on disk before any worker sees it. The caller holds the lock. Raises ConfigError, CheckpointError."""
    path = directory / FILE
    try:
        before = read_object(path) if path.exists() else {"epoch": 0, "started_unix_seconds": 0.0}
        epoch, started = int(before["epoch"]) + 1, float(before["started_unix_seconds"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}): which workers are of this cluster cannot be determined. End them, then remove the file"
        ) from None
    epoch_started = Epoch(epoch, started if continues else time.time())
    durable.write_file(path, json.dumps({"epoch": epoch_started.epoch, "started_unix_seconds": epoch_started.started_unix_seconds}) + "\n")
    return epoch_started


def lock_store(directory: Path) -> int:
    """Lock the directory itself; no worker inherits the lock, so a killed controller holds none. Raises ConfigError if it is held."""
    handle = try_lock(directory)
    if handle is None:
        raise ConfigError(f"output_dir {directory} is in use by another controller. Stop that one, or choose another")
    return handle
