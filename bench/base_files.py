"""A base as files, as a user has it: random weights of a known shape, and a tokenizer trained on the texts of the real jobs."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.shapes import EXPERT_PARAMETERS, PACKED, SHAPES, make_model
from bench.workload import REAL_VOCABULARY, train_tokenizer
from tlora.adapters.peft import write_tensors

DATA = Path(__file__).with_name("data")
_SHARD_BYTES = 1 << 30
_WRITERS = 8  # each holds a shard
_PIECE_BYTES = 16 << 20
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
_EXPONENT = 127 - 9  # the mean square of E2M1's numbers is 2.9^2: times 2^-9 they are as large as plain weights


def make_base(shape: str, parent: Path, device: str, layers: int | None = None) -> dict[str, Any]:
    """Write the base to `parent` unless it is whole there, and read it once: then it is in the page cache. Returns its facts.

    In a process of its own: the weights, and the CUDA context that would stay beside the runs, are gone with it.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(make_base_here, shape, parent, device, layers).result()


def make_base_here(shape: str, parent: Path, device: str, layers: int | None = None) -> dict[str, Any]:
    """`make_base` in this process."""
    directory, start = parent / (f"{shape}-{layers}-layers" if layers else shape), time.perf_counter()
    place = torch.device(device)
    if not (directory / "config.json").is_file():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        _write(shape, directory, place, layers)
    written = time.perf_counter()
    num_bytes = _read_once(directory)
    return {
        "base": str(directory),
        "base_bytes": num_bytes,
        "base_write_seconds": written - start,
        "base_read_seconds": time.perf_counter() - written,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
    }


def write_tokenizer(shape: str, directory: Path) -> None:
    """The tokenizer of such a base; the same texts give the same one."""
    files = sorted(file for file in DATA.iterdir() if file.suffix in (".json", ".jsonl"))
    train_tokenizer(files, min(REAL_VOCABULARY, SHAPES[shape].vocab_size)).save_pretrained(directory)


def _write(shape: str, directory: Path, device: torch.device, layers: int | None) -> None:
    """config.json comes last: where it is, the base is whole."""
    write_tokenizer(shape, directory)
    model = make_model(shape, device, torch.bfloat16, layers)
    config = model.config
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (config.tie_word_embeddings and name == "lm_head.weight")}
    if shape in PACKED:
        weights, config.quantization_config = _with_packed_experts(weights), _MXFP4
    shards = list(_shards(weights))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda name, shard: _write_shard(directory / name, shard), names, shards))
    index = {"metadata": {}, "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()  # or the disk would still be writing the base while a run's own writes are measured
    config.save_pretrained(directory)


def _write_shard(path: Path, shard: dict[str, torch.Tensor]) -> None:
    write_tensors(path, {name: tensor.cpu() for name, tensor in shard.items()}, {"format": "pt"})


def _with_packed_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random numbers of MXFP4 in place of the parameters [E, K, N] of experts, under the names and in the shapes of gpt-oss' checkpoint."""
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith(EXPERT_PARAMETERS)}
    packed: dict[str, torch.Tensor] = {}
    for name in weights.keys() - plain.keys():
        experts, inputs, outputs = weights[name].shape
        scales = torch.full((experts, outputs, inputs // 32), _EXPONENT, dtype=torch.uint8, device=weights[name].device)
        packed[f"{name}_scales"] = scales
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*scales.shape, 16), dtype=torch.uint8, device=scales.device)
    return plain | packed


def _shards(weights: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """`weights` in their order, a shard full when it has `_SHARD_BYTES`; each of one dtype."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if shard and (sum(part.nbytes for part in shard.values()) >= _SHARD_BYTES or next(iter(shard.values())).dtype != tensor.dtype):
            yield shard
            shard = {}
        shard[name] = tensor
    if shard:
        yield shard


def _read_once(directory: Path) -> int:
    """Bytes of the weights, all of them read."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        return sum(pool.map(_read_file, sorted(directory.glob("*.safetensors"))))


def _read_file(path: Path) -> int:
    piece, total = bytearray(_PIECE_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            total += count
    return total
