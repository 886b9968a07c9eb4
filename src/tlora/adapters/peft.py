"""Adapters as PEFT's files: `adapter_config.json` and `adapter_model.safetensors`. The only place that spells PEFT's tensor names.

`write_tensors` gives the bytes of `safetensors.torch.save_file` and their sha256, which it computes while it writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlora.adapter_shape import LoraConfig, Number, matching_keys, pattern_value
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.targets import in_indexer
from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.json_file import read_object

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_PIECE_BYTES = 16 << 20  # written, then hashed while it is in the cache; while another thread computes, each piece waits for Python's lock

_NO_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # by a base's model_type; PEFT raises at any of that name


def refused_by_peft(model_type: str, layout: AdapterLayout) -> list[str]:
    """In a line, that PEFT does not load such an adapter over a base of that type."""
    if model_type not in _NO_OUT_PROJ or all(shape.module.rpartition(".")[2] != "out_proj" for shape in layout.linears):
        return []
    return [f"PEFT loads no adapter at out_proj over {model_type}. Write exclude_modules: [out_proj] for one that it does"]


def without_place_in_peft(model_type: str, layout: AdapterLayout, lost: Sequence[str]) -> list[str]:
    """In a line, that PEFT finds no place for the adapters of the modules `lost`."""
    if not lost:
        return []
    why = f"transformers changes the names of its modules as it reads files, that of {lost[0]} first"
    if len(lost) == len(layout.linears):
        return [f"PEFT finds no place for an adapter over {model_type}: {why}. Use tlora generate, which reads it"]
    ends = sorted({".".join(name.split(".")[-2:]) for name in lost})
    loses = f"PEFT leaves out {len(lost)} of the {len(layout.linears)} modules of an adapter over {model_type}: {why}"
    return [f"{loses}. Write exclude_modules: [{', '.join(ends)}] for one that it loads whole"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a new file of host tensors of one dtype; return its sha256. Nothing is synced. Raises OSError.

    The library's function leaves a file that must be read again for its hash, and holds Python's lock while it writes.
    """
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for piece in _pieces(tensors, metadata):
            left = piece
            while left:  # a call may write less than it was given
                left = left[file.write(left) :]
            digest.update(piece)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    ordered = sorted(tensors.items())
    yield memoryview(_header(ordered, metadata))
    for _, tensor in ordered:
        content = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]


