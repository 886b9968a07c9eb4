"""Runs on several GPUs against the same GPUs alone, through the command that users run.

    python -m bench.many_gpus --gpus 4 --rows placed --shape llama-3-8b --out FILE
    python -m bench.many_gpus --gpus 2 --rows shared --shape llama-3-70b-quarter --steps 3 --out FILE
    python -m bench.many_gpus --gpus 4 --rows spanning --shape llama-3-8b --steps 12 --out FILE
    python -m bench.many_gpus --gpus 2 --rows placed --shape tiny --device cpu --steps 6 --set dtype=float32

shared: four of those jobs, deterministic, on all GPUs with a memory limit below the bytes of the base, so that it must be shared; then on
one GPU with the base whole. It compares the adapters' bytes, and says when the first step was through.
spanning: one job of rank 16 with batches of 16 x 2,048 tokens (`--batch`) on all GPUs, of which each computes a replica; then on one GPU,
uncut. The ratio is that of the steady rates; how long each GPU waited for the others is in the notes. Then jobs of a replica's batch, one
placed on each GPU: what a step of the spanning job takes more than that of the slowest of them is the exchange, `exchange_seconds`.
placed: the eight jobs of bench/real_jobs.yaml on all GPUs at once; then, for each GPU, the jobs that had been placed there, alone on that
GPU. The ratio is the steady rate of the first over the sum of the others'. Each launch is made twice and the second one counts: its caches
are warm. A row is added to the file as soon as it is there; until then its launches so far are under `unfinished`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from bench import launch, machine
from bench.base_files import make_base
from bench.real_jobs import JOBS_FILE
from bench.shapes import SHAPES

ROWS = ("placed", "shared", "spanning")
_SHARED_JOBS = ("alpaca", "identity", "sft", "conversations")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, with commas")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each job")
    parser.add_argument("--batch", type=_batch, default=(16, 2048), metavar="SAMPLESxTOKENS", help="of the job of the row spanning")
    parser.add_argument("--limit-share", type=float, default=0.97, help="of the base's bytes: the memory limit of the row shared")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as of `tlora train`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--base-dir", type=Path, help="where bases are kept; default: a temporary directory")
    parser.add_argument("--out", type=Path, help="a file of an earlier run is added to")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    options.rows = options.rows.split(",")
    if options.batch[0] % options.gpus and "spanning" in options.rows:
        parser.error(f"--batch: {options.batch[0]} samples cannot be cut among {options.gpus} GPUs")
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"--rows: {unknown[0]!r} is none of {', '.join(ROWS)}")
    return options


def _batch(text: str) -> tuple[int, int]:
    samples, _, tokens = text.partition("x")
    return int(samples), int(tokens)


class Bench:
    """Launches of one benchmark: one base, one set of caches. `tell` is called after each launch."""

    def __init__(self, options: argparse.Namespace, base: Path, directory: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._options, self._base, self._directory, self._tell = options, base.resolve(), directory, tell
        content = yaml.safe_load(JOBS_FILE.read_text(encoding="utf-8"))
        self._defaults, self._jobs = content["defaults"], {job["name"]: job for job in content["jobs"]}
        self._environment = launch.with_caches(directory)

    def placed(self) -> dict[str, Any]:
        together = self.launch(list(self._jobs), str(self._options.gpus), warm_up=True)
        alone = [self.launch(jobs, self._one(gpu)) for gpu, jobs in enumerate(together["homes"]) if jobs]
        rates = [one["steady_tokens_per_second"] for one in alone]
        ratio = together["steady_tokens_per_second"] / sum(rates) if all(rates) else None
        return {"row": "placed", "ratio": ratio, "together": together, "alone": alone}

    def shared(self) -> dict[str, Any]:
        base_bytes = sum(file.stat().st_size for file in self._base.glob("*.safetensors"))
        limit = (f"memory_limit={int(self._options.limit_share * base_bytes)}", "deterministic=true")
        together = self.launch(_SHARED_JOBS, str(self._options.gpus), limit, warm_up=True)
        alone = self.launch(_SHARED_JOBS, self._one(0), ("deterministic=true",))
        same = together.get("adapters") == alone.get("adapters")
        ratio = together["first_step_seconds"] / alone["first_step_seconds"] if "first_step_seconds" in together else None
        return {"row": "shared", "ratio": ratio, "same_bytes": same, "limit": limit[0], "together": together, "alone": [alone]}

    def spanning(self) -> dict[str, Any]:
        (samples, length), gpus = self._options.batch, self._options.gpus
        data = self._directory / "long.jsonl"
        words = " ".join(f"w{number % 997}" for number in range(4000))  # whatever the tokenizer, more than 2,048 tokens
        data.write_text("".join(json.dumps({"text": f"{row} {words}"}) + "\n" for row in range(64)), encoding="utf-8")
        replicas = [f"replica-{number}" for number in range(gpus)]
        for name, batch in {"wide": samples, **dict.fromkeys(replicas, samples // gpus)}.items():
            self._jobs[name] = {"name": name, "data": str(data), "r": 16, "batch_size": batch, "max_length": length}
        together = self.launch(["wide"], str(gpus), warm_up=True)
        alone = self.launch(["wide"], self._one(0))
        placed = self.launch(replicas, str(gpus))
        row = {"row": "spanning", "batch": [samples, length], "ratio": None, "together": together, "alone": [alone], "replicas": placed}
        spanned, whole = together.get("steady_tokens_per_second"), alone.get("steady_tokens_per_second")
        if not spanned or not whole:
            return row
        row["ratio"] = spanned / whole
        slowest = min(placed.get("gpu_tokens_per_second", [0.0]))
        parts = sum(line.count("a part of wide") for line in together["notes"] if "(predicted" in line)
        if [len(jobs) for jobs in placed["homes"]] == [1] * gpus and parts == gpus - 1 and slowest:
            row["exchange_seconds"] = samples * length / spanned - samples // gpus * length / slowest
        return row

    def _one(self, gpu: int) -> str | None:
        return f"{gpu}," if self._options.device == "cuda" else None

    def launch(self, names: Sequence[str], gpus: str | None, more: Sequence[str] = (), *, warm_up: bool = False) -> dict[str, Any]:
        """The figures of one `tlora train`; with `warm_up`, of the second of two. `more` are settings beside those of the command line."""
        if warm_up:
            cold = self.launch(names, gpus, more)
            return self.launch(names, gpus, more) | {
                "cold_first_step_seconds": cold.get("first_step_seconds"),
                "errors": cold.get("errors", []),
            }
        output_dir, file, options = self._directory / "run", self._directory / "jobs.yaml", self._options
        shutil.rmtree(output_dir, ignore_errors=True)
        jobs = [{**self._jobs[name], "data": str(JOBS_FILE.parent / self._jobs[name]["data"])} for name in names]
        order = {"base_model": str(self._base), "output_dir": str(output_dir), "defaults": self._defaults, "jobs": jobs}
        file.write_text(yaml.safe_dump(order), encoding="utf-8")
        settings = [f"defaults.max_steps={options.steps}", *options.settings, *more]
        command = [sys.executable, "-m", "tlora", "train", str(file), "--device", options.device]
        command += ["--gpus", gpus] if gpus else []
        command += [part for setting in settings for part in ("--set", setting)]
        ended = launch.run_process(command, self._environment, output_dir, None)
        steps, _ = launch.read_log(output_dir, ended.start)
        found = _figures(steps, _homes(ended.lines, names), ended)
        files = sorted(output_dir.glob("*/adapter_model.safetensors"))
        found["adapters"] = {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        shutil.rmtree(output_dir, ignore_errors=True)
        self._tell({"gpus": gpus or "one", "jobs": list(names)} | found)
        print(
            f"{gpus or 'one'}: {len(names)} jobs, exit {ended.code}, {found.get('steady_tokens_per_second', 0):,.0f} tokens/s", flush=True
        )
        return found


def _homes(lines: Sequence[tuple[float, str]], names: Sequence[str]) -> list[list[str]]:
    """The jobs that began on each GPU, from the line that says so; all on one without it."""
    for _, line in lines:
        if "(predicted" in line:
            parts = line.rpartition(" (predicted")[0].split("; ")
            each = [re.sub(r"^GPU \d+: ", "", part).split(", ") for part in parts]
            return [[name for name in jobs if name in names] for jobs in each]
    return [list(names)]


def _figures(steps: list[launch.Step], homes: list[list[str]], ended: launch.Ended) -> dict[str, Any]:
    """`steady_tokens_per_second` is the sum over GPUs, each over its own steady part (`launch.speeds`)."""
    found: dict[str, Any] = {"homes": homes, "exit_code": ended.code, "wall_seconds": ended.end - ended.start}
    each = [launch.speeds(own, []) for jobs in homes if (own := [step for step in steps if step.job in jobs])]
    if ended.code or not each:
        return found | {"errors": [line for _, line in ended.lines[-8:]]}
    rates = [one["steady_tokens_per_second"] or 0.0 for one in each]
    found |= {"gpu_tokens_per_second": rates, "steady_tokens_per_second": sum(rates), "tokens": sum(one["tokens"] for one in each)}
    found |= {"first_step_seconds": steps[0].seconds, "last_step_seconds": steps[-1].seconds}
    firsts = [min(step.seconds for step in steps if step.job in jobs) for jobs in homes if jobs]
    return found | {
        "all_gpus_first_step_seconds": max(firsts),
        "notes": [line for _, line in ended.lines if line.startswith(("GPU ", "with the", "the base"))],
    }


def main() -> int:
    options = read_options()
    facts = machine.facts(torch.device("cpu"), options.commit)
    found: dict[str, Any] = {"benchmark": "many_gpus", **facts, "rows": []}
    if options.out is not None and options.out.is_file():
        found["rows"] = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory(prefix="many-gpus-") as name:
        base = make_base(options.shape, options.base_dir or Path(name) / "bases", options.device)
        found["device"] = base.pop("device") or found["device"]

        def keep(launched: dict[str, Any]) -> None:
            found.setdefault("unfinished", []).append(launched)
            machine.write(options.out, found)

        bench = Bench(options, Path(base["base"]), Path(name), keep)
        for row in options.rows:
            measured = getattr(bench, row)() | {"gpus": options.gpus, "shape": options.shape, "steps": options.steps}
            found["rows"].append(measured)
            del found["unfinished"]
            machine.write(options.out, found)
            print(f"{row}: ratio {measured['ratio']} {measured.get('same_bytes', '')} {measured.get('exchange_seconds', '')}", flush=True)
    launches = [one for row in found["rows"] for one in (row["together"], *row["alone"], *([row["replicas"]] if "replicas" in row else []))]
    return 1 if any(one.get("errors") for one in launches) else 0


if __name__ == "__main__":
    sys.exit(main())
