"""Real jobs through the command that users run: launches of `tlora train` on the jobs of bench/real_jobs.yaml, measured by their logs.

Over a mixture of experts the jobs are those of bench/expert_jobs.yaml, whose adapters are at the experts too.

    python -m bench.real_jobs --shape llama-3-8b --launches cold,warm,one-dropout:warm,all-dropout:warm,sigterm --out FILE
    python -m bench.real_jobs --shape qwen3-1.7b --launches cold,warm --out FILE
    python -m bench.real_jobs --shape llama-3-8b --launches cold,nf4:warm,plain:warm,nf4:warm --set token_budget=2048 --out FILE
    python -m bench.real_jobs --shape llama-3-8b --case nf4 --steps 24 --rivals qlora --out FILE
    python -m bench.real_jobs --shape llama-3-8b --case nf4 --steps 24 --jobs 4 --set memory_limit=12GiB --out FILE
    python -m bench.real_jobs --shape qwen3-1.7b --case plain-path --steps 24 --rivals trl --out FILE
    python -m bench.real_jobs --shape llama-3-8b --gpus 2 --launches plain:cold,shared:cold,stages-host:cold,stages:warm --out FILE
    python -m bench.real_jobs --shape qwen3-30b-a3b --layers 36 --launches cold --launch-seconds 120 --rivals peft --out FILE
    python -m bench.real_jobs --shape llama-3-8b --work heterogeneous --steps 12 --out FILE
    python -m bench.real_jobs --shape qwen3-30b-a3b --layers 36 --work small-steps --launches cold [--jobs 1] --out FILE
    python -m bench.real_jobs --shape llama-3-8b --gpus 2 --work few-long-padded --steps 40 --set recompute=22 --out FILE
    python -m bench.real_jobs --shape tiny --device cpu --steps 6 --set dtype=float32

A launch is KIND or CASE:KIND. cold: all caches are new and empty (this program's, compiled kernels included, and CUDA's). warm: with the
caches of the launches before. sigterm: warm, with a SIGTERM after --signal-after steps of some job. The base has random weights and a
tokenizer trained on the texts; its files are made in --base-dir, unless they are there, and read once before the first launch.

The cases plain-path and sm_80 force that class of GPU. After the launches, --rivals trains the same jobs with others' trainers, one job
after another (bench.trl_baseline), over the same files. On a GPU the peak of the memory stands beside what was predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from bench import launch, long_tasks, machine, rivals, small_steps, summaries
from bench.base_files import make_base
from bench.shapes import SHAPES, experts_per_token, shape_of
from tlora.kernels.device import FORCED

JOBS_FILE = Path(__file__).with_name("real_jobs.yaml")
_EXPERT_JOBS_FILE = JOBS_FILE.with_name("expert_jobs.yaml")  # over a mixture
_ROOT = Path(__file__).parent.parent
DROPOUT = "lora_dropout=0.05"
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "one-dropout": (f"jobs.alpaca.{DROPOUT}",),
    "all-dropout": (f"defaults.{DROPOUT}",),
    "nf4": ("base_precision=nf4",),
    "plain-path": (),
    "sm_80": (),
    "whole": ("layout=whole",),
    "shared": ("layout=shared",),
    "streamed": ("layout=streamed",),
    "stages": ("layout=stages",),
    "stages-host": ("layout=stages", "links=host"),
}
_CARD_CLASSES = {"plain-path": "plain", "sm_80": "sm_80"}  # of those cases, what TLORA_CARD_CLASS is
KINDS = ("cold", "warm", "sigterm")
_PREDICTED = re.compile(r"memory limit ([\d.]+ [GM]iB), predicted peak ([\d.]+ [GM]iB)")
_LEAST_DISK_BYTES, _MOST_DISK_BYTES = 64 << 20, 2 << 30  # written to find the disk's rate


@dataclass(frozen=True)
class Order:
    """A launch to be made."""

    case: str
    kind: str


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of the base's decoder; default: the shape's own")
    parser.add_argument("--case", choices=CASES, default="plain", help="of launches that name none")
    works = ("real", *summaries.WORKS, *long_tasks.WORKS, *small_steps.WORKS)
    others = "bench.summaries, bench.long_tasks or bench.small_steps"
    parser.add_argument("--work", choices=works, default="real", help=f"the file's jobs, or those of {others}")
    parser.add_argument("--jobs", help="names of the file's jobs, with commas, or how many of the first; default: all")
    parser.add_argument("--launches", default="cold,warm", help="[CASE:]cold|warm|sigterm, in their order")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each job")
    parser.add_argument("--signal-after", type=int, default=20, help="steps of some job, for sigterm")
    parser.add_argument("--launch-seconds", type=float, default=math.inf, help="after which a launch gets SIGTERM; what it trained counts")
    parser.add_argument("--rivals", default="", help=f"with commas, of {', '.join(rivals.RIVALS)}")
    parser.add_argument("--rival-seconds", type=float, default=90.0, help="about what a rival takes")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as of `tlora train`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", help="as of `tlora train`; default: one process")
    parser.add_argument("--base-dir", type=Path, help="where bases are kept, one directory per shape; default: a temporary one")
    parser.add_argument("--caches", type=Path, help="directory of the caches; kept, so that a later run can begin warm")
    parser.add_argument(
        "--work-dir", type=Path, help="where the runs write, each deleted when it has been measured; default: a temporary one"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    options.orders = [_order(text, options.case, parser) for text in options.launches.split(",")]
    options.rivals = [name for name in options.rivals.split(",") if name]
    if options.work == "real":
        options.jobs = _names_of(options, parser)
    elif options.rivals or not (options.jobs or "1").isdecimal():
        parser.error(f"--work {options.work}: --rivals and names of --jobs are of the real jobs; --jobs may be how many of the first")
    if unknown := [name for name in options.rivals if name not in rivals.RIVALS]:
        parser.error(f"--rivals: {unknown[0]!r} is none of {', '.join(rivals.RIVALS)}")
    begins_warm = options.orders[0].kind != "cold"
    if begins_warm and not (options.caches and options.caches.is_dir()):
        remedy = "begin with cold, or name those of an earlier run with --caches"
        parser.error(f"--launches: {options.launches!r} begins with warm caches, and there are none; {remedy}")
    return options


def _names_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """Of the real jobs that are asked for, with commas; None: of all."""
    known = [job["name"] for job in yaml.safe_load(jobs_file_of(options.shape).read_text(encoding="utf-8"))["jobs"]]
    if options.jobs and options.jobs.isdecimal():
        return ",".join(known[: int(options.jobs)])
    if options.jobs and (unknown := [name for name in options.jobs.split(",") if name not in known]):
        parser.error(f"--jobs: {unknown[0]!r} is none of {', '.join(known)}")
    return options.jobs


def _order(text: str, case: str, parser: argparse.ArgumentParser) -> Order:
    named, colon, kind = text.rpartition(":")
    found = Order(named if colon else case, kind)
    if found.case not in CASES or found.kind not in KINDS:
        parser.error(f"--launches: {text!r} is not [CASE:]KIND with a case of {', '.join(CASES)} and a kind of {', '.join(KINDS)}")
    return found


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.out` after every launch."""
    facts = machine.facts(torch.device("cpu"), options.commit)
    with tempfile.TemporaryDirectory(prefix="real-jobs-") as name:
        directory = options.work_dir or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        base_dir, caches = options.base_dir or Path(name) / "bases", options.caches or Path(name) / "caches"
        base = make_base(options.shape, base_dir, options.device, options.layers)
        facts["device"] = base.pop("device") or facts["device"]
        setup = {"shape": options.shape, "steps": options.steps, "settings": options.settings}
        setup |= {"jobs_file": jobs_file_of(options.shape).name, "layers": shape_of(options.shape, options.layers).num_hidden_layers} | base
        setup |= {"jobs": options.jobs} if options.jobs else {}
        setup |= {"gpus": options.gpus} if options.gpus else {}
        options.jobs_file, lengths = _jobs_file(options, directory)
        setup |= lengths
        found: dict[str, Any] = {"benchmark": "real_jobs", **facts, "setup": setup, "launches": []}
        print(format_head(found), flush=True)
        for order in options.orders:
            if order.kind == "cold":
                for cache in launch.CACHES.values():
                    shutil.rmtree(caches / cache, ignore_errors=True)
            row = _measure(order, options, Path(base["base"]), caches, directory / "run")
            found["launches"].append(row)
            machine.write(options.out, found)
            print(format_row(row), flush=True)
        for name in options.rivals:
            rival = rivals.measure(name, options, Path(base["base"]), directory)
            rival["ours_over_best"] = rivals.compare(found["launches"], rival)
            found.setdefault("rivals", []).append(rival)
            machine.write(options.out, found)
            print(rivals.format_rival(rival), flush=True)
    return found


