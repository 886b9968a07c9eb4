"""Real workers on two one-thread "GPUs": jobs arrive, join, move and lose their worker, and end with the bytes of never having moved."""

from __future__ import annotations
