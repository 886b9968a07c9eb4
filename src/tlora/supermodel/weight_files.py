"""The weight files of a base by their headers: what is missing, too much, cut off or quantised is known before any weight is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from tlora.data.base_files import located, snapshot
from tlora.errors import ModelError
from tlora.file_identity import FileIdentity, identity_of
from tlora.job import UnusedWeights, split_revision
from tlora.supermodel.base_config import package_missing
from tlora.supermodel.packed_format import format_of, without_packing
from tlora.supermodel.tensor_files import find_tensors
from tlora.supermodel.text_model import model_class, other_parameters
from tlora.wording.numbers import are, quantity

# In the order in which transformers looks for them.
_WHOLE_OR_INDEX = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STRANGE = torch.uint8  # stands for all that is no plain number


def check_weights(base_model: str, config: Any) -> str | None:
    """Compare the headers of the base's files with the model that its `config` makes; no weight is read.

    Raises ModelError for a file that is missing or cut off and for a tensor that is missing, of another shape or no plain number.
    Returns what cannot be known: of a hub id whose files are not in the cache yet.
    """
    is_local = Path(base_model).is_dir()
    directory = Path(base_model) if is_local else _snapshot(base_model)
    try:
        files = _weight_files(directory, base_model)
    except ModelError:
        if is_local:
            raise
        return f"the weights of {base_model} are not in the hub's cache: they are checked when they have been downloaded"
    _compare(_files_now(files, config, base_model))
    return None


def check_unused(
    base_model: str, config: Any, unused: UnusedWeights, remedy: str = "write `unused_weights: ignore` at the top of the jobs file"
) -> list[str]:
    """In lines, which tensors of the base's files its model leaves out; of a hub id whose files are not here yet, nothing.

    Raises ModelError for tensors that a model of this family would use, unless `unused` is "ignore", which the `remedy` says how to order:
    the model would be another than the files hold. Layers that predict several tokens and towers of other modalities are said only.
    """
    directory = Path(base_model) if Path(base_model).is_dir() else _snapshot(base_model)
    try:
        files = _weight_files(directory, base_model)
    except ModelError:
        return []  # of a directory, `check_weights` says it
    found, text = _compare(_files_now(files, config, base_model)), config.get_text_config()
    beyond = {name for name in found.unexpected if not _BUFFER.search(name)}
    layers = getattr(text, "num_hidden_layers", 0), getattr(text, "num_nextn_predict_layers", 0) or 0
    strange = sorted(name for name in beyond if not _is_left_out(name, *layers))
    if strange and unused != "ignore":
        in_layer = _LAYER.search(strange[0]) is not None
        kept = f"its config.json has num_hidden_layers {layers[0]}" if in_layer else "its config.json makes a model without them"
        raise ModelError(
            f"base_model {base_model}: {quantity(len(strange), 'tensor')} of its files {are(len(strange))} not used, {strange[0]} first: "
            f"{kept}, and another model than the files hold would be used. Compare config.json with the original's, or {remedy} if this is "
            "meant"
        )
    ignored = {name for name in found.nowhere if _matches(found.may_be_ignored, name) and not _BUFFER.search(name)}
    left = sorted(beyond | ignored | set(found.other_modalities))
    said = f"{quantity(len(left), 'tensor')} of {base_model} {are(len(left))} not part of the model that is used"
    return [f"{said}, {left[0]} first"] if left else []


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_BUFFER = re.compile(r"inv_freq$|(?:attn|attention)\.(?:masked_)?bias$|position_ids$")
_ELSEWHERE = re.compile(
    r"(?:^|[._])(?:vision|visual|image|audio|speech|multi_?modal|mm_projector|talker|code2wav|mtp|nextn|eagle)", re.IGNORECASE
)


def _is_left_out(name: str, num_layers: int, predicting: int) -> bool:
    """Whether a tensor belongs to another modality, or to one of the layers after the last that predict several tokens."""
    layer = _LAYER.search(name)
    return _ELSEWHERE.search(name) is not None or (layer is not None and num_layers <= int(layer[1]) < num_layers + predicting)


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def find_safetensors(name: str, revision: str | None) -> list[Path]:
    """The safetensors files of a base: of a directory, or of a hub id, whose files are downloaded if they are not in the cache.

    Raises ModelError where there are none.
    """
    there, _ = located(f"{name}@{revision}" if revision else name, weights=True)
    if Path(there).is_dir():
        files = _weight_files(Path(there), name)
    else:
        options: Any = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        get_shards: Any = get_checkpoint_shard_files
        try:
            whole, index = (cached_file(name, file, **options) for file in _WHOLE_OR_INDEX[:2])
            names = [whole] if whole else get_shards(name, index, revision=revision)[0] if index else []
        except Exception as error:  # a library's border: what it raises depends on the network
            raise ModelError(f"base_model {name}: its weights cannot be had: {' '.join(str(error).split())[:400]}") from None
        files = [Path(file) for file in names]
    if not files or files[0].suffix != ".safetensors":
        raise ModelError(f"base_model {name}: has no safetensors files, which a shared base is read from. Convert it, or load it unshared")
    return files


def _snapshot(base_model: str) -> Path:
    if (there := snapshot(base_model)) is not None:
        return there
    name, revision = split_revision(base_model)
    config_file = cached_file(name, "config.json", revision=revision)
    assert config_file is not None, f"{base_model}: no config.json"
    return Path(config_file).parent


def _weight_files(directory: Path, base_model: str) -> list[Path]:
    name = next((name for name in _WHOLE_OR_INDEX if (directory / name).is_file()), None)
    if name is None:
        raise ModelError(f"base_model {base_model}: has no weights (looked for {', '.join(_WHOLE_OR_INDEX)}). Copy the model again")
    if not name.endswith(".json"):
        return [directory / name]
    try:
        shards = sorted(set(json.loads((directory / name).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"base_model {base_model}: {name} cannot be read ({type(error).__name__}: {error}). Copy it again") from None
    lacking = [shard for shard in shards if not (directory / shard).is_file()]
    if lacking or not shards:
        what = f"{len(lacking)} of {len(shards)} weight files are missing, {lacking[0]} first" if lacking else f"{name} names no files"
        raise ModelError(f"base_model {base_model}: {what}. Copy the model again")
    return [directory / shard for shard in shards]


class _Header(Tensor):
    """A tensor without numbers that stays so where it is to be moved: transformers joins some on the host (Qwen4-Exp's embeddings)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.to and kwargs:
            kwargs = kwargs | {"device": None}
        return super().__torch_function__(func, types, args, kwargs or {})


def _plain_headers(files: list[Path], config: Any, base_model: str) -> dict[str, Tensor]:
    """Every tensor of the files on the meta device; packed ones as the plain weights that they stand for. Raises ModelError."""
    headers, form = _read_headers(files, base_model), format_of(config, base_model)
    if form is None:
        return headers
    packed = form.find(find_tensors(files))
    taken = {name for tensor in packed.values() for name in tensor.names}
    plain = {key: torch.empty(tensor.shape, dtype=tensor.value_dtype, device="meta") for key, tensor in packed.items()}
    return {name: tensor for name, tensor in headers.items() if name not in taken} | plain


def _read_headers(files: list[Path], base_model: str) -> dict[str, Tensor]:
    """Every tensor of the files on the meta device."""
    headers: dict[str, Tensor] = {}
    for file in files:
        try:
            headers |= _read_pickled(file) if file.suffix == ".bin" else _read_safetensors(file)
        except Exception as error:  # a library's border: what it raises depends on what is damaged
            why = " ".join(str(error).split())[:200]
            raise ModelError(
                f"base_model {base_model}: cannot be loaded: {file.name} is cut off or damaged ({why}). Copy the model again"
            ) from None
    return headers


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    headers: dict[str, Tensor] = {}
    with safe_open(file, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype(), _STRANGE)
            headers[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return headers


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Of a file of `torch.save`, which is mapped: none of its numbers is read."""
    tensors: dict[str, Any] = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    plain = set(_DTYPES.values())
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype if tensor.dtype in plain else _STRANGE, device="meta")
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }


@dataclass(frozen=True)
class _Files:
    """A base's weight files as they are now. A fact about them holds as long as they are equal (`file_identity.py`)."""

    base_model: str
    paths: tuple[Path, ...]
    identities: tuple[FileIdentity, ...]
    config_text: str
    config: Any = field(compare=False)


def _files_now(paths: list[Path], config: Any, base_model: str) -> _Files:
    return _Files(base_model, tuple(paths), tuple(identity_of(path.stat()) for path in paths), repr(config), config)


@dataclass(frozen=True)
class _Comparison:
    """Names of tensors. `unexpected`: as transformers reports them; `nowhere`: in the files, and neither in the model nor reported."""

    unexpected: frozenset[str]
    nowhere: frozenset[str]
    may_be_ignored: tuple[str, ...]  # patterns
    other_modalities: tuple[str, ...]


@lru_cache(8)  # a run compares before it plans and before it loads
def _compare(files: _Files) -> _Comparison:
    """What transformers reports of a load on the meta device: its own matching of names knows what a family renames, ties and fuses."""
    config, base_model = files.config, files.base_model
    tensors = _plain_headers(list(files.paths), config, base_model)
    try:
        model, loading_info = model_class(config).from_pretrained(
            None,
            config=without_packing(config),
            state_dict={name: tensor.as_subclass(_Header) for name, tensor in tensors.items()},
            device_map="meta",
            attn_implementation="eager",  # a config that was outlined names ours, which a tower for images may not know
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except ImportError as error:
        raise package_missing(base_model, error) from None
    except Exception as error:  # a library's border: what it raises depends on family and version
        why = " ".join(str(error).split())[:400]
        raise ModelError(f"base_model {base_model}: its weights do not fit its config.json: {why}. Copy the model again") from None
    refuse_incomplete(loading_info, base_model)
    quantized = sorted(name for name in tensors if tensors[name].dtype == _STRANGE and name in dict(model.named_parameters()))
    if quantized:
        raise ModelError(
            f"base_model {base_model}: {quantity(len(quantized), 'tensor')} {are(len(quantized))} no plain numbers of 16 bits or more, "
            f"{quantized[0]} first. Use the original, unquantised model"
        )
    unexpected = frozenset(map(str, loading_info["unexpected_keys"]))
    nowhere = frozenset(tensors.keys() - model.state_dict().keys() - unexpected)
    return _Comparison(unexpected, nowhere, tuple(model._keys_to_ignore_on_load_unexpected or ()), tuple(other_parameters(model)))


def refuse_incomplete(found: dict[str, Any], base_model: str) -> None:
    """Raise ModelError by what transformers reports of a load: a tensor that is missing would be drawn at random."""
    lacking = sorted(str(key[0] if isinstance(key, tuple) else key) for key in (*found["missing_keys"], *found["mismatched_keys"]))
    if lacking:
        raise ModelError(
            f"base_model {base_model}: {quantity(len(lacking), 'tensor')} {are(len(lacking))} missing or of another shape, "
            f"{lacking[0]} first. Compare config.json with the original's, or copy the base again"
        )
