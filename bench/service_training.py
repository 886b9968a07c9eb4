"""Training under `tlora serve` against `tlora train`, and how soon a submitted job trains: on a GPU, through the commands that users run.

    python -m bench.service_training --shape qwen3-1.7b [--rows warm-up,cold,first-steps,speed] [--repeats 3] [--steps 100] [--json FILE]
    python -m bench.service_training --backend ray --rows warm-up,speed --jobs c4 --steps 200
    python -m bench.service_training --shape tiny --device cpu --steps 6 --repeats 1 --submissions 3

warm-up: a short `tlora train`, whose kernels are then compiled and tuned for all that follow. first-steps: while a job trains, others
are submitted one by one: seconds from the first byte of the upload of 1,000 samples until the job's first optimizer step can be read
from the server. speed: the jobs of bench/real_jobs.yaml, by `tlora submit` to the server and by `tlora train`, in turns; tokens/s by
the jobs' own logs (`launch.speeds`). cold: their first steps where nothing is compiled yet, by a server that has no worker and by
`tlora train`, each with empty caches of its own. `max_slowdown` is 100: no bound keeps the policy from putting all into one group. It may
train one after another all the same, where they end sooner so on average: of `--jobs` that are one, both ways compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import launch, machine
from bench.base_files import make_base
from bench.real_jobs import JOBS_FILE, narrowed
from bench.service import Server, start
from bench.shapes import SHAPES

ROWS = ("warm-up", "cold", "first-steps", "speed")
_WARM_UP_STEPS = 10
_SAMPLES, _WORDS = 1000, 40  # of a submitted job: samples, and words of each
_LONG_SECONDS = 900.0  # after which a wait has failed
_UNBOUNDED = 100.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="service-training-") as name:
        place = Path(name)
        base = make_base(options.shape, options.base_dir or place / "bases", options.device)
        found: dict[str, Any] = {"benchmark": "service_training", **machine.facts(torch.device("cpu"), options.commit)}
        found["device"] = base.pop("device") or found["device"]
        found |= {"shape": options.shape, "steps": options.steps, "samples": _SAMPLES, "policy": options.policy, "backend": options.backend}
        base_path = Path(base["base"])
        options.jobs_file = narrowed(JOBS_FILE, options.jobs, place) if options.jobs else JOBS_FILE
        found |= {"jobs": options.jobs} if options.jobs else {}
        if "warm-up" in options.rows:
            train(options, base_path, place / "warm-up", _WARM_UP_STEPS)
        if "cold" in options.rows:
            try:
                found["cold"] = cold(options, base_path, place)
            finally:
                keep_logs(place, options.logs)
            machine.write(options.json, found)
            serve, alone = (found["cold"][way]["first_step_seconds"] for way in ("serve", "train"))
            print(
                f"nothing compiled: first step {serve:.1f} s after the submission, {alone:.1f} s after the start of tlora train", flush=True
            )
        if not {"first-steps", "speed"} & set(options.rows):
            return found
        server = start_server(options, base_path, place / "server", os.environ)
        try:
            if "first-steps" in options.rows:
                found["first_steps"] = first_steps(server, options.submissions)
                machine.write(options.json, found)
                print(format_first_steps(found["first_steps"]), flush=True)
            if "speed" in options.rows:
                if "first-steps" not in options.rows:
                    served(server, options, place / "served-first")  # which starts its worker
                turns: dict[str, list[dict[str, Any]]] = {"serve": [], "train": []}
                for number in range(options.repeats):
                    turns["serve"].append(served(server, options, place / f"served-{number}"))
                    turns["train"].append(train(options, base_path, place / f"trained-{number}", options.steps))
                    found["speed"] = turns | ratios(turns)
                    machine.write(options.json, found)
                    print(format_speed(found["speed"]), flush=True)
        finally:
            server.end()
            keep_logs(place, options.logs)
    return found


def start_server(options: argparse.Namespace, base: Path, directory: Path, environment: Mapping[str, str]) -> Server:
    """Ready, without a worker."""
    directory.mkdir()
    command = ["serve", "--data-dir", str(directory), "--port", "0", "--device", options.device, "--policy", options.policy]
    command += ["--backend", "ray"] if options.backend == "ray" else ["--gpus", "0"]
    server = start(directory, "tlora", *command, "--base-model", f"base={base.resolve()}", environment=environment)
    server.wait()
    return server


def cold(options: argparse.Namespace, base: Path, place: Path) -> dict[str, dict[str, Any]]:
    """The jobs by `tlora train`, and by a server that has no worker yet, each with empty caches of its own."""

    def with_empty_caches(way: str) -> dict[str, str]:
        return launch.with_caches(place / f"caches-{way}")

    alone = train(options, base, place / "trained-cold", options.steps, with_empty_caches("train"))
    server = start_server(options, base, place / "cold-server", with_empty_caches("serve"))
    try:
        return {"train": alone, "serve": served(server, options, place / "served-cold")}
    finally:
        server.end()


# -- how soon a job trains -----------------------------------------------------------------------------------------------


def first_steps(server: Server, submissions: int) -> dict[str, Any]:
    """Seconds of each submission until its data was accepted, its order was, and its first step could be read."""
    fields = {"max_steps": 100_000, "save_steps": 100_000, "batch_size": 8}
    beside = submit(server, "beside", server.upload(samples(0)), fields)
    wait_for_step(server, beside)
    seconds = list[tuple[float, float, float]]()
    for number in range(1, submissions + 1):
        content, began = samples(number), time.monotonic()
        file = server.upload(content)
        uploaded = time.monotonic()
        job = submit(server, f"job-{number}", file, {"max_steps": 20, "batch_size": 8, "seed": number})
        accepted = time.monotonic()
        wait_for_step(server, job)
        seconds.append((uploaded - began, accepted - began, time.monotonic() - began))
        wait_for_end(server, [job])
    server.json("POST", f"/v1/jobs/{beside}/cancel")
    wait_for_end(server, [beside])
    uploaded, accepted, first = ([row[which] for row in seconds] for which in range(3))
    p95 = statistics.quantiles(first, n=20, method="inclusive")[-1] if len(first) > 1 else first[0]
    return {"uploaded": uploaded, "accepted": accepted, "first_step": first, "median": statistics.median(first), "p95": p95}


def samples(seed: int) -> bytes:
    """Lines of prompts and completions that no other seed gives."""
    lines = list[str]()
    for row in range(_SAMPLES):
        words = [f"word{(seed * 7919 + row * _WORDS + place) % 9973}" for place in range(_WORDS)]
        lines.append(json.dumps({"prompt": " ".join(words[: _WORDS // 2]), "completion": " ".join(words[_WORDS // 2 :])}))
    return "".join(f"{line}\n" for line in lines).encode()


def submit(server: Server, name: str, file: str, fields: dict[str, Any]) -> str:
    order = {"name": name, "base_model": "base", "data": {"file": file}, "r": 16, "max_slowdown": _UNBOUNDED, "logging_steps": 1}
    return server.json("POST", "/v1/jobs", order | fields)["id"]


def wait_for_step(server: Server, job: str) -> None:
    """Until a row of its metrics has a loss."""
    until = time.monotonic() + _LONG_SECONDS
    while not any("loss" in row for row in server.json("GET", f"/v1/jobs/{job}/metrics")["data"]):
        if time.monotonic() > until:
            raise SystemExit(f"{job} has made no step in {_LONG_SECONDS:.0f} s: {server.json('GET', f'/v1/jobs/{job}')}")
        time.sleep(0.01)


def wait_for_end(server: Server, jobs: Sequence[str], look: Callable[[], None] = lambda: None) -> None:
    until = time.monotonic() + _LONG_SECONDS
    open_jobs = set(jobs)
    while open_jobs:
        found = {job: server.json("GET", f"/v1/jobs/{job}") for job in open_jobs}
        for job, view in found.items():
            if view["status"] == "failed":
                raise SystemExit(f"{job} failed: {view}")
        open_jobs = {job for job, view in found.items() if view["status"] not in ("succeeded", "cancelled")}
        if time.monotonic() > until:
            raise SystemExit(f"{sorted(open_jobs)} have not ended in {_LONG_SECONDS:.0f} s")
        look()
        time.sleep(0.05)


# -- how fast jobs train -------------------------------------------------------------------------------------------------


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Of the medians of both."""
    made = dict[str, float]()
    for span in ("steady_tokens_per_second", "whole_tokens_per_second"):
        serve, alone = (statistics.median(row[span] for row in found[way]) for way in ("serve", "train"))
        made[f"{span}_ratio"] = serve / alone
    return made


