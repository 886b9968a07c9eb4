"""One launch of `tlora train` as a user has it, a process of its own, and what its own logs tell of it.

A log row's `seconds` are of the run's clock. A file was last changed when its last row was written, so the two together say when that
clock began: all times here are seconds since the launch. An optimizer step counts when its row is written, which is when its result has
been read from the device.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.05
_STALL_SECONDS = 5.0  # silences from here on are listed
_PIECE_BYTES = 4 << 20
_WINDOW = (0.1, 0.9)  # of all tokens: the steady part
# Where a user's caches are, so that cold ones can be had beside those of the machine; CUDA's own does not go by XDG's variable. All else
# is as a user's: what the program keeps where is its own affair.
CACHES = {"XDG_CACHE_HOME": "xdg", "CUDA_CACHE_PATH": "cuda"}
_ELSEWHERE = ("TLORA_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR")  # which go before XDG's


@dataclass
class Ended:
    """A process that is gone. Times are of time.time(); `signalled` is when SIGTERM was sent, if it was."""

    start: float
    end: float
    code: int
    host_peak_bytes: int
    signalled: float | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """An optimizer step of one job: seconds since the launch, and the tokens of its samples since that job's start."""

    seconds: float
    job: str
    number: int
    num_tokens: int


def with_caches(directory: Path) -> dict[str, str]:
    """This process's environment with a user's caches in `directory`, and without what would put some of them elsewhere."""
    for name in CACHES.values():
        (directory / name).mkdir(parents=True, exist_ok=True)
    kept = {variable: value for variable, value in os.environ.items() if variable not in _ELSEWHERE}
    return kept | {variable: str((directory / name).resolve()) for variable, name in CACHES.items()}


def run_process(
    command: Sequence[str], environment: Mapping[str, str], output_dir: Path, signal_after: int | None, seconds: float = math.inf
) -> Ended:
    """Run `command` to its end. SIGTERM is sent after `seconds`, or when a job's log under `output_dir` has `signal_after` steps."""
    start = time.time()
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    ended = Ended(start, 0.0, 0, 0)
    reader = threading.Thread(target=_read_lines, args=(process, ended))
    reader.start()
    try:
        _see_to_its_end(process, ended, output_dir, math.inf if signal_after is None else signal_after, seconds)
    except BaseException:
        process.kill()
        raise
    finally:
        reader.join()
    return ended


def _see_to_its_end(process: subprocess.Popen[str], ended: Ended, output_dir: Path, signal_after: float, seconds: float) -> None:
    if min(signal_after, seconds) < math.inf:
        while (runs := _runs(process)) and time.time() < ended.start + seconds and _steps_logged(output_dir) < signal_after:
            time.sleep(_POLL_SECONDS)
        if runs:
            ended.signalled = time.time()
            process.send_signal(signal.SIGTERM)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    ended.host_peak_bytes = usage.ru_maxrss << 10
    ended.end, ended.code = time.time(), process.returncode


def _runs(process: subprocess.Popen[str]) -> bool:
    """Its status stays to be waited for, so that the peak of its memory can be asked."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _read_lines(process: subprocess.Popen[str], ended: Ended) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        ended.lines += ((time.time() - ended.start, line.rstrip("\n")) for line in stream)


def _steps_logged(output_dir: Path) -> int:
    """Of the job that has most."""
    return max((path.read_bytes().count(b"\n") for path in output_dir.glob("*/metrics.jsonl")), default=0)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Of a file with one JSON object a line; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def read_log(output_dir: Path, start: float) -> tuple[list[Step], list[dict[str, Any]]]:
    """All optimizer steps in the order of time, and the rows of run.jsonl, with `seconds` since `start`."""
    files = [path for path in (*output_dir.glob("*/metrics.jsonl"), output_dir / "run.jsonl") if path.is_file()]
    rows = {path: read_rows(path) for path in files}
    clocks = [path.stat().st_mtime - found[-1]["seconds"] for path, found in rows.items() if found]
    shift = min(clocks, default=start) - start
    steps = [
        Step(row["seconds"] + shift, path.parent.name, row["step"], row["num_tokens"])
        for path, found in rows.items()
        if path.name == "metrics.jsonl"
        for row in found
        if "loss" in row
    ]
    of_run = [row | {"seconds": row["seconds"] + shift} for row in rows.get(output_dir / "run.jsonl", [])]
    return sorted(steps, key=lambda step: step.seconds), of_run


def speeds(steps: Sequence[Step], of_run: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens per second, of the samples' own tokens without padding, over three spans.

    `steady`: from the optimizer step with which a tenth of all tokens is through to the last one before nine tenths are. `whole`: from the
    first step to the last; a step's tokens count at its end. `all_jobs`: from the first step to the end of the job that ends first.
    """
    passed, before, total = [], dict[str, int](), 0
    for step in steps:
        total += step.num_tokens - before.get(step.job, 0)
        before[step.job] = step.num_tokens
        passed.append((step.seconds, total))
    first_end = min(max(step.seconds for step in steps if step.job == job) for job in before)
    low, high = (share * total for share in _WINDOW)
    computed = sum(row["computed"] + row["tail_computed"] for row in of_run)
    return {
        "tokens": total,
        "steady_tokens_per_second": _rate([moment for moment in passed if low <= moment[1] <= high]),
        "whole_tokens_per_second": _rate(passed),
        "all_jobs_tokens_per_second": _rate([moment for moment in passed if moment[0] <= first_end]),
        "all_jobs_seconds": first_end - passed[0][0],
        "padding_share": 1 - sum(row["tokens"] + row["tail_tokens"] for row in of_run) / computed if computed else None,
        "micro_batches": sum(row["micro_batches"] + row["tail_micro_batches"] for row in of_run),
    }


def _rate(moments: Sequence[tuple[float, int]]) -> float | None:
    """Tokens per second from the first moment to the last; None where no time lies between."""
    if len(moments) < 2 or moments[-1][0] <= moments[0][0]:
        return None
    return (moments[-1][1] - moments[0][1]) / (moments[-1][0] - moments[0][0])


def silences(steps: Sequence[Step], of_run: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The longest time without a row, from the first step to the last, and all long ones as (from, seconds).

    After a micro-batch run.jsonl gets a row when the last is a second old, so no micro-batch between took longer than such a silence, and
    one took no less than it less a second.
    """
    first, last = steps[0].seconds, steps[-1].seconds
    times = sorted({step.seconds for step in steps} | {row["seconds"] for row in of_run if first < row["seconds"] < last})
    gaps = [(after - before, before) for before, after in itertools.pairwise(times)]
    longest, at = max(gaps, default=(0.0, first))
    return {
        "longest_silence_seconds": longest,
        "longest_silence_at": at,
        "long_silences": [(begin, gap) for gap, begin in gaps if gap >= _STALL_SECONDS],
    }


def bytes_since(directory: Path, moment: float) -> int:
    """Bytes of the files that were written to after `moment` (of time.time()), each once however many names it has."""
    found = {
        (stat.st_dev, stat.st_ino): stat.st_size
        for path in directory.rglob("*")
        if path.is_file()
        for stat in [path.stat()]
        if stat.st_mtime >= moment
    }
    return sum(found.values())


def disk_rate(directory: Path, num_bytes: int) -> float:
    """Bytes per second that a new file takes there, fsync included."""
    piece, path = os.urandom(_PIECE_BYTES), directory / "disk-rate"
    pieces = -(-num_bytes // _PIECE_BYTES)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(pieces):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return pieces * _PIECE_BYTES / seconds
