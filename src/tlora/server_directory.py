"""The directory of this user's server, for the server and its clients."""

from __future__ import annotations

import os
from pathlib import Path

HOME = "TLORA_HOME"
FIRST_KEY = "first-key"
ADDRESS = "address"  # a file with the URL that the server answers at


def default_directory() -> Path:
    """$TLORA_HOME, or `tlora/server` in the user's data directory."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.environ.get(HOME) or Path(home) / "tlora" / "server").expanduser().absolute()