def settings_of(steps: int, *more: str) -> list[str]:
    chosen = (f"defaults.max_steps={steps}", "defaults.logging_steps=1", *more)
    return [part for setting in chosen for part in ("--set", setting)]


def train(
    options: argparse.Namespace, base: Path, output_dir: Path, steps: int, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    command = [sys.executable, "-m", "tlora", "train", str(options.jobs_file), "--output-dir", str(output_dir), "--device", options.device]
    ended = launch.run_process(command + settings_of(steps, f"base_model={base.resolve()}"), environment, output_dir, None)
    if ended.code != 0:
        raise SystemExit(f"tlora train ended with {ended.code}: {ended.lines[-5:]}")
    return figures(output_dir, ended.start)


def served(server: Server, options: argparse.Namespace, links: Path) -> dict[str, Any]:
    """`tlora submit` of the file, until all jobs have ended. `links`: made, a directory like that of a run."""
    environment = os.environ | {"TLORA_URL": f"http://{server.host}:{server.port}", "TLORA_API_KEY": server.key}
    command = [sys.executable, "-m", "tlora", "submit", str(options.jobs_file), "--json"]
    command += settings_of(options.steps, "base_model=base", f"defaults.max_slowdown={_UNBOUNDED}")
    before, began = jobs_of(server).keys(), time.time()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    mine = {job: name for job, name in jobs_of(server).items() if job not in before}
    groups: list[tuple[float, list[list[str]]]] = []
    wait_for_end(server, list(mine), lambda: see_groups(server, began, mine, groups))
    links.mkdir()
    for job, name in mine.items():
        (links / name).symlink_to(server.directory / "jobs" / job)
    return {**figures(links, began), "groups": groups}


def see_groups(server: Server, began: float, names: dict[str, str], seen: list[tuple[float, list[list[str]]]]) -> None:
    """Adds who is together, where that has changed, and since when [s]."""
    groups = [sorted(names.get(job, "?") for job in group["jobs"]) for group in server.json("GET", "/v1/cluster")["groups"]]
    if not seen or groups != seen[-1][1]:
        seen.append((round(time.time() - began, 2), groups))


def jobs_of(server: Server) -> dict[str, str]:
    """Id -> name, of the newest."""
    return {job["id"]: job["name"] for job in server.json("GET", "/v1/jobs?limit=100")["data"]}


def figures(output_dir: Path, began: float) -> dict[str, Any]:
    steps, of_run = launch.read_log(output_dir, began)
    return {"first_step_seconds": steps[0].seconds, "last_step_seconds": steps[-1].seconds, **launch.speeds(steps, of_run)}


# -- what is shown -------------------------------------------------------------------------------------------------------


def format_first_steps(found: dict[str, Any]) -> str:
    text = f"submit to first step: median {found['median']:.2f} s, p95 {found['p95']:.2f} s of {len(found['first_step'])}"
    return f"{text}; upload {statistics.median(found['uploaded']):.2f} s of it"


def format_speed(found: dict[str, Any]) -> str:
    lines = list[str]()
    for way in ("serve", "train"):
        rates = " ".join(f"{row['steady_tokens_per_second']:10,.0f} ({row['whole_tokens_per_second']:,.0f})" for row in found[way])
        lines.append(f"{way}: steady (whole) tok/s {rates}")
    steady, whole = (found[f"{span}_tokens_per_second_ratio"] for span in ("steady", "whole"))
    return "\n".join([*lines, f"ratio steady {steady:.4f}, whole {whole:.4f}"])


def keep_logs(place: Path, target: Path | None) -> None:
    """What servers and workers said so far, in one file, if one is asked for."""
    if target is not None:
        logs = sorted(place.rglob("*.log"))
        target.write_text("\n".join(f"== {log.relative_to(place)}\n{log.read_text(errors='replace')}" for log in logs))


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--submissions", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each job of the row speed")
    parser.add_argument("--jobs", help="names of the file's jobs, with commas, or how many of the first; default: all")
    parser.add_argument("--policy", default="residual_capacity", help="of the server")
    parser.add_argument("--backend", choices=("local", "ray"), default="local", help="what starts the server's workers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--base-dir", type=Path, help="where bases are kept, one directory per shape; default: a temporary one")
    parser.add_argument("--logs", type=Path, help="a file for the servers' and their workers' logs")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    options.rows = options.rows.split(",")
    if unknown := sorted(set(options.rows) - set(ROWS)):
        parser.error(f"--rows: {', '.join(unknown)} is none of {', '.join(ROWS)}")
    return options


def main() -> None:
    measure(read_options())


if __name__ == "__main__":
    main()
