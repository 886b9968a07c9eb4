"""Where the user's cache is. What lies there belongs to those who put it there."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where what can be made again (tokenized data, tables of tiles) is kept: $TLORA_CACHE, or tlora in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TLORA_CACHE") or Path(home) / "tlora").expanduser()
