"""Two versions of this repository on one device, window by window: is the second as fast as the first?

    python -m bench.turns --old DIRECTORY --new . --rounds 9 --out FILE -- --shape llama-3-8b --batch-size 2 --lengths 512
    python -m bench.turns --old DIRECTORY --new . -- --shape tiny --device cpu --lengths 64 --token-budget 512

What stands behind `--` goes to each version's own `bench.throughput --systems together`. Both run at once, each in a process with caches
of its own, and train in turns: one window of either a round, in the order old, new in even rounds and new, old in odd ones. A change of
clocks meets both. The first two windows of each version do not count. `ratio` is the median over the rounds of new over old.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import launch, machine

WARM_UP = 2  # windows
_REPORT = "turn: "
# Runs in either version: its bench.throughput, whose every window waits for a line on stdin and reports its tokens and seconds.
_PROGRAM = f"""
import os, sys
from bench import throughput, together
measure = together.run_window
def run_window(engine, tokens):
    if not sys.stdin.readline():
        os._exit(0)
    done, seconds = measure(engine, tokens)
    print({_REPORT!r}, done, seconds, flush=True)
    return done, seconds
together.run_window = run_window
throughput.run_benchmark(throughput.read_options(sys.argv[1:]))
"""


class Version:
    """One version of the repository at work. Its first turn begins when it has compiled and taken one optimizer step."""

    def __init__(self, tree: Path, arguments: Sequence[str], directory: Path) -> None:
        environment = launch.with_caches(directory) | {
            "PYTHONPATH": os.pathsep.join([f"{tree}/src", str(tree), os.environ.get("PYTHONPATH", "")])
        }
        program = [sys.executable, "-c", _PROGRAM, "--systems", "together", "--seconds", "1e9", "--commit", "-", *arguments]
        self._process = subprocess.Popen(
            program, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        )

    def train(self) -> tuple[int, float]:
        """Tokens and seconds of one window. RuntimeError where the version has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_REPORT):
                tokens, seconds = line.removeprefix(_REPORT).split()
                return int(tokens), float(seconds)
        raise RuntimeError(f"a version ended with exit code {self._process.wait()} before its turn did")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(old: Path, new: Path, rounds: int, arguments: Sequence[str], caches: Path) -> dict[str, Any]:
    """Tokens per second of the windows of either version, and the ratios of the rounds."""
    versions = {name: Version(tree, arguments, caches / name) for name, tree in (("old", old), ("new", new))}
    try:
        for version in [*versions.values()] * WARM_UP:
            version.train()
        speeds: dict[str, list[float]] = {name: [] for name in versions}
        for turn in range(rounds):
            for name in sorted(versions, reverse=turn % 2 == 0):  # "old" first in even rounds
                tokens, seconds = versions[name].train()
                speeds[name].append(tokens / seconds)
    finally:
        for version in versions.values():
            version.end()
    ratios = [n / o for n, o in zip(speeds["new"], speeds["old"], strict=True)]
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    return {
        "arguments": list(arguments),
        "ratio": statistics.median(ratios),
        "tokens_per_second": medians,
        "ratios_of_rounds": ratios,
        "tokens_per_second_of_rounds": speeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the version before")
    parser.add_argument("--new", type=Path, required=True, help="a checkout of the version after")
    parser.add_argument("--old-commit", help="what to call it")
    parser.add_argument("--commit", help="what to call the new one where there is no git")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--caches", type=Path, help="directory of the caches, kept for the next case; default: a new one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="of bench.throughput, after --")
    options = parser.parse_args()
    device = torch.device("cpu" if "cpu" in options.arguments else "cuda")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        caches = options.caches or Path(name)
        row = measure(options.old.resolve(), options.new.resolve(), options.rounds, options.arguments, caches.resolve())
    facts = machine.facts(device, options.commit) | {"old_commit": options.old_commit or str(options.old)}
    machine.write(options.out, {"benchmark": "turns", **facts, **row, "seconds": time.perf_counter() - start})
    print(f"new {row['tokens_per_second']['new']:,.0f} tokens/s, old {row['tokens_per_second']['old']:,.0f}: {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