def _measure(order: Order, options: argparse.Namespace, base: Path, caches: Path, output_dir: Path) -> dict[str, Any]:
    """One launch, its figures, and what was wrong with it under "errors"."""
    shutil.rmtree(output_dir, ignore_errors=True)
    settings = [f"base_model={base.resolve()}", f"defaults.max_steps={options.steps}", *CASES[order.case], *options.settings]
    peaks = output_dir.parent / "peaks.json"
    peaks.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "bench.train_with_peaks",
        str(peaks),
        "train",
        str(options.jobs_file),
        "--output-dir",
        str(output_dir),
        "--device",
        options.device,
    ]
    command += ["--gpus", options.gpus] if options.gpus else []
    command += [part for setting in settings for part in ("--set", setting)]
    environment = launch.with_caches(caches)
    if order.case in _CARD_CLASSES:
        environment[FORCED] = _CARD_CLASSES[order.case]
    signal_after = options.signal_after if order.kind == "sigterm" else None
    ended = launch.run_process(command, environment, output_dir, signal_after, options.launch_seconds)
    row: dict[str, Any] = asdict(order) | {"exit_code": ended.code, "wall_seconds": ended.end - ended.start}
    row |= {"card_class": environment[FORCED]} if FORCED in environment else {}
    row["memory"] = None if options.gpus else _memory(peaks, [line for _, line in ended.lines])  # ranks have their own
    row["host_peak_gib"] = ended.host_peak_bytes / 2**30
    row["errors"] = _errors(order, ended, output_dir, options.steps)
    steps, of_run = launch.read_log(output_dir, ended.start)
    if steps:
        row |= _figures(steps, of_run, ended, output_dir)
    row["notes"] = [(seconds, line.replace(f"{_ROOT}/", "")) for seconds, line in ended.lines if line and not line.startswith("[")]
    shutil.rmtree(output_dir, ignore_errors=True)
    return row


