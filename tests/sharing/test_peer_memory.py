"""Handles of GPU memory as words in a store that may be on another host: nothing that comes from it is run."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import tlora
from tlora.errors import RankError
from tlora.sharing.peer_memory import handle_fields, handle_words

FIELDS = (1, b"\x00handle\xff", 1 << 21, 512, b"counter", 64, b"event", True)
"""As torch's `_share_cuda_` gives them."""


class Trap:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_handle_goes_through_json_and_comes_back() -> None:
    assert handle_fields(json.loads(json.dumps(handle_words(FIELDS)))) == list(FIELDS)


def test_what_is_no_handle_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = base64.b64encode(pickle.dumps(Trap(tmp_path / "sprung"))).decode()
    words = handle_words(FIELDS)
    for wrong in (trap, [trap], [*words[:-1], trap], [trap, *words[1:]], words[:-1], None, {}, [*words[:1], "not base64!", *words[2:]]):
        with pytest.raises(RankError, match="no handle of GPU memory"):
            handle_fields(wrong)
    assert not (tmp_path / "sprung").exists()


def test_nothing_in_the_package_unpickles() -> None:
    """Neither by pickle nor by libraries' functions that use it. With `weights_only=True` torch has a reader of its own that makes nothing
    but tensors and plain containers: that is how a base's .bin files are read.
    """
    for path in Path(tlora.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"pickle|dill|marshal|shelve|joblib|torch\.load", text):
            continue  # nothing below could be found in it
        tree = ast.parse(text)
        safe = [call.func for call in ast.walk(tree) if isinstance(call, ast.Call) and _reads_weights_only(call)]
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name) and node not in safe:
                assert node.value.id not in ("torch", "joblib"), path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path


def _reads_weights_only(call: ast.Call) -> bool:
    given = {word.arg: word.value for word in call.keywords}.get("weights_only")
    return isinstance(given, ast.Constant) and given.value is True
