"""The last line of a model card: it proves that the card is unedited, so that its names may be changed. Pure text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

CARD_FILE = "README.md"  # a card's name in its adapter's directory
_SEAL = re.compile(r"<!-- written by tlora, sha256 of the text above: ([0-9a-f]{64}) -->\n")
_NAMES = re.compile(r"^# (?P<heading>.+)$|`(?P<quoted>[^`\n]+)`|^\| started from \| (?P<start>.+) \|$", re.MULTILINE)


def seal(text: str) -> str:
    """The card with this text."""
    return text + f"<!-- written by tlora, sha256 of the text above: {_digest(text)} -->\n"


def unsealed(card: str) -> str | None:
    """The text of a card that is unchanged since `seal`; None for any other."""
    mark = next(iter(_SEAL.finditer(card)), None)
    if mark is None or mark.end() != len(card) or _digest(card[: mark.start()]) != mark[1]:
        return None
    return card[: mark.start()]


def rename(card: str, names: Mapping[str, str]) -> str:
    """Rename the job, base, files and start in a card; an edited card stays unchanged."""
    text = unsealed(card)
    return card if text is None else seal(_NAMES.sub(lambda match: _renamed(match, names), text))


def _renamed(match: re.Match[str], names: Mapping[str, str]) -> str:
    kind = match.lastgroup or 0
    begin, end = match.start(kind) - match.start(), match.end(kind) - match.start()
    return match[0][:begin] + names.get(match[kind], match[kind]) + match[0][end:]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
