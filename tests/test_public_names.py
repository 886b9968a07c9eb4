"""What `import tlora` offers, and that it costs nothing before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tlora


@pytest.mark.parametrize("name", tlora.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(tlora, name)
    assert found.__name__ == name and found.__module__.startswith("tlora.")


def test_names_that_are_not_public_are_told() -> None:
    with pytest.raises(AttributeError, match="module 'tlora' has no attribute 'nothing'"):
        _ = tlora.nothing  # type: ignore[attr-defined]


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, tlora; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