def _header(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    assert len({tensor.dtype for _, tensor in tensors}) <= 1, "safetensors puts larger dtypes first"
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors:
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_CONVERT = "Save it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), which makes a plain LoRA adapter of it"
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")  # the others change the base's weights, or lean on data that is not here
_RETRAIN = "Train a plain LoRA adapter without it, or merge this one into its base (PEFT's merge_and_unload) and start from there"
_NOT_PLAIN = {  # what an adapter may not set -> (why, remedy)
    "use_dora": ("is DoRA", _RETRAIN),
    "use_qalora": ("is QALoRA", _RETRAIN),
    "use_bdlora": ("is BD-LoRA", _RETRAIN),
    "arrow_config": ("routes between adapters", _RETRAIN),
    "monteclora_config": ("is MonteCLoRA", _RETRAIN),
    "kasa_config": ("is KaSA", _RETRAIN),
    "modules_to_save": (
        "holds weights of whole modules",
        "For new tokens train their rows alone (trainable_token_indices); else merge this one into its base (PEFT's merge_and_unload)",
    ),
    "lora_bias": ("has biases in addition to A and B", _RETRAIN),
    "layer_replication": ("is of a base with layers repeated", _RETRAIN),
    "alora_invocation_tokens": ("works behind these tokens only", _RETRAIN),
}


def _names(layout: AdapterLayout) -> dict[str, tuple[str, ...]]:
    """By module, of A and B; of an embedding's rows the one name. PEFT wraps a module of experts once for each of its parameters, the first
    one innermost.
    """
    of_experts = [shape.module for shape in layout.shapes if shape.experts > 1]
    names: dict[str, tuple[str, ...]] = {}
    for shape in layout.shapes:
        path = shape.module
        if shape.experts > 1:
            path = path.rpartition(".")[0]
            alike = [module for module in of_experts if module.rpartition(".")[0] == path]
            path += ".base_layer" * (len(alike) - 1 - alike.index(shape.module))
        ends = ("token_adapter.trainable_tokens_delta",) if shape.tokens else ("lora_A.weight", "lora_B.weight")
        names[shape.module] = tuple(f"{_PREFIX}{path}.{end}" for end in ends)
    return names


def _b_in_files(b_RN: Tensor, experts: int) -> Tensor:
    """B [out, r] of B transposed [r, out]; of experts [out, r E], of which neighbours are of two experts. A view."""
    return b_RN.view(experts, -1, b_RN.shape[1]).permute(2, 1, 0) if experts > 1 else b_RN.t()


def save_adapter(directory: Path, layout: AdapterLayout, params: Tensor, lora: LoraConfig, base_model: str) -> None:
    """Write both files into `directory`. A is [r, in], B is [out, r], in the precision of `params`; of E experts A is [E r, in] with an
    expert's rows together, and B [out, r E] with an expert's columns E apart.
    """
    (directory / WEIGHTS_FILE).unlink(missing_ok=True)
    write_adapter(directory, layout, params, lora, base_model)


def write_adapter(directory: Path, layout: AdapterLayout, params: Tensor, lora: LoraConfig, base_model: str) -> dict[str, str]:
    """As `save_adapter`, into a directory without these files; returns the sha256 of the weights by file name."""
    digests = write_weights(directory, layout, params)
    (directory / CONFIG_FILE).write_text(json.dumps(adapter_config(layout, lora, base_model), indent=2, sort_keys=True) + "\n")
    return digests


def write_weights(directory: Path, layout: AdapterLayout, params: Tensor) -> dict[str, str]:
    """The file of the weights alone; returns its sha256 by name."""
    tensors: dict[str, Tensor] = {}
    names = _names(layout)
    for shape, a_RK, b_RN in layout.views(params.detach().cpu()):
        tensors |= zip(names[shape.module], (a_RK, _b_in_files(b_RN, shape.experts).flatten(1)), strict=False)
    return {WEIGHTS_FILE: write_tensors(directory / WEIGHTS_FILE, tensors, {"format": "pt"})}


def adapter_config(layout: AdapterLayout, lora: LoraConfig, base_model: str) -> dict[str, Any]:
    """PEFT's config of this adapter. What it adapts is written as names, so that a reader needs no model, and patterns as one value for
    each module where their order counts: PEFT sorts them when it saves.
    """
    ends = {s.module.rsplit(".", 1)[-1] for s in layout.linears if s.experts == 1}
    divided = _divided(layout, lora)
    alphas = _by_module(lora.alpha_pattern, layout, lora.lora_alpha)
    alphas |= {key: alpha for key, (_, alpha) in divided.items() if not matching_keys(lora.alpha_pattern, key)}
    targets = layout.names or sorted(lora.target_modules if isinstance(lora.target_modules, list) else ends)
    name, revision = split_revision(base_model)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": layout.transposed,
        "init_lora_weights": True,
        "modules_to_save": None,
        "r": lora.r,
        "lora_alpha": _plain(lora.lora_alpha),
        "lora_dropout": lora.lora_dropout,
        "target_modules": list(targets),
        **({"target_parameters": list(lora.target_parameters)} if lora.target_parameters else {}),
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        **({"trainable_token_indices": lora.trainable_token_indices} if lora.trainable_token_indices else {}),
        "rank_pattern": _by_module(lora.rank_pattern, layout, lora.r) | {key: rank for key, (rank, _) in divided.items()},
        "alpha_pattern": {key: _plain(alpha) for key, alpha in alphas.items()},
    }