def _memory(peaks: Path, lines: Sequence[str]) -> dict[str, float] | None:
    """GiB of the device: at the peak, reserved at most, predicted, and the limit, as the run says the latter two; None on a CPU."""
    said = next((found for line in reversed(lines) if (found := _PREDICTED.search(line))), None)
    if not peaks.is_file() or said is None:
        return None
    counted = json.loads(peaks.read_text(encoding="utf-8"))
    peak = counted["peak_bytes"] / 2**30
    limit, predicted = (float(count) / (1 if unit == "GiB" else 1024) for count, unit in map(str.split, said.groups()))
    return {
        "peak_gib": peak,
        "reserved_gib": counted["reserved_bytes"] / 2**30,
        "predicted_gib": predicted,
        "limit_gib": limit,
        "peak_over_predicted": peak / predicted,
    }


def jobs_file_of(shape: str) -> Path:
    """Of the eight real jobs over a base of `shape`."""
    return _EXPERT_JOBS_FILE if experts_per_token(SHAPES[shape]) else JOBS_FILE


def _jobs_file(options: argparse.Namespace, directory: Path) -> tuple[Path, dict[str, Any]]:
    """The file of all jobs, or one of those that were asked for; and what is to be known of jobs that are no real ones."""
    path, facts = jobs_file_of(options.shape), dict[str, Any]()
    vocab_size = SHAPES[options.shape].vocab_size
    if options.work in long_tasks.WORKS:
        path, lengths = long_tasks.write_jobs(options.work, vocab_size, directory)
        facts = {"tasks": lengths}
    elif options.work in small_steps.WORKS:
        path, steps = small_steps.write_jobs(path, options.steps, vocab_size, directory)
        facts = {"tasks": steps}
    elif options.work in summaries.WORKS:
        path, lengths = summaries.write_jobs(options.work, options.steps, vocab_size, directory)
        published = summaries.PUBLISHED.get(options.shape, {}).get(options.work)
        facts = {"samples": lengths, "published_tokens_per_second": published}
    facts |= {"jobs_file": path.name} if facts else {}
    return (narrowed(path, options.jobs, directory) if options.jobs else path), facts


