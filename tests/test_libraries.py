"""What a program leaves behind that imports the model libraries in one go."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
from tlora.libraries import begin_imports, end_imports
begin_imports()
import triton
end_imports()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_nothing_is_called_leaked_at_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
