"""Downloads what is missing of a base from the hub: the disk is checked for room first, and progress is shown in bytes of all files."""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora import durable
from tlora.data.base_files import cache_of, has_tokenizer, has_weights, snapshot, weight_names
from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.wording.numbers import duration_text

_ASK_SECONDS = 20.0  # for the hub to list a base's files
_LOOK_SECONDS, _RATE_SECONDS = 0.25, 30.0  # between two looks at the bytes; over which their rate is taken
_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|jinja|txt|model|tiktoken)|additional_chat_templates/[^/]+\.jinja")  # what transformers reads


@dataclass(frozen=True)
class _Lacking:
    """Files of a base that the hub's cache lacks: `files` to fetch, `needed` their bytes, `total` the bytes of all files that are read."""

    files: tuple[str, ...]
    needed: int
    total: int


def fetch_base(base_model: str, show: Callable[[str], None], *, weights: bool = True) -> None:
    """Download the files that transformers reads of a hub id whose config.json is in the hub's cache already, with or without `weights`.

    `show` takes a line of progress about four times a second, in the caller's thread. A directory, or a complete cache, needs no request.
    Raises ModelError if the disk has no room or a download fails; complete files are kept.
    """
    directory = snapshot(base_model)
    if directory is None or (has_tokenizer(directory) and (has_weights(directory) or not weights)):
        return
    lacking = _look_up(base_model, directory, weights)
    if lacking is None or not lacking.files:
        return
    _require_room(base_model, lacking.needed)
    try:
        _download(base_model, directory.name, lacking, show)
    except Exception as error:  # a library's border: what it raises depends on the network
        if durable.is_full(error):
            _raise_no_room(base_model, lacking.needed)
        raise ModelError(
            f"base_model {base_model}: cannot be downloaded: {_in_a_line(error)}. The files that are whole are kept: start again to go on"
        ) from None


def describe_download(base_model: str) -> str | None:
    """One line on what training will download of a hub id first; None if it is all here. Raises ModelError if the disk has no room."""
    directory = snapshot(base_model)
    if directory is None or has_weights(directory):
        return None
    lacking = _look_up(base_model, directory, weights=True)
    if lacking is None or not lacking.files:
        return None
    _require_room(base_model, lacking.needed)
    room = _size(shutil.disk_usage(_existing(cache_of(base_model))).free)
    return f"training downloads {_size(lacking.needed)} of {base_model} first, to {cache_of(base_model).parent} ({room} free)"


def _look_up(base_model: str, directory: Path, weights: bool) -> _Lacking | None:
    """The files of `directory`'s commit that the cache lacks; None if the hub does not say and those that are here may suffice."""
    from huggingface_hub import HfApi, constants

    name = split_revision(base_model)[0]
    if constants.HF_HUB_OFFLINE:
        return None  # the loader says what is not here
    try:
        hub = HfApi(endpoint=constants.ENDPOINT)
        listing = hub.model_info(name, revision=directory.name, files_metadata=True, timeout=_ASK_SECONDS)
        files = {file.rfilename: file for file in listing.siblings or ()}
        wanted = [path for path in files if _BESIDE_WEIGHTS.fullmatch(path)]
        wanted += weight_names(files, lambda index: _fetch_one(name, directory.name, index)) if weights else ()
    except Exception as error:  # a library's border, as above
        if has_weights(directory) or not weights:
            return None
        raise ModelError(
            f"base_model {base_model}: its weights are not in the hub's cache, and the hub does not list its files: {_in_a_line(error)}. "
            "Check the connection, or give a directory"
        ) from None
    absent = [path for path in wanted if path in files and not (directory / path).is_file()]
    needed = sum(files[path].size or 0 for path in absent if not _has_blob(cache_of(base_model), files[path]))
    return _Lacking(tuple(absent), needed, sum(files[path].size or 0 for path in wanted if path in files))


def _fetch_one(name: str, commit: str, path: str) -> Path:
    from huggingface_hub import constants, hf_hub_download

    return Path(hf_hub_download(name, path, revision=commit, cache_dir=constants.HF_HUB_CACHE, endpoint=constants.ENDPOINT))


def _has_blob(cache: Path, entry: Any) -> bool:
    """Whether another commit's snapshot has the same content."""
    return (cache / "blobs" / str(entry.lfs.sha256 if entry.lfs is not None else entry.blob_id)).is_file()


