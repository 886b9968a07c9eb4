"""What the model libraries would import and this program does not use. Imports nothing of them itself."""

from __future__ import annotations

import sys

_UNUSED = ("sklearn", "scipy", "torchvision", "torchaudio")


def leave_unused_out() -> None:
    """For a process of its own, before it imports transformers: what that imports where it is installed takes up to 3 s."""
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
