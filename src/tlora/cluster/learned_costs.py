"""The speeds of bases that a scheduler has learned, kept in a file of the store for the next start.

The file is small and may be lost: without it, or if it is damaged, a scheduler begins with the constants and says so.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tlora import durable
from tlora.errors import CheckpointError
from tlora.job import Recompute
from tlora.json_file import read_object
from tlora.shape.cost import LEAST_CORRECTION, MOST_CORRECTION, CostModel, Learned, constants_digest

FILE = "learned-costs.json"
VERSION = 1
_MOST_ENTRIES = 4  # of one base on one kind of GPU, each with other constants
_ENTRIES: TypeAdapter[dict[str, dict[str, dict[str, Any]]]] = TypeAdapter(dict[str, dict[str, dict[str, Any]]])
SAVE_SECONDS = 60.0  # between two saves of observations that change no prediction


def learned_of(base_model: str, device: str, recompute: Recompute) -> str:
    """What observations are of: a base's files and its devices, and how much is recomputed by order."""
    return f"{base_model} {device}" + (f" recompute {recompute}" if recompute not in ("auto", "none", 0) else "")


class LearnedCosts:
    """The file in `directory`. `note` gets a line if it is damaged or cannot be written."""

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        self._path, self._note = directory / FILE, note
        self._stored = self._read()  # by base and `_key`, the newest last; also of bases that are not known here
        self._of: dict[str, str] = {}  # base -> what its observations are of
        self._models: dict[str, CostModel] = {}  # by kind of GPU; "": the cluster's own
        self._saved_at = -math.inf
        self._saved_corrections = -1
        self._saved: dict[tuple[str, str], Learned] = {}  # by base and kind, with ages as of the save
        self._broken = False

    def teach(self, cost: CostModel, base: str, of: str, now: float) -> None:
        """Give `cost` what was learned of `base` earlier, if that was of the same, as `learned_of` names it.

        Each entry is of some constants, and counts once the base has these: they may come later, from a worker's measurement.
        """
        self._of[base] = of
        self._models[""] = cost
        for kind, model in list(self._models.items()):  # the scheduler's thread may add one
            self._recall(model, base, kind, now)

    def teach_kind(self, kind: str, cost: CostModel, now: float) -> None:
        """The same of GPUs of a kind, whose model is new."""
        self._models[kind] = cost
        for base in list(self._of):
            self._recall(cost, base, kind, now)

    def _recall(self, cost: CostModel, base: str, kind: str, now: float) -> None:
        for key, entry in self._stored.get(base, {}).items():
            try:
                if entry["of"] == self._of[base] and (digest := _digest_of(key, kind)):
                    cost.recall(base, digest, _parse(entry), now)
            except (ValueError, TypeError, KeyError) as error:
                self._note(f"{self._path}: what it says of {base!r} is damaged ({error}): its speed is learned anew")

    def see(self, now: float, *, at_once: bool = False) -> None:
        """Save what is new, now and then; `at_once` at an end. After a full disk a later call saves it."""
        corrections = sum(model.times_corrected for model in list(self._models.values()))
        if not self._of or not (at_once or corrections != self._saved_corrections or now - self._saved_at >= SAVE_SECONDS):
            return
        self._saved_at = now
        known = [(base, kind) for kind, model in list(self._models.items()) for base in list(self._of) if base in model.constants]
        state = {(base, kind): self._models[kind].learned(base, 0.0) for base, kind in known}
        if state == self._saved:
            return
        for base, kind in known:
            learned = self._models[kind].learned(base, now)
            if any(weight for _, weight, _ in learned.means):
                entry = {"of": self._of[base], "unix_seconds": time.time(), **asdict(learned)}
                entries = self._stored.setdefault(base, {})
                newest = _key(constants_digest(self._models[kind].constants[base]), kind)
                entries.pop(newest, None)  # so that it comes last
                entries[newest] = entry
                for oldest in [key for key in entries if _digest_of(key, kind)][:-_MOST_ENTRIES]:
                    del entries[oldest]
        if not self._stored:
            return
        try:
            durable.write_file(self._path, json.dumps({"version": VERSION, "bases": self._stored}) + "\n")
        except CheckpointError as error:
            if not self._broken:
                self._note(f"{error}; what was learned of speeds is kept for this run only")
            self._broken = True
        else:
            self._broken, self._saved_corrections, self._saved = False, corrections, state

    def _read(self) -> dict[str, dict[str, dict[str, Any]]]:
        if not self._path.exists():
            return {}
        try:
            found = read_object(self._path)
            if found.get("version") != VERSION:
                raise ValueError(f"its version is {found.get('version')!r}, and {VERSION} is read")
            return _ENTRIES.validate_python(found.get("bases"))
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            self._note(f"{self._path}: what was learned of speeds cannot be read ({why}): it is learned anew")
            return {}


def _key(digest: str, kind: str) -> str:
    """Of an entry: of some constants, on GPUs of a kind."""
    return f"{digest} {kind}" if kind else digest


def _digest_of(key: str, kind: str) -> str:
    """ "" for an entry of another kind."""
    digest, _, of = key.partition(" ")
    return digest if of == kind else ""


def _parse(found: dict[str, Any]) -> Learned:
    """The entry, aged by the time since it was written. Raises ValueError, TypeError, KeyError."""
    away = max(0.0, time.time() - _number(found["unix_seconds"]))
    one, node, nodes = (_number(value, LEAST_CORRECTION, MOST_CORRECTION) for value in found["corrections"])
    means: list[tuple[float, float, float]] = []
    for ratio, weight, age in found["means"]:
        means.append((_number(ratio, LEAST_CORRECTION, MOST_CORRECTION), _number(weight), _number(age) + away))
    if len(means) != 4:
        raise ValueError(f"{len(means)} means in place of 4")
    return Learned((one, node, nodes), tuple(means))


def _number(value: Any, least: float = 0.0, most: float = 1e12) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{value!r} is no number from {least:g} to {most:g}")
    return float(value)