def _require_room(base_model: str, needed: int) -> None:
    if needed > shutil.disk_usage(_existing(cache_of(base_model))).free:
        _raise_no_room(base_model, needed)


def _raise_no_room(base_model: str, needed: int) -> None:
    place = cache_of(base_model).parent
    free = shutil.disk_usage(_existing(place)).free
    variable = next((name for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if os.environ.get(name)), "HF_HOME")
    raise ModelError(
        f"base_model {base_model}: {_size(needed)} are to be downloaded, and the disk of {place} has {_size(free)} free. "
        f"Free space there, or set {variable} to a directory on a larger disk"
    ) from None


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


class _Count:
    """Bytes that the library's threads report. `bars` has those of each bar: what came over the network, and what is written."""

    def __init__(self) -> None:
        self.bars: dict[int, float] = {}
        self.stopped = False
        self._lock = threading.Lock()

    def add(self, bar: int, num_bytes: float) -> None:
        if self.stopped:
            raise InterruptedError("the download was interrupted")
        with self._lock:
            self.bars[bar] = self.bars.get(bar, 0) + num_bytes

    @property
    def bytes(self) -> int:
        return int(max([0, *self.bars.copy().values()]))


def _bar_class(count: _Count) -> Any:
    """A progress bar for `snapshot_download` that draws nothing and counts bytes."""
    from tqdm.std import tqdm  # not tqdm.auto: in a notebook that draws

    class Bar(tqdm):
        monitor_interval = 0  # no thread of tqdm's own

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("unit") == "B"  # or it counts files
            super().__init__(*args, **(options | {"file": io.StringIO(), "leave": False, "disable": False}))

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts:
                count.add(id(self), n or 0)
            return super().update(n)

        def display(self, *_args: Any, **_options: Any) -> None:
            pass

    return Bar


def _download(base_model: str, commit: str, lacking: _Lacking, show: Callable[[str], None]) -> None:
    """Download in a separate thread, so that a stalled network is shown too and Ctrl-C works."""
    from huggingface_hub import constants, snapshot_download

    count, failures, ended = _Count(), list[BaseException](), threading.Event()

    def run() -> None:
        try:
            options: Mapping[str, Any] = {"cache_dir": constants.HF_HUB_CACHE, "endpoint": constants.ENDPOINT}
            files = [re.sub(r"([\[*?])", r"[\1]", path) for path in lacking.files]  # names, not patterns
            name = split_revision(base_model)[0]
            snapshot_download(name, revision=commit, allow_patterns=files, tqdm_class=_bar_class(count), **options)
        except BaseException as error:
            failures.append(error)
        ended.set()

    threading.Thread(target=run, name="download", daemon=True).start()
    meter = Meter(lacking.total - lacking.needed, lacking.total)
    try:
        show(f"downloading {base_model}: {meter.text(0, time.monotonic())}")
        while not ended.wait(_LOOK_SECONDS):
            show(f"downloading {base_model}: {meter.text(count.bytes, time.monotonic())}")
    except BaseException:
        count.stopped = True  # the library's threads end with their next piece
        raise
    if failures:
        raise failures[0]
    show(f"downloading {base_model}: {meter.text(lacking.needed, time.monotonic())}")


class Meter:
    """Bytes, rate over the last seconds and time to go of a download of `total` bytes, of which `before` are there when it starts."""

    def __init__(self, before: int, total: int) -> None:
        self._before, self._total = before, total
        self._history: deque[tuple[float, int]] = deque()

    def text(self, fetched: int, now: float) -> str:
        """`fetched`: bytes by `now`, on a monotonic clock."""
        fetched = min(fetched, self._total - self._before)
        self._history.append((now, fetched))
        while len(self._history) > 2 and now - self._history[1][0] > _RATE_SECONDS:
            self._history.popleft()
        then, earlier = self._history[0]
        rate = max(0.0, fetched - earlier) / (now - then) if now > then else 0.0
        left = self._total - self._before - fetched
        parts = [f"{_size(self._before + fetched)} of {_size(self._total)}"]
        parts += [f"{_size(rate)}/s"] if now > then else []
        parts += [f"ETA {duration_text(left / rate)}"] if rate and left else []
        return ", ".join(parts)


def _size(num_bytes: float) -> str:
    """A size in decimal units, as on the hub's pages."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
