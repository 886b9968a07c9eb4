"""Digests of a base's files, and `base.json`: over which base the adapter in a directory was trained. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.errors import ModelError
from tlora.json_file import read_object

BASE_FILE = "base.json"  # in each job's directory: what `run.json` has of the base and how it computes (store/run_recovery.py)
_SERVED = "served"  # in a `base.json` that a server sent: its base_model is a name of that server alone
_BLOCK_BYTES = 4096
_MOST_BLOCKS = 512  # per base: 512 reads take 3 ms from memory, and about 0.1 s from an NVMe drive
_LARGEST_HEADER = 100_000_000  # bytes, the limit of safetensors itself
_NO_FUNCTION = ("transformers_version", "_name_or_path")  # of config.json: entries that do not change what the model computes


@dataclass(frozen=True)
class Fingerprint:
    """What a run records of its base. `quick` covers all files; `sha256` has each weight file's hash, and is empty until all are known."""

    quick: str
    sha256: Mapping[str, str]


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers would load from `directory`, in its order of preference; empty if one of them is not there."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return [directory / name]
        if index.is_file():
            try:
                shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                files = [directory / shard for shard in sorted(set(shards))]
            except (ValueError, KeyError, TypeError, AttributeError):
                return []  # loading says what is wrong with it
            return files if all(file.is_file() for file in files) else []
    return []


def quick_digest(directory: Path) -> str | None:
    """sha256 over config.json and, of each weight file, its name, size, header and a block in the middle of up to 512 tensors.

    None where the weights are not all there (a hub model that has not been downloaded yet).
    """
    files = weight_files(directory)
    if not files:
        return None
    digest = hashlib.sha256(_config_text(directory / "config.json").encode())
    for file in files:
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(f"\n{file.name} {size}\n".encode())
            for offset, length in _blocks(opened.fileno(), size, max(1, _MOST_BLOCKS // len(files))):
                digest.update(os.pread(opened.fileno(), length, offset))
    return digest.hexdigest()


def _config_text(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return text  # loading says what is wrong with it
    if not isinstance(config, dict):
        return text
    return json.dumps({key: value for key, value in config.items() if key not in _NO_FUNCTION}, sort_keys=True)


def _blocks(file: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths: the header and tensors' middles of a safetensors file, evenly spaced blocks of any other."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{length} bytes of header")
        header = json.loads(os.pread(file, length, 8))
        spans = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
        middles = [8 + length + (begin + end) // 2 for begin, end in spans]
        yield 0, 8 + length
    except (ValueError, KeyError, TypeError, AttributeError):
        middles = [size * number // most for number in range(most)]
    step = -(-len(middles) // most) if middles else 1
    yield from ((offset, _BLOCK_BYTES) for offset in middles[::step])


def read_fingerprint(content: Mapping[str, Any]) -> Fingerprint | None:
    """The base's fingerprint in `run.json`; None for a run of a version that did not record it."""
    saved = content.get("base_files")
    return Fingerprint(str(saved["quick"]), dict(saved["sha256"])) if isinstance(saved, dict) else None


@dataclass(frozen=True, slots=True)
class TrainedOver:
    """The base of an adapter. `served`: `name` is what a server calls it, neither a path nor a hub id. `files`: None if not recorded."""

    name: str
    served: bool
    files: Fingerprint | None

    def __str__(self) -> str:
        return f"the server's base {self.name!r}" if self.served else self.name

    def differs(self, files: Path) -> bool | None:
        """Whether the base that lies in `files` has another digest: it is another model, or the same in another format. None if unknown."""
        try:
            digest = quick_digest(files)
        except OSError:  # loading says which file cannot be read
            digest = None
        return None if self.files is None or digest is None else digest != self.files.quick


def trained_over(adapter: Path) -> TrainedOver | None:
    """What the `base.json` of an adapter's or a checkpoint's directory says; None without one. Raises ModelError for a damaged one."""
    path = (adapter.parent if adapter.name.startswith("checkpoint-") else adapter) / BASE_FILE
    try:
        facts = read_object(path)
        return TrainedOver(str(facts["base_model"]), bool(facts.get(_SERVED)), read_fingerprint(facts))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: cannot be read ({why}). Copy the directory again, or only the adapter's files") from None


def served_facts(directory: Path, name: str | None) -> dict[str, Any] | None:
    """The `base.json` that a server sends with the adapter in `directory`: with `name`, what it calls the base, in place of a path of its
    own; None where the adapter's config has no such path and nothing is known of the base's files.
    """
    try:
        facts = {key: value for key, value in read_object(directory / BASE_FILE).items() if key in ("base_model", "base_files")}
    except (OSError, ValueError):  # of an earlier version, or damaged: nothing is known of the files
        facts = dict[str, Any]()
    return facts | {"base_model": name, _SERVED: True} if name is not None else facts or None
