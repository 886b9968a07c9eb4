"""What fits on cards that are not here: `tlora check --gpu` over bases of five sizes, as the table of docs/reference/cards.md.

    python -m bench.cards [--json FILE] [--write docs/reference/cards.md]

Four jobs of rank 16 over real data sets, samples of up to 2,048 tokens. Nothing is measured: bytes are counted from the layers, tokens a
second are extrapolated (`tlora/shape/gpu_models.py`). The bases have a config.json and weight files of the right size that hold nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from bench.base_files import DATA, write_tokenizer
from bench.machine import facts, write
from bench.shapes import SHAPES, qwen3
from tlora.engine.check import RunCheck, check
from tlora.job import BasePrecision, DataConfig, JobSpec, RunSpec
from tlora.registry import BASE_PRECISIONS

CARDS = {"12 GB": "rtx3060", "16 GB": "rtx4080", "24 GB": "rtx4090", "48 GB": "rtxa6000", "80 GB": "h100"}
FILES = {
    "alpaca": ("alpaca_en_demo.json", 8),
    "identity": ("identity.json", 4),
    "toolcall": ("glaive_toolcall_en_demo.json", 4),
    "sft": ("v1_sft_demo.jsonl", 8),
}
PRECISIONS: tuple[BasePrecision | None, ...] = (None, *BASE_PRECISIONS)
BEGIN, END = "<!-- begin: python -m bench.cards -->", "<!-- end -->"


BASES = {
    "1.7B": SHAPES["qwen3-1.7b"],
    "8B": SHAPES["llama-3-8b"],
    "14B": qwen3(5120, 17408, num_hidden_layers=40, num_attention_heads=40, tied=False),
    "32B": qwen3(5120, 25600, num_hidden_layers=64, num_attention_heads=64, tied=False),
    "70B": SHAPES["llama-3-70b"],
}


def make_base(name: str, directory: Path) -> Path:
    """As `outline_base`, of one of `BASES`."""
    return outline_base(BASES[name], directory)


def outline_base(shape: PretrainedConfig, directory: Path) -> Path:
    """A directory as `save_pretrained` makes it, with holes for weights."""
    directory.mkdir()
    config = copy.deepcopy(shape)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    write_tokenizer("llama-3-8b", directory)
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in model.state_dict().items():
        if key != "lm_head.weight" or not config.tie_word_embeddings:
            header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + 2 * tensor.numel()]}
            end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return directory


def rows(directory: Path) -> Iterator[dict[str, Any]]:
    jobs = [
        JobSpec(name=name, data=DataConfig(path=str(DATA / file), max_length=2048), r=16, batch_size=batch_size, max_steps=60)
        for name, (file, batch_size) in FILES.items()
    ]
    for base in BASES:
        path = make_base(base, directory / base)
        for precision in PRECISIONS:
            run = RunSpec(base_model=str(path), output_dir=str(directory / "out"), base_precision=precision, jobs=jobs)
            for memory, gpu in CARDS.items():
                yield {"base": base, "precision": precision or "bf16", "memory": memory, "gpu": gpu} | summary(check(run, gpu=gpu))


def summary(found: RunCheck) -> dict[str, Any]:
    problems = [*found.problems, *(problem for job in found.jobs for problem in job.problems)]
    return {
        "fits": not problems,
        "why_not": problems[0] if problems else None,
        "jobs_at_once": found.resident_jobs,
        "token_budget": found.token_budget,
        "recomputed_layers": found.recomputed_layers,
        "layers_of_budget": found.layers_of_budget,
        "num_layers": found.num_layers,
        "predicted_bytes": found.predicted_bytes,
        "limit_bytes": found.limit_bytes,
        "tokens_per_second": found.tokens_per_second,
    }


def table(found: list[dict[str, Any]]) -> str:
    cards = "".join(f" {memory} ({gpu}) |" for memory, gpu in CARDS.items())
    lines = [f"| base |{cards}", "| --- |" + " --- |" * len(CARDS)]
    for base in BASES:
        for precision in (each or "bf16" for each in PRECISIONS):
            own = [row for row in found if (row["base"], row["precision"]) == (base, precision)]
            lines.append(f"| {base}, {precision} | " + " | ".join(_cell(row) for row in own) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "no fp8" if "base_precision fp8" in row["why_not"] else "-"
    jobs = "all at once" if row["jobs_at_once"] == len(FILES) else f"{row['jobs_at_once']} at once"
    most, each = row["recomputed_layers"], row["layers_of_budget"]
    layers = f", {each if each == most else f'{each} to {most}'} of {row['num_layers']} layers again" if most else ""
    return f"{row['predicted_bytes'] / 2**30:.1f} GiB, {jobs}, {row['token_budget']:,} tokens{layers}: {row['tokens_per_second']:,.0f}/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    parser.add_argument("--commit", help="where there is no git")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TLORA_CACHE"] = str(Path(directory) / "cache")
        for row in rows(Path(directory)):
            found.append(row)
            print(json.dumps(row), flush=True)
            write(given.json, facts(torch.device("cpu"), given.commit) | {"rows": found})
    text = table(found)
    print(text)
    if given.write is not None:
        head, _, rest = given.write.read_text(encoding="utf-8").partition(BEGIN)
        given.write.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
