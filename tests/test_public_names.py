"""What `import tlora` offers, and that it costs nothing before it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_modules_that_the_environment_names_are_imported_with_the_package(tmp_path: Path) -> None:
    """So that each process of a run knows their entries."""
    (tmp_path / "own_names.py").write_text("from tlora.registry import BASE_PRECISIONS\nBASE_PRECISIONS['own'] = __name__\n")
    code = "import sys, tlora.registry; sys.exit(tlora.registry.BASE_PRECISIONS['own'] != 'own_names' or 'torch' in sys.modules)"
    environment = os.environ | {"TLORA_PLUGINS": "own_names", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=False).returncode == 0
    missing = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"TLORA_PLUGINS": "nowhere"}, capture_output=True, text=True, check=False
    )
    assert "TLORA_PLUGINS: module 'nowhere' cannot be imported" in missing.stderr and "PYTHONPATH" in missing.stderr