def _divided(layout: AdapterLayout, lora: LoraConfig) -> dict[str, tuple[int, float]]:
    """Rank and alpha of parameters of experts whose rank is a part of r, by the ends of their names; by whole ones beside the job's own."""
    by_name = bool(lora.rank_pattern or lora.alpha_pattern)
    found: dict[str, tuple[int, float]] = {}
    for shape in layout.shapes:
        if shape.experts > 1 and not matching_keys(lora.rank_pattern, shape.module) and shape.rank != lora.r:
            key = shape.module if by_name else ".".join(shape.module.rsplit(".", 2)[-2:])
            found[key] = shape.rank, lora.alpha_of(shape.module, lora.r // shape.rank)
    return found


def _by_module(pattern: dict[str, Number], layout: AdapterLayout, default: Number) -> dict[str, Number]:
    """`pattern`, or what it means by whole names where more than one of its keys matches a module."""
    modules = [shape.module for shape in layout.linears]
    if not any(len(matching_keys(pattern, module)) > 1 for module in modules):
        return dict(pattern)
    value_by_module = {module: pattern_value(pattern, module, default) for module in modules}
    return {module: value for module, value in value_by_module.items() if value != default}


def _plain(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha  # readers such as vLLM expect an integer where there is one


def read_config(directory: Path) -> dict[str, Any]:
    """`adapter_config.json` of a LoRA adapter. Raises ModelError when it is missing, broken or of a kind that cannot be trained here."""
    path = directory / CONFIG_FILE
    try:
        config = read_object(path)
    except FileNotFoundError:
        what = f"{path}: not found. An adapter is a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT saves it"
        raise ModelError(f"{what}{_adapters_in(directory)}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}). Save the adapter again with PEFT's save_pretrained") from None
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type must be LORA, and is {config.get('peft_type')!r}")
    for key, (why, remedy) in _NOT_PLAIN.items():
        if value := config.get(key):
            raise ModelError(f"{path}: {key}={value!r}: the adapter {why}, and only a plain LoRA adapter can be used. {remedy}")
    init = config.get("init_lora_weights")
    if init not in _PLAIN_INITS and str(init).lower() not in _PLAIN_INITS:
        raise ModelError(
            f"{path}: init_lora_weights={init!r}: such a start may change the base's weights, and the base here is as it was. {_CONVERT}; "
            "where it left the base alone (eva), write true there"
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias={config['bias']!r} trains base weights, but the base is shared and frozen. Use bias='none'")
    return config


def _adapters_in(directory: Path) -> str:
    """The adapters and checkpoints in a run's or an unfinished job's `directory`, which may be meant; "" where there are none."""
    inside = [file for place in ("*", "*/*") for file in directory.glob(f"{place}/{CONFIG_FILE}")]
    with suppress(OSError, ValueError):  # none, or one that a run has replaced meanwhile
        newest = max(inside, key=lambda file: file.stat().st_mtime_ns).parent
        return f". The newest of {len(inside)} in {directory} is {newest}" if len(inside) > 1 else f". There is one: {newest}"
    return ""


def load_params(directory: Path, layout: AdapterLayout, dtype: torch.dtype) -> Tensor:
    """The flat parameters of the adapter in `directory` for `layout`, on the CPU.

    Raises ModelError naming the first tensor that is missing, unexpected or of another shape: an adapter of another base, rank or
    other targets. What PEFT has put at indexers, with B zero, is left out.
    """
    path = directory / WEIGHTS_FILE
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: is not a plain file. An adapter is a directory with {CONFIG_FILE} and {WEIGHTS_FILE}")
    params = torch.empty(layout.numel, dtype=dtype)
    try:
        with safe_open(path, framework="pt") as file:
            left, names = set(file.keys()), _names(layout)
            for shape, a_RK, b_RN in layout.views(params):
                for name, out in zip(names[shape.module], (a_RK, _b_in_files(b_RN, shape.experts)), strict=False):
                    _copy_tensor(file, name, out, left, path)
            _check_indexers(file, left, path)
    except FileNotFoundError:
        raise ModelError(f"{path}: not found. An adapter is a directory with {CONFIG_FILE} and {WEIGHTS_FILE}") from None
    except SafetensorError as error:
        raise ModelError(f"{path}: is no whole safetensors file ({error}). Copy it again") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error}). Copy it again, or make it readable") from None
    left = {name for name in left if not in_indexer(name)}
    if left:
        raise ModelError(f"{path}: has a tensor for a layer that this job does not train: {min(left)}. Add the layer to target_modules")
    return params


def adapted_modules(directory: Path) -> set[str]:
    """Names of the modules at which the adapter's file has A or B; none where it cannot be read."""
    path = directory / WEIGHTS_FILE
    if not path.is_file():  # a pipe would never end
        return set()
    with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
        return {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in file.keys() if ".lora_" in name}  # noqa: SIM118
    return set()


def _check_indexers(file: Any, left: set[str], path: Path) -> None:
    """PEFT puts adapters at indexers too, where no gradient comes: they do nothing as long as B is zero."""
    for name in sorted(left):
        if in_indexer(name) and name.endswith(".lora_B.weight") and bool(file.get_tensor(name).any()):
            raise ModelError(
                f"{path}: {name} is not zero: it changes which tokens an indexer chooses, and no adapter is put at indexers here, as they "
                "get no gradients. Merge the adapter into its base (PEFT's merge_and_unload), and train over that"
            )


def _copy_tensor(file: Any, name: str, out: Tensor, left: set[str], path: Path) -> None:
    if name not in left:
        raise ModelError(f"{path}: has no tensor {name}. The adapter is of another base model, or has other target_modules than this job")
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype not in _WEIGHT_DTYPES:
        raise ModelError(
            f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}. Weights must be float32, bfloat16, float16 or float64: "
            "save the adapter again in one of them"
        )
    needed = [out.shape[0], out.shape[1:].numel()]
    if list(tensor.shape) != needed:
        raise ModelError(
            f"{path}: {name} is {list(tensor.shape)}, and this job needs {needed}. "
            "The adapter has another rank, or is of another base model"
        )
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{path}: {name} holds NaN or Inf. Start from a healthy checkpoint")
    out.copy_(tensor.view(out.shape))
    left.discard(name)