def narrowed(path: Path, wanted: str, directory: Path) -> Path:
    """A file with those of the jobs of `path` that have one of the names `wanted`, or that are so many of the first."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    jobs = content["jobs"]
    kept = jobs[: int(wanted)] if wanted.isdecimal() else [job for job in jobs if job["name"] in wanted.split(",")]
    content["jobs"] = [job | {"data": str(path.parent / job["data"])} for job in kept]
    file = directory / "jobs.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def _figures(steps: list[launch.Step], of_run: list[dict[str, Any]], ended: launch.Ended, output_dir: Path) -> dict[str, Any]:
    """Where SIGTERM was sent, the end begins with it; else with the last optimizer step."""
    closing = ended.signalled or ended.start + steps[-1].seconds
    last_bytes = launch.bytes_since(output_dir, closing)
    rate = launch.disk_rate(output_dir, min(max(last_bytes, _LEAST_DISK_BYTES), _MOST_DISK_BYTES))
    return {
        "first_step_seconds": steps[0].seconds,
        "last_step_seconds": steps[-1].seconds,
        "signal_seconds": ended.signalled - ended.start if ended.signalled else None,
        "exit_seconds": ended.end - closing,
        "exit_bytes": last_bytes,
        "disk_bytes_per_second": rate,
        "exit_seconds_less_disk": ended.end - closing - last_bytes / rate,
        "written_bytes": launch.bytes_since(output_dir, 0.0),
        **launch.speeds(steps, of_run),
        **launch.silences(steps, of_run),
    }


def _errors(order: Order, ended: launch.Ended, output_dir: Path, steps: int) -> list[str]:
    """What makes the launch none that counts."""
    found: list[str] = []
    expected = 0 if ended.signalled is None else 143
    if order.kind == "sigterm" and ended.signalled is None:
        found.append("it ended before SIGTERM could be sent")
    if ended.code != expected:
        found.append(f"exit code {ended.code}, not {expected}: {' | '.join(line for _, line in ended.lines[-5:])}")
    results = [json.loads(path.read_text()) for path in sorted(output_dir.glob("*/result.json"))]
    if not results:
        found.append("no job has a result")
    for result in results:
        whole = result["status"] == "done" and result["steps"] == steps
        if not whole and not (ended.signalled is not None and result["status"] == "stopped"):
            found.append(f"{result['name']}: {result['status']} at step {result['steps']}: {result['reason']}")
    return found


def format_head(found: dict[str, Any]) -> str:
    setup = found["setup"]
    made = f"base of {setup['base_bytes'] / 1e9:.1f} GB made in {setup['base_write_seconds']:.1f} s"
    made += f", read in {setup['base_read_seconds']:.1f} s"
    columns = ("first step s", "steady tok/s", "whole tok/s", "silence s", "exit s", "less disk", "wall s")
    lines = [
        f"{found['device']}, torch {found['versions']['torch']}, commit {found['commit']}: {found['command']}",
        f"{setup['shape']}: {made}",
    ]
    return "\n".join([*lines, " ".join([f"{'':22}", *(f"{column:>12}" for column in columns)])])


def format_row(row: dict[str, Any]) -> str:
    """One launch in a line; below it, what was wrong with it."""
    keys = ("first_step", "steady_tokens_per", "whole_tokens_per", "longest_silence", "exit", "exit_less_disk", "wall")
    names = [f"{key}_second" if key.endswith("_per") else f"{key}_seconds" for key in keys]
    names[5] = "exit_seconds_less_disk"
    cells = [row.get(name) for name in names]
    text = [f"{'—':>12}" if cell is None else f"{cell:12,.{0 if cell >= 1000 else 2}f}" for cell in cells]
    lines = [" ".join([f"{row['case'] + ' ' + row['kind']:22}", *text])]
    if (memory := row.get("memory")) is not None:
        peak = f"peak {memory['peak_gib']:.2f} GiB, {memory['peak_over_predicted']:.3f} of the {memory['predicted_gib']:.2f} predicted"
        lines.append(f"  {peak}; reserved {memory['reserved_gib']:.2f}, limit {memory['limit_gib']:.2f}")
    return "\n".join([*lines, *(f"  wrong: {error}" for error in row["errors"])])


def main() -> int:
    found = run_benchmark(read_options())
    wrong = [row for row in found["launches"] if row["errors"]] + [rival for rival in found.get("rivals", []) if rival["error"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
