"""The server is free of the model stack, and what it imports is small."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "datasets", "numpy", "pyarrow", "peft", "safetensors")


def test_server_imports_nothing_of_the_model_stack() -> None:
    code = f"import sys, tlora.service.server; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
