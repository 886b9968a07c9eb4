"""PEFT with and without `accelerate_peft`, taking turns in one run: forward and backward of the decoder layers of a model's shape.

    python -m bench.peft_plugin [--adapters fp32,bf16] [--dropouts 0,0.05] [--layers 4] [--rank 16] [--compiled] [--json FILE]

Adapters at all seven linears, with and without dropout, in PEFT's default (fp32, under autocast in bf16) and in its fastest setting (bf16).
Without embedding, head, loss and optimizer, which are the same on both sides; a model of 32 layers spends nearly all its time in these.
First the gradients of both are held against each other, with the same seed for dropout; a ratio of wrong numbers is none. Llama-3-8B's
shape at 4 layers takes 3 GiB of weights; the whole run a few minutes on one H200 (compiled, longer).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.machine import facts, wait, write
from bench.shapes import SHAPES
from tlora.supermodel.peft_plugin import accelerate_peft

BATCHES = ((1, 2048), (4, 2048))
WARM_UP = 3
STEPS_A_TURN = 2  # between two waits for the device
ADAPTERS = ("fp32", "bf16")  # PEFT's default, and its fastest
NEAR = 3e-2  # relative difference of all gradients together: each side rounds to bf16 at each of its operations


@dataclass(frozen=True)
class Setting:
    """How PEFT is used."""

    adapters: str
    dropout: float
    compiled: bool

    @property
    def name(self) -> str:
        known = {"fp32": "PEFT's default (fp32 adapters)", "bf16": "PEFT's fastest (bf16 adapters)"}
        return f"{known[self.adapters]}, lora_dropout {self.dropout:g}"


def make_peft_model(shape: str, layers: int, rank: int, setting: Setting, device: torch.device) -> Any:
    """One adapter with B drawn at random: a B of zeros would leave the gradient of A zero, and nothing to compare."""
    config = type(SHAPES[shape])(**{**SHAPES[shape].to_dict(), "num_hidden_layers": layers, "vocab_size": 1024})
    torch.manual_seed(0)
    with device:
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=setting.dropout, target_modules="all-linear", task_type="CAUSAL_LM")
        model: Any = get_peft_model(base, lora, autocast_adapter_dtype=setting.adapters == "fp32")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
    return model.to(device).train()


def step(model: Any, embedded: Tensor, gradient: Tensor, autocast: bool) -> None:
    """Forward and backward of the decoder. Gradients begin anew: an addition to those before would be on both sides."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(embedded.device.type, torch.bfloat16, enabled=autocast):
        hidden = model.base_model.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    hidden.backward(gradient.to(hidden.dtype))


def difference(models: dict[str, Any], embedded: Tensor, gradient: Tensor, autocast: bool) -> float:
    """‖ours - PEFT's‖ / ‖PEFT's‖ over the gradients of all adapters, after the same random numbers."""
    found: list[Tensor] = []
    for model in models.values():
        torch.manual_seed(2)
        step(model, embedded, gradient, autocast)
        found.append(torch.cat([p.grad.float().reshape(-1) for p in model.parameters() if p.grad is not None]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def measure(models: dict[str, Any], setting: Setting, shape: tuple[int, int], repeats: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step and peak memory of either way, and how many times as fast ours is. `shape`: rows and their tokens."""
    torch.manual_seed(1)
    rows, length = shape
    autocast = setting.adapters == "fp32"
    hidden = next(iter(models.values())).config.hidden_size
    embedded = torch.randn(rows, length, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn_like(embedded) * 1e-3
    apart = None
    if not (setting.compiled and setting.dropout):  # Inductor draws numbers of its own
        apart = difference(models, embedded, gradient, autocast)
        assert apart <= NEAR, f"gradients differ by {apart:.1e}: no figure is worth anything"
    seconds: dict[str, list[float]] = {name: [] for name in models}
    peaks: dict[str, float] = {}
    for turn in range(WARM_UP + repeats):
        for name, model in models.items():
            wait(device)
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                step(model, embedded, gradient, autocast)
            wait(device)
            if turn >= WARM_UP:
                seconds[name].append((time.perf_counter() - start) / STEPS_A_TURN)
            peaks[name] = ((torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0) - before) / 2**30
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [p / o for p, o in zip(*seconds.values(), strict=True)]
    return {
        "adapters": setting.adapters,
        "dropout": setting.dropout,
        "rows": rows,
        "length": length,
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "times_as_fast": medians["peft"] / medians["accelerated"],
        "times_as_fast_of_turns": [min(ratios), max(ratios)],
        "step_gib": peaks,
        "gradients_differ_by": apart,
    }


def _adapters(text: str) -> list[str]:
    unknown = sorted(set(text.split(",")) - set(ADAPTERS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no adapters in {unknown[0]!r}; there are {', '.join(ADAPTERS)}")
    return text.split(",")


def _dropouts(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--length", type=int, help="instead of 2048 tokens")
    parser.add_argument(
        "--adapters", type=_adapters, default=list(ADAPTERS), help="fp32: PEFT's default, under autocast; bf16: its fastest"
    )
    parser.add_argument("--dropouts", type=_dropouts, default=[0.0, 0.05], help="values of lora_dropout")
    parser.add_argument("--compiled", action="store_true", help="both ways with each decoder layer under torch.compile")
    parser.add_argument("--commit", help="where there is no git: the commit that is measured")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.json` after every row."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    order = {"shape": options.shape, "layers": options.layers, "rank": options.rank, "compiled": options.compiled}
    found: dict[str, Any] = {**facts(device, options.commit), **order, "rows": []}
    for adapters, dropout in itertools.product(options.adapters, options.dropouts):
        setting = Setting(adapters, dropout, options.compiled)
        models = {name: make_peft_model(options.shape, options.layers, options.rank, setting, device) for name in ("peft", "accelerated")}
        print(f"{setting.name}: {accelerate_peft(models['accelerated'])}")
        if options.compiled:
            for layer in (layer for model in models.values() for layer in model.base_model.model.model.layers):
                layer.compile()
        for rows, length in BATCHES:
            found["rows"].append(measure(models, setting, (rows, options.length or length), options.repeats, device))
            write(options.json, found)
            print(format_row(found["rows"][-1]), flush=True)
        del models
        torch.compiler.reset()
        gc.collect()
    return found


def format_row(row: dict[str, Any]) -> str:
    low, high = row["times_as_fast_of_turns"]
    times = "   ".join(f"{name} {value:8.2f} ms {row['step_gib'][name]:6.2f} GiB" for name, value in row["milliseconds"].items())
    return f"  {row['rows']} x {row['length']}: {times}   {row['times_as_fast']:.3f} x PEFT ({low:.3f} to {high:.3f} by turns)"


def main() -> None:
    run_benchmark(read_options())


if __name__ == "__main__":
    main()
