"""A base that the GPUs of one host share, against one that each holds whole: the same bits, what fetching costs, how fast bytes come.

    python -m bench.shared_base --gpus 2 --json FILE                    # bits to early; each in processes of its own
    python -m bench.shared_base --gpus 4 --parts links,step --shape llama-3-8b --tokens 8192 --json FILE
    python -m bench.shared_base --device cpu --gpus 2 --shape tiny --tokens 64 --repeats 2

Parts. `bits`: a small base, in 16 bits and in fp8, with recomputed layers and a reference pass, on every GPU, streamed and resident.
`step`: forward and backward of one micro-batch over `--shape`, in turns: with resident weights (as CUDA graphs and from Python), with
layers copied from the peers, and with layers gathered by NCCL, without and with the copy that FSDP2 makes of what it gathered.
`links`: bytes into every GPU at once, alone. `early`: one rank ends, and the others go on reading what it held.
`big`: random layers of a 70B in 16 bits, shared, as many as fit; `fp8`: in fp8, whole on each GPU; `--lengths` has them train on mixed
samples. `fsdp`: the rival, `--shape` by FSDP2, PEFT and Liger. These three are run when asked for.
Random weights. Medians; each rank's own figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.big_base_parts import big, fp8
from bench.fsdp_part import fsdp
from bench.shared_base_parts import bits, early, links, step
from bench.shared_base_rank import Rank
from tlora.sharing.multicast import NO_MULTICAST

PARTS = {"bits": bits, "step": step, "links": links, "early": early, "big": big, "fp8": fp8, "fsdp": fsdp}
DEFAULT_PARTS = ["bits", "step", "links", "early"]
# after which a part's processes are killed
SECONDS = {"bits": 150.0, "step": 170.0, "links": 60.0, "early": 60.0, "big": 170.0, "fp8": 170.0, "fsdp": 240.0}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="ranks: one process for each")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=DEFAULT_PARTS, help=f"in this order; of {','.join(PARTS)}")
    parser.add_argument("--shape", default="llama-3-8b", help="of bench.shapes, for step and links")
    parser.add_argument("--layers", type=int, help="fewer than the shape's")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--big-tokens", type=int, default=4096, help="of a micro-batch of big and fp8, at most")
    parser.add_argument("--lengths", type=_range, metavar="LOW-HIGH", help="tokens of the samples of big and fp8; default: all alike")
    parser.add_argument("--ways", help="regular expression: those ways of fsdp whose names it is found in; default: all")
    parser.add_argument("--repeats", type=int, default=8, help="micro-batches of each kind that are measured")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--total-seconds", type=float, default=235.0, help="no part runs past this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a process that this program started
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    wrong = sorted(set(options.parts) - set(PARTS))
    if wrong:
        parser.error(f"no part {wrong[0]!r}; there are {', '.join(PARTS)}")
    return options


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high)


def run_part(part: str, options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """What each rank found, or why it did not."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [sys.executable, "-m", "bench.shared_base", *sys.argv[1:], "--parts", part, "--directory", directory]
        environment = os.environ | NO_MULTICAST
        processes = [subprocess.Popen([*arguments, "--rank", str(rank)], env=environment) for rank in range(options.gpus)]
        deadline, found = time.monotonic() + seconds, []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            file = Path(directory) / f"{rank}.json"
            result = json.loads(file.read_text()) if file.is_file() else {}
            if process.returncode != 0 and "error" not in result:
                result["error"] = f"rank {rank} ended with {process.returncode}" + (
                    " (its time was up)" if process.returncode == -9 else ""
                )
            found.append(result)
        return found


def run_rank(options: argparse.Namespace) -> int:
    """One part on one rank, in a process of its own. What was found up to an error is kept."""
    part, file = options.parts[0], options.directory / f"{options.rank}.json"
    found: dict[str, Any] = {}
    rank = Rank(options, found, lambda: _write(file, found))
    try:
        PARTS[part](rank)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        rank.say(f"FAILED: {found['error']}")
    _write(file, found)
    sys.stdout.flush()
    os._exit(1 if "error" in found else 0)  # no rank's end waits for another's


def _write(file: Path, found: dict[str, Any]) -> None:
    file.write_text(json.dumps(found))


def main() -> None:
    options = read_options()
    if options.rank is not None:
        run_rank(options)
    import torch

    started = time.monotonic()
    found: dict[str, Any] = {"benchmark": "shared_base", **machine.facts(torch.device(options.device), options.commit)}
    keys = ("gpus", "shape", "layers", "tokens", "big_tokens", "lengths", "ways", "repeats", "slots")
    found |= {"setup": {key: getattr(options, key) for key in keys}, "parts": {}}
    for part in options.parts:
        left = options.total_seconds - (time.monotonic() - started)
        if left < 10:
            found["parts"][part] = [{"error": "not run: no time was left"}]
            continue
        print(f"== {part} (at most {min(left, SECONDS[part]):.0f} s)", flush=True)
        before = time.monotonic()
        found["parts"][part] = run_part(part, options, min(left, SECONDS[part]))
        print(f"== {part} took {time.monotonic() - before:.0f} s", flush=True)
        machine.write(options.json, found)
    print(json.dumps(found["parts"], indent=1))


if __name__ == "__main__":
    main()
