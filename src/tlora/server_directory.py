"""The directory of this user's server, for the server and its clients."""

from __future__ import annotations

import os
from pathlib import Path

from tlora.errors import ConfigError

HOME = "TLORA_HOME"
FIRST_KEY = "first-key"
ADDRESS = "address"  # a file with the URL that the server answers at


def default_directory() -> Path:
    """$TLORA_HOME, or `tlora/server` in the user's data directory."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.environ.get(HOME) or Path(home) / "tlora" / "server").expanduser().absolute()


def check_rights(directory: Path) -> None:
    """Raises ConfigError for a server's directory that this user may not look into."""
    try:
        (directory / ADDRESS).stat()
    except PermissionError:
        raise ConfigError(
            f"{directory}: this user may not look into it. Run this as the user of its server (sudo -u), or ask the server: set TLORA_URL "
            "and TLORA_API_KEY"
        ) from None
    except OSError:  # there is none
        return
