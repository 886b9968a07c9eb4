"""What a scheduler has learned of the speeds of its bases, kept in a file of the store: a restart goes on with it.

The file is small and can be lost: without it, or where it is damaged, a scheduler begins with the constants and says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tlora import durable
from tlora.costs.cost import LEAST_CORRECTION, MOST_CORRECTION, CostModel, Learned
from tlora.errors import CheckpointError
from tlora.json_file import read_object

FILE = "learned-costs.json"
VERSION = 1
SAVE_SECONDS = 60.0  # between two saves of observations that change no prediction


class LearnedCosts:
    """The file in `directory`. `note` is told where it is damaged, or cannot be written."""

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        self._path, self._note = directory / FILE, note
        self._stored = self._read()  # by base: as the file has it; of bases that are not known here too
        self._of: dict[str, str] = {}  # base -> what its observations are of
        self._saved_at = -math.inf
        self._saved_corrections = -1
        self._saved: dict[str, Learned] = {}  # with ages on a clock that stands
        self._broken = False

    def teach(self, cost: CostModel, base: str, of: str, now: float) -> None:
        """Let `cost` go on with what was learned of `base` earlier, if that was of the same: `of` names its files and its devices."""
        self._of[base] = self._key(cost, base, of)
        found = self._stored.get(base)
        if found is None:
            return
        try:
            learned = _parse(found) if found.get("of") == self._of[base] else None
        except (ValueError, TypeError, KeyError, IndexError) as error:
            self._note(f"{self._path}: what it says of {base!r} is damaged ({error}): its speed is learned anew")
            return
        if learned is not None:
            away = max(0.0, time.time() - float(found["unix_seconds"]))
            aged = tuple([(ratio, weight, age + away) for ratio, weight, age in learned.means])
            cost.relearn(base, Learned(learned.corrections, aged), now)

    def see(self, cost: CostModel, now: float, *, at_once: bool = False) -> None:
        """Save what is new, now and then; `at_once` at an end. On a full disk later."""
        corrected = cost.times_corrected != self._saved_corrections
        if not self._of or not (at_once or corrected or now - self._saved_at >= SAVE_SECONDS):
            return
        self._saved_at = now
        state = {base: cost.learned(base, 0.0) for base in self._of}
        if state == self._saved:
            return
        for base, of in self._of.items():
            learned = cost.learned(base, now)
            if any(weight for _, weight, _ in learned.means):
                self._stored[base] = {"of": of, "unix_seconds": time.time(), **asdict(learned)}
        if not self._stored:
            return
        try:
            durable.write_file(self._path, json.dumps({"version": VERSION, "bases": self._stored}) + "\n")
        except CheckpointError as error:
            if not self._broken:
                self._note(f"{error}; what was learned of speeds is kept for this run only")
            self._broken = True
        else:
            self._broken, self._saved_corrections, self._saved = False, cost.times_corrected, state

    @staticmethod
    def _key(cost: CostModel, base: str, of: str) -> str:
        """Observations are ratios to constants: with other constants they say nothing."""
        numbers = {name: value for name, value in asdict(cost.constants[base]).items() if name != "source"}
        return f"{of} {hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]}"

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self._path.exists():
            return {}
        try:
            found = read_object(self._path)
            if found.get("version") != VERSION:
                raise ValueError(f"its version is {found.get('version')!r}, and {VERSION} is read")
            bases = found.get("bases")
            if not isinstance(bases, dict) or not all(isinstance(entry, dict) for entry in cast("dict[str, Any]", bases).values()):
                raise ValueError("it has no mapping of bases")
        except (OSError, ValueError) as error:
            self._note(f"{self._path}: what was learned of speeds cannot be read ({error}): it is learned anew")
            return {}
        return cast("dict[str, dict[str, Any]]", bases)


def _parse(found: dict[str, Any]) -> Learned:
    """Raises ValueError, TypeError, KeyError, IndexError."""
    one, node, nodes = (_number(value, LEAST_CORRECTION, MOST_CORRECTION) for value in found["corrections"])
    means = tuple(
        [(_number(ratio, LEAST_CORRECTION, MOST_CORRECTION), _number(weight), _number(age)) for ratio, weight, age in found["means"]]
    )
    _number(found["unix_seconds"])
    if len(means) != 4:
        raise ValueError(f"{len(means)} means in place of 4")
    return Learned((one, node, nodes), means)


def _number(value: Any, least: float = 0.0, most: float = 1e12) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{value!r} is no number from {least:g} to {most:g}")
    return float(value)
