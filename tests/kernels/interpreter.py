"""Triton kernels in tests: on the GPU where there is one, else through Triton's interpreter on the CPU.

A kernel is interpreted when `TRITON_INTERPRET` was set as it was defined, and so must Triton's own `tl.sum` and the like have been:
`tests/conftest.py` imports this before anything that imports triton (transformers does). The variable does not stay set, since the
super-model would then take its GPU path on the CPU; a test module wraps its imports of kernels in `interpreted`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

_VARIABLE = "TRITON_INTERPRET"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MARKS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # numpy on the interpreter
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy on NaN and overflows made on purpose
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]
"""`pytestmark` of a module whose kernels run on `DEVICE`."""


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are defined (modules that are first imported) within it are interpreted, unless there is a GPU."""
    before = os.environ.get(_VARIABLE)
    if DEVICE.type == "cpu":
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)


if find_spec("triton") is not None:
    assert "triton" not in sys.modules or _VARIABLE in os.environ or DEVICE.type == "cuda", "triton was imported before tests/conftest.py"
    with interpreted():
        import triton.experimental.gluon  # noqa: F401  (its first use, by the interpreter, would define things late)
