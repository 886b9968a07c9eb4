"""The last line of a model card: by it a card that nobody has edited is known, and its names may be changed. Pure text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

CARD_FILE = "README.md"  # a card's name in its adapter's directory
_SEAL = re.compile(r"<!-- written by tlora, sha256 of the text above: ([0-9a-f]{64}) -->\n")
_NAMES = re.compile(r"^# (?P<heading>.+)$|`(?P<quoted>[^`\n]+)`|^\| started from \| (?P<start>.+) \|$", re.MULTILINE)


def seal(text: str) -> str:
    """The card whose text that is."""
    return text + f"<!-- written by tlora, sha256 of the text above: {_digest(text)} -->\n"


def unsealed(card: str) -> str | None:
    """The text of a card that is as `seal` made it; None of another."""
    found = next(iter(_SEAL.finditer(card)), None)
    if found is None or found.end() != len(card) or _digest(card[: found.start()]) != found[1]:
        return None
    return card[: found.start()]


def rename(card: str, names: Mapping[str, str]) -> str:
    """Job, base, files and what it was started from by other names; a card that was edited stays as it is."""
    text = unsealed(card)
    return card if text is None else seal(_NAMES.sub(lambda found: _renamed(found, names), text))


def _renamed(found: re.Match[str], names: Mapping[str, str]) -> str:
    kind = found.lastgroup or 0
    begin, end = found.start(kind) - found.start(), found.end(kind) - found.start()
    return found[0][:begin] + names.get(found[kind], found[kind]) + found[0][end:]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
